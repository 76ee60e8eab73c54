"""`gather_paged` in portable torch."""

from __future__ import annotations

import torch

from kvdock.bits import as_bits
from kvdock.ops.index_values import slots_in_range
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel

__all__ = ["GatherPaged"]


class GatherPaged(PortableKernel):
    """Reads every slot that is in range, and zeros elsewhere."""

    def run(
        self, plan: PortableDescriptor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor
    ) -> None:
        """Fill the outputs, which are the last two arguments."""
        capacity = k_cache.shape[0] * k_cache.shape[1]
        if plan.on_host:
            slots_in_range(plan.op, slot_mapping, capacity)
        slots = slot_mapping.to(torch.int64)
        valid = (slots >= 0) & (slots < capacity)
        slots = torch.where(valid, slots, 0)
        plan.workspace_bytes = 4 * max(out.nbytes for out in rest[-2:])  # what torch takes to index rows
        for cache, out in zip((k_cache, v_cache), rest[-2:], strict=True):
            if capacity == 0:
                out.zero_()
                continue
            as_bits(out).copy_(torch.where(valid[..., None, None], as_bits(cache)[slots // cache.shape[1], slots % cache.shape[1]], 0))
