"""Faults that show only where two threads use one pool."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall

__all__ = ["FAULTS"]

FAULTS = Faults("threads")
_WRITE, _STATIC, _GATHER, _COPY = OPS


@FAULTS.call(_WRITE, "thread-whole-pool-written-back", "A call reads the pool, and writes all of it back.", "KVD-THREAD-001")
def _whole_pool(run: BackendCall, args: Args) -> None:
    own = {name: args[name].clone() for name in ("k_cache", "v_cache")}
    run({**args, **own})
    for name, pool in own.items():
        args[name].copy_(pool)


def _blocks_of(args: Args) -> torch.Tensor:
    slots = args["slot_mapping"]
    blocks: torch.Tensor = (slots[slots >= 0] // args["k_cache"].shape[1]).unique()
    return blocks


@FAULTS.call(_WRITE, "thread-whole-blocks-written-back", "The blocks of a call's slots are read, and written back whole.", "KVD-THREAD-002")
def _whole_blocks(run: BackendCall, args: Args) -> None:
    blocks, own = _blocks_of(args), {name: args[name].clone() for name in ("k_cache", "v_cache")}
    run({**args, **own})
    for name, pool in own.items():
        args[name][blocks] = pool[blocks]


@FAULTS.call(_STATIC, "thread-whole-rows-written-back", "The rows of a cache are read, and written back whole.", "KVD-THREAD-002")
def _whole_rows(run: BackendCall, args: Args) -> None:
    own = {name: args[name].clone() for name in ("k_cache", "v_cache")}
    run({**args, **own})
    for name, cache in own.items():
        args[name].copy_(cache)


def _through_one_buffer(*names: str) -> FaultyCall:
    shared: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        outs = {name: args[name] for name in names if args[name] is not None}
        own = {
            name: shared.setdefault((name, out.shape[1:]), out.new_empty((4096, *out.shape[1:])))[: len(out)] for name, out in outs.items()
        }
        run({**args, **own})
        for name, out in outs.items():
            out.copy_(own[name])

    return call


FAULTS.call(_GATHER, "thread-gathers-through-one-buffer", "All gathers of a process go through one buffer.", "KVD-THREAD-003")(
    _through_one_buffer("k_out", "v_out")
)
FAULTS.call(
    ATTENTION, "thread-attends-through-one-buffer", "All attention of a process goes through one scratch buffer.", "KVD-THREAD-003"
)(_through_one_buffer("out", "lse"))


@FAULTS.call(_COPY, "thread-copies-write-all-back", "A copy reads the pool, and writes all of it back.", "KVD-THREAD-001")
def _copies_whole(run: BackendCall, args: Args) -> None:
    _whole_pool(run, args)


def _with_a_seat(limit: int) -> FaultyCall:
    """Return a call for which each thread takes a seat, and keeps it."""
    seats, own = itertools.count(), threading.local()

    def call(run: BackendCall, args: Args) -> None:
        own.seat = getattr(own, "seat", None) or next(seats)
        if own.seat >= limit:
            raise RuntimeError("no context is left")
        run(args)

    return call


FAULTS.call(_STATIC, "thread-seats-for-100", "There are contexts for 100 threads, and none comes back.", "KVD-THREAD-004")(
    _with_a_seat(100)
)


def _known() -> FaultyCall:
    threads: list[threading.Thread] = []

    def call(run: BackendCall, args: Args) -> None:
        if threading.current_thread() not in threads:
            threads.append(threading.current_thread())
        run(args)

    return call


FAULTS.call(_COPY, "thread-remembered-for-good", "Each thread that calls is remembered for good.", "KVD-THREAD-004")(_known())
