"""`static_update_` in portable torch."""

from __future__ import annotations

import torch

from kvdock.bits import as_bits
from kvdock.ops.index_values import check_lengths
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel, write_rows

__all__ = ["StaticUpdate"]


class StaticUpdate(PortableKernel):
    """Writes all rows behind one length that the host knows, or each behind its own, which lies in a tensor."""

    def run(
        self,
        plan: PortableDescriptor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache_lengths: int | torch.Tensor,
    ) -> None:
        """Write ``k`` and ``v``. A row that does not fit behind a length in a tensor on a device is skipped whole.

        A static cache is a paged one whose blocks are its rows: position p of row r is slot ``r * S + p``.
        """
        (rows, _, new, _), length = k.shape, k_cache.shape[2]
        if not isinstance(cache_lengths, torch.Tensor):  # a plain copy, on any device
            check_lengths(plan.op, [cache_lengths], new, length)
            for cache, source in ((k_cache, k), (v_cache, v)):
                as_bits(cache)[:rows, :, cache_lengths : cache_lengths + new].copy_(as_bits(source))
            return
        if plan.on_host:
            check_lengths(plan.op, cache_lengths.reshape(-1).tolist(), new, length)
        start = cache_lengths.to(torch.int64).reshape(-1).expand(rows)
        valid = ((start >= 0) & (start <= length - new)).repeat_interleave(new, output_size=rows * new)
        plan.skipped.add_((~valid).sum())
        if new > length:
            return
        plan.workspace_bytes = 4 * max(k.nbytes, v.nbytes)  # what torch takes to index rows
        first = torch.arange(rows, device=start.device) * length + start
        slots = (first[:, None] + torch.arange(new, device=start.device)).reshape(-1)
        for cache, source in ((k_cache, k), (v_cache, v)):
            write_rows(cache.transpose(1, 2), source.transpose(1, 2), slots, valid)
