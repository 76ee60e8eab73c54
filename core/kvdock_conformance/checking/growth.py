"""What a process holds, and whether it holds more each time that something is done."""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError

__all__ = ["ROUNDS", "MallocInfo", "check_growth", "held", "malloc_info", "seconds", "set_apart", "times_that_fit"]

ROUNDS = 4
"""So many rounds in a row must each leave something behind: what is made once, and kept for all, is no leak."""

_ATTEMPTS = 3
_ROUND_S, _FEWEST, _MOST = 0.02, 6, 64


class MallocInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


@functools.cache
def malloc_info() -> Any:
    """Return glibc's ``mallinfo2``; None where there is another C library."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = MallocInfo
    return function


def _fill_cache_of_malloc() -> None:
    """Make this thread's cache of malloc as full as it can be: what is freed to it, of a size that is new to it, counts as in use.

    glibc keeps up to 7 pieces (16 since 2.42) for every 16 bytes up to 1,032 there. What is freed besides is free.
    """
    libc = _libc()
    for size in range(8, 1048, 16):
        for piece in [libc.malloc(size) for _ in range(16)]:
            libc.free(piece)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    return libc


def _started_by(task: Path) -> int:
    """Return how many processes a thread has started that nobody has waited for, also such as have ended."""
    try:
        return len((task / "children").read_bytes().split())
    except OSError:  # the thread has ended meanwhile, or the system does not tell
        return 0


def held(device: torch.device) -> dict[str, int]:
    """Return what this process holds now, by name, as far as it can be told exactly."""
    found = {"blocks of Python's memory": sys.getallocatedblocks()}
    mallinfo = malloc_info()
    if mallinfo is not None:
        _fill_cache_of_malloc()
        now = mallinfo()
        found["units of 16 bytes of malloc"] = (now.uordblks + now.hblkhd) // 16
    with contextlib.suppress(OSError):  # another system
        found["pages of address space"] = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        found["open files"], found["threads"] = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        found["processes"] = sum(map(_started_by, Path("/proc/self/task").iterdir()))
    with contextlib.suppress(OSError):
        # Others come and go there too, but not as many in each round as what leaves one each time.
        found["temporary files"] = len(os.listdir(tempfile.gettempdir()))
    allocated = getattr(getattr(torch, device.type, None), "memory_allocated", None)
    if allocated is not None:
        found["bytes that torch holds of the device"] = allocated(device)
    return found


def set_apart() -> None:
    """Make `gc.collect` look only at what comes into being from now on: all that torch brought takes long to look through."""
    gc.collect()  # what is set apart is never collected
    gc.freeze()


def check_growth(
    what: str,
    device: torch.device,
    times: int,
    work: Callable[[int], object],
    least: Mapping[str, int] | None = None,
    attempts: int = _ATTEMPTS,
) -> None:
    """Do something again and again, and look whether each time leaves something behind.

    Args:
        what: what is done, for the error.
        device: on which device.
        times: how often ``work`` does it in a round.
        work: does it so often; takes the number of the round.
        least: what counts as left behind of what `held` names, each time, and nothing else does; None for one of anything.
        attempts: how often what is left must be seen: noise of other threads comes once.

    Raises:
        NonconformanceError: each of `ROUNDS` rounds left so much behind.
    """
    set_apart()
    work(0)
    for attempt in range(attempts):
        grown = _grown(_levels(device, lambda number: work(attempt * ROUNDS + number)), times, least)  # noqa: B023 - called at once
        if not grown:
            return
    name, count = grown[0]
    raise NonconformanceError(
        f"{what}: {name} that are left behind, in each of {ROUNDS} rounds of {times}", expected="none", got=f"at least {count}"
    )


def _levels(device: torch.device, work: Callable[[int], object]) -> dict[str, list[int]]:
    """Return what is held before and after each round, by name."""
    # Room is made before: what is measured must not grow by what is noted of it.
    levels = {name: array.array("q", [0] * (ROUNDS + 1)) for name in held(device)}
    for number in range(ROUNDS + 1):
        if number:
            work(number)
        gc.collect()
        for name, level in held(device).items():
            levels[name][number] = level
    return {name: list(values) for name, values in levels.items()}


def _grown(levels: Mapping[str, list[int]], times: int, least: Mapping[str, int] | None) -> list[tuple[str, int]]:
    """Return what grew in every round, and by how much at least."""
    steps = {name: min(after - before for before, after in itertools.pairwise(values)) for name, values in levels.items()}
    if least is not None:
        steps = {name: step for name, step in steps.items() if step >= times * least.get(name, sys.maxsize)}
    return [(name, step) for name, step in steps.items() if 2 * step > times]


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call of a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def times_that_fit(function: Callable[[], object], fewest: int = _FEWEST) -> int:
    """Return how often a function can be called in a round: fewer times where it is slow, as under an interpreter."""
    return max(fewest, min(_MOST, int(_ROUND_S / statistics.median(seconds(function) for _ in range(3)))))
