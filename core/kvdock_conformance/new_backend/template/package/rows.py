"""What the kernels share: moving rows as bits, to and from places that only the device knows.

No function here waits for a device, so that calls can be captured into graphs. What cannot be looked at cannot raise: a
place out of range is skipped, and counted on the device.
"""

from __future__ import annotations

import torch

from kvdock.plugin import SkipCounter, as_bits

__all__ = ["SKIPPED", "redirect", "write_rows"]

SKIPPED = SkipCounter()
"""Skipped writes of all kernels."""


def redirect(places: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace what is invalid by a copy of the first valid element, so that all may be written and nothing else changes.

    Dropping elements needs their number on the host, which would synchronise; writing the same bits twice does not.

    Args:
        places: ``[n]`` int64, where each element goes; at least one.
        valid: ``[n]`` bool.

    Returns:
        ``(source, place)``, both ``[n]`` int64: element ``source[i]`` goes to ``place[i]``. When nothing is valid all are
        element 0, and its place means nothing.
    """
    first = valid.to(torch.uint8).argmax().reshape(1)
    position = torch.arange(places.numel(), device=places.device)
    return torch.where(valid, position, first), torch.where(valid, places, places.index_select(0, first))


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor) -> None:
    """Write the valid ones of ``rows`` into a cache, without asking the device which they are.

    Args:
        cache: ``[num_blocks, block_size, heads, dim]``, any strides; at least one block.
        rows: ``[..., heads, dim]``, any strides.
        slots: ``[n]`` int64, flat over the leading dimensions of ``rows``.
        valid: ``[n]`` bool; a slot that is not valid may be any number.
    """
    block_size, width = cache.shape[1], max(rows.shape[1], 1)
    source, place = redirect(slots, valid)
    place = place.clamp(0, cache.shape[0] * block_size - 1)
    block, offset = place // block_size, place % block_size
    bits, new = as_bits(cache), as_bits(rows)
    taken = new.index_select(0, source) if rows.dim() == 3 else new[source // width, source % width]
    # With nothing valid all places are one place: it is written with what it holds.
    held = bits[block[:1], offset[:1]]
    bits.index_put_((block, offset), torch.where(valid.any(), taken, held))
