"""The backend object: devices and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvdock.plugin import HOST, Backend, Kernel, Probe

from .copy_blocks import CopyBlocks
from .gather_paged import GatherPaged
from .paged_caching import PagedCaching
from .rows import SKIPPED
from .static_update import StaticUpdate

__all__ = ["NewcomerBackend"]


class NewcomerBackend(Backend):
    """Serves newcomer_device tensors; and those in host memory when asked for by name, as tests without hardware do."""

    name = "newcomer"
    device_type = "newcomer_device"

    def probe(self) -> Probe:
        """Report ready, with or without hardware: its kernels are torch operations, which run on the host as well."""
        found = len(self._hardware())
        return Probe.ready(f"{found} {self.device_type} devices" if found else "no hardware here: host memory, when asked by name")

    def claims(self, device: torch.device) -> bool:
        """Claim its own type of device only, so that it is in no other backend's way."""
        return device.type == self.device_type

    def devices(self) -> Sequence[torch.device]:
        """List its hardware, which the conformance kit takes first, and the host."""
        return [*self._hardware(), HOST]

    def kernels(self) -> Mapping[str, Kernel]:
        """Return one kernel per op."""
        return {
            "paged_caching_": PagedCaching(),
            "static_update_": StaticUpdate(),
            "gather_paged": GatherPaged(),
            "copy_blocks_": CopyBlocks(),
        }

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make ``device`` the current one, where torch has such a switch for its type."""
        switch: Any = getattr(self._module(), "device", None)
        return switch(device) if switch and self.claims(device) else nullcontext()

    def skipped_writes(self, device: torch.device) -> int:
        """Return how many writes its kernels skipped. Synchronises."""
        return SKIPPED.read(device)

    def _module(self) -> Any:
        """Return what torch knows of its type of device, ``torch.<type>``; None where it knows none."""
        return getattr(torch, self.device_type, None)

    def _hardware(self) -> list[torch.device]:
        """List its devices. Counting must open no context on any: a forked child could not use it then."""
        count: Any = getattr(self._module(), "device_count", None)
        return [torch.device(self.device_type, index) for index in range(count())] if count else []
