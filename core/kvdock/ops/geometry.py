"""Arithmetic on shapes and strides that keys, checks and errors share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["MAX_ALIGNMENT", "alignment_of", "extent", "has_internal_overlap", "normalised", "ranges_overlap"]

MAX_ALIGNMENT = 16
"""Bytes. No device kvdock knows moves more than 16 bytes in one memory instruction of a thread."""


def alignment_of(numbers: Iterable[int]) -> int:
    """Return the largest power of two up to `MAX_ALIGNMENT` that divides every one of ``numbers`` (bytes)."""
    bits = MAX_ALIGNMENT
    for number in numbers:
        bits |= number
    return bits & -bits


def normalised(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return ``strides`` with 0 for dims of size 1, whose stride says nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last, 0 when it is empty."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def ranges_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors of one device share a byte. A tensor without memory has none."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return 0 not in (a_start, b_start) and a_start < b_start + extent(b) and b_start < a_start + extent(a)


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether two places of a tensor may be one place in memory, as in what `expand` returns.

    Sufficient for every layout in use: sorted by stride, each dim must step over the whole of those inside it.
    """
    if tensor.numel() == 0:
        return False
    inner = 1
    for stride, size in sorted((st, sz) for sz, st in zip(tensor.shape, tensor.stride(), strict=True) if sz != 1):
        if stride < inner:
            return True
        inner = stride * (size - 1) + inner
    return False
