"""Arithmetic on shapes and strides that keys, checks and errors share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import ArgumentValueError

__all__ = ["LOWEST", "MAX_ALIGNMENT", "alignment_of", "extent", "has_internal_overlap", "normalised", "ranges_overlap", "share_memory"]

MAX_ALIGNMENT = 16
"""Bytes. No device kvdock knows moves more than 16 bytes in one memory instruction of a thread."""

LOWEST = 1 << 22
"""Below this address no program has memory: what seems to lie there is an offset in a storage that was given back."""


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


_MOST_WORK = 100_000
"""Steps of numpy's search for a common byte: some milliseconds. Pools interleaved in one storage take about ten."""


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one device share a byte; interleaved ones, whose address ranges overlap, need not.

    Raises:
        ArgumentValueError: it would take too long to find out, as for strides without a common divisor.
    """
    if not ranges_overlap(a, b):
        return False
    try:
        return np.shares_memory(_described(a), _described(b), max_work=_MOST_WORK)  # type: ignore[arg-type] # the stub has two values only
    except np.exceptions.TooHardError:
        raise ArgumentValueError(
            "two tensors in one address range",
            expected="strides of which it can be told whether they meet",
            got=f"strides {list(a.stride())} and {list(b.stride())} for shapes {list(a.shape)} and {list(b.shape)}",
            fix="give each memory of its own, or equal strides",
        ) from None


def _described(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return an array of the same addresses, on whatever device: it must not be read."""
    size = tensor.element_size()
    place = {"data": (tensor.data_ptr(), False), "typestr": f"|V{size}", "version": 3}
    steps = {"shape": tuple(tensor.shape), "strides": tuple(stride * size for stride in tensor.stride())}
    return np.asarray(SimpleNamespace(__array_interface__=place | steps))


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
