"""The backend object: devices and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvdock.plugin import Backend, Capabilities, Kernel, Probe
from kvdock_cpu.copy_blocks import CopyBlocks
from kvdock_cpu.gather_paged import GatherPaged
from kvdock_cpu.mla_caching import MLACaching
from kvdock_cpu.mla_gather import MLAGather
from kvdock_cpu.paged_attention import PagedAttention
from kvdock_cpu.paged_caching import PagedCaching
from kvdock_cpu.static_update import StaticUpdate
from kvdock_cpu.swap_blocks import SwapBlocks

__all__ = ["CpuBackend"]


class CpuBackend(Backend):
    """Serves tensors in host memory. Out-of-range slots raise before anything is written, so none is ever skipped."""

    name = "cpu"
    device_type = "cpu"

    def probe(self) -> Probe:
        """Report ready: torch always has a CPU."""
        return Probe.ready("host memory")

    def claims(self, device: torch.device) -> bool:
        """Claim the one CPU device."""
        return device.type == "cpu"

    def devices(self) -> Sequence[torch.device]:
        """List the one CPU device."""
        return [torch.device("cpu")]

    def kernels(self) -> Mapping[str, Kernel]:
        """Return one kernel per op."""
        return {
            "paged_caching_": PagedCaching(),
            "static_update_": StaticUpdate(),
            "gather_paged": GatherPaged(),
            "copy_blocks_": CopyBlocks(),
            "swap_blocks_": SwapBlocks(),
            "paged_attention": PagedAttention(),
            "mla_caching_": MLACaching(),
            "mla_gather": MLAGather(),
        }

    def capabilities(self) -> Capabilities:
        """Claim equal bits in any batch: sequences are attended to one after the other."""
        return Capabilities(batch_invariant=True)
