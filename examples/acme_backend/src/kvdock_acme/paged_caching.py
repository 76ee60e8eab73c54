"""`paged_caching_` on Acme's copy engine: one program for keys, one for values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvdock.plugin import Descriptor, Kernel, Request, slots_in_range

from .engine import Engine
from .memory import pieces, reasons

__all__ = ["PagedCaching", "PagedCachingDescriptor"]


class PagedCachingDescriptor(Descriptor):
    """Writes keys and values into pools of one geometry.

    Args:
        op: name of the op, for errors.
        engine: moves the rows.
    """

    uses_autograd = False  # the engine moves bytes by address: there is nothing that autograd could record

    def __init__(self, op: str, engine: Engine) -> None:
        self._op = op
        self._engine = engine

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any
    ) -> None:
        """Check all slots, then write."""
        slots_in_range(self._op, slot_mapping, k_cache.shape[0] * k_cache.shape[1])
        for pool, rows in ((k_cache, k), (v_cache, v)):
            self._engine.write(pieces(pool), pieces(rows), slot_mapping.numpy())


class PagedCaching(Kernel):
    """Prepares `PagedCachingDescriptor`.

    Args:
        engine: the device's copy engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def supports(self, request: Request) -> Sequence[str]:
        """Serve what the engine can reach."""
        return reasons(request, pools=("k_cache", "v_cache"), rows=("k", "v"))

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to compile: the engine takes any geometry that `supports` lets through."""
        return PagedCachingDescriptor(request.op, self._engine)
