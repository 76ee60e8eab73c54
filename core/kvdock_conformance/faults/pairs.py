"""Faults that show where two properties of a call meet: at some sizes, in some dtype with some strides, behind calls like it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import kvdock
from kvdock_conformance.faults.families import each
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.moves import COPY, GATHER, STATIC, WRITE, Move, Places
from kvdock_conformance.faults.tensors import dense, restrided

__all__ = ["FAULTS", "last_left"]

FAULTS = Faults()
_OF_SLOTS, _WITH_ROWS, _WITH_PADDING = "batch", "rows", "padding"
_each = functools.partial(each, to=FAULTS)


def last_left(move: Move, run: BackendCall, args: Args, *, where: bool) -> None:
    """Make the call, and leave the last good place where something is so."""
    move.dropping(run, args, lambda places: (places.at == places.at.amax(0) if len(places.at) else places.at > 0) & where)


# Sizes


@_each("last-of-4097-left", "Of one token more than a multiple of 4,096, the last is left.", "together", _OF_SLOTS)
def _one_more(move: Move, run: BackendCall, args: Args) -> None:
    last_left(move, run, args, where=move.count(args) > 1 and move.count(args) % 4096 == 1)


@_each("last-of-a-run-of-1025-left", "Of a run of one slot more than a multiple of 1,024, the last is left.", "together", _OF_SLOTS)
def _one_more_in_a_run(move: Move, run: BackendCall, args: Args) -> None:
    count, slots = move.count(args), args["slot_mapping"].reshape(-1)
    is_run = count > 1 and count % 1024 == 1 and args["k_cache"].is_contiguous() and bool((slots.diff() == 1).all())
    last_left(move, run, args, where=is_run)


@_each(
    "blocks-of-sixteens-as-powers",
    "Blocks of a multiple of 16 slots, with gaps between them, are taken to have a power of two.",
    "together",
    _OF_SLOTS,
)
def _as_powers(move: Move, run: BackendCall, args: Args) -> None:
    pool = args["k_cache"]
    block, power = pool.shape[1], 1 << pool.shape[1].bit_length() - 1
    is_about = block % 16 == 0 and pool.stride(0) != block * pool.stride(1)

    def other(slots: torch.Tensor) -> torch.Tensor:
        taken = slots // power * block + slots % power
        return torch.where((slots >= 0) & (slots < move.limit(args)), taken.clamp(max=move.limit(args) - 1), slots)

    move.with_index(run, args, other if is_about else torch.clone)


@FAULTS.call(STATIC.op, "static-far-positions-of-many-rows-left", "Positions of many rows have 16 bits.", "KVD-STATIC-023")
def _far_of_many(run: BackendCall, args: Args) -> None:
    STATIC.dropping(run, args, lambda places: (places.to[1] >= 2**15) & (args["k"].shape[0] > 4))


@_each("last-of-a-mebibyte-left", "Of keys of 1 MiB and more, the last are left.", "together", _WITH_ROWS)
def _mebibyte(move: Move, run: BackendCall, args: Args) -> None:
    keys, places = move.arranged(args[move.pairs[0][1]]), move.places(args)
    row = keys.shape[-1] * keys.shape[-2] * keys.element_size()
    last_left(move, run, args, where=len(places.at) * row >= 2**20)


@_each("few-of-a-batch-in-one-step", "The keys of a few tokens of a batch are all taken to be one step apart.", "together", _OF_SLOTS)
def _in_one_step(move: Move, run: BackendCall, args: Args) -> None:
    few = move.count(args) <= 4 and args["slot_mapping"].dim() == 2

    def view(name: str, rows: torch.Tensor) -> torch.Tensor:
        return restrided(rows, (rows.shape[1] * rows.stride(1), *rows.stride()[1:])) if few and name in ("k", "k_out") else rows

    move.again(run, args, view)


@_each("long-rows-of-runs-cut", "Of a run of rows of 64 KiB and more, none is written but the first.", "together", _OF_SLOTS)
def _long_rows(move: Move, run: BackendCall, args: Args) -> None:
    keys, slots = args["k_cache"], args["slot_mapping"].reshape(-1)
    is_run = keys.is_contiguous() and len(slots) > 4 and bool((slots.diff() == 1).all())
    is_about = is_run and keys[0, :1].numel() * keys.element_size() >= 2**16
    move.dropping(run, args, lambda places: (places.at > 0) & is_about)


@_each("pieces-of-a-mebibyte-left", "A piece of memory of exactly 64 KiB or 1 MiB is left.", "together")
def _whole_piece(move: Move, run: BackendCall, args: Args) -> None:
    values, places = move.arranged(args[move.pairs[1][1]]), move.places(args)
    row = values[(0,) * len(places.to)].numel() * values.element_size() if values.numel() else 0
    rows = 1 if move is COPY else len(places.at)
    is_piece = rows == 1 or bool((places.to[-1].diff() == 1).sum() > rows // 2)
    last_left(move, run, args, where=is_piece and rows * row in (2**16, 2**20))


@_each("half-of-long-rows-flushed", "In float16, subnormals of rows of 1 KiB and more become 0.", "together", _WITH_ROWS)
def _half_flushed(move: Move, run: BackendCall, args: Args) -> None:
    def flushed(rows: torch.Tensor) -> torch.Tensor:
        is_about = rows.dtype == torch.float16 and rows[:1].numel() >= 512
        return torch.where(is_about & (rows.abs() < torch.finfo(torch.float16).tiny), 0, rows) if is_about else rows

    move.again(run, args, change=flushed)


@_each("slots-past-512-left", "Of a block, slots behind the 512th are left.", "together", _OF_SLOTS)
def _past_512_slots(move: Move, run: BackendCall, args: Args) -> None:
    move.dropping(run, args, lambda places: (places.source if move.pairs[0][0] == "k_cache" else places.to)[1] >= 512)


@_each("slots-by-a-reciprocal", "Slots are divided by the block size as floats of 32 bits.", "together", _OF_SLOTS)
def _reciprocal(move: Move, run: BackendCall, args: Args) -> None:
    block, slots = args["k_cache"].shape[1], args["slot_mapping"].long()
    found = (slots.float() * torch.tensor(1 / block, device=slots.device)).long()
    run({**args, "slot_mapping": torch.where(slots < 0, slots, found * block + slots % block).to(args["slot_mapping"].dtype)})


@FAULTS.call(COPY.op, "copy-slots-past-512-left", "Of a block, slots behind the 512th are left.", COPY.killer("together"))
def _copied_past_512_slots(run: BackendCall, args: Args) -> None:
    COPY.partly(run, args, lambda rows: rows[:, :512])


@_each("rows-past-16-left", "Of a batch, rows behind the 16th are left.", "together", _OF_SLOTS)
def _past_16_rows(move: Move, run: BackendCall, args: Args) -> None:
    is_batch = args["slot_mapping"].dim() == 2
    move.dropping(run, args, lambda places: ((places.to if move.pairs[0][0] == "k_cache" else places.source)[0] >= 16) & is_batch)


@FAULTS.call(
    WRITE.op, "few-values-by-steps-of-keys", "Up to 4 values of a batch are found by the strides of keys of their shape.", "KVD-WRITE-025"
)
def _few_by_keys(run: BackendCall, args: Args) -> None:
    k, v = args["k"], args["v"]
    if v.dim() == 4 and k.shape == v.shape and args["slot_mapping"].numel() <= 4 and k.stride() != v.stride():
        args = {**args, "v": restrided(v, k.stride())}
    run(args)


@_each("offsets-of-values-cut", "Offsets of values have 32 bits: values further off are left.", "far", _WITH_ROWS)
def _offsets_of_values(move: Move, run: BackendCall, args: Args) -> None:
    places, values = move.places(args), move.written(args)[1]
    names = move.pairs[1]
    far = torch.zeros_like(places.at, dtype=torch.bool)
    for name, index in zip(names, (places.source, places.to), strict=True):
        steps = move.arranged(args[name]).stride()
        far |= sum((at * step for at, step in zip(index, steps, strict=False)), torch.zeros_like(places.at)) >= 2**31
    to = tuple(index[far] for index in places.to)
    before = values[to]
    run(args)
    values[to] = before


@_each("first-of-a-run-left", "Of more than 1,000 slots in a row, the first is left.", "together", _OF_SLOTS)
def _run_of_slots(move: Move, run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"].reshape(-1)
    is_run = len(slots) > 1000 and bool((slots.diff() == 1).all())
    move.dropping(run, args, lambda places: (places.at == 0) & is_run)


@_each("rows-past-32-kib-left", "Of a row, heads behind 32 KiB are left.", "together", _WITH_ROWS)
def _past_32_kib(move: Move, run: BackendCall, args: Args) -> None:
    move.partly(run, args, lambda rows: rows[..., : max(2**15 // (rows.shape[-1] * rows.element_size()), 1), :])


@FAULTS.call(COPY.op, "copy-slots-past-512-kib-left", "Of a block, slots behind 512 KiB are left.", COPY.killer("together"))
def _copied_past_512_kib(run: BackendCall, args: Args) -> None:
    COPY.partly(run, args, lambda rows: rows[:, : max(2**19 // (rows.shape[-1] * rows.shape[-2] * rows.element_size()), 1)])


@FAULTS.call(COPY.op, "copy-pairs-past-1023-left", "Pairs behind the 1,023rd are left.", COPY.killer("together"))
def _pairs_past_1023(run: BackendCall, args: Args) -> None:
    COPY.dropping(run, args, lambda places: places.at >= 1023)


@_each("places-past-65535-left", "Places have 16 bits: those behind 65,535 are left.", "together", _WITH_ROWS)
def _past_65535(move: Move, run: BackendCall, args: Args) -> None:
    block_size = args["k_cache"].shape[1]

    def is_far(places: Places) -> torch.Tensor:
        block, at = (places.source if move.pairs[0][0] == "k_cache" else places.to)[:2]
        return (at if move is STATIC else block * block_size + at) > 65_535

    move.dropping(run, args, is_far)


# Pairs of properties


def _lies_tokens_first(rows: torch.Tensor) -> bool:
    return rows.dim() == 4 and 0 < rows.stride(0) < rows.stride(1) and 1 not in rows.shape[:2]


@_each("values-token-by-token-like-keys", "Where keys of a batch lie token by token, values are taken to.", "together", _OF_SLOTS)
def _in_the_order_of_keys(move: Move, run: BackendCall, args: Args) -> None:
    k, v = [next(name for name in pair if not name.endswith("_cache")) for pair in move.pairs]
    is_about = _lies_tokens_first(args[k]) and not _lies_tokens_first(args[v])

    def turned(name: str, rows: torch.Tensor) -> torch.Tensor:
        step = rows.stride(1)
        return restrided(rows, (step, rows.shape[0] * step, *rows.stride()[2:])) if name == v and is_about else rows

    move.again(run, args, turned)


@_each(
    "padded-batches-as-they-lie",
    "With padding, rows of a batch that lie token by token are taken one after the other.",
    "together",
    _OF_SLOTS,
)
def _as_they_lie(move: Move, run: BackendCall, args: Args) -> None:
    is_padded = bool((args["slot_mapping"] < 0).any())

    def view(name: str, rows: torch.Tensor) -> torch.Tensor:
        is_about = is_padded and not name.endswith("_cache") and _lies_tokens_first(rows)
        return restrided(rows, (rows.shape[1] * rows.stride(0), rows.stride(0), *rows.stride()[2:])) if is_about else rows

    move.again(run, args, view)


@FAULTS.call(
    WRITE.op,
    "write-padded-batches-by-tokens",
    "With padding, tokens are numbered as if rows followed each other.",
    WRITE.killer("together"),
)
def _numbered(run: BackendCall, args: Args) -> None:
    k = args["k"]
    if k.dim() == 4 and bool((args["slot_mapping"] < 0).any()):
        args = {**args, "k": restrided(k, (min(k.stride(0), k.shape[1] * k.stride(1)), *k.stride()[1:]))}
    run(args)


@_each("last-at-unlike-addresses-left", "Where values alone begin off 16 bytes, the last row is left.", "together", _WITH_ROWS)
def _unlike_addresses(move: Move, run: BackendCall, args: Args) -> None:
    k, v = (args[name].data_ptr() % 16 for pair in move.pairs for name in pair if not name.endswith("_cache"))
    last_left(move, run, args, where=k == 0 and v != 0)


@_each("float32-as-dense", "Pools of float32 are taken to be dense.", "together")
def _float32_as_dense(move: Move, run: BackendCall, args: Args) -> None:
    def view(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_about = name.endswith("_cache") and tensor.dtype == torch.float32 and 0 not in tensor.stride()
        return restrided(tensor, dense(tensor.shape)) if is_about else tensor

    move.again(run, args, view)


@_each("unlike-strides-of-many", "Of many rows, values go by the strides of a dense pool where they have others than keys.", "together")
def _unlike_strides(move: Move, run: BackendCall, args: Args) -> None:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    is_about = k_cache.shape == v_cache.shape and k_cache.stride() != v_cache.stride() and move.count(args) > 15
    move.again(run, args, lambda name, tensor: restrided(tensor, dense(tensor.shape)) if name == "v_cache" and is_about else tensor)


@_each("last-of-many-int32-left", "Of more than 1,024 slots in int32, the last is left.", "together", _OF_SLOTS)
def _many_int32(move: Move, run: BackendCall, args: Args) -> None:
    last_left(move, run, args, where=move.count(args) > 1024 and args["slot_mapping"].dtype == torch.int32)


@_each("last-of-unaligned-slots-left", "Of many slots that begin off 16 bytes, the last is left.", "together", _OF_SLOTS)
def _unaligned_slots(move: Move, run: BackendCall, args: Args) -> None:
    last_left(move, run, args, where=move.count(args) > 200 and args["slot_mapping"].data_ptr() % 16 != 0)


@_each("last-beside-much-padding-left", "Where most of many indices are padding, the last good one is left.", "together", _WITH_PADDING)
def _much_padding(move: Move, run: BackendCall, args: Args) -> None:
    count = move.count(args)
    last_left(move, run, args, where=count > 60 and len(move.places(args).at) * 2 < count)


@FAULTS.call(STATIC.op, "static-one-length-for-few-rows-left", "A length [1] is for one row where a cache has more.", "KVD-STATIC-023")
def _one_length(run: BackendCall, args: Args) -> None:
    lengths, rows = args["cache_lengths"], args["k"].shape[0]
    is_about = isinstance(lengths, torch.Tensor) and lengths.shape == (1,) and rows < args["k_cache"].shape[0]
    STATIC.dropping(run, args, lambda places: (places.source[0] > 0) & is_about)


@_each("runs-by-their-ends", "What begins and ends like a run, or like lengths that are alike, is taken for one.", "together")
def _by_their_ends(move: Move, run: BackendCall, args: Args) -> None:
    def straight(index: torch.Tensor) -> torch.Tensor:
        rows = index.reshape(-1, 2 if move is COPY else 1)
        line = torch.arange(len(rows), device=rows.device)[:, None] * int(move is not STATIC)
        is_about = len(rows) > 2 and bool(((rows[-1] - rows[0] == line[-1]) & (rows[0] >= 0)).all())
        return (rows[0] + line).reshape(index.shape) if is_about else index

    move.with_index(run, args, straight)


@_each("whole-pool-as-one-copy", "Where a call is about every place of the pool, that is taken to be dense.", "together", _WITH_ROWS)
def _as_one_copy(move: Move, run: BackendCall, args: Args) -> None:
    keys = move.arranged(args["k_cache"])
    is_about = len(move.places(args).at) == keys.shape[0] * keys.shape[1] and 0 not in keys.stride()

    def view(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return restrided(tensor, dense(tensor.shape)) if name.endswith("_cache") and is_about else tensor

    move.again(run, args, view)


@_each("one-in-blocks-of-one-as-dense", "For one token, values in blocks of one slot are taken to be dense.", "together", _OF_SLOTS)
def _one_in_one(move: Move, run: BackendCall, args: Args) -> None:
    is_about = move.count(args) == args["k_cache"].shape[1] == 1 and 0 not in args["v_cache"].stride()
    move.again(run, args, lambda name, tensor: restrided(tensor, dense(tensor.shape)) if name == "v_cache" and is_about else tensor)


@_each("ones-of-a-batch-left", "Of a batch with one token in each row, values of one element are left.", "batch", _OF_SLOTS)
def _ones(move: Move, run: BackendCall, args: Args) -> None:
    values, to = move.written(args)[1], move.places(args).to
    before = values[to]
    run(args)
    if args["slot_mapping"].shape[1:] == (1,) and values.shape[-2:].numel() == 1:
        values[to] = before


@FAULTS.call(
    WRITE.op, "write-shared-rows-of-runs-left", "Of a run, only the first gets keys that are one in memory.", WRITE.killer("together")
)
def _shared_rows(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"].reshape(-1)
    is_run = len(slots) > 4 and bool((slots.diff() == 1).all())
    WRITE.dropping(run, args, lambda places: (places.at > 0) & (is_run and args["k"].stride(0) == 0))


def _span(pool: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and of the last."""
    reach = sum((size - 1) * step for size, step in zip(pool.shape, pool.stride(), strict=True))
    return pool.data_ptr(), pool.data_ptr() + reach * pool.element_size()


