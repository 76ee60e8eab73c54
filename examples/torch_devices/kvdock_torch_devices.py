"""kvdock on devices that torch supports and no plugin serves. There is no kernel here: the portable ones serve every op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvdock.plugin import Backend, Capabilities, Kernel, Priority, Probe, hookimpl

__all__ = ["KVDOCK_API", "kvdock_backends"]

KVDOCK_API = (1, 0)
DEVICE_TYPES = ("xpu", "mps", "npu", "hpu", "mlu", "musa", "cpu")


class TorchDevice(Backend):
    """One type of device, as torch names it. The host is served only when asked for by name: it has a backend already."""

    def __init__(self, device_type: str) -> None:
        self.name, self.device_type = f"torch-{device_type}", device_type
        self._module: Any = getattr(torch, device_type, None)

    def probe(self) -> Probe:
        """Ask torch, which counts devices without opening a context on one."""
        if self._module is None:
            return Probe.absent(f"torch {torch.__version__} knows no torch.{self.device_type}")
        is_there = self._module.is_available()
        return Probe.ready() if is_there else Probe.absent(f"torch.{self.device_type}.is_available() says no")

    def claims(self, device: torch.device) -> bool:
        """Claim every device of the type."""
        return device.type == self.device_type != "cpu"

    def devices(self) -> Sequence[torch.device]:
        """List them, with an index where there may be several."""
        count = self._module.device_count()
        return [torch.device(self.device_type, index) for index in range(count)] if self.device_type != "cpu" else [torch.device("cpu")]

    def kernels(self) -> Mapping[str, Kernel]:
        """Bring none."""
        return {}

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a device the current one, where torch has such a switch."""
        switch: Any = getattr(self._module, "device", None)
        return switch(device) if switch and device.index is not None else nullcontext()

    def capabilities(self) -> Capabilities:
        """Step back as soon as another backend claims the device."""
        return Capabilities(priority=Priority.FALLBACK)


@hookimpl
def kvdock_backends() -> list[Backend]:
    """Return one backend for each type of device."""
    return [TorchDevice(device_type) for device_type in DEVICE_TYPES]
