"""Streams beside the current one, and host memory that kernels read and write: by torch's module for a kind of device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

from kvdock.plugin import BackendError, Mark, Stream

__all__ = ["SideStream", "has_streams", "pinned"]

_PORTABLE = 1
"""For all devices of the process: another one may swap with the same memory."""


def has_streams(module: Any) -> bool:
    """Whether torch's module for a kind of device, such as `torch.cuda`, has streams."""
    return all(hasattr(module, name) for name in ("Event", "Stream", "current_stream", "stream"))


@attrs.frozen(eq=False)
class _Event(Mark):
    """An event of torch's.

    Args:
        event: recorded already.
        current_stream: returns the device's current stream.
    """

    event: Any
    current_stream: Callable[[], Any]

    def reached(self) -> bool:
        """Ask the device."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Let the current stream wait."""
        self.event.wait(self.current_stream())

    def synchronize(self) -> None:
        """Wait on the host."""
        self.event.synchronize()


class SideStream(Stream):
    """A stream of torch's.

    Args:
        module: torch's module for the devices.
        device: the device, which is current.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._stream = module, module.Stream()
        self._current_stream = functools.partial(module.current_stream, device)

    def follow(self) -> None:
        """Wait for the current stream of the device."""
        self._stream.wait_stream(self._current_stream())

    def current(self) -> AbstractContextManager[Any]:
        """Make it current; torch makes its device so, too."""
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def mark(self) -> Mark:
        """Record an event."""
        event = self._module.Event()
        event.record(self._stream)
        return _Event(event, self._current_stream)


def pinned(module: Any, memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
    """Lock the pages of host memory, where torch has the driver's function for it. See `kvdock.plugin.Backend.pin`."""
    driver = getattr(module, "cudart", None)
    if driver is None:
        return None
    address, nbytes, runtime = memory.data_ptr(), memory.nbytes, driver()
    code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(code):
        _forget_error(device)
        fix = "ask for less memory, or raise the limit (ulimit -l)"
        raise BackendError("pin", expected=f"{nbytes} bytes of host memory locked", got=f"code {int(code)} of the driver", fix=fix)

    def undo() -> None:
        module.synchronize(device)  # a kernel may still read it
        runtime.cudaHostUnregister(address)

    return undo


def _forget_error(device: torch.device) -> None:
    """Let the next check of torch's find the error that the driver keeps, and no call of a user's."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return
