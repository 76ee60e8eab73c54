"""`copy_blocks_` on the CPU: one plain copy per block, which allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, as_bits, live_pairs, quantised_reasons

__all__ = ["CopyBlocks", "CopyBlocksDescriptor"]


class CopyBlocksDescriptor(Descriptor):
    """Copies whole blocks within each cache.

    Args:
        op: name of the op, for errors.
    """

    def __init__(self, op: str) -> None:
        self._op = op

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Check all pairs, then copy."""
        pairs = live_pairs(self._op, block_pairs, k_cache.shape[0])
        for cache in (as_bits(k_cache), as_bits(v_cache)):
            for src, dst in pairs:
                cache[dst].copy_(cache[src])


class CopyBlocks(Kernel):
    """Prepares `CopyBlocksDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to prepare."""
        return CopyBlocksDescriptor(request.op)
