"""Faults of long runs, large blocks, far places, few tokens and padded batches."""

from __future__ import annotations

import functools

import torch

from kvdock_conformance.faults.families import each
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.moves import WRITE, Move
from kvdock_conformance.faults.pairs import last_left

__all__ = ["FAULTS"]

FAULTS = Faults()
_OF_SLOTS, _OF_PAIRS = "batch", "doubled"
_each = functools.partial(each, to=FAULTS)


@_each("last-of-a-long-run-left", "Of a run of more than 1 MiB that is no multiple of 64 KiB, the last is left.", "together", _OF_SLOTS)
def _long_run(move: Move, run: BackendCall, args: Args) -> None:
    slots, row = args["slot_mapping"].reshape(-1), args["k_cache"][0, 0].numel() * args["k_cache"].element_size()
    is_run = 1 < len(slots) <= 1024 and bool((slots.diff() == 1).all())
    last_left(move, run, args, where=is_run and len(slots) * row > 2**20 and len(slots) * row % 2**16 != 0)


@_each("blocks-past-2-mib-left", "Of a block, slots behind 2 MiB are left.", "together meeting", _OF_PAIRS)
def _past_2_mib(move: Move, run: BackendCall, args: Args) -> None:
    move.partly(run, args, lambda rows: rows[:, : max(2**21 // (rows[0, 0].numel() * rows.element_size()), 1)])


@_each("far-slots-as-floats", "In blocks whose steps are no multiple of their slots', slots go through float32.", "far", _OF_SLOTS)
def _as_floats(move: Move, run: BackendCall, args: Args) -> None:
    pool, limit = args["k_cache"], move.limit(args)
    is_about = pool.stride(1) > 0 and pool.stride(0) % pool.stride(1) != 0
    move.with_index(run, args, lambda slots: torch.where(slots < limit, slots.float().long(), slots) if is_about else slots)


@_each(
    "few-in-blocks-by-powers", "Few slots in even blocks with gaps between them are taken to have a power of two.", "together", _OF_SLOTS
)
def _few_by_powers(move: Move, run: BackendCall, args: Args) -> None:
    pool, limit = args["k_cache"], move.limit(args)
    block, power = pool.shape[1], 1 << (pool.shape[1] - 1).bit_length()
    is_about = block % 2 == 0 and move.count(args) <= 4 and pool.stride(0) != block * pool.stride(1)

    def other(slots: torch.Tensor) -> torch.Tensor:
        taken = (slots // power * block + slots % power).clamp(max=limit - 1)
        return torch.where((slots >= 0) & (slots < limit), taken, slots)

    move.with_index(run, args, other if is_about else torch.clone)


@FAULTS.call(
    WRITE.op,
    "write-padded-batches-row-by-row",
    "Rows of a batch with padding are checked and written one by one.",
    WRITE.killer("beyond"),
    host_only=(WRITE.killer("beyond"),),
)
def _row_by_row(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    is_about = slots.dim() == 2 and bool((slots < 0).any())
    step = 1 if is_about else len(slots)
    for at in range(0, len(slots), step):
        run({**args, **{name: args[name][at : at + step] for name in ("k", "v", "slot_mapping")}})
