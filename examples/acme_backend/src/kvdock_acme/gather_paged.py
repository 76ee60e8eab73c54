"""`gather_paged` on Acme's copy engine, straight into the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, slots_in_range

from .engine import Engine
from .memory import pieces, reasons

__all__ = ["GatherPaged", "GatherPagedDescriptor"]


class GatherPagedDescriptor(Descriptor):
    """Reads keys and values from pools of one geometry.

    Args:
        op: name of the op, for errors.
        engine: moves the rows.
    """

    uses_autograd = False  # see `PagedCachingDescriptor`

    def __init__(self, op: str, engine: Engine) -> None:
        self._op = op
        self._engine = engine

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor) -> None:
        """Check all slots, then fill the outputs, which are the last two arguments."""
        slots_in_range(self._op, slot_mapping, k_cache.shape[0] * k_cache.shape[1])
        for pool, out in zip((k_cache, v_cache), rest[-2:], strict=True):
            self._engine.read(pieces(pool), pieces(out), slot_mapping.numpy())


class GatherPaged(Kernel):
    """Prepares `GatherPagedDescriptor`.

    Args:
        engine: the device's copy engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def supports(self, request: Request) -> Sequence[str]:
        """Serve what the engine can reach."""
        return reasons(request, pools=("k_cache", "v_cache"), rows=("k_out", "v_out"))

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to compile."""
        return GatherPagedDescriptor(request.op, self._engine)
