"""Faults of ``static_update_``: in lengths, sizes, strides, bits and repeated calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.tensors import bits, dense, flip_byte, restrided

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = "static_update_"
_PAIRS = (("k_cache", "k"), ("v_cache", "v"))


def _starts(args: Args) -> list[int]:
    """Return the length of each row of a call, read from wherever it is."""
    given, rows = args["cache_lengths"], args["k"].shape[0]
    lengths = [given] if isinstance(given, int) else [int(length) for length in given.reshape(-1)]
    return lengths * rows if len(lengths) == 1 else lengths


def _room(args: Args) -> int:
    """Return the largest length that leaves room for the new positions."""
    return int(args["k_cache"].shape[2] - args["k"].shape[2])


def _fits(args: Args) -> bool:
    return all(0 <= start <= _room(args) for start in _starts(args))


def _store(cache: torch.Tensor, source: torch.Tensor, starts: list[int]) -> None:
    """Write ``[b, H, s, D]`` behind a length for each row, in plain torch, as far as a row fits."""
    new, length = source.shape[2], cache.shape[2]
    for row, start in enumerate(starts):
        if 0 <= start <= length - new:
            bits(cache)[row, :, start : start + new] = bits(source)[row]


def _store_at(args: Args, starts: list[int]) -> None:
    """Write keys and values behind other lengths than the call gives."""
    for cache, source in _PAIRS:
        _store(args[cache], args[source], starts)


def _partly(run: BackendCall, args: Args, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, with only a part of the cache written: the rest is put back as it was."""
    kept = [(args[cache], args[cache].clone()) for cache, _ in _PAIRS]
    run(args)
    for cache, before in kept:
        written = bits(cache).clone()
        bits(cache).copy_(bits(before))
        bits(part(cache)).copy_(part(written))


# Lengths


@FAULTS.call(_OP, "static-lengths-strides-ignored", "cache_lengths is read as if it were dense.", "KVD-STATIC-003")
def _length_strides_ignored(run: BackendCall, args: Args) -> None:
    lengths = args["cache_lengths"]
    run(args if isinstance(lengths, int) else {**args, "cache_lengths": restrided(lengths, dense(lengths.shape))})


@FAULTS.call(_OP, "static-first-length-for-all-rows", "Every row is written behind the length of the first.", "KVD-STATIC-004")
def _first_length(run: BackendCall, args: Args) -> None:
    if not _fits(args):
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
    if 0 in starts and _fits(args):
        _store_at(args, [start or -1 for start in starts])
    else:
        run(args)


@FAULTS.call(_OP, "static-full-row-refused", "A row that would be exactly full is taken for one that does not fit.", "KVD-STATIC-005")
def _full_refused(run: BackendCall, args: Args) -> None:
    if _room(args) in _starts(args):
        raise kvdock.IndexRangeError(f"{_OP}: cache_lengths", expected=f"less than {_room(args)}", got=_room(args))
    run(args)


@FAULTS.call(_OP, "static-overflow-clamped", "A row that would end beyond the cache is moved back until it fits.", "KVD-STATIC-006")
def _clamped(run: BackendCall, args: Args) -> None:
    starts = _starts(args)
    if 0 <= _room(args) < max(starts, default=0) and min(starts) >= 0:
        _store_at(args, [min(start, _room(args)) for start in starts])
    else:
        run(args)


@FAULTS.call(
    _OP, "static-overflow-cut", "Of a row that would end beyond the cache, what fits is written, and nothing said.", "KVD-STATIC-006"
)
def _cut(run: BackendCall, args: Args) -> None:
    starts, length = _starts(args), args["k_cache"].shape[2]
    if _fits(args) or min(starts) < 0:
        run(args)
        return
    for row, start in enumerate(starts):
        room = max(min(length - start, args["k"].shape[2]), 0)
        for cache, source in _PAIRS:
            bits(args[cache])[row, :, min(start, length) : min(start, length) + room] = bits(args[source])[row, :, :room]


@FAULTS.call(
    _OP, "static-overflow-silent", "A row that does not fit is skipped, and neither raised nor counted.", "KVD-STATIC-006", "KVD-STATIC-007"
)
def _silent(run: BackendCall, args: Args) -> None:
    if _fits(args):
        run(args)
    else:
        _store_at(args, _starts(args))


@FAULTS.call(
    _OP,
    "static-error-after-a-partial-write",
    "Rows that fit are written before the others are refused.",
    "KVD-STATIC-006",
    host_only=("KVD-STATIC-006",),
)
def _partial_write(run: BackendCall, args: Args) -> None:
    if not _fits(args):
        _store_at(args, _starts(args))
    run(args)


