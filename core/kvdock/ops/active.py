"""Which dispatcher the public functions use: that of the process's runtime, resolved at the first call.

The runtime sits above ops, so it hands itself in here rather than being imported.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdock.ops.dispatcher import OpDispatcher, OpEntry

__all__ = ["active_dispatcher", "active_op", "set_provider"]

_provider: Callable[[], OpDispatcher] | None = None
_ops: dict[str, OpEntry] = {}


def set_provider(provider: Callable[[], OpDispatcher]) -> None:
    """Say where the dispatcher comes from, and forget the one in use."""
    global _provider  # noqa: PLW0603 - the one seam between ops and the runtime
    _provider = provider
    _ops.clear()


def active_dispatcher() -> OpDispatcher:
    """Return the dispatcher of the process's runtime."""
    assert _provider is not None, "kvdock/__init__ imports the runtime, which sets the provider"  # noqa: S101
    return _provider()


def active_op(name: str) -> OpEntry:
    """Return an op of the process's runtime."""
    entry = _ops.get(name)
    if entry is None:
        entry = _ops[name] = active_dispatcher().op(name)
    return entry
