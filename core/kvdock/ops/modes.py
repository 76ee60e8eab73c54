"""What a block of code asks of all calls in it: a backend by name, and debug mode.

Both are context variables: they follow a thread or an asyncio task, and never leak into another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import attrs

from kvdock.errors import ArgumentTypeError

__all__ = ["MODE", "Mode", "debug", "use_backend"]


@attrs.frozen
class Mode:
    """What is asked of the calls in a block.

    Args:
        named: backend to use, or None for the usual choice.
        debug: whether index values are checked before each launch, on every device.
    """

    named: str | None = None
    debug: bool = False


MODE: ContextVar[Mode | None] = ContextVar("kvdock_mode", default=None)
"""The mode in force; None, the usual, costs a call one read."""


@contextlib.contextmanager
def _changed(change: Callable[[Mode], Mode]) -> Iterator[None]:
    token = MODE.set(change(MODE.get() or Mode()))
    try:
        yield
    finally:
        MODE.reset(token)


def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
    """Use one backend in a block: for its calls, and for good in the caches created in it.

    It comes before anything that is configured, and need not claim the tensors' device, but must run on it.

    Args:
        name: name of the backend, as ``kvdock backends`` lists it.

    Raises:
        BackendUnavailableError: at the first call in the block, when there is no such backend or it is not ready.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError("use_backend: name", expected='the name of a backend, such as "cpu"', got=repr(name))
    return _changed(lambda mode: attrs.evolve(mode, named=name))


def debug(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Check index values before each launch in a block, on every device.

    Slots, positions and block ids out of range raise as they do on the host, and equal slots in one call are reported as
    a `KVDockWarning`. This reads index tensors back, so it synchronises; while a graph is captured it does nothing, since
    nothing can be read then, and the kernel's own counting remains.
    """
    return _changed(lambda mode: attrs.evolve(mode, debug=bool(enabled)))
