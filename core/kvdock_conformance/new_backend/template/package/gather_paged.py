"""`gather_paged`: keys and values are read from the slots of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, as_bits, quantised_reasons

__all__ = ["GatherPaged", "GatherPagedDescriptor"]


class GatherPagedDescriptor(Descriptor):
    """Reads every slot that is in range, and zeros elsewhere."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor) -> None:
        """Fill the outputs, which are the last two arguments."""
        block_size = k_cache.shape[1]
        capacity = k_cache.shape[0] * block_size
        slots = slot_mapping.to(torch.int64)
        outside = (slots < 0) | (slots >= capacity)
        slots = slots.masked_fill(outside, 0)
        self.workspace_bytes = 4 * max(out.nbytes for out in rest[-2:])  # what torch takes to index rows
        for cache, out in zip((k_cache, v_cache), rest[-2:], strict=True):
            if capacity == 0:
                out.zero_()
                continue
            to = as_bits(out)
            to.copy_(as_bits(cache)[slots // block_size, slots % block_size])
            to.masked_fill_(outside[..., None, None], 0)


class GatherPaged(Kernel):
    """Prepares `GatherPagedDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Nothing to prepare."""
        return GatherPagedDescriptor()
