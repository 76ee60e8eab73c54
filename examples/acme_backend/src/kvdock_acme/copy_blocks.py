"""`copy_blocks_` on Acme's copy engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, check_pairs

from .engine import Engine
from .memory import pieces, reasons

__all__ = ["CopyBlocks", "CopyBlocksDescriptor"]


class CopyBlocksDescriptor(Descriptor):
    """Copies whole blocks within each pool.

    Args:
        op: name of the op, for errors.
        engine: moves the blocks.
    """

    uses_autograd = False  # see `PagedCachingDescriptor`

    def __init__(self, op: str, engine: Engine) -> None:
        self._op = op
        self._engine = engine

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Check all pairs, then copy those that are no padding."""
        check_pairs(self._op, block_pairs, k_cache.shape[0])
        pairs = block_pairs[(block_pairs >= 0).all(1)].numpy()
        for pool in (k_cache, v_cache):
            self._engine.move(pieces(pool), pairs)


class CopyBlocks(Kernel):
    """Prepares `CopyBlocksDescriptor`.

    Args:
        engine: the device's copy engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def supports(self, request: Request) -> Sequence[str]:
        """Serve what the engine can reach."""
        return reasons(request, pools=("k_cache", "v_cache"))

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to compile."""
        return CopyBlocksDescriptor(request.op, self._engine)
