"""The kernel for every device that torch has: it waits for none, so that calls can be captured into graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import HOST, Descriptor, IndexRangeError, Kernel, Request, SkipCounter, slots_in_range, write_rows

__all__ = ["SKIPPED", "RopeCaching", "RopeCachingDescriptor"]

SKIPPED = SkipCounter()
"""Tokens that were skipped on a device, for a slot or a position out of range."""


class RopeCachingDescriptor(Descriptor):
    """Rotates and writes.

    Args:
        op: name of the op, for errors.
        device: where its tensors are.
    """

    def __init__(self, op: str, device: torch.device) -> None:
        self._op, self._on_host, self._skipped = op, device == HOST, SKIPPED.prepare(device)

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Check what the host can read, then write."""
        capacity = k_cache.shape[0] * k_cache.shape[1]
        if self._on_host:
            slots_in_range(self._op, slot_mapping, capacity)
            _check_positions(self._op, positions, cos.shape[0])
        slots, places = slot_mapping.to(torch.int64), positions.to(torch.int64)
        beyond = (slots >= 0) & ((slots >= capacity) | (places < 0) | (places >= cos.shape[0]))
        self._skipped.add_(beyond.sum())
        if capacity == 0:
            return
        valid = (slots >= 0) & ~beyond
        places = places.clamp(0, cos.shape[0] - 1)
        write_rows(k_cache, _rotated(k, cos[places], sin[places]), slots, valid)
        write_rows(v_cache, v, slots, valid)


def _check_positions(op: str, positions: torch.Tensor, count: int) -> None:
    wrong = ((positions < 0) | (positions >= count)).nonzero()
    if wrong.numel():
        place = int(wrong[0])
        fix = "make cos and sin as long as the longest sequence"
        raise IndexRangeError(f"{op}: positions[{place}]", expected=f"a position below {count}", got=int(positions[place]), fix=fix)


def _rotated(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[T, H, D]`` by ``[T, D / 2]``: products and sums in float32, rounded once to the dtype of the keys."""
    first, second = k.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(k.dtype)


class RopeCaching(Kernel):
    """Prepares `RopeCachingDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve everything that the schema allows."""
        return ()

    def prepare(self, request: Request) -> Descriptor:
        """Make sure that the device has a count."""
        return RopeCachingDescriptor(request.op, request.device)