@FAULTS.call(_OP, "static-error-names-another-row", "The error names the last bad row instead of the first.", "KVD-STATIC-006")
def _another_row(run: BackendCall, args: Args) -> None:
    bad = [row for row, start in enumerate(_starts(args)) if not 0 <= start <= _room(args)]
    if bad:
        raise kvdock.IndexRangeError(f"{_OP}: cache_lengths[{bad[-1]}]", expected="a length that fits", got="another")
    run(args)


@FAULTS.call(_OP, "static-lengths-cut-to-32-bits", "The upper half of an int64 length is ignored.", "KVD-STATIC-006", "KVD-STATIC-007")
def _cut_to_32_bits(run: BackendCall, args: Args) -> None:
    lengths = args["cache_lengths"]
    is_wide = isinstance(lengths, torch.Tensor) and lengths.dtype == torch.int64
    run({**args, "cache_lengths": lengths.to(torch.int32).to(torch.int64)} if is_wide else args)


@FAULTS.call(_OP, "static-negative-length-wraps", "A negative length counts from the end of the cache.", "KVD-STATIC-007")
def _negative_wraps(run: BackendCall, args: Args) -> None:
    starts, length = _starts(args), args["k_cache"].shape[2]
    wrapped = [start + length if start < 0 else start for start in starts]
    if wrapped != starts and all(0 <= start <= _room(args) for start in wrapped):
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


@FAULTS.call(_OP, "static-keys-into-values", "Where keys and values have one shape, keys go to both caches.", "KVD-STATIC-001")
def _keys_into_values(run: BackendCall, args: Args) -> None:
    run({**args, "v": args["k"]} if args["k"].shape == args["v"].shape and args["k"].stride() == args["v"].stride() else args)


@FAULTS.call(
    _OP, "static-rows-behind-a-smaller-batch", "The last row is written to the rows behind those of the call, too.", "KVD-STATIC-009"
)
def _rows_behind(run: BackendCall, args: Args) -> None:
    run(args)
    rows, batch = args["k"].shape[0], args["k_cache"].shape[0]
    for cache, source in _PAIRS:
        _store(args[cache][rows:], args[source][-1:].expand(batch - rows, -1, -1, -1), _starts(args)[-1:] * (batch - rows))


@FAULTS.call(_OP, "static-last-position-dropped", "The last of several new positions is dropped.", "KVD-STATIC-001", "KVD-STATIC-010")
def _last_position(run: BackendCall, args: Args) -> None:
    last = args["k"].shape[2] - 1
    run({**args, "k": args["k"][:, :, :last], "v": args["v"][:, :, :last]} if last and _fits(args) else args)


