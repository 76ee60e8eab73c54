"""Faults of reading: beside a tensor, and later than the call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import attrs
import torch

from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall, HostSeed

__all__ = ["FAULTS"]

_AREA = "reads"
FAULTS = Faults(_AREA)
_WRITE, _STATIC, _GATHER, _COPY = OPS


def _beside(name: str, sentence: str, op: str, peek: Callable[[Args], None], killer: str = "KVD-READ-001") -> None:
    """Add a fault that reads beside a tensor, and does nothing with what it finds."""

    def faulty(run: BackendCall, args: Args) -> None:
        peek(args)
        run(args)

    made = Faults()
    made.call(op, f"reads-{name}", sentence, killer)(faulty)
    (fault,) = made
    FAULTS.append(attrs.evolve(fault, area=_AREA, seed=HostSeed(fault.seed)))


def _span(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the first and the end of the last element."""
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def _vectors(name: str, width: int) -> Callable[[Args], None]:
    """Return what reads an argument in whole vectors, the last of which may end behind it."""

    def peek(args: Args) -> None:
        if args[name].numel():
            ctypes.string_at(args[name].data_ptr(), -(-_span(args[name]) // width) * width)

    return peek


def _with_gaps(name: str) -> Callable[[Args], None]:
    """Return what reads rows in whole steps, if their heads lie together: the last one with the gap behind it."""

    def peek(args: Args) -> None:
        rows = args[name]
        if rows.stride(-2) == rows.shape[-1] < rows.stride(0):
            ctypes.string_at(rows.data_ptr(), rows.shape[0] * rows.stride(0) * rows.element_size())

    return peek


def _in_front(name: str) -> Callable[[Args], None]:
    def peek(args: Args) -> None:
        ctypes.string_at(args[name].data_ptr() - 1, 1)

    return peek


def _next_block(args: Args) -> None:
    """Read the id behind the last one, of a row that is full, as whoever reads one ahead does."""
    table, lens = args["block_table"], args["seq_lens"]
    if len(lens) and 0 < int(lens[-1]) == table.shape[1] * args["k_cache"].shape[1]:
        ctypes.string_at(table.data_ptr() + _span(table), table.element_size())


def _next_of_chunks(args: Args) -> None:
    if args["cu_query_lens"] is not None and args["window"] is not None:
        _next_block(args)


def _behind_sums(args: Args) -> None:
    if args["cu_query_lens"] is not None:
        _vectors("cu_query_lens", 32)(args)


_beside("next-block", "The id behind that of the last block is read.", ATTENTION, _next_block)
_beside("next-block-of-chunks", "Of chunks in a window, the id behind that of the last block is read.", ATTENTION, _next_of_chunks)
_beside("sums-behind-the-last", "Sums of queries are read in vectors of 32 bytes.", ATTENTION, _behind_sums)


@FAULTS.call(ATTENTION, "reads-queries-scaled-and-restored", "Without sums, queries are scaled, and then restored.", "KVD-READ-001")
def _restored(run: BackendCall, args: Args) -> None:
    root = args["q"].shape[2] ** 0.5
    if args["lse"] is None and root.is_integer():
        args["q"].div_(root)
        args["q"].mul_(root)
    run(args)


_beside("a-vector-behind-k", "Keys are read in vectors of 16 bytes, the last behind their end.", _WRITE, _vectors("k", 16))
_beside("a-vector-behind-v", "New values are read in vectors of 32 bytes, the last behind their end.", _STATIC, _vectors("v", 32))
_beside("the-gap-behind-the-last-row", "Rows are read in whole steps, the last too.", _WRITE, _with_gaps("v"))
_beside("slots-behind-the-last", "Slots are read eight at a time.", _WRITE, _vectors("slot_mapping", 64))
_beside("a-vector-behind-the-pool", "The last block is read in whole vectors.", _GATHER, _vectors("v_cache", 16))
_beside("a-pair-behind-the-last", "Pairs are read four at a time.", _COPY, _vectors("block_pairs", 64))
_beside("in-front-of-the-pool", "A vector that ends in the pool's first block begins in front of it.", _COPY, _in_front("k_cache"))


@FAULTS.plan(_WRITE, "reads-known-slots-as-wide", "Behind three calls like it, a slot of 32 bits is read as one of 64.", "KVD-READ-001")
def _known_as_wide() -> FaultyCall:
    made: list[torch.Size] = []

    def call(run: BackendCall, args: Args) -> None:
        slots = args["slot_mapping"]
        made.append(slots.shape)
        if slots.numel() == 1 and made.count(slots.shape) > 3:
            _vectors("slot_mapping", 8)(args)
        run(args)

    return call


def _in_front_for_padding(args: Args) -> None:
    if bool((args["slot_mapping"] < 0).any()):
        ctypes.string_at(args["v_cache"].data_ptr() - 1, 1)


def _in_front_for_rows_of_padding(args: Args) -> None:
    if args["slot_mapping"].dim() == 2 and bool((args["slot_mapping"] < 0).any()):
        ctypes.string_at(args["k_cache"].data_ptr() - 1, 1)


def _as_many_lengths(args: Args) -> None:
    ctypes.string_at(args["cache_lengths"].data_ptr(), args["k"].shape[0] * args["cache_lengths"].element_size())


def _writes_lengths(args: Args) -> None:
    args["cache_lengths"].copy_(args["cache_lengths"].clone())


_beside("the-place-of-padding", "The slot that padding would have is read.", _WRITE, _in_front_for_padding)
_beside(
    "the-place-of-padding-in-rows", "Of slots in rows, that of padding is read.", _GATHER, _in_front_for_rows_of_padding, "KVD-READ-003"
)
_beside("a-length-for-each-row", "A length for all rows is read as one for each.", _STATIC, _as_many_lengths)
_beside("lengths-and-writes-them-back", "Lengths are written back as they were.", _STATIC, _writes_lengths)


@FAULTS.call(_WRITE, "reads-inputs-again-later", "A call is made once more by a thread, from what its inputs hold then.", "KVD-READ-002")
def _again_later(run: BackendCall, args: Args) -> None:
    run(args)
    threading.Timer(0.005, run, (args,)).start()


@FAULTS.plan(_GATHER, "reads-slots-of-the-address", "Slots are known by their address.", "KVD-READ-002")
def _slots_of_the_address() -> FaultyCall:
    known: dict[int, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        slots = args["slot_mapping"]
        kept = known.setdefault(slots.data_ptr(), slots.clone())
        run({**args, "slot_mapping": kept if kept.shape == slots.shape else slots})

    return call


@FAULTS.plan(_COPY, "reads-pairs-of-the-second-call", "Behind its second call, a plan goes by the pairs of that one.", "KVD-READ-002")
def _pairs_of_the_second_call() -> FaultyCall:
    seen: list[torch.Tensor] = []

    def call(run: BackendCall, args: Args) -> None:
        seen.append(args["block_pairs"].clone())
        run({**args, "block_pairs": seen[:2][-1] if seen[-1].shape == seen[:2][-1].shape else seen[-1]})

    return call


@FAULTS.plan(_COPY, "reads-pairs-when-the-next-call-comes", "Copies are made when the next call comes.", "KVD-READ-002")
def _when_the_next_comes() -> FaultyCall:
    waiting: list[Args] = []

    def call(run: BackendCall, args: Args) -> None:
        for earlier in waiting:
            run(earlier)
        waiting[:] = [args]

    return call


def _block_behind_the_pool(args: Args) -> None:
    cache = args["k_cache"]
    if bool((args["block_table"] >= len(cache)).any()) and cache.numel():
        ctypes.string_at(cache.data_ptr() + len(cache) * cache.stride(0) * cache.element_size(), 1)


def _pages_of_many(args: Args) -> None:
    if args["k_cache"].shape[:2].numel() >= 128 and int(args["seq_lens"].max()) >= 128:
        _vectors("k_cache", 4096)(args)


def _starts_eight_at_a_time(args: Args) -> None:
    if args["starts"] is not None:
        _vectors("starts", 64)(args)


_beside("a-block-behind-the-pool", "A block that a table names behind a sequence's end is fetched.", ATTENTION, _block_behind_the_pool)
_beside("a-page-behind-many-keys", "Keys of many tokens are read in pages, the last behind their end.", ATTENTION, _pages_of_many)
_beside("starts-behind-the-last", "Starts are read eight at a time.", ATTENTION, _starts_eight_at_a_time, "KVD-READ-003")


@FAULTS.plan(ATTENTION, "reads-tables-of-the-address", "Tables and lengths are known by their addresses.", "KVD-READ-002")
def _tables_of_the_address() -> FaultyCall:
    known: dict[int, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        own = {name: known.setdefault(args[name].data_ptr(), args[name].clone()) for name in ("block_table", "seq_lens")}
        run({**args, **{name: kept for name, kept in own.items() if kept.shape == args[name].shape}})

    return call
