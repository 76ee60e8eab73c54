"""The backend object: devices, kernels, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvdock.plugin import Backend, Capabilities, Kernel, Priority, Probe

from .copy_blocks import CopyBlocks
from .engine import Engine
from .gather_paged import GatherPaged
from .paged_caching import PagedCaching
from .static_update import StaticUpdate

__all__ = ["AcmeBackend"]


class AcmeBackend(Backend):
    """Serves Acme accelerators, which are simulated in host memory: it is asked for by name, and is in nobody's way."""

    name = "acme"
    device_type = "npu"

    def __init__(self) -> None:
        self._engine = Engine.find()

    def probe(self) -> Probe:
        """Look at the firmware."""
        if self._engine.firmware < 2:
            return Probe.unusable(f"firmware {self._engine.firmware} has no copy engine. Fix: update it to 2 or newer")
        return Probe.ready(f"simulated, firmware {self._engine.firmware}")

    def claims(self, device: torch.device) -> bool:
        """Claim its own type of device only."""
        return device.type == self.device_type

    def devices(self) -> Sequence[torch.device]:
        """List the host, where the accelerator is simulated."""
        return [torch.device("cpu")]

    def kernels(self) -> Mapping[str, Kernel]:
        """Return one kernel for each op."""
        return {
            "paged_caching_": PagedCaching(self._engine),
            "static_update_": StaticUpdate(self._engine),
            "gather_paged": GatherPaged(self._engine),
            "copy_blocks_": CopyBlocks(self._engine),
        }

    def capabilities(self) -> Capabilities:
        """Declare the dtypes that the engine moves, and that it is to be preferred to whoever else claims the device."""
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        return Capabilities(dtypes=dtypes, priority=Priority.SPECIALISED, graph_capture=False)

    def notes(self) -> Sequence[str]:
        """Say which firmware is used, and what is known of it."""
        known = "" if self._engine.firmware > 2 else "; padding is known to be wrong, see expected-firmware-2.toml"
        return [f"copy engine: firmware {self._engine.firmware}, simulated in host memory{known}"]
