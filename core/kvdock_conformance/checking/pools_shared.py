"""Threads that use one pool at once, at places of their own."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import REFERENCES
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.target import Target

__all__ = ["PoolThread", "check_shared_pools", "stumbling"]

_LOOKS = 3
_SHARE, _SLEEP_S = 0.2, 1e-4  # of the events of Python's own profiler, and how long a thread stands back at them
_STOPS = 40  # in one call: one under an interpreter has tens of thousands of such events
_RUN_S, _FEWEST_TURNS = 0.15, 4  # most threads meet within so long; under an interpreter, a call takes long
_WAIT_S = 30.0


@contextmanager
def stumbling(seed: int) -> Iterator[None]:
    """Make this thread let others go first now and then in a block, between any two calls of Python's: what is not one step comes apart.

    Python alone switches between threads too seldom, the more so on a busy machine.
    """
    draw, before, left = random.Random(seed).random, sys.getprofile(), [_STOPS]  # noqa: S311 - the same in every run

    def now_and_then(frame: object, event: str, argument: object) -> None:
        if draw() < _SHARE:
            time.sleep(_SLEEP_S)
            left[0] -= 1
        if not left[0]:
            sys.setprofile(before)

    sys.setprofile(now_and_then)
    try:
        yield
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
        REFERENCES[self._op](*(expected.tensor(spec) for spec in call["args"].values()))
        after = before.copy()
        REFERENCES[self._op](*(after.tensor(spec) for spec in call["args"].values()))
        changed = [(was != now).nonzero().flatten() for was, now in zip(before.bytes, after.bytes, strict=True)]
        self._places = [
            (content, places.to(content.device), now[places].to(content.device))
            for content, places, now in zip(memory.bytes, changed, after.bytes, strict=True)
            if len(places)
        ]

    def run(self, ready: threading.Barrier) -> None:
        """Spoil what is this thread's own, make the call, and look: nobody else writes there.

        Raises:
            NonconformanceError: a byte is not what it must be.
        """
        ready.wait(_WAIT_S)
        end = time.monotonic() + _RUN_S
        for turn in itertools.count():
            for content, places, right in self._places:
                content[places] = ~right
            # Every other time at full speed: what is native can only meet what runs at the same time.
            with stumbling(turn * 31 + self._number) if turn % 2 else nullcontext():
                self._target.call(self._op, self._args)
            for _ in range(_LOOKS):  # what others write back late is found too
                self._look()
                time.sleep(0)
            if turn + 1 >= _FEWEST_TURNS and time.monotonic() > end:
                break

    def _look(self) -> None:
        for content, places, right in self._places:
            if not torch.equal(content[places], right):
                wrong = int((content[places] != right).sum())
                what = f"{self._op} by a thread beside others"
                raise NonconformanceError(what, expected="its own bytes as they were written", got=f"{wrong} that are not")


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
    with ThreadPoolExecutor(len(threads)) as pool:
        made = [pool.submit(thread.run, ready) for thread in threads]
    for future in made:
        future.result()
    every = {f"{name} of thread {number}": spec for number, call in enumerate(data["calls"]) for name, spec in call["args"].items()}
    compare(memory, expected, every, f"{data['calls'][0]['op']} by threads at once")
