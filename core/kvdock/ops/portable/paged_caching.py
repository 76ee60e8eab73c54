"""`paged_caching_` in portable torch."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.ops.index_values import slots_in_range
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel, write_rows

__all__ = ["PagedCaching"]


class PagedCaching(PortableKernel):
    """Writes every token whose slot is in range."""

    def run(
        self,
        plan: PortableDescriptor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slot_mapping: torch.Tensor,
        *scales: Any,
    ) -> None:
        """Write ``k`` and ``v``."""
        capacity = k_cache.shape[0] * k_cache.shape[1]
        if plan.on_host:
            slots_in_range(plan.op, slot_mapping, capacity)
        slots = slot_mapping.reshape(-1).to(torch.int64)
        beyond = slots >= capacity
        plan.skipped.add_(beyond.sum())
        if capacity == 0:
            return
        valid = (slots >= 0) & ~beyond
        plan.workspace_bytes = 4 * max(k.nbytes, v.nbytes)  # what torch takes to index rows
        write_rows(k_cache, k, slots, valid)
        write_rows(v_cache, v, slots, valid)
