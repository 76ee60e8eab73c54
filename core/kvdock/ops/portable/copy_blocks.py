"""`copy_blocks_` in portable torch."""

from __future__ import annotations

import torch

from kvdock.bits import as_bits
from kvdock.interface import HOST
from kvdock.ops.index_values import pairs_on_device
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel, redirect

__all__ = ["CopyBlocks"]


class CopyBlocks(PortableKernel):
    """Copies whole blocks within each cache."""

    def run(self, plan: PortableDescriptor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Copy block ``src`` to block ``dst`` for each pair."""
        num_blocks = k_cache.shape[0]
        if block_pairs.device == HOST:
            block_pairs = pairs_on_device(plan.op, block_pairs, num_blocks, k_cache.device)
        pairs = block_pairs.to(torch.int64)
        padding, beyond = (pairs < 0).any(1), (pairs >= num_blocks).any(1)
        plan.skipped.add_((beyond & ~padding).sum())
        if num_blocks == 0:
            return
        valid = ~(padding | beyond)
        source, dst = redirect(pairs[:, 1], valid)
        src = pairs[:, 0].index_select(0, source)
        # With nothing valid, block 0 is copied onto itself.
        src, dst = (torch.where(valid.any(), ids, 0) for ids in (src, dst))
        plan.workspace_bytes = 2 * len(pairs) * max(k_cache[:1].nbytes, v_cache[:1].nbytes)  # what torch takes to index blocks
        for cache in (k_cache, v_cache):
            as_bits(cache).index_put_((dst,), as_bits(cache).index_select(0, src))
