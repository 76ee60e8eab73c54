"""Memory of a device: how much may be asked for, how it is taken, and what is said where it is not there."""

from __future__ import annotations

import ctypes
import math
import mmap
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kvdock.errors import ArgumentValueError, CapacityError, KVDockError
from kvdock.guarded import is_about_memory
from kvdock.interface import HOST

__all__ = ["aligned", "allocated", "check_bytes", "fresh"]

T = TypeVar("T")


def aligned(nbytes: int, to: int) -> int:
    """Return the next multiple of ``to``."""
    return -(-nbytes // to) * to


_MOST_BYTES = 2**56
"""What a program can address on the processors there are, with page tables of five levels."""


def check_bytes(subject: str, nbytes: int, made_of: str) -> None:
    """Refuse a cache that no machine could hold, before a device is touched; torch says what this one cannot.

    Raises:
        ArgumentValueError: more bytes than an address space has.
    """
    if nbytes > _MOST_BYTES:
        raise ArgumentValueError(
            subject,
            expected=f"at most {_MOST_BYTES} bytes, an address space",
            got=f"{nbytes} bytes: {made_of}",
            fix="ask for a smaller cache",
        )


def allocated(subject: str, nbytes: int, device: torch.device, make: Callable[[], T]) -> T:
    """Return what ``make`` allocates. When it raises, all that it had made is let go at once, whoever keeps the error.

    Args:
        subject: what is made, for the error.
        nbytes: how many bytes it takes.
        device: where.
        make: makes it, and keeps it in variables of its own until it returns.

    Raises:
        CapacityError: the device has not as much memory.
    """
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, KVDockError) or not is_about_memory(error):
            raise
        said = str(error).partition("\n")[0][:200]
    raise CapacityError(
        subject,
        expected=f"{nbytes} bytes of memory on {device}",
        got=f"fewer: {said}",
        fix="ask for a smaller cache, or free memory on the device first",
    )


def _in_large_pages(memory: torch.Tensor) -> torch.Tensor:
    """Ask for large pages for host memory that nobody has touched yet, as numpy does, and return it: decoding looks up fewer addresses.

    Where the system has none, all stays as it is.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if memory.device == HOST and advice is not None:
        first, last = -(-memory.data_ptr() // mmap.PAGESIZE), (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE), advice)
    return memory


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device, alignment: int = 1) -> torch.Tensor:
    """Return zeroed memory, dense, whose address is a multiple of ``alignment``: a power of two, in bytes.

    Where the allocator gives less, so many bytes more are taken, and what is before and behind stays unused.
    """
    with torch.inference_mode(False):  # a cache made while inferring must be writable afterwards too
        memory = torch.empty(tuple(shape), dtype=dtype, device=device)
        if memory.data_ptr() % alignment:
            del memory
            count = math.prod(shape)
            whole = torch.empty(count + alignment // dtype.itemsize, dtype=dtype, device=device)
            memory = whole.narrow(0, -whole.data_ptr() % alignment // dtype.itemsize, count).view(tuple(shape))
        return _in_large_pages(memory).zero_()
