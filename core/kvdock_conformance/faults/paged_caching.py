"""Faults of ``paged_caching_``: in slots, sizes, strides, bits and repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.quantised import QuantisedKernel
from kvdock_conformance.faults.tensors import bits, capacity, dense, flip_byte, in_range, restrided, store

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = "paged_caching_"
_PAIRS = (("k_cache", "k"), ("v_cache", "v"))


def _with_slots(run: BackendCall, args: Args, slots: torch.Tensor) -> None:
    run({**args, "slot_mapping": slots.to(args["slot_mapping"].dtype)})


def _dropping(run: BackendCall, args: Args, dropped: torch.Tensor) -> None:
    """Make the call with some tokens' slots made padding."""
    _with_slots(run, args, torch.where(dropped, -1, args["slot_mapping"]))


# Slots


@FAULTS.call(_OP, "write-off-by-one-at-a-block-border", "The first slot of a block goes to the last of the one before.", "KVD-WRITE-005")
def _off_by_one(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    _with_slots(run, args, torch.where((slots > 0) & (slots % args["k_cache"].shape[1] == 0) & in_range(args), slots - 1, slots))


@FAULTS.call(_OP, "write-last-slot-dropped", "The last slot of the pool is taken for one beyond it.", "KVD-WRITE-005")
def _last_slot_dropped(run: BackendCall, args: Args) -> None:
    _dropping(run, args, args["slot_mapping"] == capacity(args) - 1)


@FAULTS.call(_OP, "write-slot-zero-is-padding", "Slot 0 is taken for padding.", "KVD-WRITE-005")
def _slot_zero_is_padding(run: BackendCall, args: Args) -> None:
    _dropping(run, args, args["slot_mapping"] == 0)


@FAULTS.call(_OP, "write-last-token-dropped", "The last of several tokens is dropped.", "KVD-WRITE-001", "KVD-WRITE-014")
def _last_token_dropped(run: BackendCall, args: Args) -> None:
    dropped = torch.zeros_like(args["slot_mapping"], dtype=torch.bool)
    if dropped.numel() > 1:
        dropped.view(-1)[-1] = True
    _dropping(run, args, dropped)


@FAULTS.call(_OP, "write-keys-into-values", "Where keys and values have one shape, keys go to both pools.", "KVD-WRITE-001")
def _keys_into_values(run: BackendCall, args: Args) -> None:
    run({**args, "v": args["k"]} if args["k"].shape == args["v"].shape and args["k"].stride() == args["v"].stride() else args)


@FAULTS.call(_OP, "write-negative-slot-wraps", "A negative slot counts from the end of the pool.", "KVD-WRITE-003")
def _negative_wraps(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    _with_slots(run, args, torch.where((slots < 0) & (slots >= -capacity(args)), slots + capacity(args), slots))


@FAULTS.call(_OP, "write-only-minus-one-is-padding", "Negative slots other than -1 are taken modulo the pool.", "KVD-WRITE-003")
def _only_minus_one(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    _with_slots(run, args, torch.where(slots < -1, slots % max(capacity(args), 1), slots))


@FAULTS.call(_OP, "write-padding-ends-the-call", "Tokens behind the first padding are dropped.", "KVD-WRITE-003")
def _padding_ends(run: BackendCall, args: Args) -> None:
    flat = args["slot_mapping"].reshape(-1)
    _dropping(run, args, ((flat < 0).cumsum(0) > 0).reshape(args["slot_mapping"].shape))


@FAULTS.call(_OP, "write-beyond-the-pool-clamped", "A slot beyond the pool is taken for the last one.", "KVD-WRITE-004")
def _clamped(run: BackendCall, args: Args) -> None:
    _with_slots(run, args, args["slot_mapping"].clamp(max=capacity(args) - 1))


@FAULTS.call(_OP, "write-beyond-the-pool-silent", "A slot beyond the pool is skipped, and neither raised nor counted.", "KVD-WRITE-004")
def _silent(run: BackendCall, args: Args) -> None:
    _dropping(run, args, args["slot_mapping"] >= capacity(args))


@FAULTS.call(
    _OP,
    "write-error-after-a-partial-write",
    "What is good is written before the others are refused.",
    "KVD-WRITE-004",
    host_only=("KVD-WRITE-004",),
)
def _partial_write(run: BackendCall, args: Args) -> None:
    beyond = args["slot_mapping"] >= capacity(args)
    if bool(beyond.any()):
        _dropping(run, args, beyond)
    run(args)


@FAULTS.call(_OP, "write-error-names-another-place", "The error names the last bad place instead of the first.", "KVD-WRITE-004")
def _another_place(run: BackendCall, args: Args) -> None:
    beyond = (args["slot_mapping"] >= capacity(args)).nonzero()
    if len(beyond):
        raise kvdock.IndexRangeError(f"{_OP}: slot_mapping{beyond[-1].tolist()}", expected="a slot of the pool", got="another")
    run(args)


@FAULTS.call(_OP, "write-slots-cut-to-32-bits", "The upper half of an int64 slot is ignored.", "KVD-WRITE-004", "KVD-WRITE-003")
def _cut_to_32bits(run: BackendCall, args: Args) -> None:
    _with_slots(run, args, args["slot_mapping"].to(torch.int32))


@FAULTS.call(_OP, "write-slot-strides-ignored", "slot_mapping is read as if it were dense.", "KVD-WRITE-006")
def _slot_strides_ignored(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    run({**args, "slot_mapping": restrided(slots, dense(slots.shape))})


@FAULTS.call(_OP, "write-first-row-of-a-batch", "Of a batch of rows, the first is written.", "KVD-WRITE-007")
def _first_row(run: BackendCall, args: Args) -> None:
    dropped = torch.zeros_like(args["slot_mapping"], dtype=torch.bool)
    if dropped.dim() == 2:
        dropped[1:] = True
    _dropping(run, args, dropped)


@FAULTS.function(_OP, "write-no-tokens-refused", "A call without tokens raises.", "KVD-WRITE-008")
def _no_tokens_refused(function: Callable[..., None]) -> Callable[..., None]:
    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, *others: Any, **scales: Any) -> None:
        if k.numel() == 0:
            raise kvdock.ArgumentValueError(f"{_OP}: k", expected="tokens", got="none")
        function(k_cache, v_cache, k, *others, **scales)

    return call


@FAULTS.call(_OP, "write-equal-slots-dropped", "A slot that occurs twice is not written.", "KVD-WRITE-009")
def _equal_slots_dropped(run: BackendCall, args: Args) -> None:
    _, inverse, counts = torch.unique(args["slot_mapping"], return_inverse=True, return_counts=True)
    _dropping(run, args, (counts > 1)[inverse] & in_range(args))


# Sizes


@FAULTS.call(_OP, "write-blocks-of-16-at-most", "The place within a block is taken modulo 16.", "KVD-WRITE-010")
def _blocks_of_16(run: BackendCall, args: Args) -> None:
    slots, block = args["slot_mapping"], args["k_cache"].shape[1]
    _with_slots(run, args, torch.where(in_range(args), slots // block * block + slots % block % 16, slots))


@FAULTS.call(_OP, "write-dim-rounded-down-to-16", "Elements behind the last multiple of 16 are dropped.", "KVD-WRITE-011")
def _dim_rounded_down(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda rows: rows[..., : rows.shape[-1] // 16 * 16] if rows.shape[-1] > 16 else rows)


@FAULTS.call(_OP, "write-heads-past-512-threads-dropped", "Heads behind the 512th element are dropped.", "KVD-WRITE-012")
def _past_512(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda rows: rows[..., : max(512 // rows.shape[-1], 1), :])


@FAULTS.call(_OP, "write-values-sized-like-keys", "As many heads and elements of values are written as keys have.", "KVD-WRITE-013")
def _sized_like_keys(run: BackendCall, args: Args) -> None:
    heads, dim = args["k"].shape[-2:]
    _partly(run, args, lambda rows: rows[..., :heads, :dim])


def _partly(run: BackendCall, args: Args, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, with only a part of each row written: the rest is put back as it was."""
    kept = [(args[cache], args[cache].clone()) for cache, _ in _PAIRS]
    run(args)
    for cache, before in kept:
        written = bits(cache).clone()
        bits(cache).copy_(bits(before))
        bits(part(cache)).copy_(part(written))


@FAULTS.call(_OP, "write-tail-of-tokens-dropped", "Tokens behind the last multiple of 16 are dropped.", "KVD-WRITE-014")
def _tail_dropped(run: BackendCall, args: Args) -> None:
    position = torch.arange(args["slot_mapping"].numel(), device=args["k"].device).reshape(args["slot_mapping"].shape)
    _dropping(run, args, position >= max(position.numel() // 16 * 16, 16))


@FAULTS.call(_OP, "write-grid-limit", "Tokens behind the 65,535th are dropped.", "KVD-WRITE-015")
def _grid_limit(run: BackendCall, args: Args) -> None:
    position = torch.arange(args["slot_mapping"].numel(), device=args["k"].device).reshape(args["slot_mapping"].shape)
    _dropping(run, args, position >= 65_535)


@FAULTS.call(_OP, "write-int32-offsets", "Rows more than 2**31 elements into a pool are dropped.", "KVD-WRITE-023")
def _int32_offsets(run: BackendCall, args: Args) -> None:
    step = max(args[cache].stride(0) for cache, _ in _PAIRS)
    _dropping(run, args, in_range(args) & (args["slot_mapping"] // args["k_cache"].shape[1] * step >= 2**31))


# Layout


@FAULTS.call(
    _OP, "write-pool-strides-ignored", "Pools are written as if they were dense.", "KVD-WRITE-016", "KVD-WRITE-017", "KVD-WRITE-024"
)
def _pool_strides_ignored(run: BackendCall, args: Args) -> None:
    run({**args, "slot_mapping": torch.full_like(args["slot_mapping"], -1)} if bool(in_range(args).all()) else args)
    for cache, source in _PAIRS:
        store(restrided(args[cache], dense(args[cache].shape)), args[source], args)


@FAULTS.call(_OP, "write-values-by-the-strides-of-keys", "Values are written by the strides of the key pool.", "KVD-WRITE-016")
def _strides_of_keys(run: BackendCall, args: Args) -> None:
    run(args)
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    if k_cache.shape == v_cache.shape and k_cache.stride() != v_cache.stride():
        store(restrided(v_cache, dense(v_cache.shape)), args["v"], args)


@FAULTS.call(_OP, "write-block-stride-ignored", "Blocks are taken to follow each other without a gap.", "KVD-WRITE-017", "KVD-WRITE-002")
def _block_stride_ignored(run: BackendCall, args: Args) -> None:
    run({**args, "slot_mapping": torch.full_like(args["slot_mapping"], -1)} if bool(in_range(args).all()) else args)
    for cache, source in _PAIRS:
        pool = args[cache]
        step = pool.stride(1) * pool.shape[1] if pool.stride(0) > pool.stride(1) > pool.stride(2) else pool.stride(0)
        store(restrided(pool, (step, *pool.stride()[1:])), args[source], args)


@FAULTS.call(_OP, "write-token-strides-ignored", "Tokens are read as if they were dense.", "KVD-WRITE-018", "KVD-WRITE-007")
def _token_strides_ignored(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        if rows.stride() != tuple(dense(rows.shape)) and 0 not in rows.stride():
            store(args[cache], restrided(rows, dense(rows.shape)), args)


@FAULTS.call(_OP, "write-head-stride-of-tokens-ignored", "Heads of a token are taken to follow each other without a gap.", "KVD-WRITE-018")
def _head_stride_ignored(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        store(args[cache], restrided(rows, (*rows.stride()[:-2], rows.shape[-1], 1)) if rows.stride(-2) > rows.shape[-1] else rows, args)


@FAULTS.call(_OP, "write-addresses-rounded-to-16", "Rows are read from the multiple of 16 bytes at or before them.", "KVD-WRITE-019")
def _rounded_addresses(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        past = rows.data_ptr() % 16 // rows.element_size()
        if past and rows.storage_offset() >= past:
            store(args[cache], restrided(rows, rows.stride(), -past), args)


@FAULTS.call(_OP, "write-one-byte-past-the-row", "The byte behind the first row written is changed.", "KVD-WRITE-002")
def _byte_past_the_row(run: BackendCall, args: Args) -> None:
    run(args)
    pool, slots = args["v_cache"], args["slot_mapping"][in_range(args)].tolist()
    if slots:
        block, offset = divmod(slots[0], pool.shape[1])
        last = pool[block, offset, -1]
        flip_byte(pool, last.storage_offset() + last.shape[-1])


# Numbers


@FAULTS.call(_OP, "write-nan-payload-lost", "Every NaN is written as the one NaN of its dtype.", "KVD-WRITE-020")
def _nan_payload_lost(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        store(args[cache], torch.where(rows.isnan(), float("nan"), rows), args)


@FAULTS.call(_OP, "write-minus-zero-lost", "-0 is written as 0.", "KVD-WRITE-020")
def _minus_zero_lost(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        positive = torch.where(bits(rows) == torch.iinfo(bits(rows).dtype).min, 0, bits(rows)).to(bits(rows).dtype)
        store(args[cache], positive.view(rows.dtype), args)


@FAULTS.call(_OP, "write-subnormals-flushed", "Subnormal numbers are written as 0.", "KVD-WRITE-020")
def _subnormals_flushed(run: BackendCall, args: Args) -> None:
    run(args)
    for cache, source in _PAIRS:
        rows = args[source]
        small = rows.abs() < torch.finfo(rows.dtype).tiny
        store(args[cache], torch.where(small & (rows != 0), 0, bits(rows)).to(bits(rows).dtype).view(rows.dtype), args)


@FAULTS.call(_OP, "write-input-scaled-in-place", "Keys are changed in place.", "KVD-WRITE-021")
def _input_changed(run: BackendCall, args: Args) -> None:
    run(args)
    if args["k"].numel():
        bits(args["k"]).view(-1)[:1].bitwise_not_() if args["k"].is_contiguous() else bits(args["k"])[..., :1].bitwise_not_()


@FAULTS.call(_OP, "write-slots-clamped-in-place", "Padding in slot_mapping is overwritten with -1.", "KVD-WRITE-021")
def _slots_changed(run: BackendCall, args: Args) -> None:
    run(args)
    args["slot_mapping"].clamp_(min=-1)


class _ScaleIgnored(kvdock.plugin.Descriptor):
    """Stores elements in the cache's dtype as they come."""

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *scales: Any
    ) -> None:
        for cache, rows in ((k_cache, k), (v_cache, v)):
            store(cache, rows.to(cache.dtype), {"k_cache": k_cache, "slot_mapping": slots})


@FAULTS.kernel(_OP, "write-scale-ignored", "A quantised cache is served, and its scale ignored.", "KVD-WRITE-022")
class _ScaleIgnoredKernel(QuantisedKernel):
    """Claims every quantised cache."""

    descriptor = _ScaleIgnored


@FAULTS.kernel(_OP, "write-refused-without-a-reason", "A quantised cache is refused with an empty reason.", "KVD-WRITE-022")
class _NoReasonKernel(QuantisedKernel):
    about_quantised = ("",)


# Repeated calls


@FAULTS.plan(_OP, "write-first-slots-kept", "A plan writes to the slots of its first call for ever.", "KVD-WRITE-024")
def _first_slots_kept() -> FaultyCall:
    kept: dict[torch.Size, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        slots = kept.setdefault(args["slot_mapping"].shape, args["slot_mapping"].clone())
        _with_slots(run, args, slots)

    return call


@FAULTS.kernel(_OP, "write-stale-plan-after-a-stride-change", "A plan is found by shapes alone, whatever the strides.", "KVD-WRITE-024")
class _StalePlan(kvdock.plugin.Kernel):
    """Keeps the first pool's strides for each shape."""

    def __init__(self, inner: kvdock.plugin.Kernel) -> None:
        self._inner = inner
        self._strides: dict[Any, Any] = {}

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Return the plan of the first request with these shapes."""
        k_cache = request.tensor("k_cache")
        first = self._strides.setdefault((k_cache.shape, k_cache.dtype), k_cache.strides)
        return self._inner.prepare(request) if first == k_cache.strides else _OldStrides(first or ())


class _OldStrides(kvdock.plugin.Descriptor):
    """Writes keys by strides that were those of another pool."""

    def __init__(self, strides: Sequence[int]) -> None:
        self._strides = strides

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *scales: Any
    ) -> None:
        args = {"k_cache": k_cache, "slot_mapping": slots}
        store(restrided(k_cache, self._strides), k, args)
        store(v_cache, v, args)
