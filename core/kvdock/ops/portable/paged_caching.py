"""`paged_caching_` in portable torch."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.ops.index_values import slots_in_range
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel, write_rows

__all__ = ["PagedCaching", "PagedCachingDescriptor"]


class PagedCachingDescriptor(PortableDescriptor):
    """Writes every token whose slot is in range."""

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
        self.workspace_bytes = 4 * max(k.nbytes, v.nbytes)  # what torch takes to index rows
        write_rows(k_cache, k, slots, valid)
        write_rows(v_cache, v, slots, valid)


class PagedCaching(PortableKernel):
    """Prepares `PagedCachingDescriptor`."""

    descriptor = PagedCachingDescriptor
