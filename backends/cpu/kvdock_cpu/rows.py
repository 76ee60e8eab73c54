"""What the CPU kernels share: moving rows of bytes in as wide elements as their addresses allow, and which rows queries see.

torch's indexed copies cost one step per element, so a row of 2 KB goes about five times as fast as 128 elements of 16
bytes than as 1,024 of 2 bytes. The elements are never computed with: bits arrive as they came.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kvdock.plugin import HOST, TensorMeta, as_bits, bits_dtype, common_alignment

__all__ = ["Part", "memmove", "ranges", "runs_of", "spans", "wide_dtype", "widen"]

memmove = ctypes.PyDLL(None).memmove
"""``memmove(to, start, count)``: addresses and bytes. A sixth quicker than `ctypes.memmove`, which gives up the GIL for
each row and makes an object of its result."""
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None


def wide_dtype(pool: TensorMeta, *others: TensorMeta) -> torch.dtype:
    """Return the widest element that divides every address and step of a pool and of what is copied to or from it.

    Args:
        pool: a pool: shape and strides known.
        others: tensors whose rows move; their alignment covers their rows and steps.
    """
    return bits_dtype(common_alignment(pool, *others))


def widen(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a tensor's rows as elements of ``dtype``, which divides its rows, addresses and steps.

    torch also asks that the strides of size-1 dims, which say nothing, and the offset in the storage be divisible.
    """
    wide, size = dtype.itemsize, tensor.element_size()
    if 1 in tensor.shape[:-1]:
        steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        tensor = tensor.as_strided(tensor.shape, [wide if length == 1 else stride for length, stride in steps] + [1])
    if tensor.storage_offset() * size % wide:
        return as_bits(tensor)
    return tensor.view(dtype)


def spans(keep: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of each run of True in a ``[n]`` bool tensor."""
    edges = torch.diff(keep.to(torch.int8), prepend=keep.new_zeros(1, dtype=torch.int8), append=keep.new_zeros(1, dtype=torch.int8))
    places = edges.nonzero().flatten().tolist()
    yield from zip(places[::2], places[1::2], strict=True)


def runs_of(slots: torch.Tensor, capacity: int) -> list[tuple[int, int, int]] | None:
    """Return the runs of consecutive slots, as ``(first position, first slot, length)``.

    numpy, since its calls cost a third of torch's on arrays of this size.

    Args:
        slots: at least one slot, any shape, in host memory.
        capacity: slots of the pool.

    Returns:
        The runs, or None when one holds padding or leaves the pool: for the caller to look at closely.
    """
    flat = slots.numpy().reshape(-1)
    cut = (flat[1:] - flat[:-1] != 1).nonzero()[0] + 1
    starts = [0, *cut.tolist()]
    firsts = [int(flat[0]), *flat[cut].tolist()]
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(flat)], strict=True)]
    if min(firsts) < 0 or max(map(int.__add__, firsts, lengths)) > capacity:
        return None
    return list(zip(starts, firsts, lengths, strict=True))


class Part:
    """Some queries of a sequence, and which keys they see.

    Args:
        start: first key that may be seen.
        length: how many keys there are.
        begin: position of the first query.
        end: position behind the last.
        causal: whether a query sees none behind its own.
        window: how many it sees up to its own.
    """

    def __init__(self, start: int, length: int, begin: int, end: int, causal: bool, window: int | None) -> None:
        self.start, self.length, self.causal, self.window = start, length, causal, window
        self.begin, self.end = begin, end
        self.shared = self.first(end - 1), self.stop(begin)
        """The keys that all of them see."""

    def first(self, position: int) -> int:
        """Return the first key that the query at a position sees."""
        return self.start if self.window is None else max(self.start, position - self.window + 1)

    def stop(self, position: int) -> int:
        """Return the one behind the last."""
        return min(position + 1, self.length) if self.causal else self.length

    def tiles(self, size: int) -> Iterator[tuple[int, int]]:
        """Return the ranges of keys to look at: no key outside is seen by any."""
        return ranges(self.first(self.begin), self.stop(self.end - 1), size)

    def is_seen(self, begin: int, end: int) -> torch.Tensor | None:
        """Return which keys of a range each query sees, ``[n, keys]``; None for all."""
        if self.shared[0] <= begin and end <= self.shared[1]:
            return None
        keys, positions = torch.arange(begin, end, device=HOST), torch.arange(self.begin, self.end, device=HOST)[:, None]
        is_seen = keys <= positions if self.causal else torch.ones_like(keys <= positions)
        return is_seen if self.window is None else is_seen & (keys > positions - self.window)


def ranges(first: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges from ``first`` to ``stop``, if any, that reach over no multiple of ``size``."""
    for begin in range(first - first % size, stop, size) if first < stop else ():
        yield max(begin, first), min(begin + size, stop)
