"""Threads that use one pool at once, at places of their own."""

from __future__ import annotations

import faulthandler
import functools
import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from kvdock import runtime
from kvdock_conformance.checking.growth import check_growth
from kvdock_conformance.checking.meaning import forgive
from kvdock_conformance.checking.memory import compare
from kvdock_conformance.checking.pool_thread import MADE_BY, WAIT_S, by_another_thread, spread, steps_of, threads_of
from kvdock_conformance.checking.target import HOST, Target

__all__ = ["check_first_calls", "check_inside", "check_new_threads", "check_shared_pools"]

_MEETINGS = {"its own thread": 16, "a forked process": 8}
"""At so many steps of a call another one is made, by whom; to fork takes as long as all else together."""
_PER_THREAD = {"blocks of Python's memory": 1, "open files": 1, "threads": 1}


def check_inside(target: Target, data: Mapping[str, Any]) -> None:
    """Make the first call of a case, and the second in the middle of it, by whom ``data["by"]`` says.

    Raises:
        NonconformanceError: a byte of either is not what it must be. The process ends where the calls do not.
    """
    _, _, (one, other) = threads_of(target, data)
    # torch itself refuses a forked process a device that is in use
    by = data["by"] if target.device == HOST else "its own thread"
    for _ in range(5):
        other.call()
        steps = steps_of(one.call)
    for number in range(1, _MEETINGS[by] + 1):
        faulthandler.dump_traceback_later(WAIT_S, exit=True)  # one waits for the other for ever
        one.meet(other, spread(number, steps), MADE_BY[by])
        faulthandler.cancel_dump_traceback_later()


def check_first_calls(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case in pairs, each of sizes that no call had before, by two threads: one in the middle of the other.

    With ``data["anew"]`` neither has a plan.

    Raises:
        NonconformanceError: a byte of either is not what it must be.
    """
    _, _, threads = threads_of(target, data)
    steps = 0
    with ThreadPoolExecutor(1) as elsewhere:
        for number, (one, other) in enumerate(zip(threads[::2], threads[1::2], strict=True)):
            if data["anew"]:
                runtime.default().dispatcher.descriptors.clear()
            if number > 1:
                one.meet(other, spread(number, steps), functools.partial(by_another_thread, elsewhere))
            else:
                steps = steps_of(one.call)  # the first may compile what all have


def check_shared_pools(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case, each by a thread of its own; they write to other places of the same memory.

    First one in the middle of another, then all at once and again and again: only one of both where ``data["at_full_speed"]`` is given.

    Raises:
        NonconformanceError: a byte is not what it must be.
    """
    memory, expected, threads = threads_of(target, data)
    ready = threading.Barrier(len(threads))
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in threads]
        if not data.get("at_full_speed", False):
            for (one, own), (other, elsewhere) in itertools.permutations(zip(threads, pools, strict=True), 2):
                own.submit(one.in_the_middle, other, elsewhere).result()
        if data.get("at_full_speed", True):
            for done in [pool.submit(thread.run, ready) for thread, pool in zip(threads, pools, strict=True)]:
                done.result()
    for call in data["calls"]:
        forgive(memory, expected, call)
    every = {f"{name} of thread {number}": spec for number, call in enumerate(data["calls"]) for name, spec in call["args"].items()}
    compare(memory, expected, every, f"{data['calls'][0]['op']} by threads at once")


def check_new_threads(target: Target, data: Mapping[str, Any]) -> None:
    """Make the first call of a case in threads that come, call and go, ``data["threads"]`` of them there at once.

    Raises:
        NonconformanceError: a byte is not what it must be, or each thread leaves something behind.
    """
    _, _, (thread, *_others) = threads_of(target, data)

    def work(number: int) -> None:
        with ExitStack() as stack:  # all of a round are there at once, so that none has the number of another
            for _ in range(data["threads"]):
                thread.spoil()
                stack.enter_context(ThreadPoolExecutor(1)).submit(thread.call).result(WAIT_S)
                thread.look()

    check_growth(f"{data['calls'][0]['op']} by new threads", target.device, data["threads"], work, _PER_THREAD)
