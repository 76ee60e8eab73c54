"""`paged_caching_` in portable torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvdock.interface import HOST, Descriptor, Kernel, Request
from kvdock.ops.hostcheck import slots_in_range
from kvdock.ops.portable.rows import SKIPPED, quantised_reasons, write_rows

__all__ = ["PagedCaching", "PagedCachingDescriptor"]


class PagedCachingDescriptor(Descriptor):
    """Writes every token whose slot is in range.

    Args:
        op: name of the op, for errors.
        skipped: count of out-of-range slots on the device, int64 ``[]``.
        on_host: whether slots can be read, so that one out of range raises before anything is written.
    """

    def __init__(self, op: str, skipped: torch.Tensor, on_host: bool) -> None:
        self._op = op
        self._skipped = skipped
        self._on_host = on_host

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any
    ) -> None:
        """Write ``k`` and ``v``."""
        capacity = k_cache.shape[0] * k_cache.shape[1]
        if self._on_host:
            slots_in_range(self._op, slot_mapping, capacity)
        slots = slot_mapping.reshape(-1).to(torch.int64)
        beyond = slots >= capacity
        self._skipped.add_(beyond.sum())
        if capacity == 0:
            return
        valid = (slots >= 0) & ~beyond
        write_rows(k_cache, k, slots, valid)
        write_rows(v_cache, v, slots, valid)


class PagedCaching(Kernel):
    """Prepares `PagedCachingDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Make sure that the device has a count."""
        return PagedCachingDescriptor(request.op, SKIPPED.prepare(request.device), request.device == HOST)
