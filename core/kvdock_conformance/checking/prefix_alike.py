"""Prefix caches that are fed alike, in interpreters that share nothing but the calls."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from kvdock.errors import KVDockError
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_calls import why_it_stores_nothing
from kvdock_conformance.checking.prefix_play import namespace_of, tokens_of
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.requirement import Capability, Check

__all__ = ["ALIKE", "SCRIPT", "STORES_AND_CHOOSES", "another_world", "answers_of", "check_alike", "check_alike_here"]

ALIKE: dict[tuple[str, str | None, str | None, str], list[list[Any]]] = {}
"""What was answered, so that each question starts its interpreters once: a start costs the import of torch."""

SCRIPT = """
from __future__ import annotations

import contextlib, importlib, itertools, json, random, sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import kvdock
from kvdock.errors import KVDockError

{sources}

name, setup, fault, played, seed, step = json.load(sys.stdin)
if setup:
    module, _, function = setup.partition(":")
    getattr(importlib.import_module(module), function)()
if fault:
    from kvdock_conformance import faults
    from kvdock_conformance.checking.prefix_target import PrefixTarget
    target = PrefixTarget(name)
    seeded, make = faults.load()[fault].seeded(target), lambda size: target.make(size)
else:
    seeded, make = contextlib.nullcontext(), lambda size: kvdock.create_prefix_cache(name, block_size=size)
make(16)  # which loads the plugins, in the usual world
with seeded, another_world(seed, step):
    print(json.dumps([answers_of(make(data["block_size"]), data) for data in played]))
"""


@contextlib.contextmanager
def another_world(seed: int, step: int) -> Iterator[None]:
    """Let chance, the order of free memory, and clocks that go on by ``step`` at each look, be others for a block."""
    state, ticks = random.getstate(), itertools.count(1 << 30, step)
    with contextlib.ExitStack() as stack:
        for clock in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"):
            stack.enter_context(mock.patch(f"time.{clock}", ticks.__next__))
        random.seed(seed)
        kept = [bytes(random.randrange(500)) for _ in range(20_000)]  # noqa: S311 - the same in every run
        random.shuffle(kept)
        del kept[::2]  # holes of all sizes, which are filled in the order in which they came to be
        try:
            yield
        finally:
            random.setstate(state)


def answers_of(cache: Any, data: Mapping[str, Any]) -> list[list[Any]]:
    """Return what a cache answers to the steps of a case, each with its step and the events; of an error its type.

    Nothing is compared with what is right: what was evicted is not stored again, and no id is used twice.
    """
    told, events = list[list[Any]](), list[str]()
    handles, size, fresh = [(cache.match_prefix([]).handle, ())], data["block_size"], itertools.count()

    def answer(do: str, step: Mapping[str, Any]) -> Any:
        handle, space = handles[step.get("handle", -1) % len(handles)]
        tokens = tokens_of(step.get("pieces", ()), step.get("rest", 0), size)
        if do in ("lock", "unlock"):
            return cache.lock_handle(handle, unlock=do == "unlock")
        if do == "evict":
            count = step["count"] if "count" in step else int(step["share"] * cache.size_info.evictable_size / size)
            return cache.evict(count).tolist()
        if do == "discard":
            return cache.discard_prefix(handle, step["keep"]).tolist()
        if do == "record":
            return cache.record_match(handle, step["tokens"] + handle.cached_len)
        if do == "partial":
            return (found := cache.match_partial(handle, tokens)) and [found.block, found.num_tokens]
        space = space if do == "behind" else namespace_of(data["spaces"][step["space"]])
        if do == "match":
            made = cache.match_prefix(tokens, space, record=step["record"])
        else:
            options = {"behind": handle} if do == "behind" else {}
            made = cache.insert_prefix(tokens, [next(fresh) for _ in step["pieces"]], space, priority=step["priority"], **options)
        handles.append((made.handle, space))
        return [made.handle.cached_len, made.blocks.tolist()]

    cache.subscribe(lambda event: events.append(repr(event)))
    for number, step in enumerate(data["steps"]):
        try:
            said = answer(step["do"], step)
        except KVDockError as error:
            said = type(error).__name__
        told.append([f"step {number}, {step['do']}", said, *events])
        events.clear()
    return [*told, ["sizes, statistics", repr((cache.size_info, cache.stats))]]


def check_alike(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Feed caches alike in two fresh interpreters: of other hashes, other memory, another chance, and time that runs backwards.

    Raises:
        NonconformanceError: an answer differs, or an interpreter ended with an error.
    """
    key = target.name, target.setup, target.fault, json.dumps(data["played"])
    if key not in ALIKE:
        with contextlib.ExitStack() as stack:
            started = [(stack.enter_context(_started(target, seed)), seed) for seed in (1, 2)]  # both, before either is waited for
            asked = [target.name, target.setup, target.fault, data["played"]]
            ALIKE[key] = [_told(process, [*asked, seed, 3 - 2 * seed]) for process, seed in started]
    for first, second in zip(*ALIKE[key], strict=True):
        for one, other in zip(first, second, strict=True):
            if one != other:
                raise NonconformanceError(f"{one[0]}, of two caches that are fed alike in two processes", expected=one[1:], got=other[1:])


def check_alike_here(target: PrefixTarget, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Feed caches that store nothing alike in one process, which is much cheaper, since there is nothing to choose.

    Raises:
        NonconformanceError: an answer differs.
    """
    for played in data["played"]:
        one, other = (answers_of(target.make(played["block_size"]), played) for _ in range(2))
        if one != other:
            raise NonconformanceError("answers of two caches that are fed alike", expected=one, got=other)


STORES_AND_CHOOSES = Capability("stores blocks", why_it_stores_nothing, check_alike_here)
"""The capability of storing anything at all, of which something could be chosen."""


def _started(target: PrefixTarget, seed: int) -> subprocess.Popen[str]:
    """Start an interpreter with a seed of Python's hashes."""
    sources = "\n\n".join(inspect.getsource(function) for function in (tokens_of, namespace_of, another_world, answers_of))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-P", "-c", SCRIPT.format(sources=sources)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)  # noqa: S603 - our own script


def _told(process: subprocess.Popen[str], asked: Any) -> list[Any]:
    """Return what an interpreter answers."""
    output, errors = process.communicate(json.dumps(asked))
    if process.returncode:
        raise NonconformanceError("a fresh interpreter with the prefix cache", expected="no error", got=errors[-4000:])
    found: list[Any] = json.loads(output.splitlines()[-1])
    return found
