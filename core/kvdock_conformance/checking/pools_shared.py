"""Threads that use one pool at once, at places of their own."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import check_growth
from kvdock_conformance.checking.meaning import forgive, refer, schema_of, tolerance_of
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.target import Target

__all__ = ["PoolThread", "check_new_threads", "check_shared_pools", "steps_of", "stopped_at"]

_LOOKS = 3
_FEWEST, _MOST = 16, 48  # of the steps of a call at which another one is made
_RUN_S, _FEWEST_TURNS = 0.05, 4  # under an interpreter, a call takes long
_GOLDEN = 0.618034  # multiples of it are spread evenly, however many there are
_LOCKED_S = 0.2  # a call that waits so long waits for the one that is stopped
_WAIT_S = 30.0
_THREADS = 32  # of a round: five rounds are more than tables of 128 have room for
_PER_THREAD = {"blocks of Python's memory": 1, "open files": 1, "threads": 1}


def steps_of(function: Callable[[], object]) -> int:
    """Call a function, and return how many steps Python's own profiler sees in it."""
    seen, before = [0], sys.getprofile()

    def count(frame: object, event: str, argument: object) -> None:
        seen[0] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return seen[0]


def stopped_at(step: int, function: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Call a function, and something else in the middle of it: before one of its steps."""
    left, before = [step], sys.getprofile()

    def stop(frame: object, event: str, argument: object) -> None:
        left[0] -= 1
        if not left[0]:
            sys.setprofile(before)
            meanwhile()

    sys.setprofile(stop)
    try:
        function()
    finally:
        sys.setprofile(before)


class PoolThread:
    """A thread's call, made again and again, and the bytes that it must write each time.

    Args:
        target: the backend.
        memory: the memory of all threads.
        expected: what it must hold once every call was made; a twin that is written to.
        call: the call as data.
        number: which of the threads it is.
    """

    def __init__(self, target: Target, memory: Arenas, expected: Arenas, call: Mapping[str, Any], number: int) -> None:
        self._number = number
        self._target, self._memory, self._op = target, memory, call["op"]
        self._args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        before = memory.copy()
        refer(expected, call)
        after = before.copy()
        refer(after, call)
        written = {arg.name: call["args"][arg.name] for arg in schema_of(self._op).mutated if arg.name in call["args"]}
        self._computed = [
            (self._args[name], after.tensor({**spec, "values": None}).to(self._args[name].device), tolerance)
            for name, spec in written.items()
            if (tolerance := tolerance_of(self._op, self._args[name].dtype))
        ]
        changed = [(was != now).nonzero().flatten() for was, now in zip(before.bytes, after.bytes, strict=True)]
        self._places = [
            (content, places.to(content.device), now[places].to(content.device))
            for content, places, now in zip(memory.bytes, changed, after.bytes, strict=True)
            if len(places) and not self._computed
        ]

    def spoil(self) -> None:
        """Spoil what is this thread's own."""
        for content, places, right in self._places:
            content[places] = ~right
        for result, _, _ in self._computed:
            result.fill_(torch.nan)

    def call(self) -> None:
        """Make the call."""
        self._target.call(self._op, self._args)

    def look(self) -> None:
        """Look at what is this thread's own: nobody else writes there.

        Raises:
            NonconformanceError: a byte is not what it must be.
        """
        for content, places, right in self._places:
            if not torch.equal(content[places], right):
                wrong = int((content[places] != right).sum())
                what = f"{self._op} by a thread beside others"
                raise NonconformanceError(what, expected="its own bytes as they were written", got=f"{wrong} that are not")
        for result, right, by in self._computed:
            if not torch.allclose(result.double(), right.double(), rtol=by, atol=by):
                what, off = f"{self._op} by a thread beside others", float((result.double() - right.double()).abs().max())
                raise NonconformanceError(what, expected=f"its own results, at most {by} off", got=f"numbers {off:.3g} apart")

    def run(self, ready: threading.Barrier) -> None:
        """Make the call again and again, at full speed: what is native can only meet what runs at the same time.

        Raises:
            NonconformanceError: a byte is not what it must be.
        """
        ready.wait(_WAIT_S)
        end, turn = time.monotonic() + _RUN_S, 0
        while turn < _FEWEST_TURNS or time.monotonic() < end:
            self.spoil()
            self.call()
            for _ in range(_LOOKS):  # what others write back late is found too
                self.look()
                time.sleep(0)
            turn += 1

    def in_the_middle(self, other: PoolThread, elsewhere: ThreadPoolExecutor) -> None:
        """Make the call, and another thread's in the middle of it: at one of its steps after the other, so that chance has no part in it.

        Raises:
            NonconformanceError: a byte of either is not what it must be.
        """
        for _ in range(5):  # what comes once is behind both
            elsewhere.submit(other.call).result(_WAIT_S)
            steps = steps_of(self.call)
        end = time.monotonic() + _RUN_S
        for number in range(1, _MOST + 1):
            made: list[Future[None]] = []

            def meanwhile() -> None:
                made.append(elsewhere.submit(other.call))  # noqa: B023 - called at once
                wait(made, _LOCKED_S)  # noqa: B023 - called at once

            self.spoil()
            other.spoil()
            stopped_at(1 + int(number * _GOLDEN % 1 * steps), self.call, meanwhile)
            if not made:  # this call had fewer steps
                meanwhile()
            made[0].result(_WAIT_S)
            self.look()
            other.look()
            if number >= _FEWEST and time.monotonic() > end:
                break


def check_shared_pools(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case, each by a thread of its own, at once and again and again; they write to other places of the same memory.

    Raises:
        NonconformanceError: a byte is not what it must be.
    """
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        for spec in call["args"].values():
            memory.tensor(spec)  # writes its values
    expected = memory.copy()
    threads = [PoolThread(target, memory, expected, call, number) for number, call in enumerate(data["calls"])]
    ready = threading.Barrier(len(threads))
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in threads]
        for (one, own), (other, elsewhere) in itertools.permutations(zip(threads, pools, strict=True), 2):
            own.submit(one.in_the_middle, other, elsewhere).result()
        for done in [pool.submit(thread.run, ready) for thread, pool in zip(threads, pools, strict=True)]:
            done.result()
    for call in data["calls"]:
        forgive(memory, expected, call)
    every = {f"{name} of thread {number}": spec for number, call in enumerate(data["calls"]) for name, spec in call["args"].items()}
    compare(memory, expected, every, f"{data['calls'][0]['op']} by threads at once")


def check_new_threads(target: Target, data: Mapping[str, Any]) -> None:
    """Make the first call of a case in threads that come, call and go.

    Raises:
        NonconformanceError: a byte is not what it must be, or each thread leaves something behind.
    """
    memory = Arenas(data["arenas"], target.device)
    for spec in data["calls"][0]["args"].values():
        memory.tensor(spec)  # writes its values
    thread = PoolThread(target, memory, memory.copy(), data["calls"][0], 0)

    def work(number: int) -> None:
        with ExitStack() as stack:  # all of a round are there at once, so that none has the number of another
            for _ in range(_THREADS):
                thread.spoil()
                stack.enter_context(ThreadPoolExecutor(1)).submit(thread.call).result(_WAIT_S)
                thread.look()

    check_growth(f"{data['calls'][0]['op']} by new threads", target.device, _THREADS, work, _PER_THREAD)
