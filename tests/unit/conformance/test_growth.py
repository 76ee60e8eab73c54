"""What a process holds, as the kit counts it."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from kvdock_conformance.checking import growth
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import check_growth, malloc_info

HOST = torch.device("cpu")
UNITS = {"units of 16 bytes of malloc": 1}
LIBC = ctypes.CDLL(None)

pytestmark = pytest.mark.skipif(malloc_info() is None, reason="the C library has no mallinfo2")


@pytest.fixture(autouse=True)
def typed() -> None:
    """Give malloc and free their types, as addresses are longer than C's int."""
    LIBC.malloc.restype, LIBC.malloc.argtypes, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def test_what_was_given_back_is_not_held_whatever_malloc_keeps_of_it() -> None:
    """Pieces of a size that nobody had before, each time: glibc keeps up to 7 of each for the thread, and counts them as in use."""
    sizes = itertools.count(24, 16)

    def work(number: int) -> None:
        for size in itertools.islice(sizes, 8):
            for piece in [LIBC.malloc(size) for _ in range(7)]:
                LIBC.free(piece)

    check_growth("pieces", HOST, 8, work, UNITS, attempts=1)


@pytest.mark.parametrize("size", [24, 200, 1000, 5000])
def test_what_is_kept_is_seen_at_once(size: int) -> None:
    kept: list[int] = []
    with pytest.raises(NonconformanceError, match="units of 16 bytes of malloc that are left behind, in each of 4 rounds of 2"):
        check_growth("pieces", HOST, 2, lambda number: kept.extend(LIBC.malloc(size) for _ in range(2)), UNITS, attempts=1)
    assert len(kept) == 2 * (1 + growth.ROUNDS)
    for piece in kept:
        LIBC.free(piece)
