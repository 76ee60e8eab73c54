"""Faults that show only where two threads use one pool."""

from __future__ import annotations

import functools
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.descriptors import OwnKernel, OwnPlan
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

FAULTS = Faults("threads")
_WRITE, _STATIC, _GATHER, _COPY = OPS


@FAULTS.call(
    _STATIC, "thread-rows-of-a-step-written-back", "A few rows are read, and written back whole, for one position.", "KVD-THREAD-002"
)
def _few_rows(run: BackendCall, args: Args) -> None:
    if args["k"].shape[2] == 1 and len(args["k"]) <= 4:
        _whole_pool(run, args)
    else:
        run(args)


@FAULTS.call(_STATIC, "thread-whole-rows-written-back", "The rows of a cache are read, and written back whole.", "KVD-THREAD-002")
@FAULTS.call(_COPY, "thread-copies-write-all-back", "A copy reads the pool, and writes all of it back.", "KVD-THREAD-001")
@FAULTS.call(_WRITE, "thread-whole-pool-written-back", "A call reads the pool, and writes all of it back.", "KVD-THREAD-001")
def _whole_pool(run: BackendCall, args: Args) -> None:
    own = {name: args[name].clone() for name in ("k_cache", "v_cache")}
    run({**args, **own})
    for name, pool in own.items():
        args[name].copy_(pool)


@FAULTS.call(_WRITE, "thread-block-of-a-step-written-back", "The block of one token is read, and written back whole.", "KVD-THREAD-002")
def _block_of_a_step(run: BackendCall, args: Args) -> None:
    if args["slot_mapping"].numel() == 1:
        _whole_blocks(run, args)
    else:
        run(args)


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


@FAULTS.call(
    _GATHER, "thread-places-in-one-buffer", "Places in blocks that lie apart are worked out in a buffer of the process.", "KVD-THREAD-003"
)
def _places_in_one(run: BackendCall, args: Args) -> None:
    pool, slots = args["k_cache"], args["slot_mapping"]
    if pool.stride(0) != pool.shape[1] * pool.stride(1):
        args = {**args, "slot_mapping": _own(slots.device, slots.dtype)[: slots.numel()].view(slots.shape).copy_(slots)}
    run(args)


def _padded_in_one(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    if bool((slots < 0).any()):
        args = {**args, "slot_mapping": _own(slots.device, slots.dtype)[: slots.numel()].view(slots.shape).copy_(slots)}
    run(args)


for _op, _killer in ((_WRITE, "KVD-THREAD-002"), (_GATHER, "KVD-THREAD-003")):
    _name = f"thread-padding-in-one-buffer-of-{_op.strip('_').replace('_', '-')}"
    FAULTS.call(_op, _name, "Slots among which there is padding go through a buffer of the process.", _killer)(_padded_in_one)


@FAULTS.call(_GATHER, "thread-buffers-by-count", "Slots go through a buffer of the process for each number of them.", "KVD-THREAD-003")
def _buffer_by_count(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    if tuple(slots.shape) not in _by_shape:
        _by_shape.clear()
    shared = _by_shape.setdefault(tuple(slots.shape), torch.empty_like(slots))
    run({**args, "slot_mapping": shared.copy_(slots) if shared.dtype == slots.dtype else slots})


_by_shape: dict[tuple[int, ...], torch.Tensor] = {}


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


def _through_one(buffer: Callable[[torch.Tensor], torch.Tensor]) -> FaultyCall:
    def call(run: BackendCall, args: Args) -> None:
        run({**args, "slot_mapping": buffer(args["slot_mapping"]).copy_(args["slot_mapping"])})

    return call


_own = functools.cache(lambda device, dtype: torch.empty(1 << 17, dtype=dtype, device=device))  # one for all threads
_pages = mmap.mmap(-1, 1 << 20)
FAULTS.call(_WRITE, "thread-int32-slots-in-one-buffer", "Slots of 32 bits are widened in a buffer of the process.", "KVD-THREAD-002")(
    _through_one(
        lambda slots: _own(slots.device, torch.int64)[: slots.numel()].view(slots.shape) if slots.dtype == torch.int32 else slots.clone()
    )
)
FAULTS.call(_GATHER, "thread-slots-shared-with-forks", "Slots are staged in memory that forked processes share.", "KVD-THREAD-005")(
    _through_one(lambda slots: torch.frombuffer(_pages, dtype=slots.dtype, count=slots.numel() or 1)[: slots.numel()].view(slots.shape))
)


@FAULTS.call(_STATIC, "thread-lock-that-is-taken-once", "A call takes a lock that its own thread cannot take again.", "KVD-THREAD-005")
def _locked(run: BackendCall, args: Args) -> None:
    with _lock:
        run(args)


_lock = threading.Lock()


@FAULTS.call(_COPY, "thread-word-behind-a-block", "The rest of the word behind the last block is read, and written back.", "KVD-THREAD-001")
def _word_behind(run: BackendCall, args: Args) -> None:
    keys, last = args["k_cache"], int(args["block_pairs"].amax())
    behind = (
        bits(keys[last + 1 : last + 2]).flatten()[: 8 // keys.element_size() - 1]
        if keys.is_contiguous() and last >= 0
        else bits(keys).flatten()[:0]
    )
    before = behind.clone()
    run(args)
    behind.copy_(before)


@FAULTS.call(
    _WRITE, "thread-table-seen-half-built", "What is known of a number of tokens is found before it is complete.", "KVD-THREAD-006"
)
def _half_built(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    table = _TABLES.get(slots.numel())
    if table is None:
        table = _TABLES[slots.numel()] = []
        for number in range(slots.numel()):
            table.append(abs(number))  # step by step
    places = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    run({**args, "slot_mapping": slots.masked_fill(places >= len(table), -1)})


_TABLES: dict[int, list[int]] = {}


class _NoPlan(OwnPlan):
    """Does nothing."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


@FAULTS.kernel(_STATIC, "thread-prepared-for-what-was-asked-last", "A plan is for the request that was asked about last.", "KVD-THREAD-007")
class _AskedLast(OwnKernel):
    """Keeps one request."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        """Ask the backend, and keep what was asked."""
        self.kept["last"] = request
        return super().supports(request)

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        """Return a plan that does nothing for any other."""
        return plan if self.kept.get("last", request) == request else _NoPlan(plan)


@FAULTS.call(_GATHER, "thread-parameters-of-many", "From 64 tokens on, arguments go by one place of the process.", "KVD-THREAD-003")
@FAULTS.call(_COPY, "thread-parameters-of-many-copies", "From 64 pairs on, arguments go by one place of the process.", "KVD-THREAD-001")
def _parameters_of_many(run: BackendCall, args: Args) -> None:
    if max(len(args[name]) for name in ("slot_mapping", "block_pairs") if name in args) < 64:
        run(args)
        return
    _PARAMETERS["args"] = args
    time.sleep(0)
    run(_PARAMETERS["args"])


_PARAMETERS: dict[str, Args] = {}