@FAULTS.call(_OP, "static-tail-of-positions-dropped", "New positions behind the last multiple of 16 are dropped.", "KVD-STATIC-010")
def _tail_dropped(run: BackendCall, args: Args) -> None:
    kept = max(args["k"].shape[2] // 16 * 16, 16)
    run({**args, "k": args["k"][:, :, :kept], "v": args["v"][:, :, :kept]} if _fits(args) else args)


@FAULTS.call(_OP, "static-dim-rounded-down-to-16", "Elements behind the last multiple of 16 are dropped.", "KVD-STATIC-011")
def _dim_rounded_down(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda cache: cache[..., : cache.shape[-1] // 16 * 16] if cache.shape[-1] > 16 else cache)


@FAULTS.call(_OP, "static-heads-past-512-threads-dropped", "Heads behind the 512th element are dropped.", "KVD-STATIC-012")
def _past_512(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda cache: cache[:, : max(512 // cache.shape[-1], 1)])


@FAULTS.call(_OP, "static-values-sized-like-keys", "As many heads and elements of values are written as keys have.", "KVD-STATIC-013")
def _sized_like_keys(run: BackendCall, args: Args) -> None:
    heads, dim = args["k"].shape[1], args["k"].shape[3]
    _partly(run, args, lambda cache: cache[:, :heads, :, :dim])


@FAULTS.call(_OP, "static-grid-limit", "Rows behind the 65,535th are dropped.", "KVD-STATIC-022")
def _grid_limit(run: BackendCall, args: Args) -> None:
    lengths, most = args["cache_lengths"], 65_535
    if not isinstance(lengths, int) and lengths.numel() > most:
        lengths = lengths[:most]
    run({**args, "k": args["k"][:most], "v": args["v"][:most], "cache_lengths": lengths})


@FAULTS.call(_OP, "static-int32-offsets", "Positions more than 2**31 elements into a cache are dropped.", "KVD-STATIC-021")
def _int32_offsets(run: BackendCall, args: Args) -> None:
    cache, starts = args["k_cache"], _starts(args)
    reach = [row * cache.stride(0) + start * cache.stride(2) for row, start in enumerate(starts)]
    if _fits(args) and max(reach, default=0) >= 2**31:
        _store_at(args, [start if step < 2**31 else -1 for start, step in zip(starts, reach, strict=True)])
    else:
        run(args)


# Layout


@FAULTS.call(
    _OP, "static-cache-strides-ignored", "Caches are written as if they were dense.", "KVD-STATIC-014", "KVD-STATIC-015", "KVD-STATIC-020"
)
def _cache_strides_ignored(run: BackendCall, args: Args) -> None:
    if not _fits(args):
        run(args)
        return
    for cache, source in _PAIRS:
        _store(restrided(args[cache], dense(args[cache].shape)), args[source], _starts(args))


@FAULTS.call(_OP, "static-values-by-the-strides-of-keys", "Values are written by the strides of the key cache.", "KVD-STATIC-014")
def _strides_of_keys(run: BackendCall, args: Args) -> None:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    if _fits(args) and k_cache.shape == v_cache.shape and k_cache.stride() != v_cache.stride():
        _store(k_cache, args["k"], _starts(args))
        _store(restrided(v_cache, dense(v_cache.shape)), args["v"], _starts(args))
    else:
        run(args)


@FAULTS.call(_OP, "static-row-stride-ignored", "Rows are taken to follow each other without a gap.", "KVD-STATIC-015", "KVD-STATIC-002")
def _row_stride_ignored(run: BackendCall, args: Args) -> None:
    if not _fits(args):
        run(args)
        return
    for cache, source in _PAIRS:
        pool = args[cache]
        inner = max(pool.stride(1) * pool.shape[1], pool.stride(2) * pool.shape[2])
        step = inner if pool.stride(0) > inner else pool.stride(0)
        _store(restrided(pool, (step, *pool.stride()[1:])), args[source], _starts(args))


@FAULTS.call(_OP, "static-source-strides-ignored", "New positions are read as if they were dense.", "KVD-STATIC-016")
def _source_strides_ignored(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        if rows.stride() != tuple(dense(rows.shape)) and 0 not in rows.stride():
            _store(args[cache], restrided(rows, dense(rows.shape)), _starts(args))


@FAULTS.call(_OP, "static-addresses-rounded-to-16", "Positions are read from the multiple of 16 bytes at or before them.", "KVD-STATIC-017")
def _rounded_addresses(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        past = rows.data_ptr() % 16 // rows.element_size()
        if past and rows.storage_offset() >= past:
            _store(args[cache], restrided(rows, rows.stride(), -past), _starts(args))


@FAULTS.call(_OP, "static-one-byte-past-the-position", "The byte behind the last position written is changed.", "KVD-STATIC-002")
def _byte_past_the_position(run: BackendCall, args: Args) -> None:
    run(args)
    for row, start in enumerate(_starts(args)[:1]):
        last = args["v_cache"][row, -1, start + args["k"].shape[2] - 1]
        flip_byte(last, last.storage_offset() + len(last))


# Numbers


@FAULTS.call(_OP, "static-nan-payload-lost", "Every NaN is written as the one NaN of its dtype.", "KVD-STATIC-018")
def _nan_payload_lost(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        _store(args[cache], torch.where(args[source].isnan(), float("nan"), args[source]), _starts(args))


@FAULTS.call(_OP, "static-minus-zero-lost-in-many-rows", "Where rows have lengths of their own, -0 is written as 0.", "KVD-STATIC-018")
def _minus_zero_lost(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS if args["k"].shape[0] > 4 else ():
        rows = bits(args[source])
        _store(args[cache], torch.where(rows == torch.iinfo(rows.dtype).min, 0, rows).to(rows.dtype), _starts(args))


@FAULTS.call(_OP, "static-values-scaled-in-place", "Values are changed in place.", "KVD-STATIC-019")
def _input_changed(run: BackendCall, args: Args) -> None:
    run(args)
    bits(args["v"])[:1, :1, :1, :1].bitwise_not_()


@FAULTS.call(_OP, "static-lengths-advanced-in-place", "cache_lengths is advanced by the new positions.", "KVD-STATIC-019")
def _lengths_advanced(run: BackendCall, args: Args) -> None:
    run(args)
    if isinstance(args["cache_lengths"], torch.Tensor):
        args["cache_lengths"].add_(args["k"].shape[2])


# Repeated calls


@FAULTS.plan(_OP, "static-first-length-kept", "A plan writes behind the length of its first call for ever.", "KVD-STATIC-020")
def _first_length_kept() -> FaultyCall:
    kept: dict[Any, Any] = {}

    def call(run: BackendCall, args: Args) -> None:
        lengths = args["cache_lengths"]
        key = "int" if isinstance(lengths, int) else lengths.shape
        run({**args, "cache_lengths": kept.setdefault(key, lengths if isinstance(lengths, int) else lengths.clone())})

    return call
