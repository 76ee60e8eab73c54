"""`static_update_` on Acme's copy engine: whether the lengths are an int or lie in a tensor, the host can read them here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvdock.plugin import Descriptor, Kernel, Request, check_lengths

from .engine import Engine
from .memory import pieces, reasons

__all__ = ["StaticUpdate", "StaticUpdateDescriptor"]


class StaticUpdateDescriptor(Descriptor):
    """Writes new positions behind the length of each row.

    Args:
        op: name of the op, for errors.
        engine: moves the vectors.
    """

    uses_autograd = False  # see `PagedCachingDescriptor`

    def __init__(self, op: str, engine: Engine) -> None:
        self._op = op
        self._engine = engine

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: int | torch.Tensor
    ) -> None:
        """Check all lengths, then write."""
        lengths = [cache_lengths] if isinstance(cache_lengths, int) else cache_lengths.flatten().tolist()
        check_lengths(self._op, lengths, k.shape[2], k_cache.shape[2])
        for cache, rows in ((k_cache, k), (v_cache, v)):
            self._engine.append(pieces(cache), pieces(rows), np.broadcast_to(lengths, rows.shape[:1]))


class StaticUpdate(Kernel):
    """Prepares `StaticUpdateDescriptor`.

    Args:
        engine: the device's copy engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def supports(self, request: Request) -> Sequence[str]:
        """Serve what the engine can reach."""
        return reasons(request, pools=("k_cache", "v_cache"), rows=("k", "v"))

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to compile."""
        return StaticUpdateDescriptor(request.op, self._engine)
