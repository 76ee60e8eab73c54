"""`swap_blocks_` on the CPU, between pools in host memory: one plain copy per block, which allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, as_bits, live_pairs, quantised_reasons

__all__ = ["SwapBlocks", "SwapBlocksDescriptor"]


class SwapBlocksDescriptor(Descriptor):
    """Copies whole blocks from one cache to another.

    Args:
        op: name of the op, for errors.
    """

    def __init__(self, op: str) -> None:
        self._op = op

    def __call__(self, src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Check all pairs, then copy."""
        source, to = as_bits(src_cache), as_bits(dst_cache)
        for src, dst in live_pairs(self._op, block_pairs, len(to), num_sources=len(source)):
            to[dst].copy_(source[src])


class SwapBlocks(Kernel):
    """Prepares `SwapBlocksDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to prepare."""
        return SwapBlocksDescriptor(request.op)
