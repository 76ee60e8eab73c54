"""Standing in for a model's layers in one pass of one thread, while others call them."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from kvdock.integrations.transformers.passes import current_pass

__all__ = ["stand_in", "step_back"]

_STANDING: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Passes that are under way in which a model's layers are stood in for, in any thread."""
_LOCK = threading.Lock()


def stand_in(inner: Any) -> None:
    """Begin to stand in for a model's layers, in a pass that has a `replay`."""
    with _LOCK:
        _STANDING[inner] = _STANDING.get(inner, 0) + 1
        vars(inner)["forward"] = functools.partial(_forward, inner)


def step_back(inner: Any) -> None:
    """Let them be called again; once for each `stand_in`."""
    with _LOCK:
        _STANDING[inner] -= 1
        if not _STANDING[inner]:
            del _STANDING[inner], vars(inner)["forward"]


def _forward(inner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Be the forward of a model's layers, in passes of this thread and, as it was, in all others."""
    begun = current_pass()
    if begun is not None and begun.replay is not None:
        return begun.replay(inner, args, kwargs)
    return type(inner).forward(inner, *args, **kwargs)
