"""`paged_caching_`: new keys and values go to the slots of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvdock.plugin import Descriptor, Kernel, Request, quantised_reasons

from .rows import SKIPPED, write_rows

__all__ = ["PagedCaching", "PagedCachingDescriptor"]


class PagedCachingDescriptor(Descriptor):
    """Writes every token whose slot is in range. A negative slot is padding; one beyond the pool is skipped and counted.

    Args:
        skipped: count of skipped writes on the device, int64 ``[]``.
    """

    def __init__(self, skipped: torch.Tensor) -> None:
        self._skipped = skipped

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any
    ) -> None:
        """Write ``k`` and ``v``."""
        capacity = k_cache.shape[0] * k_cache.shape[1]
        slots = slot_mapping.reshape(-1).to(torch.int64)
        beyond = slots >= capacity
        self._skipped.add_(beyond.sum())
        if capacity == 0:
            return
        valid = (slots >= 0) & ~beyond
        self.workspace_bytes = 4 * max(k.nbytes, v.nbytes)  # what torch takes to index rows
        write_rows(k_cache, k, slots, valid)
        write_rows(v_cache, v, slots, valid)


class PagedCaching(Kernel):
    """Prepares `PagedCachingDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Make sure that the device has a count."""
        return PagedCachingDescriptor(SKIPPED.prepare(request.device))
