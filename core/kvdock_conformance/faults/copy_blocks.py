"""Faults of ``copy_blocks_`` alone. Those that other moves have too are in `families`, those before any kernel in `copy_forms`."""

from __future__ import annotations

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.moves import COPY
from kvdock_conformance.faults.quantised import QuantisedKernel
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = COPY.op


def _with_pairs(run: BackendCall, args: Args, pairs: torch.Tensor) -> None:
    run({**args, "block_pairs": pairs.to(args["block_pairs"].dtype)})


def _as_padding(run: BackendCall, args: Args, taken: torch.Tensor) -> None:
    _with_pairs(run, args, torch.where(taken[:, None], -1, args["block_pairs"]))


def _also(run: BackendCall, args: Args, pairs: torch.Tensor) -> None:
    """Make the call, and then copy more pairs, as far as they are good, in plain torch."""
    run(args)
    COPY.move({**args, "block_pairs": pairs})


# Pairs


@FAULTS.call(_OP, "copy-whole-steps", "Where values lie in the blocks of keys, a block is copied up to the next one.", COPY.killer("parts"))
def _whole_steps(run: BackendCall, args: Args) -> None:
    run(args)
    k, v = bits(args["k_cache"]), bits(args["v_cache"])
    step, start, room = k.stride(0), int(k.storage_offset()), k.untyped_storage().nbytes() // k.element_size()
    if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and start < v.storage_offset() < start + step == start + v.stride(
        0
    ):
        places, whole = COPY.places(args), k.as_strided((room - start,), (1,), start)
        for src, dst in zip(places.source[0].tolist(), places.to[0].tolist(), strict=True):
            count = min(step, room - start - max(src, dst) * step)
            whole[dst * step :][:count] = whole[src * step :][:count]


@FAULTS.call(_OP, "copy-source-and-destination-swapped", "Blocks are copied from dst to src.", "KVD-COPY-001", "KVD-COPY-005")
def _swapped(run: BackendCall, args: Args) -> None:
    _with_pairs(run, args, args["block_pairs"].flip(1))


@FAULTS.call(_OP, "copy-values-left", "Blocks of values are not copied.", "KVD-COPY-001", "KVD-COPY-010")
def _values_left(run: BackendCall, args: Args) -> None:
    (to,), values = COPY.places(args).to, bits(args["v_cache"])
    before = values[to]
    run(args)
    values[to] = before


@FAULTS.call(_OP, "copy-sources-cleared", "Blocks are moved: the sources are cleared.", "KVD-COPY-001", "KVD-COPY-002")
def _moved(run: BackendCall, args: Args) -> None:
    run(args)
    for rows in COPY.written(args):
        rows[COPY.places(args).source] = 0


@FAULTS.call(_OP, "copy-negative-id-wraps", "A negative id counts from the end of the pool.", "KVD-COPY-003")
def _negative_wraps(run: BackendCall, args: Args) -> None:
    pairs, blocks = args["block_pairs"], COPY.limit(args)
    _also(run, args, torch.where((pairs < 0) & (pairs >= -blocks), pairs + blocks, pairs)[(pairs < 0).any(1)])


@FAULTS.call(_OP, "copy-negative-destination-is-zero", "A negative destination is taken for block 0.", "KVD-COPY-003")
def _negative_destination(run: BackendCall, args: Args) -> None:
    pairs = args["block_pairs"]
    _also(run, args, torch.where(pairs < 0, 0, pairs)[(pairs[:, 1] < 0) & (pairs[:, 0] >= 0)])


