"""Faults of `paged_attention` where tiles or splits of keys are joined, and a query sees nothing of some of them."""

from __future__ import annotations

import math

import torch

from kvdock_conformance.cases.attention import OP
from kvdock_conformance.faults.fault import Faults
from kvdock_conformance.faults.seeds import Args, BackendCall

__all__ = ["FAULTS"]

FAULTS = Faults()
_TILE, _SPLIT = 64, 256


def _seen(args: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each query the first key that it sees, the key behind the last, and its sequence."""
    lens, sums = args["seq_lens"].long(), args["cu_query_lens"]
    counts = torch.ones_like(lens) if sums is None else sums.long().diff()
    rows = torch.arange(len(lens), device=lens.device).repeat_interleave(counts)
    own = torch.arange(len(rows), device=lens.device) + (lens - counts.cumsum(0))[rows]
    first = (torch.zeros_like(lens) if args["starts"] is None else args["starts"].long())[rows]
    first = first if args["window"] is None else torch.maximum(first, own - args["window"] + 1)
    return first.clamp(min=0), own + 1 if args["causal"] else lens[rows], rows


def _spoil(args: Args, is_spoilt: torch.Tensor) -> None:
    """Make results of some queries NaN, as exp(-inf - -inf) is."""
    for result in (args["out"], args["lse"]):
        if result is not None:
            result[: len(is_spoilt)][is_spoilt] = math.nan


@FAULTS.call(OP, "attn-first-tile-hidden", "A query whose first tile of 64 keys is hidden, and seen by others, gets NaN.", "KVD-ATTN-002")
def _first_tile(run: BackendCall, args: Args) -> None:
    run(args)
    first, end, rows = _seen(args)
    if len(rows):
        of_all = torch.full_like(args["seq_lens"].long(), 2**31).scatter_reduce(0, rows, first, "amin")
        _spoil(args, (first // _TILE > of_all[rows] // _TILE) & (first < end))


@FAULTS.call(
    OP,
    "attn-two-tiles-hidden",
    "A query to which the first two tiles of 2 MiB of keys are hidden, and not to others, gets NaN.",
    "KVD-ATTN-010",
)
def _two_tiles(run: BackendCall, args: Args) -> None:
    run(args)
    first, end, rows = _seen(args)
    row = args["k_cache"].shape[2] * args["k_cache"].shape[3] * 4
    if len(rows) and row >= 2**15:
        of_all = torch.full_like(args["seq_lens"].long(), 2**31).scatter_reduce(0, rows, first, "amin")
        _spoil(args, (first // (2**21 // row) > of_all[rows] // (2**21 // row) + 1) & (first < end))


@FAULTS.call(OP, "attn-blocks-above-a-tile", "Of blocks of more than 8 MiB of keys, results are of zeros.", "KVD-ATTN-010")
def _above_a_tile(run: BackendCall, args: Args) -> None:
    run(args)
    if args["k_cache"][:1].numel() >= 2**21:
        args["out"].zero_()


@FAULTS.call(OP, "attn-hidden-split-has-weight", "A split of 256 keys that is hidden weighs as one key whose score is 0.", "KVD-ATTN-002")
def _has_weight(run: BackendCall, args: Args) -> None:
    run(args)
    if args["lse"] is not None:
        first, end, rows = _seen(args)
        lse = args["lse"][: len(rows)]
        joined = torch.logaddexp(lse, torch.where(first < end, first // _SPLIT, 0)[:, None].log())
        args["out"][: len(rows)].mul_((lse - joined).nan_to_num().exp()[..., None])
        lse.copy_(joined)


@FAULTS.call(
    OP, "attn-every-split-hidden", "A query that sees nothing of several splits of 256 keys gets NaN.", "KVD-ATTN-002", "KVD-ATTN-004"
)
def _every_split(run: BackendCall, args: Args) -> None:
    run(args)
    first, end, rows = _seen(args)
    _spoil(args, (first >= end) & (args["seq_lens"].long()[rows] > _SPLIT))
