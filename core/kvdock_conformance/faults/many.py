"""Faults of what lies behind many good indices, and of more tokens, heads, slots and pairs together than 16 bits count."""

from __future__ import annotations

import functools

import torch

from kvdock_conformance.faults.families import each
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.moves import STATIC, Move, starts_of

__all__ = ["FAULTS"]

FAULTS = Faults()
_OF_SLOTS, _OF_PAIRS = "batch", "doubled"
_MOST = 2**16 - 1
_each = functools.partial(each, to=FAULTS)


@_each("beyond-of-later-rows-left", "Behind eight rows of a batch, what is beyond the pool is padding.", "beyond!", _OF_SLOTS)
@_each("beyond-of-later-pairs-left", "Behind 32 pairs, one with a block beyond the pool is padding.", "beyond!", _OF_PAIRS)
def _later_beyond(move: Move, run: BackendCall, args: Args) -> None:
    index = args[move.index]
    first = {**args, move.index: index[: 32 if move.index == "block_pairs" else 8]}
    if index.dim() == 2 and move.beyond(args) and not move.beyond(first):
        move.left_out(run, args)
    else:
        run(args)


@_each("doubled-of-many-taken", "Of more than 1,024 pairs, the last with a destination wins, without an error.", "doubled", _OF_PAIRS)
def _doubled_of_many(move: Move, run: BackendCall, args: Args) -> None:
    to = args[move.index][:, 1]
    if 1024 < len(to) < 5000:
        again = (to[:, None] == to).triu(1).any(1) & (to >= 0)
        move.with_index(run, args, lambda pairs: torch.where(again[:, None], -1, pairs))
    else:
        run(args)


@_each("heads-of-many-in-rows-left", "Of a batch of rows, what is behind 65,535 heads of tokens is left.", "grid", _OF_SLOTS)
def _heads_in_rows(move: Move, run: BackendCall, args: Args) -> None:
    is_about, heads = args[move.index].dim() == 2, args["k_cache"].shape[2]
    move.dropping(run, args, lambda places: (places.at * heads >= _MOST) & is_about)


@_each("slots-of-many-left", "Of pairs, slots and heads, 65,535 together are copied.", "products", _OF_PAIRS)
def _slots_of_many(move: Move, run: BackendCall, args: Args) -> None:
    block, heads = args[move.pairs[0][1]].shape[1:3]
    at = _MOST // max(heads, 1)  # the first slot that is left, if all those of the call follow one another
    places, written = move.places(args), move.written(args)
    last = [(number, to, max(at - number * block, 0)) for number, to in enumerate(places.to[0].tolist()) if (number + 1) * block > at]
    before = [rows[to, begin:].clone() for rows in written for _, to, begin in last]
    run(args)
    for (rows, to, begin), old in zip([(rows, to, begin) for rows in written for _, to, begin in last], before, strict=True):
        rows[to, begin:] = old


@FAULTS.call(
    STATIC.op,
    "static-positions-of-many-left",
    "Of rows with their own lengths, positions and heads, 65,535 together are written.",
    STATIC.killer("grid"),
)
def _positions_of_many(run: BackendCall, args: Args) -> None:
    _, heads, new, _ = args["k"].shape
    is_about = isinstance(args["cache_lengths"], torch.Tensor) and args["cache_lengths"].numel() > 1 and heads > 1
    STATIC.dropping(run, args, lambda places: ((places.source[0] * new + places.at) * heads >= _MOST) & is_about)


@FAULTS.call(
    STATIC.op, "static-later-negative-int32-left", "Behind eight rows, a negative length of 32 bits is padding.", STATIC.killer("negative")
)
def _later_negative(run: BackendCall, args: Args) -> None:
    lengths = args["cache_lengths"]
    starts = starts_of(args).tolist()
    is_about = isinstance(lengths, torch.Tensor) and lengths.dtype == torch.int32 and len(starts) > 8
    if is_about and min(starts[:8]) >= 0 > min(starts):
        STATIC.move(args)
    else:
        run(args)
