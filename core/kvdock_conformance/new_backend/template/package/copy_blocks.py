"""`copy_blocks_`: whole blocks are copied inside one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import HOST, Descriptor, Kernel, Request, as_bits, pairs_on_device, quantised_reasons

from .rows import SKIPPED, redirect

__all__ = ["CopyBlocks", "CopyBlocksDescriptor"]


class CopyBlocksDescriptor(Descriptor):
    """Copies whole blocks within each cache. A negative id is padding; a pair beyond the pool is skipped and counted.

    Args:
        op: name of the op, for errors.
        skipped: count of skipped writes on the device, int64 ``[]``.
    """

    def __init__(self, op: str, skipped: torch.Tensor) -> None:
        self._op = op
        self._skipped = skipped

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Copy block ``src`` to block ``dst`` for each pair. Pairs in host memory are checked first, and may raise."""
        num_blocks = k_cache.shape[0]
        if block_pairs.device == HOST:
            block_pairs = pairs_on_device(self._op, block_pairs, num_blocks, k_cache.device)
        pairs = block_pairs.to(torch.int64)
        padding, beyond = (pairs < 0).any(1), (pairs >= num_blocks).any(1)
        self._skipped.add_((beyond & ~padding).sum())
        if num_blocks == 0:
            return
        valid = ~(padding | beyond)
        source, dst = redirect(pairs[:, 1], valid)
        src = pairs[:, 0].index_select(0, source)
        # With nothing valid, block 0 is copied onto itself.
        src, dst = (torch.where(valid.any(), ids, 0) for ids in (src, dst))
        self.workspace_bytes = 2 * len(pairs) * max(k_cache[:1].nbytes, v_cache[:1].nbytes)  # what torch takes to index blocks
        for cache in (k_cache, v_cache):
            bits = as_bits(cache)
            bits.index_put_((dst,), bits.index_select(0, src))


class CopyBlocks(Kernel):
    """Prepares `CopyBlocksDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Make sure that the device has a count."""
        return CopyBlocksDescriptor(request.op, SKIPPED.prepare(request.device))
