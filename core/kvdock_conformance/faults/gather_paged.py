"""Faults of ``gather_paged`` in slots, sizes, strides, bits and repeated calls. Those of its results are in `gather_results`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.quantised import QuantisedKernel
from kvdock_conformance.faults.tensors import bits, capacity, dense, flip_byte, in_range, restrided

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = "gather_paged"
_PAIRS = (("k_cache", "k_out"), ("v_cache", "v_out"))


def _with_slots(run: BackendCall, args: Args, slots: torch.Tensor) -> None:
    run({**args, "slot_mapping": slots.to(args["slot_mapping"].dtype)})


def _as_padding(run: BackendCall, args: Args, taken: torch.Tensor) -> None:
    _with_slots(run, args, torch.where(taken, -1, args["slot_mapping"]))


def _rows(cache: torch.Tensor, args: Args) -> torch.Tensor:
    """Return the bits of the rows at the slots of a call, zeros where a slot is none of the pool's: in plain torch."""
    if capacity(args) == 0:
        return torch.zeros((*args["slot_mapping"].shape, *cache.shape[2:]), dtype=bits(cache).dtype, device=cache.device)
    valid, block = in_range(args), cache.shape[1]
    slots = torch.where(valid, args["slot_mapping"], 0).long()
    return torch.where(valid[..., None, None], bits(cache)[slots // block, slots % block], 0)


def _reading(run: BackendCall, args: Args, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, and read again through another view of each pool."""
    run(args)
    for cache, out in _PAIRS:
        bits(args[out]).copy_(_rows(view(args[cache]), args))


def _writing(run: BackendCall, args: Args, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, and change the elements that it has read."""
    run(args)
    for _, out in _PAIRS:
        bits(args[out]).copy_(bits(change(args[out])))


def _position(args: Args) -> torch.Tensor:
    slots = args["slot_mapping"]
    return torch.arange(slots.numel(), device=slots.device).reshape(slots.shape)


# Slots


@FAULTS.call(_OP, "gather-off-by-one-at-a-block-border", "The first slot of a block reads the last of the one before.", "KVD-GATHER-005")
def _off_by_one(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    _with_slots(run, args, torch.where((slots > 0) & (slots % args["k_cache"].shape[1] == 0) & in_range(args), slots - 1, slots))


@FAULTS.call(_OP, "gather-last-slot-is-beyond", "The last slot of the pool reads as zeros.", "KVD-GATHER-005")
def _last_slot(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, args["slot_mapping"] == capacity(args) - 1)


@FAULTS.call(_OP, "gather-slot-zero-is-padding", "Slot 0 is taken for padding.", "KVD-GATHER-005")
def _slot_zero(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, args["slot_mapping"] == 0)


@FAULTS.call(_OP, "gather-keys-for-values", "Where keys and values have one shape, both outputs get keys.", "KVD-GATHER-001")
def _keys_for_values(run: BackendCall, args: Args) -> None:
    run(args)
    if args["k_out"].shape == args["v_out"].shape:
        bits(args["v_out"]).copy_(bits(args["k_out"]))


@FAULTS.call(_OP, "gather-last-token-left", "The last of several tokens is not written.", "KVD-GATHER-001", "KVD-GATHER-014")
def _last_token(run: BackendCall, args: Args) -> None:
    kept = [(args[out], args[out].clone()) for _, out in _PAIRS]
    run(args)
    for out, before in kept:
        if args["slot_mapping"].numel() > 1:
            bits(out)[(-1,) * args["slot_mapping"].dim()] = bits(before)[(-1,) * args["slot_mapping"].dim()]


@FAULTS.call(_OP, "gather-padding-left-as-it-was", "The rows of padding keep what the outputs held.", "KVD-GATHER-003", "KVD-GATHER-023")
def _padding_left(run: BackendCall, args: Args) -> None:
    kept = [(args[out], args[out].clone()) for _, out in _PAIRS]
    run(args)
    padding = args["slot_mapping"] < 0
    for out, before in kept:
        bits(out)[padding] = ~bits(before)[padding]  # inverted: a new tensor may happen to be zeros


@FAULTS.call(_OP, "gather-negative-slot-wraps", "A negative slot counts from the end of the pool.", "KVD-GATHER-003")
def _negative_wraps(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    _with_slots(run, args, torch.where((slots < 0) & (slots >= -capacity(args)), slots + capacity(args), slots))


@FAULTS.call(_OP, "gather-only-minus-one-is-padding", "Negative slots other than -1 are taken modulo the pool.", "KVD-GATHER-003")
def _only_minus_one(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    _with_slots(run, args, torch.where((slots < -1) & (capacity(args) > 0), slots % max(capacity(args), 1), slots))


@FAULTS.call(_OP, "gather-padding-clears-the-gap-too", "Where a token is padding, what lies behind its heads is cleared.", "KVD-GATHER-002")
def _gap_cleared(run: BackendCall, args: Args) -> None:
    run(args)
    out = args["k_out"]
    gap = min((out.stride(i) for i in range(out.dim() - 1) if out.shape[i] > 1), default=out.shape[-1])
    if gap > out.shape[-1]:
        wide = out.as_strided((*out.shape[:-1], out.shape[-1] + 1), out.stride())
        wide[args["slot_mapping"] < 0] = 0


@FAULTS.call(_OP, "gather-beyond-the-pool-clamped", "A slot beyond the pool is taken for the last one.", "KVD-GATHER-004", "KVD-GATHER-023")
def _clamped(run: BackendCall, args: Args) -> None:
    _with_slots(run, args, args["slot_mapping"].clamp(max=capacity(args) - 1))


@FAULTS.call(
    _OP,
    "gather-beyond-the-pool-silent",
    "In host memory a slot beyond the pool reads as zeros.",
    "KVD-GATHER-004",
    host_only=("KVD-GATHER-004",),
)
def _silent(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, args["slot_mapping"] >= capacity(args))


@FAULTS.call(
    _OP,
    "gather-error-after-a-partial-write",
    "What is good is read before the others are refused.",
    "KVD-GATHER-004",
    host_only=("KVD-GATHER-004",),
)
def _partial(run: BackendCall, args: Args) -> None:
    beyond = args["slot_mapping"] >= capacity(args)
    if bool(beyond.any()):
        _as_padding(run, args, beyond)
    run(args)


@FAULTS.call(_OP, "gather-error-names-another-place", "The error names the last bad place instead of the first.", "KVD-GATHER-004")
def _another_place(run: BackendCall, args: Args) -> None:
    beyond = (args["slot_mapping"] >= capacity(args)).nonzero()
    if len(beyond):
        raise kvdock.IndexRangeError(f"{_OP}: slot_mapping{beyond[-1].tolist()}", expected="a slot of the pool", got="another")
    run(args)


@FAULTS.call(_OP, "gather-slots-cut-to-32-bits", "The upper half of an int64 slot is ignored.", "KVD-GATHER-004", "KVD-GATHER-003")
def _cut_to_32_bits(run: BackendCall, args: Args) -> None:
    _with_slots(run, args, args["slot_mapping"].to(torch.int32))


@FAULTS.call(_OP, "gather-slot-strides-ignored", "slot_mapping is read as if it were dense.", "KVD-GATHER-006")
def _slot_strides_ignored(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    run({**args, "slot_mapping": restrided(slots, dense(slots.shape))})


@FAULTS.call(_OP, "gather-first-row-of-a-batch", "Of a batch of rows, the first is read.", "KVD-GATHER-007")
def _first_row(run: BackendCall, args: Args) -> None:
    rows = _position(args) // max(args["slot_mapping"].shape[-1], 1)
    _as_padding(run, args, (rows > 0) & (args["slot_mapping"].dim() == 2))


@FAULTS.call(_OP, "gather-repeated-slots-once", "A slot that occurs again reads as zeros.", "KVD-GATHER-009")
def _repeated_once(run: BackendCall, args: Args) -> None:
    flat = args["slot_mapping"].reshape(-1)
    again = (flat[:, None] == flat[None, :]).tril(-1).any(1) if len(flat) < 1000 else torch.zeros_like(flat, dtype=torch.bool)
    _as_padding(run, args, again.reshape(args["slot_mapping"].shape) & in_range(args))


# Sizes


@FAULTS.call(_OP, "gather-blocks-of-16-at-most", "The place within a block is taken modulo 16.", "KVD-GATHER-010")
def _blocks_of_16(run: BackendCall, args: Args) -> None:
    slots, block = args["slot_mapping"], args["k_cache"].shape[1]
    _with_slots(run, args, torch.where(in_range(args), slots // block * block + slots % block % 16, slots))


def _partly(run: BackendCall, args: Args, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call, with only a part of each row read: the rest is zeros."""

    def keep(out: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(bits(out))
        part(kept).copy_(part(bits(out)))
        return kept

    _writing(run, args, keep)


@FAULTS.call(_OP, "gather-dim-rounded-down-to-16", "Elements behind the last multiple of 16 are dropped.", "KVD-GATHER-011")
def _dim_rounded_down(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda rows: rows[..., : rows.shape[-1] // 16 * 16] if rows.shape[-1] > 16 else rows)


@FAULTS.call(_OP, "gather-heads-past-512-threads-dropped", "Heads behind the 512th element are dropped.", "KVD-GATHER-012")
def _past_512(run: BackendCall, args: Args) -> None:
    _partly(run, args, lambda rows: rows[..., : max(512 // rows.shape[-1], 1), :])


@FAULTS.call(_OP, "gather-values-sized-like-keys", "As many heads and elements of values are read as keys have.", "KVD-GATHER-013")
def _sized_like_keys(run: BackendCall, args: Args) -> None:
    heads, dim = args["k_out"].shape[-2:]
    _partly(run, args, lambda rows: rows[..., :heads, :dim])


@FAULTS.call(_OP, "gather-tail-of-tokens-dropped", "Tokens behind the last multiple of 16 read as zeros.", "KVD-GATHER-014")
def _tail_dropped(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, _position(args) >= max(args["slot_mapping"].numel() // 16 * 16, 16))


@FAULTS.call(_OP, "gather-grid-limit", "Tokens behind the 65,535th read as zeros.", "KVD-GATHER-015")
def _grid_limit(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, _position(args) >= 65_535)


@FAULTS.call(_OP, "gather-int32-offsets", "Rows more than 2**31 elements into a pool read as zeros.", "KVD-GATHER-025")
def _int32_offsets(run: BackendCall, args: Args) -> None:
    step = max(args[cache].stride(0) for cache, _ in _PAIRS)
    _as_padding(run, args, in_range(args) & (args["slot_mapping"].long() // args["k_cache"].shape[1] * step >= 2**31))


# Layout


@FAULTS.call(
    _OP, "gather-pool-strides-ignored", "Pools are read as if they were dense.", "KVD-GATHER-016", "KVD-GATHER-017", "KVD-GATHER-026"
)
def _pool_strides_ignored(run: BackendCall, args: Args) -> None:
    _reading(run, args, lambda pool: pool if 0 in pool.stride() else restrided(pool, dense(pool.shape)))


@FAULTS.call(_OP, "gather-values-by-the-strides-of-keys", "Values are read by the strides of the key pool.", "KVD-GATHER-016")
def _strides_of_keys(run: BackendCall, args: Args) -> None:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    alike = k_cache.shape == v_cache.shape and 0 not in k_cache.stride()
    run(args)
    if alike and k_cache.stride() != v_cache.stride():
        bits(args["v_out"]).copy_(_rows(restrided(v_cache, dense(v_cache.shape)), args))


@FAULTS.call(_OP, "gather-block-stride-ignored", "Blocks are taken to follow each other without a gap.", "KVD-GATHER-017")
def _block_stride_ignored(run: BackendCall, args: Args) -> None:
    def close(pool: torch.Tensor) -> torch.Tensor:
        is_in_order = pool.stride(0) > pool.stride(1) > pool.stride(2)
        return restrided(pool, (pool.stride(1) * pool.shape[1], *pool.stride()[1:])) if is_in_order else pool

    _reading(run, args, close)


@FAULTS.call(_OP, "gather-expanded-blocks-beyond-the-first", "Of a pool whose blocks are one, the first block is read.", "KVD-GATHER-022")
def _expanded_blocks(run: BackendCall, args: Args) -> None:
    is_expanded = any(args[cache].stride(0) == 0 for cache, _ in _PAIRS)
    _as_padding(run, args, (args["slot_mapping"] >= args["k_cache"].shape[1]) & in_range(args) & is_expanded)


@FAULTS.call(_OP, "gather-expanded-slots-as-rows", "A slot stride of 0 is taken for the length of a row.", "KVD-GATHER-022")
def _expanded_slots(run: BackendCall, args: Args) -> None:
    def longer(pool: torch.Tensor) -> torch.Tensor:
        blocks, slots, _, _ = pool.shape
        if pool.stride(1) or slots == 1 or pool.stride(0) == 0:
            return pool
        place = torch.arange(blocks * slots, device=pool.device).reshape(blocks, slots) % blocks
        return pool[place, 0]  # the row that lies so many behind, as long as there is one

    _reading(run, args, longer)


@FAULTS.call(
    _OP, "gather-output-strides-ignored", "Outputs are written as if they were dense.", "KVD-GATHER-018", "KVD-GATHER-002", "KVD-GATHER-007"
)
def _output_strides_ignored(run: BackendCall, args: Args) -> None:
    kept = [(args[out], args[out].clone()) for _, out in _PAIRS]
    run(args)
    for out, before in kept:
        read = out.clone()
        bits(out).copy_(bits(before))
        bits(restrided(out, dense(out.shape))).copy_(bits(read))


@FAULTS.call(_OP, "gather-addresses-rounded-to-16", "Rows are written to the multiple of 16 bytes at or before them.", "KVD-GATHER-019")
def _rounded_addresses(run: BackendCall, args: Args) -> None:
    run(args)
    for _, name in _PAIRS:
        out = args[name]
        past = out.data_ptr() % 16 // out.element_size()
        if past and out.storage_offset() >= past:
            bits(restrided(out, out.stride(), -past)).copy_(bits(out.clone()))


@FAULTS.call(_OP, "gather-one-byte-past-the-outputs", "The byte behind the last row is changed.", "KVD-GATHER-002")
def _byte_past(run: BackendCall, args: Args) -> None:
    run(args)
    out = args["v_out"]
    last = out[(-1,) * (out.dim() - 1)]
    if len(out.untyped_storage()) > (last.storage_offset() + len(last)) * out.element_size():  # a new tensor has nothing behind it
        flip_byte(out, last.storage_offset() + len(last))


# Numbers


@FAULTS.call(_OP, "gather-nan-payload-lost", "Every NaN is read as the one NaN of its dtype.", "KVD-GATHER-020", "KVD-GATHER-023")
def _nan_payload_lost(run: BackendCall, args: Args) -> None:
    _writing(run, args, lambda out: torch.where(out.isnan(), float("nan"), out))


@FAULTS.call(_OP, "gather-minus-zero-lost", "-0 is read as 0.", "KVD-GATHER-020")
def _minus_zero_lost(run: BackendCall, args: Args) -> None:
    _writing(run, args, lambda out: bits(out).masked_fill(bits(out) == torch.iinfo(bits(out).dtype).min, 0))


@FAULTS.call(_OP, "gather-subnormals-flushed", "Subnormal numbers are read as 0.", "KVD-GATHER-020")
def _subnormals_flushed(run: BackendCall, args: Args) -> None:
    _writing(run, args, lambda out: bits(out).masked_fill((out.abs() < torch.finfo(out.dtype).tiny) & (out != 0), 0))


@FAULTS.call(_OP, "gather-pool-changed", "Reading inverts a bit of the pool.", "KVD-GATHER-021", "KVD-GATHER-023")
def _pool_changed(run: BackendCall, args: Args) -> None:
    run(args)
    if capacity(args):
        flip_byte(args["k_cache"], args["k_cache"].storage_offset())


@FAULTS.call(_OP, "gather-slots-clamped-in-place", "Padding in slot_mapping is overwritten with 0.", "KVD-GATHER-021")
def _slots_changed(run: BackendCall, args: Args) -> None:
    run(args)
    args["slot_mapping"].clamp_(min=0)


class _ScaleIgnored(kvdock.plugin.Descriptor):
    """Reads elements as they are."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, *rest: Any) -> None:
        for cache, out in ((k_cache, rest[-2]), (v_cache, rest[-1])):
            out.copy_(cache[slots // cache.shape[1], slots % cache.shape[1]].to(out.dtype))


@FAULTS.kernel(_OP, "gather-scale-ignored", "A quantised pool is served, and its scale ignored.", "KVD-GATHER-028")
class _ScaleIgnoredKernel(QuantisedKernel):
    """Claims every quantised pool."""

    descriptor = _ScaleIgnored


@FAULTS.kernel(_OP, "gather-refused-without-a-reason", "A quantised pool is refused with an empty reason.", "KVD-GATHER-028")
class _NoReasonKernel(QuantisedKernel):
    about_quantised = ("",)


# Repeated calls


@FAULTS.plan(_OP, "gather-first-slots-kept", "A plan reads the slots of its first call for ever.", "KVD-GATHER-026", "KVD-GATHER-027")
def _first_slots_kept() -> FaultyCall:
    kept: dict[torch.Size, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        _with_slots(run, args, kept.setdefault(args["slot_mapping"].shape, args["slot_mapping"].clone()))

    return call


@FAULTS.plan(_OP, "gather-padding-remembered", "Once a plan has seen padding at a position, it stays padding.", "KVD-GATHER-026")
def _padding_remembered() -> FaultyCall:
    seen: dict[torch.Size, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        slots = args["slot_mapping"]
        seen[slots.shape] = seen.get(slots.shape, torch.zeros_like(slots, dtype=torch.bool)) | (slots < 0)
        _as_padding(run, args, seen[slots.shape])

    return call
