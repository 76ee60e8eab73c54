"""What a process holds, as the kit counts it.

In processes of their own, as the kit does it: a thread of pytest's workers may give something back just then, which hides a leak.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvdock_conformance.checking.growth import malloc_info
from support_scripts import Interpreters

SCRIPT = """
import ctypes, itertools, json, sys, torch
from kvdock_conformance.checking.growth import ROUNDS, check_growth

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def look(times, work):
    print(json.dumps(ROUNDS))
    try:
        check_growth("pieces", torch.device("cpu"), times, work, {"units of 16 bytes of malloc": 1}, attempts=1)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
    print(json.dumps("looked"))
"""
GIVEN_BACK = """
sizes = itertools.count(24, 16)

def work(number):
    for size in itertools.islice(sizes, 8):
        for piece in [libc.malloc(size) for _ in range(7)]:
            libc.free(piece)

look(8, work)
"""
KEPT = """
kept = []
look(20, lambda number: kept.extend(libc.malloc(int(sys.argv[1])) for _ in range(20)))
print(json.dumps(len(kept)))
"""

pytestmark = pytest.mark.skipif(malloc_info() is None, reason="the C library has no mallinfo2")


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreters]:
    scripts = Interpreters(tmp_path_factory.mktemp("growth"), imports=["kvdock_conformance.checking.growth"])
    yield scripts
    scripts.close()


def test_what_was_given_back_is_not_held_whatever_malloc_keeps_of_it(interpreters: Interpreters) -> None:
    """Pieces of a size that nobody had before, each time: glibc keeps up to 7 of each for the thread, and counts them as in use."""
    _, *said = interpreters.answers(SCRIPT + GIVEN_BACK)
    assert said == ["looked"]


@pytest.mark.parametrize("size", [24, 200, 1000, 5000])
def test_what_is_kept_is_seen_at_once(interpreters: Interpreters, size: int) -> None:
    rounds, failure, *rest = interpreters.answers(SCRIPT + KEPT, str(size))
    assert failure.startswith("NonconformanceError: ")
    assert "units of 16 bytes of malloc that are left behind, in each of 4 rounds of 20" in failure
    assert rest == ["looked", 20 * (1 + rounds)]
