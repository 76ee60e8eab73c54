"""Faults in how memory is looked at: steps of sizes of 1, slots that are not one row, tensors side by side, steps beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.tensors import in_range, restrided

__all__ = ["FAULTS"]

FAULTS = Faults()
_WRITE, _STATIC, _GATHER, _COPY = CATALOG
_ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        _WRITE: ("k_cache", "v_cache", "k", "v"),
        _STATIC: ("k_cache", "v_cache", "k", "v"),
        _GATHER: ("k_cache", "v_cache", "k_out", "v_out"),
        _COPY: ("k_cache", "v_cache"),
    }
)
"""The tensors of each op that hold rows."""


def _unless(op: str, is_odd: Callable[[torch.Tensor], bool]) -> FaultyCall:
    """Return a call that is left out where a tensor that holds rows is odd."""

    def call(run: BackendCall, args: Args) -> None:
        if not any(is_odd(args[name]) for name in _ROWS[op]):
            run(args)

    return call


# Steps


def _step_of_one(rows: torch.Tensor) -> bool:
    """Whether a size of 1 has another step than a dense tensor has."""
    dense, found = 1, False
    for size, step in zip(reversed(rows.shape), reversed(rows.stride()), strict=True):
        found = found or (size == 1 and step != dense)
        dense *= size
    return found and rows.is_contiguous()


for _op, _prefix, _killers in (
    (_WRITE, "write", ("KVD-WRITE-016", "KVD-WRITE-018")),
    (_STATIC, "static", ("KVD-STATIC-014", "KVD-STATIC-016")),
    (_GATHER, "gather", ("KVD-GATHER-016", "KVD-GATHER-018")),
    (_COPY, "copy", ("KVD-COPY-019",)),
):
    FAULTS.call(_op, f"{_prefix}-steps-of-one-matter", "A call does nothing where a size of 1 has a step of its own.", *_killers)(
        _unless(_op, _step_of_one)
    )


def _beyond_32_bits(rows: torch.Tensor) -> bool:
    """Whether a step is more than 32 bits can say."""
    return max(rows.stride()) >= 2**31


for _op, _prefix, _killer in (
    (_WRITE, "write", "KVD-WRITE-023"),
    (_STATIC, "static", "KVD-STATIC-021"),
    (_GATHER, "gather", "KVD-GATHER-025"),
):
    FAULTS.call(_op, f"{_prefix}-steps-cut-to-32-bits", "A call does nothing where a step is beyond 32 bits.", _killer)(
        _unless(_op, _beyond_32_bits)
    )


# Slots


def _as_one_row(run: BackendCall, args: Args) -> None:
    """Make the call with the rows of slot_mapping taken to follow each other."""
    slots = args["slot_mapping"]
    if slots.dim() == 2 and slots.stride(0) > slots.shape[1] * slots.stride(1) > 0:
        slots = restrided(slots, (slots.shape[1] * slots.stride(1), slots.stride(1)))
    run({**args, "slot_mapping": slots})


def _one_slot_as_many(run: BackendCall, args: Args) -> None:
    """Make the call with slots that are one in memory taken to follow each other."""
    slots = args["slot_mapping"]
    run({**args, "slot_mapping": restrided(slots, [step or 1 for step in slots.stride()])})


for _op, _prefix, _killers in ((_WRITE, "write", ("KVD-WRITE-006", "KVD-WRITE-009")), (_GATHER, "gather", ("KVD-GATHER-006",) * 2)):
    FAULTS.call(_op, f"{_prefix}-slots-as-one-row", "Rows of slot_mapping are taken to follow each other.", _killers[0])(_as_one_row)
    FAULTS.call(_op, f"{_prefix}-one-slot-as-many", "A slot mapping with a step of 0 is read with a step of 1.", _killers[1])(
        _one_slot_as_many
    )


@FAULTS.call(_WRITE, "write-equal-slots-shift-the-rows", "Equal slots are written once, by rows in the order of slots.", "KVD-WRITE-009")
def _shifted(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    distinct = torch.unique(slots[in_range(args)])
    if int(in_range(args).sum()) == distinct.numel() or not bool((slots < args["k_cache"].shape[0] * args["k_cache"].shape[1]).all()):
        run(args)
        return
    k, v = (args[name].flatten(0, slots.dim() - 1)[: len(distinct)] for name in ("k", "v"))
    run({**args, "k": k, "v": v, "slot_mapping": distinct})


# Tensors side by side


@FAULTS.call(_WRITE, "write-tokens-beside-the-pool-refused", "Tokens in one storage with their pool are refused.", "KVD-WRITE-017")
def _beside(run: BackendCall, args: Args) -> None:
    for cache, rows in (("k_cache", "k"), ("v_cache", "v")):
        if args[cache].untyped_storage().data_ptr() == args[rows].untyped_storage().data_ptr():
            raise kvdock.ArgumentValueError(f"{_WRITE}: {rows}", expected="memory of its own", got=f"that of {cache}", fix="copy it")
    run(args)
