"""The backend that Triton-capable devices share: a subclass says who it is and which devices it claims.

A third party's whole backend::

    class AcmeBackend(TritonBackend):
        name = "acme"
        device_type = "acme"
        torch_type = "acme"

        def missing(self) -> str:
            return "" if acme_is_installed() else "libacme is not installed"
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvdock.plugin import Backend, BackendError, Capabilities, Kernel, Probe, SkipCounter, Stream
from kvdock_triton.graphs import captured, has_graphs
from kvdock_triton.streams import SideStream, has_streams, pinned
from kvdock_triton.tuning import DEFAULT, Tuning

__all__ = ["TritonBackend"]


_PROCESSORS = 64
"""Where torch does not know."""


class TritonBackend(Backend):
    """Devices that run Triton kernels. Light to make: Triton itself is imported when kernels are asked for."""

    torch_type: str
    """What torch calls its devices: the type of their `torch.device`."""

    def __init__(self) -> None:
        self._skipped = SkipCounter()

    def missing(self) -> str:
        """Return why there is no such hardware here; empty if there may be some. Must not open a context."""
        return ""

    def broken(self) -> str:
        """Return why the hardware that is here cannot be used; empty if it can, or if there is none. Must not open a context."""
        return ""

    def without_driver(self) -> str:
        """Return why Triton can launch nothing on these devices; empty if it can. Imports Triton; asked before the first op."""
        from kvdock_triton.launch import without_driver

        return without_driver()

    def tuning(self, device: torch.device) -> Tuning:
        """Return the tiles for a device."""
        return DEFAULT

    @property
    def module(self) -> Any:
        """Torch's module for these devices, such as `torch.cuda`."""
        return torch.get_device_module(self.torch_type)

    def probe(self) -> Probe:
        """Ask the driver, then look for devices, then for Triton."""
        reason = self.missing()
        if reason:
            return Probe.absent(reason)
        reason = self.broken()
        if reason:  # asked before devices are counted: torch counts none where the driver does not work
            return Probe.unusable(reason)
        if not _is_known(self.torch_type):
            return Probe.absent(f"torch {torch.__version__} knows no device type {self.torch_type!r}")
        reason = self._lacking()
        if reason:
            return Probe.unusable(reason)
        count = self.module.device_count()
        if count == 0:
            return Probe.absent(f"no {self.device_type} device is visible (device_count() is 0)")
        reason = _without_triton()
        return Probe.unusable(reason) if reason else Probe.ready(f"{count} device(s)")

    def _lacking(self) -> str:
        """Return what torch's module for these devices lacks; without it each call would fail."""
        needed = ["device_count", "synchronize"] + ["device"] * (type(self).device_guard is TritonBackend.device_guard)
        module = getattr(torch, self.torch_type, None) if type(self).module is TritonBackend.module else self.module
        lacking = [name for name in needed if not hasattr(module, name)]
        if not lacking:
            return ""
        what = "is not there" if module is None else f"has no {', no '.join(lacking)}"
        return f"torch.{self.torch_type} {what}. Fix: give torch a module with {', '.join(needed)}, by torch._register_device_module"

    def claims(self, device: torch.device) -> bool:
        """Claim every device of torch's type, if there is such hardware."""
        return device.type == self.torch_type and not self.missing()

    def devices(self) -> Sequence[torch.device]:
        """List the visible devices."""
        return [torch.device(self.torch_type, index) for index in range(self.module.device_count())]

    def kernels(self) -> Mapping[str, Kernel]:
        """Hand over the Triton kernels.

        Raises:
            BackendError: Triton can launch nothing on these devices.
        """
        from kvdock_triton.kernels import kernels_for

        reason = self.without_driver()
        if reason:
            raise BackendError(reason, fix=f"install the Triton that is made for {self.device_type} devices")
        return kernels_for(self)

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make ``device`` current."""
        guard: AbstractContextManager[Any] = self.module.device(device)
        return guard

    def capabilities(self) -> Capabilities:
        """Say that launches may be captured, where torch can tell."""
        return Capabilities(graph_capture=hasattr(self.module, "is_current_stream_capturing"))

    def processors(self, device: torch.device) -> int:
        """Return how many processors a device has, as far as torch can tell: work is split for so many."""
        properties = getattr(self.module, "get_device_properties", lambda device: None)(device)
        return int(getattr(properties, "multi_processor_count", _PROCESSORS))

    def notes(self) -> Sequence[str]:
        """Say how kernels are launched."""
        from kvdock_triton.launch import describe_launch

        return [describe_launch()]

    def skip_counter(self, device: torch.device) -> torch.Tensor:
        """Return a device's count of skipped writes, int64 ``[]`` in its memory, which kernels add to."""
        return self._skipped.prepare(device)

    def skipped_writes(self, device: torch.device) -> int:
        """Return how many writes were skipped on ``device``, by kernels on any of its streams. Synchronises."""
        return self._skipped.read(device)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of ``device`` is being captured."""
        if not hasattr(self.module, "is_current_stream_capturing"):
            return False
        with self.device_guard(device):
            return bool(self.module.is_current_stream_capturing())

    def side_stream(self, device: torch.device) -> Stream | None:
        """Return a stream of torch's, where its module for these devices has such."""
        return SideStream(self.module, device) if has_streams(self.module) else None

    def pin(self, memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
        """Lock the pages of host memory, where torch has the driver's function for it."""
        return pinned(self.module, memory, device)

    def capture(self, device: torch.device, steps: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
        """Record a graph of each step, where torch's module for these devices has graphs."""
        return captured(self.module, steps) if has_graphs(self.module) else steps


def _is_known(torch_type: str) -> bool:
    """Whether torch has devices of a type: those of a plugin's own have a name once its module was imported."""
    try:
        torch.device(torch_type)
    except RuntimeError:
        return False
    return True


def _without_triton() -> str:
    """Say how to get Triton where it is missing."""
    if importlib.util.find_spec("triton") is not None:
        return ""
    return "Triton is not installed. Fix: pip install 'kvdock[triton]'"