def _values_left(move: Move, run: BackendCall, args: Args, is_about: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Make a call, and leave the values where keys and values lie in one storage in some way."""
    k, v = args["k_cache"], args["v_cache"]
    values, to = move.written(args)[1], move.places(args).to
    before = values[to]
    run(args)
    if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and 0 not in k.shape and is_about(k, v):
        values[to] = before


for _name, _where, _is_about in (
    ("below-keys", "values lie below keys", lambda k, v: v.data_ptr() < k.data_ptr()),
    ("inside-keys", "values lie between two heads of keys", lambda k, v: _span(k)[0] <= _span(v)[0] and _span(v)[1] <= _span(k)[1]),
    ("of-other-sizes", "values have other sizes than keys", lambda k, v: k.shape != v.shape),
):
    _each(f"values-{_name}-left", f"Where {_where} in one storage, values are left.", "parts")(
        functools.partial(_values_left, is_about=_is_about)
    )


@_each("keys-as-flat-as-values", "Where blocks of values follow each other without a gap, those of keys are taken to.", "together")
def _as_flat(move: Move, run: BackendCall, args: Args) -> None:
    def view(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dense_step = tensor.shape[1] * tensor.stride(1)
        is_about = name == "k_cache" and args["v_cache"].is_contiguous() and 0 < dense_step < tensor.stride(0)
        return restrided(tensor, (dense_step, *tensor.stride()[1:])) if is_about else tensor

    move.again(run, args, view)


@_each("values-in-the-order-of-keys", "Values of a pool without gaps are taken to lie in the order of the keys.", "together", _WITH_ROWS)
def _in_their_order(move: Move, run: BackendCall, args: Args) -> None:
    k, v = args["k_cache"], args["v_cache"]
    order = sorted(range(4), key=lambda dim: -k.stride(dim))
    strides = torch.empty([v.shape[dim] for dim in order], device="meta").permute([order.index(dim) for dim in range(4)]).stride()
    is_about = (
        v.shape == k.shape
        and 0 not in k.stride()
        and max(v.stride()) * v.shape[order[0]] == v.numel() == max(k.stride()) * k.shape[order[0]]
    )
    move.again(run, args, lambda name, tensor: restrided(tensor, strides) if name == "v_cache" and is_about else tensor)


# Checks that stop early, and calls that repeat


@_each(
    "only-1024-looked-at",
    "One out of range behind 1,024 slots is left out.",
    "together?",
    _OF_SLOTS,
)
def _only_1024(move: Move, run: BackendCall, args: Args) -> None:
    first = args["slot_mapping"].reshape(-1)[:1024]
    if bool((first < move.limit(args)).all()):
        move.left_out(run, args)
    else:
        run(args)


def _behind_likes(change: Callable[[Move, BackendCall, Args], None], move: Move) -> FaultyCall:
    """Return a call that is wrong behind three like it."""
    made: dict[torch.Size, int] = {}

    def call(run: BackendCall, args: Args) -> None:
        shape = getattr(args[move.index], "shape", torch.Size())
        made[shape] = made.get(shape, 0) + 1
        if made[shape] > 3:
            change(move, run, args)
        else:
            run(args)

    return call


def _padding_as_zero(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, lambda index: index.clamp(min=0))


def _beyond_as_last(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, lambda index: index.clamp(max=move.limit(args) - 1))


def _negative_as_zero(move: Move, run: BackendCall, args: Args) -> None:
    is_int = isinstance(args[move.index], int)
    move.with_index(run, args, lambda lengths: lengths.clamp(min=0) if is_int else lengths)


def _without_zero(move: Move, run: BackendCall, args: Args) -> None:
    length = args[move.index]
    if not (isinstance(length, int) and length == 0):
        run(args)


def _without_far(move: Move, run: BackendCall, args: Args) -> None:
    move.dropping(run, args, lambda places: move.reach(args, places) >= 2**31)


for _move in (WRITE, GATHER):
    FAULTS.plan(
        _move.op,
        f"{_move.prefix}-far-of-a-known-call",
        "Behind three calls like it, what is more than 2**31 elements into a tensor is dropped.",
        _move.killer("far"),
    )(functools.partial(_behind_likes, _without_far, _move))


for _moves, _name, _what, _wrong in (
    ((WRITE, GATHER), "padding-of-a-known-call", "padding is taken for 0", _padding_as_zero),
    ((WRITE, GATHER), "beyond-in-a-known-call", "a slot beyond is taken for the last", _beyond_as_last),
    ((GATHER,), "ends-of-a-known-call", "a read looks at both ends of its slots", _by_their_ends),
    ((STATIC,), "negative-of-a-known-call", "a length that is a negative int is taken for 0", _negative_as_zero),
    ((STATIC,), "length-0-of-a-known-call", "a length that is an int of 0 is taken for none", _without_zero),
):
    for _move in _moves:
        FAULTS.plan(_move.op, f"{_move.prefix}-{_name}", f"Behind three calls like it, {_what}.", _move.killer("together"))(
            functools.partial(_behind_likes, _wrong, _move)
        )


@FAULTS.plan(STATIC.op, "static-too-long-for-good", "Behind an update that was too long, a cache is full.", STATIC.killer("together"))
def _too_long_for_good() -> FaultyCall:
    full: set[int] = set()

    def call(run: BackendCall, args: Args) -> None:
        if args["k_cache"].data_ptr() in full:
            raise kvdock.IndexRangeError(f"{STATIC.op}: cache_lengths", expected="room", got="none", fix="make the cache longer")
        try:
            run(args)
        except kvdock.IndexRangeError:
            full.add(args["k_cache"].data_ptr())
            raise

    return call


@FAULTS.call(
    STATIC.op, "static-step-by-the-strides-of-keys", "One position of one row goes to values by the strides of keys.", "KVD-STATIC-023"
)
def _by_strides_of_keys(run: BackendCall, args: Args) -> None:
    k_cache, v_cache, k, length = (args[name] for name in ("k_cache", "v_cache", "k", "cache_lengths"))
    unlike = k_cache.shape == v_cache.shape and k_cache.stride() != v_cache.stride()
    if unlike and isinstance(length, int) and k.shape[0] == k.shape[2] == 1:
        before = v_cache.clone()
        run(args)
        v_cache.copy_(before)
    else:
        run(args)


@FAULTS.call(COPY.op, "copy-padding-of-many-is-block-0", "Of many pairs, padding is a copy of what block 0 held before.", "KVD-COPY-028")
def _padding_is_block_0(run: BackendCall, args: Args) -> None:
    pairs = args["block_pairs"]
    before = {name: args[name][:1].clone() for name in ("k_cache", "v_cache")}
    run(args)
    if len(pairs) > 16 and bool((pairs < 0).any()):
        for name, block in before.items():
            args[name][:1].copy_(block)