@FAULTS.call(_OP, "copy-padding-checked-too", "An id beyond the pool raises even beside a negative one.", "KVD-COPY-003")
def _padding_checked(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"] >= COPY.limit(args)).nonzero().tolist()
    if beyond:
        raise kvdock.IndexRangeError(f"{_OP}: block_pairs{beyond[0]}", expected="a block of the pool", got="another")
    run(args)


@FAULTS.call(
    _OP,
    "copy-pairs-checked-one-by-one",
    "Each pair is checked and copied for itself.",
    "KVD-COPY-004",
    "KVD-COPY-006",
    "KVD-COPY-007",
    host_only=("KVD-COPY-004",),
)
def _one_by_one(run: BackendCall, args: Args) -> None:
    for row in range(len(args["block_pairs"])):
        run({**args, "block_pairs": args["block_pairs"][row : row + 1]})


@FAULTS.call(_OP, "copy-doubled-destinations-taken", "Of pairs with one destination the last wins, without an error.", "KVD-COPY-006")
def _doubled_taken(run: BackendCall, args: Args) -> None:
    dst = args["block_pairs"][:, 1]
    overwritten = (dst[:, None] == dst[None, :]).triu(1).any(1) if len(dst) < 5000 else torch.zeros_like(dst, dtype=torch.bool)
    _as_padding(run, args, overwritten & (dst >= 0))


@FAULTS.call(_OP, "copy-chains-taken", "Chained pairs are copied in their order, without an error.", "KVD-COPY-007")
def _chains_taken(run: BackendCall, args: Args) -> None:
    places = COPY.places(args)
    src, dst = places.source[0], places.to[0]
    is_chained = bool(torch.isin(dst, src).any()) and len(set(dst.tolist())) == len(dst)
    if not is_chained or bool((src == dst).any()):
        return run(args)
    return _one_by_one(run, args)


@FAULTS.call(_OP, "copy-onto-itself-taken", "A block copied onto itself is left as it is, without an error.", "KVD-COPY-007")
def _onto_itself(run: BackendCall, args: Args) -> None:
    _as_padding(run, args, args["block_pairs"][:, 0] == args["block_pairs"][:, 1])


@FAULTS.call(_OP, "copy-onto-itself-by-int32-taken", "A block copied onto itself by pairs of 32 bits is left as it is.", "KVD-COPY-007")
def _onto_itself_by_int32(run: BackendCall, args: Args) -> None:
    pairs = args["block_pairs"]
    _as_padding(run, args, (pairs[:, 0] == pairs[:, 1]) & (pairs.dtype == torch.int32))


@FAULTS.call(_OP, "copy-order-of-many-unchecked", "Of many pairs the later ones are copied later.", "KVD-COPY-006", "KVD-COPY-007")
def _order_of_many(run: BackendCall, args: Args) -> None:
    for part in args["block_pairs"].split(256 if len(args["block_pairs"]) > 256 else 1 << 20):
        run({**args, "block_pairs": part})


@FAULTS.call(_OP, "copy-order-error-without-the-block", "An error about dependent pairs names none.", "KVD-COPY-006", "KVD-COPY-007")
def _order_error(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.ArgumentValueError as error:
        raise kvdock.ArgumentValueError(f"{_OP}: block_pairs", expected="others", got="these", fix="pass others") from error


@FAULTS.call(_OP, "copy-int32-pairs-read-as-int64", "Of int32 pairs, half are read: two as one.", "KVD-COPY-009", "KVD-COPY-010")
def _int32_as_int64(run: BackendCall, args: Args) -> None:
    is_narrow = args["block_pairs"].dtype == torch.int32
    COPY.dropping(run, args, lambda places: (places.at % 2 == 1) & is_narrow)


# Sizes


@FAULTS.call(_OP, "copy-blocks-of-16-at-most", "Slots behind the 16th of a block are not copied.", "KVD-COPY-013")
def _blocks_of_16(run: BackendCall, args: Args) -> None:
    COPY.partly(run, args, lambda pool: pool[:, :16])


@FAULTS.call(_OP, "copy-last-slot-of-a-block-left", "Of several slots of a block the last is not copied.", "KVD-COPY-001", "KVD-COPY-013")
def _last_slot(run: BackendCall, args: Args) -> None:
    COPY.partly(run, args, lambda pool: pool[:, : max(pool.shape[1] - 1, 1)])


@FAULTS.call(_OP, "copy-value-slots-like-keys", "As many slots of values are copied as a block of keys has.", "KVD-COPY-016")
def _slots_like_keys(run: BackendCall, args: Args) -> None:
    COPY.partly(run, args, lambda pool: pool[:, : args["k_cache"].shape[1]])


# Layout


@FAULTS.call(_OP, "copy-block-as-one-run", "All between the first and the last element of a block is copied.", "KVD-COPY-002")
def _as_one_run(run: BackendCall, args: Args) -> None:
    def whole(_: str, pool: torch.Tensor) -> torch.Tensor:
        span = 1 + sum((size - 1) * step for size, step in zip(pool.shape[1:], pool.stride()[1:], strict=True))
        return pool.as_strided((pool.shape[0], span), (pool.stride(0), 1))

    COPY.again(run, args, whole)


# Numbers


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


# Repeated calls


@FAULTS.plan(_OP, "copy-blocks-read-once", "A plan remembers what a block held when it was first a source.", "KVD-COPY-026")
def _blocks_read_once() -> FaultyCall:
    held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def call(run: BackendCall, args: Args) -> None:
        key, pools, places = args["k_cache"].data_ptr(), COPY.written(args), COPY.places(args)
        for src in places.source[0].tolist():
            held.setdefault((key, src), (pools[0][src].clone(), pools[1][src].clone()))
        run(args)
        for src, dst in zip(places.source[0].tolist(), places.to[0].tolist(), strict=True):
            for pool, old in zip(pools, held[key, src], strict=True):
                pool[dst] = old

    return call
