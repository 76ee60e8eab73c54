"""Faults of ``static_update_`` alone. Those that other moves have too are in `families`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.moves import STATIC, starts_of
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = STATIC.op


def _starts(args: Args) -> list[int]:
    """Return the length of each row of a call, read from wherever it is."""
    return [int(start) for start in starts_of(args)]


def _store_at(args: Args, starts: Sequence[int]) -> None:
    """Write keys and values behind other lengths than the call gives, as far as they fit."""
    STATIC.move({**args, "cache_lengths": torch.tensor(starts, device=args["k"].device)})


# Lengths


@FAULTS.call(_OP, "static-first-length-for-all-rows", "Every row is written behind the length of the first.", "KVD-STATIC-004")
def _first_length(run: BackendCall, args: Args) -> None:
    if STATIC.beyond(args):
        run(args)
        return
    _store_at(args, _starts(args)[:1] * args["k"].shape[0])


@FAULTS.call(_OP, "static-rows-behind-the-64th-dropped", "Rows behind the 64th are dropped.", "KVD-STATIC-004")
def _rows_dropped(run: BackendCall, args: Args) -> None:
    lengths = args["cache_lengths"]
    if not isinstance(lengths, int) and lengths.numel() > 64:
        lengths = lengths[:64]
    run({**args, "k": args["k"][:64], "v": args["v"][:64], "cache_lengths": lengths})


@FAULTS.call(_OP, "static-empty-row-is-padding", "A row of length 0 is taken for padding.", "KVD-STATIC-005")
def _empty_is_padding(run: BackendCall, args: Args) -> None:
    starts = _starts(args)
    if 0 in starts and not STATIC.beyond(args):
        _store_at(args, [start or -1 for start in starts])
    else:
        run(args)


@FAULTS.call(_OP, "static-full-row-refused", "A row that would be exactly full is taken for one that does not fit.", "KVD-STATIC-005")
def _full_refused(run: BackendCall, args: Args) -> None:
    most = STATIC.limit(args) - 1
    if most in _starts(args):
        raise kvdock.IndexRangeError(f"{_OP}: cache_lengths", expected=f"less than {most}", got=most)
    run(args)


@FAULTS.call(
    _OP, "static-overflow-cut", "Of a row that would end beyond the cache, what fits is written, and nothing said.", "KVD-STATIC-006"
)
def _cut(run: BackendCall, args: Args) -> None:
    starts, length = _starts(args), args["k_cache"].shape[2]
    if not STATIC.beyond(args) or min(starts) < 0:
        run(args)
        return
    for row, start in enumerate(starts):
        room = max(min(length - start, args["k"].shape[2]), 0)
        for source, cache in STATIC.pairs:
            bits(args[cache])[row, :, min(start, length) : min(start, length) + room] = bits(args[source])[row, :, :room]


@FAULTS.call(_OP, "static-negative-length-wraps", "A negative length counts from the end of the cache.", "KVD-STATIC-007")
def _negative_wraps(run: BackendCall, args: Args) -> None:
    starts, length = _starts(args), args["k_cache"].shape[2]
    wrapped = [start + length if start < 0 else start for start in starts]
    if wrapped != starts and all(0 <= start < STATIC.limit(args) for start in wrapped):
        _store_at(args, wrapped)
    else:
        run(args)


@FAULTS.call(_OP, "static-negative-length-is-padding", "A row of negative length is skipped as padding.", "KVD-STATIC-007")
def _negative_is_padding(run: BackendCall, args: Args) -> None:
    if min(_starts(args), default=0) < 0:
        _store_at(args, _starts(args))
    else:
        run(args)


@FAULTS.function(
    _OP, "static-lengths-checked-without-new-positions", "A full row is refused though nothing is to be written.", "KVD-STATIC-008"
)
def _checked_without_positions(function: Callable[..., None]) -> Callable[..., None]:
    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: int | torch.Tensor) -> None:
        if k.numel() == 0 and int(torch.as_tensor(lengths).max()) >= k_cache.shape[2]:
            raise kvdock.IndexRangeError(f"{_OP}: cache_lengths", expected="room", got="a full row")
        function(k_cache, v_cache, k, v, lengths)

    return call


# Sizes


@FAULTS.call(
    _OP, "static-rows-behind-a-smaller-batch", "The last row is written to the rows behind those of the call, too.", "KVD-STATIC-009"
)
def _rows_behind(run: BackendCall, args: Args) -> None:
    run(args)
    rows, behind = args["k"].shape[0], args["k_cache"].shape[0] - args["k"].shape[0]
    last = {name: args[name][-1:].expand(behind, -1, -1, -1) for name in ("k", "v")}
    caches = {name: args[name][rows:] for name in ("k_cache", "v_cache")}
    _store_at({**args, **last, **caches}, _starts(args)[-1:] * behind)


@FAULTS.call(_OP, "static-lengths-advanced-in-place", "cache_lengths is advanced by the new positions.", "KVD-STATIC-019")
def _lengths_advanced(run: BackendCall, args: Args) -> None:
    run(args)
    if isinstance(args["cache_lengths"], torch.Tensor):
        args["cache_lengths"].add_(args["k"].shape[2])


@FAULTS.call(
    _OP,
    "static-negative-lengths-of-many",
    "Behind eight rows, a negative length is padding.",
    "KVD-STATIC-007",
)
def _negative_of_many(run: BackendCall, args: Args) -> None:
    starts = _starts(args)
    if len(starts) > 8 and min(starts[:8]) >= 0 > min(starts):
        _store_at(args, starts)
    else:
        run(args)
