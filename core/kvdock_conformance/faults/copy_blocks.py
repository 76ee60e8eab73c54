"""Faults of ``copy_blocks_`` in pairs, sizes, strides, bits and repeated calls. Those before any kernel are in `copy_forms`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.quantised import QuantisedKernel
from kvdock_conformance.faults.tensors import bits, dense, flip_byte, restrided

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = "copy_blocks_"
_CACHES = ("k_cache", "v_cache")


def _blocks(args: Args) -> int:
    return int(args["k_cache"].shape[0])


def _with_pairs(run: BackendCall, args: Args, pairs: torch.Tensor) -> None:
    run({**args, "block_pairs": pairs.to(args["block_pairs"].dtype)})


def _as_padding(run: BackendCall, args: Args, taken: torch.Tensor) -> None:
    _with_pairs(run, args, torch.where(taken[:, None], -1, args["block_pairs"]))


def _copied(args: Args) -> torch.Tensor:
    """Return the pairs of a call that are to be copied, on the pool's device."""
    pairs = args["block_pairs"].to(args["k_cache"].device).long()
    good: torch.Tensor = pairs[((pairs >= 0) & (pairs < _blocks(args))).all(1)]
    return good


def _instead(run: BackendCall, args: Args, copy: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
    """Make the call for its errors, put the pools back, and copy otherwise: ``copy`` takes a pool, sources and destinations."""
    kept = [(args[cache], bits(args[cache]).clone()) for cache in _CACHES]
    run(args)
    pairs = _copied(args)
    for cache, before in kept:
        bits(cache).copy_(before)
        copy(cache, pairs[:, 0], pairs[:, 1])


def _through(run: BackendCall, args: Args, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call through another view of each pool, in plain torch."""

    def copy(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        seen = bits(view(cache))
        seen[dst] = seen[src]

    _instead(run, args, copy)


def _changing(run: BackendCall, args: Args, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, and change the elements of the destinations."""
    run(args)
    dst = _copied(args)[:, 1]
    for cache in _CACHES:
        bits(args[cache])[dst] = bits(change(args[cache][dst]))


def _position(args: Args) -> torch.Tensor:
    return torch.arange(len(args["block_pairs"]), device=args["block_pairs"].device)


# Pairs


@FAULTS.call(_OP, "copy-source-and-destination-swapped", "Blocks are copied from dst to src.", "KVD-COPY-001", "KVD-COPY-005")
def _swapped(run: BackendCall, args: Args) -> None:
    _with_pairs(run, args, args["block_pairs"].flip(1))


@FAULTS.call(_OP, "copy-values-left", "Blocks of values are not copied.", "KVD-COPY-001", "KVD-COPY-010")
def _values_left(run: BackendCall, args: Args) -> None:
    before = bits(args["v_cache"]).clone()
    run(args)
    bits(args["v_cache"]).copy_(before)


@FAULTS.call(_OP, "copy-keys-into-values", "Where both pools have one shape, blocks of keys are copied to both.", "KVD-COPY-001")
def _keys_into_values(run: BackendCall, args: Args) -> None:
    run(args)
    if args["k_cache"].shape == args["v_cache"].shape:
        dst = _copied(args)[:, 1]
        bits(args["v_cache"])[dst] = bits(args["k_cache"])[dst]


@FAULTS.call(_OP, "copy-sources-cleared", "Blocks are moved: the sources are cleared.", "KVD-COPY-001", "KVD-COPY-002")
def _moved(run: BackendCall, args: Args) -> None:
    run(args)
    for cache in _CACHES:
        bits(args[cache])[_copied(args)[:, 0]] = 0


@FAULTS.call(_OP, "copy-last-pair-dropped", "The last of several pairs is dropped.", "KVD-COPY-001", "KVD-COPY-017")
def _last_pair(run: BackendCall, args: Args) -> None:
    count = len(args["block_pairs"])
    _as_padding(run, args, (_position(args) == count - 1) & (count > 1))


@FAULTS.call(_OP, "copy-last-block-is-beyond", "Pairs with the last block of the pool are dropped.", "KVD-COPY-005")
def _last_block(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, (args["block_pairs"] == _blocks(args) - 1).any(1))


@FAULTS.call(_OP, "copy-block-zero-is-padding", "Pairs with block 0 are taken for padding.", "KVD-COPY-005")
def _block_zero(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, (args["block_pairs"] == 0).any(1))


@FAULTS.call(_OP, "copy-negative-id-wraps", "A negative id counts from the end of the pool.", "KVD-COPY-003")
def _negative_wraps(run: BackendCall, args: Args) -> None:
    pairs, blocks = args["block_pairs"], _blocks(args)
    run(args)
    wrapped = torch.where((pairs < 0) & (pairs >= -blocks), pairs + blocks, pairs).to(args["k_cache"].device).long()
    more = wrapped[(pairs < 0).any(1).to(wrapped.device) & ((wrapped >= 0) & (wrapped < blocks)).all(1)]
    for cache in _CACHES:
        bits(args[cache])[more[:, 1]] = bits(args[cache])[more[:, 0]]


@FAULTS.call(_OP, "copy-negative-destination-is-zero", "A negative destination is taken for block 0.", "KVD-COPY-003")
def _negative_destination(run: BackendCall, args: Args) -> None:
    run(args)
    src = args["block_pairs"][(args["block_pairs"][:, 1] < 0) & (args["block_pairs"][:, 0] >= 0), 0]
    for cache in _CACHES:
        for block in src[src < _blocks(args)].tolist():
            bits(args[cache])[0] = bits(args[cache])[block]


@FAULTS.call(_OP, "copy-padding-ends-the-call", "Pairs behind the first padding are dropped.", "KVD-COPY-003")
def _padding_ends(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, (args["block_pairs"] < 0).any(1).cumsum(0) > 0)


@FAULTS.call(_OP, "copy-padding-checked-too", "An id beyond the pool raises even beside a negative one.", "KVD-COPY-003")
def _padding_checked(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"] >= _blocks(args)).nonzero()
    if len(beyond):
        raise kvdock.IndexRangeError(
            f"{_OP}: block_pairs{beyond[0].tolist()}", expected="a block of the pool", got="another", fix="correct it"
        )
    run(args)


@FAULTS.call(_OP, "copy-beyond-the-pool-clamped", "A block beyond the pool is taken for the last one.", "KVD-COPY-004", "KVD-COPY-008")
def _clamped(run: BackendCall, args: Args) -> None:
    _with_pairs(run, args, args["block_pairs"].clamp(max=_blocks(args) - 1))


@FAULTS.call(
    _OP, "copy-beyond-the-pool-silent", "A pair beyond the pool is skipped, neither raised nor counted.", "KVD-COPY-004", "KVD-COPY-008"
)
def _silent(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, (args["block_pairs"] >= _blocks(args)).any(1))


@FAULTS.call(
    _OP,
    "copy-error-after-a-partial-copy",
    "What is good is copied before the others are refused.",
    "KVD-COPY-004",
    "KVD-COPY-008",
    host_only=("KVD-COPY-004",),
)
def _partial(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"] >= _blocks(args)).any(1)
    if bool(beyond.any()):
        _as_padding(run, args, beyond)
    run(args)


@FAULTS.call(_OP, "copy-error-names-another-place", "The error names the last bad id instead of the first.", "KVD-COPY-004", "KVD-COPY-008")
def _another_place(run: BackendCall, args: Args) -> None:
    pairs = args["block_pairs"]
    beyond = ((pairs >= _blocks(args)) & (pairs >= 0).all(1, keepdim=True)).nonzero()
    if len(beyond):
        place = beyond[-1].tolist()
        raise kvdock.IndexRangeError(
            f"{_OP}: block_pairs{place}", expected="a block of the pool", got=pairs[tuple(place)], fix="correct it"
        )
    run(args)


@FAULTS.call(_OP, "copy-ids-cut-to-32-bits", "The upper half of an int64 id is ignored.", "KVD-COPY-004", "KVD-COPY-003")
def _cut_to_32_bits(run: BackendCall, args: Args) -> None:
    _with_pairs(run, args, args["block_pairs"].to(torch.int32))


def _one_by_one(run: BackendCall, args: Args, *, backwards: bool) -> None:
    rows = list(range(len(args["block_pairs"])))
    for row in reversed(rows) if backwards else rows:
        run({**args, "block_pairs": args["block_pairs"][row : row + 1]})


@FAULTS.call(
    _OP,
    "copy-pairs-checked-one-by-one",
    "Each pair is checked and copied for itself.",
    "KVD-COPY-004",
    "KVD-COPY-006",
    "KVD-COPY-007",
    host_only=("KVD-COPY-004",),
)
def _checked_one_by_one(run: BackendCall, args: Args) -> None:
    _one_by_one(run, args, backwards=False)


@FAULTS.call(_OP, "copy-doubled-destinations-taken", "Of pairs with one destination the last wins, without an error.", "KVD-COPY-006")
def _doubled_taken(run: BackendCall, args: Args) -> None:
    dst = args["block_pairs"][:, 1]
    overwritten = (dst[:, None] == dst[None, :]).triu(1).any(1) if len(dst) < 5000 else torch.zeros_like(dst, dtype=torch.bool)
    _as_padding(run, args, overwritten & (dst >= 0))


@FAULTS.call(_OP, "copy-chains-taken", "Chained pairs are copied in their order, without an error.", "KVD-COPY-007")
def _chains_taken(run: BackendCall, args: Args) -> None:
    pairs = _copied(args)
    is_chained = bool(torch.isin(pairs[:, 1], pairs[:, 0]).any()) and len(set(pairs[:, 1].tolist())) == len(pairs)
    if not is_chained or bool((pairs[:, 0] == pairs[:, 1]).any()):
        return run(args)
    return _one_by_one(run, args, backwards=False)


@FAULTS.call(_OP, "copy-onto-itself-taken", "A block copied onto itself is left as it is, without an error.", "KVD-COPY-007")
def _onto_itself(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, args["block_pairs"][:, 0] == args["block_pairs"][:, 1])


@FAULTS.call(_OP, "copy-order-error-without-the-block", "An error about dependent pairs names none.", "KVD-COPY-006", "KVD-COPY-007")
def _order_error(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.ArgumentValueError as error:
        raise kvdock.ArgumentValueError(f"{_OP}: block_pairs", expected="others", got="these", fix="pass others") from error


@FAULTS.call(_OP, "copy-pair-stride-ignored", "Pairs are read as if they were dense.", "KVD-COPY-009")
def _pair_stride_ignored(run: BackendCall, args: Args) -> None:
    pairs = args["block_pairs"]
    bad = restrided(pairs, dense(pairs.shape))
    run(args if bool((bad >= _blocks(args)).any()) else {**args, "block_pairs": bad})


@FAULTS.call(_OP, "copy-int32-pairs-read-as-int64", "Of int32 pairs, half are read: two as one.", "KVD-COPY-009", "KVD-COPY-010")
def _int32_as_int64(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, (_position(args) % 2 == 1) & (args["block_pairs"].dtype == torch.int32))


# Sizes


def _partly(run: BackendCall, args: Args, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, with only a part of each block copied."""
    _through(run, args, part)


@FAULTS.call(_OP, "copy-blocks-of-16-at-most", "Slots behind the 16th of a block are not copied.", "KVD-COPY-013")
def _blocks_of_16(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda pool: pool[:, :16])


@FAULTS.call(_OP, "copy-last-slot-of-a-block-left", "Of several slots of a block the last is not copied.", "KVD-COPY-001", "KVD-COPY-013")
def _last_slot(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda pool: pool[:, : max(pool.shape[1] - 1, 1)])


@FAULTS.call(_OP, "copy-dim-rounded-down-to-16", "Elements behind the last multiple of 16 are not copied.", "KVD-COPY-014")
def _dim_rounded_down(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda pool: pool[..., : pool.shape[-1] // 16 * 16] if pool.shape[-1] > 16 else pool)


@FAULTS.call(_OP, "copy-heads-past-512-threads-left", "Heads behind the 512th element are not copied.", "KVD-COPY-015")
def _past_512(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda pool: pool[:, :, : max(512 // pool.shape[-1], 1)])


@FAULTS.call(_OP, "copy-values-sized-like-keys", "As many slots, heads and elements of values are copied as keys have.", "KVD-COPY-016")
def _sized_like_keys(run: BackendCall, args: Args) -> None:
    slots, heads, dim = args["k_cache"].shape[1:]
    _partly(run, args, lambda pool: pool[:, :slots, :heads, :dim])


@FAULTS.call(_OP, "copy-value-slots-like-keys", "As many slots of values are copied as a block of keys has.", "KVD-COPY-016")
def _slots_like_keys(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda pool: pool[:, : args["k_cache"].shape[1]])


@FAULTS.call(_OP, "copy-tail-of-pairs-dropped", "Pairs behind the last multiple of 16 are dropped.", "KVD-COPY-017")
def _tail_dropped(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, _position(args) >= max(len(args["block_pairs"]) // 16 * 16, 16))


@FAULTS.call(_OP, "copy-grid-limit", "Pairs behind the 65,535th are dropped.", "KVD-COPY-018")
def _grid_limit(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, _position(args) >= 65_535)


@FAULTS.call(_OP, "copy-int32-offsets", "Pairs with a block more than 2**31 elements into the pool are dropped.", "KVD-COPY-025")
def _int32_offsets(run: BackendCall, args: Args) -> None:
    step = max(args[cache].stride(0) for cache in _CACHES)
    _as_padding(run, args, ((args["block_pairs"].long() < _blocks(args)) & (args["block_pairs"].long() * step >= 2**31)).any(1))


# Layout


@FAULTS.call(_OP, "copy-pool-strides-ignored", "Pools are read and written as if they were dense.", "KVD-COPY-019", "KVD-COPY-020")
def _pool_strides_ignored(run: BackendCall, args: Args) -> None:
    _through(run, args, lambda pool: restrided(pool, dense(pool.shape)))


@FAULTS.call(_OP, "copy-values-by-the-strides-of-keys", "Where strides differ, values are taken to be dense.", "KVD-COPY-019")
def _strides_of_keys(run: BackendCall, args: Args) -> None:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    unlike = k_cache.shape == v_cache.shape and k_cache.stride() != v_cache.stride()
    _through(run, args, lambda pool: restrided(pool, dense(pool.shape)) if pool is v_cache and unlike else pool)


@FAULTS.call(_OP, "copy-block-stride-ignored", "Blocks are taken to follow each other without a gap.", "KVD-COPY-020", "KVD-COPY-002")
def _block_stride_ignored(run: BackendCall, args: Args) -> None:
    def close(pool: torch.Tensor) -> torch.Tensor:
        is_in_order = pool.stride(0) > pool.stride(1) > pool.stride(2)
        return restrided(pool, (pool.stride(1) * pool.shape[1], *pool.stride()[1:])) if is_in_order else pool

    _through(run, args, close)


@FAULTS.call(_OP, "copy-block-as-one-run", "All between the first and the last element of a block is copied.", "KVD-COPY-002")
def _as_one_run(run: BackendCall, args: Args) -> None:
    def whole(pool: torch.Tensor) -> torch.Tensor:
        span = 1 + sum((size - 1) * step for size, step in zip(pool.shape[1:], pool.stride()[1:], strict=True))
        return pool.as_strided((pool.shape[0], span), (pool.stride(0), 1))

    _through(run, args, whole)


@FAULTS.call(_OP, "copy-addresses-rounded-to-16", "Blocks begin at the multiple of 16 bytes at or before them.", "KVD-COPY-021")
def _rounded_addresses(run: BackendCall, args: Args) -> None:
    def rounded(pool: torch.Tensor) -> torch.Tensor:
        past = pool.data_ptr() % 16 // pool.element_size()
        return restrided(pool, pool.stride(), -past) if pool.storage_offset() >= past else pool

    _through(run, args, rounded)


@FAULTS.call(_OP, "copy-one-byte-past-the-block", "The byte behind the last row of a destination is changed.", "KVD-COPY-002")
def _byte_past(run: BackendCall, args: Args) -> None:
    run(args)
    dst = _copied(args)[:, 1].tolist()
    if dst:
        last = args["v_cache"][dst[0], -1, -1]
        flip_byte(args["v_cache"], last.storage_offset() + len(last))


# Numbers


@FAULTS.call(_OP, "copy-nan-payload-lost", "Every NaN is copied as the one NaN of its dtype.", "KVD-COPY-022")
def _nan_payload_lost(run: BackendCall, args: Args) -> None:
    _changing(run, args, lambda rows: torch.where(rows.isnan(), float("nan"), rows))


@FAULTS.call(_OP, "copy-minus-zero-lost", "-0 is copied as 0.", "KVD-COPY-022")
def _minus_zero_lost(run: BackendCall, args: Args) -> None:
    _changing(run, args, lambda rows: bits(rows).masked_fill(bits(rows) == torch.iinfo(bits(rows).dtype).min, 0))


@FAULTS.call(_OP, "copy-subnormals-flushed", "Subnormal numbers are copied as 0.", "KVD-COPY-022")
def _subnormals_flushed(run: BackendCall, args: Args) -> None:
    _changing(run, args, lambda rows: bits(rows).masked_fill((rows.abs() < torch.finfo(rows.dtype).tiny) & (rows != 0), 0))


@FAULTS.call(_OP, "copy-pairs-clamped-in-place", "Padding in block_pairs is overwritten with -1.", "KVD-COPY-024")
def _pairs_changed(run: BackendCall, args: Args) -> None:
    run(args)
    args["block_pairs"].clamp_(min=-1)


@FAULTS.call(_OP, "copy-done-pairs-marked", "A pair is overwritten with -1 once it is copied.", "KVD-COPY-024")
def _pairs_marked(run: BackendCall, args: Args) -> None:
    run(args)
    args["block_pairs"][:1] = -1


class _Converting(kvdock.plugin.Descriptor):
    """Copies elements by way of a number each, whose largest is 96."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        pairs = block_pairs.to(k_cache.device).long()
        for cache in (k_cache, v_cache):
            bits(cache)[pairs[:, 1]] = bits(bits(cache)[pairs[:, 0]].view(cache.dtype).float().clamp(-96, 96).to(cache.dtype))


@FAULTS.kernel(_OP, "copy-quantised-converted", "Elements of a quantised pool are converted on the way.", "KVD-COPY-023")
class _ConvertingKernel(QuantisedKernel):
    """Claims every quantised pool."""

    descriptor = _Converting


@FAULTS.kernel(_OP, "copy-refused-without-a-reason", "A quantised pool is refused with an empty reason.", "KVD-COPY-023")
class _NoReasonKernel(QuantisedKernel):
    about_quantised = ("",)


# Repeated calls


@FAULTS.plan(_OP, "copy-first-pairs-kept", "A plan copies the pairs of its first call for ever.", "KVD-COPY-026")
def _first_pairs_kept() -> FaultyCall:
    kept: dict[torch.Size, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        _with_pairs(run, args, kept.setdefault(args["block_pairs"].shape, args["block_pairs"].clone()))

    return call


@FAULTS.plan(_OP, "copy-blocks-read-once", "A plan remembers what a block held when it was first a source.", "KVD-COPY-026")
def _blocks_read_once() -> FaultyCall:
    held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def call(run: BackendCall, args: Args) -> None:
        pools = [bits(args[cache]) for cache in _CACHES]
        pairs = _copied(args).tolist()
        for src, _ in pairs:
            held.setdefault((args["k_cache"].data_ptr(), src), (pools[0][src].clone(), pools[1][src].clone()))
        run(args)
        for src, dst in pairs:
            for pool, old in zip(pools, held[args["k_cache"].data_ptr(), src], strict=True):
                pool[dst] = old

    return call
