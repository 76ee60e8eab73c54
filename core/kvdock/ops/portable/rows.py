"""What the portable kernels share: moving rows as bits, to and from places that only the device knows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdock.bits import SkipCounter, as_bits, quantised_reasons
from kvdock.interface import HOST, Descriptor, Kernel, Request

__all__ = ["SKIPPED", "PortableDescriptor", "PortableKernel", "redirect", "write_rows"]

SKIPPED = SkipCounter()
"""Skipped writes of the portable kernels."""


class PortableDescriptor(Descriptor):
    """What the portable kernels prepare.

    Args:
        run: the op, as a function of this and the arguments.
        op: name of the op, for errors.
        skipped: count of what is out of range on the device, int64 ``[]``.
        on_host: whether index values can be read, so that one out of range raises before anything is written.
    """

    def __init__(self, run: Callable[..., None], op: str, skipped: torch.Tensor, on_host: bool) -> None:
        self.run, self.op, self.skipped, self.on_host = run, op, skipped, on_host

    def __call__(self, *args: Any) -> None:
        """Run the op."""
        self.run(self, *args)


class PortableKernel(Kernel):
    """Serves every cache that stores bits as they come."""

    @abstractmethod
    def run(self, plan: PortableDescriptor, *args: Any) -> None:
        """Run the op on arguments in its schema's order; a plan says how."""

    def supports(self, request: Request) -> Sequence[str]:
        """Refuse quantised caches."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Make sure that the device has a count."""
        return PortableDescriptor(self.run, request.op, SKIPPED.prepare(request.device), request.device == HOST)


def redirect(places: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace what is invalid by a copy of the first valid element, so that all may be written and nothing changes.

    Skipping needs the number of valid elements on the host, which would synchronise; writing the same bits twice to one
    place does not.

    Returns:
        ``(source, place)``, both ``[n]`` int64 like ``places``: element ``source[i]`` goes to ``place[i]``. When nothing is
        valid all are element 0, and its place means nothing.
    """
    first = valid.to(torch.uint8).argmax().reshape(1)
    position = torch.arange(places.numel(), device=places.device)
    return torch.where(valid, position, first), torch.where(valid, places, places.index_select(0, first))


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor) -> None:
    """Write the valid ones of ``rows`` into a cache, without asking the device which they are.

    Args:
        cache: ``[num_blocks, block_size, heads, dim]``, any strides.
        rows: ``[..., heads, dim]``.
        slots: ``[n]`` int64, flat over the leading dimensions of ``rows``.
        valid: ``[n]`` bool; a slot that is not valid may be any number.
    """
    block_size = cache.shape[1]
    source, place = redirect(slots, valid)
    place = place.clamp(0, cache.shape[0] * block_size - 1)
    index = (place // block_size, place % block_size)
    bits = as_bits(cache)
    # With nothing valid, the place is written with what it holds.
    rows, width = as_bits(rows), max(rows.shape[1], 1)
    taken = rows.index_select(0, source) if rows.dim() == 3 else rows[source // width, source % width]
    bits.index_put_(index, torch.where(valid.any(), taken, bits[index]))
