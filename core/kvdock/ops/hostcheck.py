"""The old place of the checks of index values, which are in `kvdock.plugin`. It leaves with kvdock 0.2."""

from __future__ import annotations

import warnings
from typing import Any

from kvdock.ops import index_values

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name not in index_values.__all__:
        raise AttributeError(f"module 'kvdock.ops.hostcheck' has no attribute {name!r}")
    text = f"kvdock.ops.hostcheck.{name} has moved to kvdock.plugin.{name}, and leaves its old place with kvdock 0.2"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return getattr(index_values, name)
