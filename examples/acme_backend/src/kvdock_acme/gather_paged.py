"""`gather_paged` on Acme's copy engine, straight into the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import kvdock
from kvdock.ops.hostcheck import slots_in_range

from .engine import Engine
from .memory import pieces, reasons

__all__ = ["GatherPaged", "GatherPagedDescriptor"]


class GatherPagedDescriptor(kvdock.Descriptor):
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


class GatherPaged(kvdock.Kernel):
    """Prepares `GatherPagedDescriptor`.

    Args:
        engine: the device's copy engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        """Serve what the engine can reach."""
        return reasons(request, pools=("k_cache", "v_cache"), rows=("k_out", "v_out"))

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        """Nothing to compile."""
        return GatherPagedDescriptor(request.op, self._engine)
