"""`gather_paged` in portable torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.interface import HOST, Descriptor, Kernel, Request
from kvdock.ops.hostcheck import slots_in_range
from kvdock.ops.portable.rows import as_bits, quantised_reasons

__all__ = ["GatherPaged", "GatherPagedDescriptor"]


class GatherPagedDescriptor(Descriptor):
    """Reads every slot that is in range, and zeros elsewhere.

    Args:
        op: name of the op, for errors.
        on_host: whether slots can be read, so that one out of range raises before anything is written.
    """

    def __init__(self, op: str, on_host: bool) -> None:
        self._op = op
        self._on_host = on_host

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor) -> None:
        """Fill the outputs, which are the last two arguments."""
        capacity = k_cache.shape[0] * k_cache.shape[1]
        if self._on_host:
            slots_in_range(self._op, slot_mapping, capacity)
        slots = slot_mapping.to(torch.int64)
        valid = (slots >= 0) & (slots < capacity)
        slots = torch.where(valid, slots, 0)
        for cache, out in zip((k_cache, v_cache), rest[-2:], strict=True):
            if capacity == 0:
                out.zero_()
                continue
            rows = as_bits(cache)[slots // cache.shape[1], slots % cache.shape[1]]
            as_bits(out).copy_(torch.where(valid[..., None, None], rows, 0))


class GatherPaged(Kernel):
    """Prepares `GatherPagedDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to prepare but the place of the slots."""
        return GatherPagedDescriptor(request.op, request.device == HOST)
