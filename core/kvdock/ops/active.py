"""Which dispatcher the public functions use: that of the process's runtime, resolved at the first call.

The runtime sits above ops, so it hands itself in here rather than being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.entry import compiling_error

__all__ = ["ACTIVE_OPS", "active_dispatcher", "set_provider"]

_provider: Callable[[], OpDispatcher] | None = None


def active_dispatcher() -> OpDispatcher:
    """Return the dispatcher of the process's runtime."""
    assert _provider is not None, "kvdock/__init__ imports the runtime, which sets the provider"  # noqa: S101
    return _provider()


class _ActiveOps(dict[str, Callable[..., Any]]):
    """The ops of the process's runtime, resolved once each: a look-up costs less than a function call."""

    def __missing__(self, name: str) -> Callable[..., None]:
        if torch.compiler.is_compiling():
            raise compiling_error(name)
        call = self[name] = active_dispatcher().op(name).call
        return call


ACTIVE_OPS = _ActiveOps()
"""``ACTIVE_OPS[name]`` is an op of the process's runtime, as a function of its arguments in the schema's order."""


def set_provider(provider: Callable[[], OpDispatcher]) -> None:
    """Say where the dispatcher comes from, and forget the one in use."""
    global _provider
    _provider = provider
    ACTIVE_OPS.clear()
