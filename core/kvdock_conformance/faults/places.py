"""Faults of places: foretold, divided or found by recursion; and of values at the address of keys."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kvdock_conformance.faults.families import each
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.moves import GATHER, STATIC, WRITE, Move

__all__ = ["FAULTS", "as_keys"]

FAULTS = Faults()
_OF_SLOTS = "batch"
_each = functools.partial(each, to=FAULTS)
_BEFORE: dict[Any, list[int]] = {}
"""By op, address and shape of an index: what its first places were."""


@_each("place-foretold", "A first place that went on by one twice is taken to go on.", "repeated")
def _foretold(move: Move, run: BackendCall, args: Args) -> None:
    index = args[move.index]
    if isinstance(index, torch.Tensor) and index.numel():
        before = _BEFORE.setdefault((move.op, index.data_ptr(), index.shape), [])
        goes_on = len(before) > 2 and before[-1] - before[-2] == before[-2] - before[-3] == 1 and before[-1] + 1 < move.limit(args)
        index = index.clone()
        before.append(before[-1] + 1 if goes_on else int(index.flatten()[0]))
        index[(0,) * index.dim()] = before[-1]
    run({**args, move.index: index})


@_each("stretches-by-recursion", "Stretches between padding are found by recursion, one level for each.", "padding", _OF_SLOTS)
def _by_recursion(move: Move, run: BackendCall, args: Args) -> None:
    is_padding = args["slot_mapping"].flatten() < 0

    def level(number: int) -> int:
        return level(number - 1) if number else 0

    level(int((is_padding[1:] & ~is_padding[:-1]).sum()))
    run(args)


@_each("slots-by-24-bits", "Slots are divided by block sizes that are no powers of two with 24 bits of 1 / block.", "blocks", _OF_SLOTS)
def _by_24_bits(move: Move, run: BackendCall, args: Args) -> None:
    block, limit = args["k_cache"].shape[1], move.limit(args)
    times = -(-(1 << 24) // block)

    def other(slots: torch.Tensor) -> torch.Tensor:
        found = (slots.long() * times >> 24) * block + slots % block
        return torch.where((slots >= 0) & (slots < limit), torch.where(found < limit, found, -1), slots)

    move.with_index(run, args, other if block & (block - 1) else torch.clone)


def as_keys(move: Move, run: BackendCall, args: Args) -> None:
    """Make a call whose values are the keys, if they are at the keys' address and of their shape."""
    (k, _), (v, _) = move.pairs
    alike = args[k].data_ptr() == args[v].data_ptr() and args[k].shape == args[v].shape
    move.again(run, args, lambda name, tensor: args[k] if name == v and alike else tensor)


for _move, _role in ((WRITE, "rows"), (STATIC, "rows"), (GATHER, "expanded")):
    FAULTS.call(
        _move.op,
        f"{_move.prefix}-values-at-the-address-of-keys",
        "Values at the address of keys, and of their shape, are taken to be the keys.",
        _move.killer(_role),
    )(functools.partial(as_keys, _move))
