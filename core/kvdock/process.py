"""The process's runtime, for what lies below it: public ops, caches, and prefix caches made by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.runtime import Runtime

__all__ = ["process_runtime"]


def process_runtime() -> Runtime:
    """Return the process's runtime, made at the first call; see `kvdock.runtime.default`."""
    # The one import upwards. A runtime is put together from ops and plugins, so it sits above both; but `kvdock.ops.*`,
    # `create_cache` and `create_prefix_cache` take that of the process where they are handed none. Imported when it is asked
    # for, nothing depends on which module was imported first.
    from kvdock.runtime import default

    return default()
