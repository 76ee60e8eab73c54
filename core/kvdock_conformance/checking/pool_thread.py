"""A thread that calls an op on memory which others use too, and who may call in the middle of it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import refer, schema_of, tolerance_of
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.target import Target

__all__ = ["MADE_BY", "WAIT_S", "PoolThread", "by_another_thread", "spread", "steps_of", "stopped_at", "threads_of"]

_LOOKS = 3
_FEWEST, _MOST = 16, 48  # of the steps of a call at which another one is made
_MEETINGS_S = 0.05
_AT_FULL_SPEED_S, _FEWEST_TURNS = 0.03, 4  # hundreds of calls; under an interpreter, a call takes long
_GOLDEN = 0.618034  # multiples of it are spread evenly, however many there are
_LOCKED_S = 0.2  # a call that waits so long waits for the one that is stopped
WAIT_S = 30.0


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
        own = {spec["arena"] for spec in call["args"].values() if isinstance(spec, Mapping)}
        before = memory.copy(own)
        refer(expected, call)
        after = before.copy(own)
        refer(after, call)
        written = {arg.name: call["args"][arg.name] for arg in schema_of(self._op).mutated if arg.name in call["args"]}
        self._computed = [
            (self._args[name], after.tensor({**spec, "values": None}).to(self._args[name].device), tolerance)
            for name, spec in written.items()
            if (tolerance := tolerance_of(self._op, self._args[name].dtype))
        ]
        changed = [(memory.bytes[at], (before.bytes[at] != after.bytes[at]).nonzero().flatten(), after.bytes[at]) for at in sorted(own)]
        self._places = [
            (content, places.to(content.device), now[places].to(content.device))
            for content, places, now in changed
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
        ready.wait(WAIT_S)
        end, turn = time.monotonic() + _AT_FULL_SPEED_S, 0
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
            elsewhere.submit(other.call).result(WAIT_S)
            steps = steps_of(self.call)
        end = time.monotonic() + _MEETINGS_S
        for number in range(1, _MOST + 1):
            self.meet(other, spread(number, steps), functools.partial(by_another_thread, elsewhere))
            if number >= _FEWEST and time.monotonic() > end:
                break

    def meet(self, other: PoolThread, step: int, made_by: MadeBy) -> None:
        """Make the call, and another one at a step of it, and look at both.

        Raises:
            NonconformanceError: a byte of either is not what it must be.
        """
        ends: list[Callable[[], object]] = []

        def meanwhile() -> None:
            ends.append(made_by(other.call))

        self.spoil()
        other.spoil()
        stopped_at(step, self.call, meanwhile)
        if not ends:  # this call had fewer steps
            meanwhile()
        ends[0]()
        self.look()
        other.look()


MadeBy = Callable[[Callable[[], object]], Callable[[], object]]
"""Makes a call, or begins to, and returns what ends it."""


def spread(number: int, steps: int) -> int:
    """Return one of some steps: those of numbers in a row are spread over all."""
    return 1 + int(number * _GOLDEN % 1 * steps)


def by_another_thread(elsewhere: ThreadPoolExecutor, call: Callable[[], object]) -> Callable[[], object]:
    """Begin a call in another thread."""
    future = elsewhere.submit(call)
    wait([future], _LOCKED_S)
    return lambda: future.result(WAIT_S)


def _by_its_own_thread(call: Callable[[], object]) -> Callable[[], object]:
    call()
    return lambda: None


def _by_a_forked_process(call: Callable[[], object]) -> Callable[[], object]:
    """Make a call in a copy of this process, which a backend may refuse; what it writes there is not seen here, so it is made here too."""
    child = os.fork()
    if not child:
        status = 1
        try:
            # GNU OpenMP waits for ever in the child for threads that only the parent has. That is torch's, and no backend's, to mend.
            torch.set_num_threads(1)
            with contextlib.suppress(kvdock.KVDockError):
                call()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)

    def end() -> None:
        call()
        if ended:
            what = "a process that was forked in the middle of a call, and made another"
            expected, got = "the exit code 0: its call is made, or raises a KVDockError", os.waitstatus_to_exitcode(ended)
            raise NonconformanceError(what, expected=expected, got=got)

    return end


MADE_BY: Mapping[str, MadeBy] = {"its own thread": _by_its_own_thread, "a forked process": _by_a_forked_process}
"""Who makes a call in the middle of another, by name."""


def threads_of(target: Target, data: Mapping[str, Any]) -> tuple[Arenas, Arenas, list[PoolThread]]:
    """Return the memory of a case, what it must hold once all calls were made, and a thread for each."""
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        for spec in call["args"].values():
            memory.tensor(spec)  # writes its values
    expected = memory.copy()
    return memory, expected, [PoolThread(target, memory, expected, call, number) for number, call in enumerate(data["calls"])]
