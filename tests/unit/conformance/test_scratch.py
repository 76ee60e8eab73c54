"""Scratch memory of calls: a little from anybody, what the plan says from torch's allocator alone, and never as much as large pools."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults.fault import Args, BackendCall, KernelSeed
from kvdock_conformance.faults.seeds import FaultyKernel
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load

MIB = 1 << 20


def checked(number: int, take: Callable[[Args], object], workspace: int = 0) -> None:
    """Check a write that takes something while it runs, and says so much of it."""

    def call(run: BackendCall, args: Args) -> None:
        taken = take(args)
        run(args)
        del taken

    requirement, target = load()[f"KVD-RESOURCE-{number:03}"], Target("cpu")
    data = requirement.selected(Level.CORE)[0].data
    seed = KernelSeed("paged_caching_", lambda inner: FaultyKernel(inner, lambda: call))
    with seed.seeded(target), mock.patch.object(kvdock.plugin.Descriptor, "workspace_bytes", workspace):
        requirement.check(target, data)


def within(count: int, take: Callable[[], object]) -> object:
    """Take something while this process may have so many bytes of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (count, before[1]))
    try:
        return take()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def of_torch(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


@pytest.mark.parametrize("number", [10, 11])
@pytest.mark.parametrize("memory", [of_torch, lambda count: np.empty(count, np.uint8)], ids=["torch", "numpy"])
def test_a_little_may_be_taken_from_anybody(number: int, memory: Callable[[int], object]) -> None:
    checked(number, lambda args: memory(2 * MIB))


def test_what_a_plan_says_may_be_taken_of_torch() -> None:
    checked(11, lambda args: [args["v"].clone() for _ in range(4)], workspace=4 * 70 * MIB)


@pytest.mark.parametrize(
    ("number", "take", "workspace", "said"),
    [
        (10, lambda args: args["k_cache"].clone(), 1 << 40, "with 16777216 bytes: RuntimeError"),
        (10, lambda args: of_torch(args["slot_mapping"].numel() * len(args["k_cache"])), 0, "with 16777216 bytes: RuntimeError"),
        (11, lambda args: [args["v"].clone() for _ in range(9)], 0, "workspace_bytes is 0, got with 16777216 bytes: RuntimeError"),
        (11, lambda args: [args["v"].clone() for _ in range(4)], 72 * MIB, "with 92274688 bytes: RuntimeError"),
        (11, lambda args: np.empty(20 * args["v"].nbytes, np.uint8), 1 << 40, "with 16777216 bytes: MemoryError"),
        (11, lambda args: of_torch(20 * args["v"].nbytes), 1 << 40, "with 1124073472 bytes: RuntimeError"),
    ],
    ids=["a clone of a pool", "a table of slots by blocks", "what no plan says", "more than a plan says", "numpy", "too much of torch"],
)
def test_what_is_too_much_or_somebody_elses(number: int, take: Callable[[Args], object], workspace: int, said: str) -> None:
    with pytest.raises(NonconformanceError, match=said):
        checked(number, take, workspace)


def test_what_malloc_has_at_hand_is_got_too() -> None:
    np.empty(31 * MIB, np.uint8)  # from now on malloc keeps what is smaller
    freed, behind = [np.empty(30 * MIB, np.uint8) for _ in range(40)], np.empty(MIB, np.uint8)
    del freed  # to malloc and not to the system, because of what lies behind
    with pytest.raises(NonconformanceError, match="with 16777216 bytes: RuntimeError"):
        checked(10, lambda args: args["k_cache"].clone(), 1 << 40)
    del behind


BEHIND_ANOTHER_ARENA = """
import contextlib
from threading import Thread

import numpy as np
import pytest

from kvdock_conformance.checking.failure import NonconformanceError
from unit.conformance.test_scratch import MIB, checked, of_torch, within

np.empty(31 * MIB, np.uint8)
freed, behind = [np.empty(30 * MIB, np.uint8) for _ in range(40)], np.empty(MIB, np.uint8)
del freed  # to the main arena
other = Thread(target=lambda: np.empty(MIB, np.uint8))  # has an arena of its own
other.start()
other.join()
with contextlib.suppress(RuntimeError):  # a thread that is refused stays with the arena that malloc asked next
    within(0, lambda: of_torch(1 << 40))
assert within(0, lambda: of_torch(64 * MIB)) is not None
with pytest.raises(NonconformanceError, match="with 16777216 bytes: RuntimeError"):
    checked(10, lambda args: args["k_cache"].clone(), 1 << 40)
"""


@pytest.mark.slow
def test_what_another_arena_has_at_hand_is_got_too() -> None:
    """In a process of its own: what one has done decides where its memory lies."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", BEHIND_ANOTHER_ARENA], env=own, check=True)
