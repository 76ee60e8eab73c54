"""Faults that every op that copies can have: each is written once, for all moves of the table `moves`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.moves import MOVES, Move
from kvdock_conformance.faults.quantised import QuantisedKernel
from kvdock_conformance.faults.tensors import at_or_before, bits, dense, flip_byte, restrided

__all__ = ["FAULTS", "each", "faults_of", "of_one_projection"]

FAULTS = Faults()
FaultyMove = Callable[[Move, BackendCall, Args], None]
_EVERY: list[Callable[[Move, Faults], None]] = []
"""What adds a fault of a move to a list, for each fault of the family."""


def each(
    name: str, sentence: str, roles: str, among: str = "", to: Faults = FAULTS, *, by_address: bool = False
) -> Callable[[FaultyMove], FaultyMove]:
    """Add a fault of every move.

    Args:
        name: its name behind that of the move: ``"keys-into-values"``. A move may have another in `Move.names`.
        sentence: what is wrong.
        roles: what the requirements are about that must notice it, of those that a move has: see `Move.roles`. With a ``!`` one
            notices it in host memory only; with a ``?`` so it is with reads, which need not say what they leave out.
        among: only moves that have a requirement about this can be wrong like this.
        to: the list.
        by_address: whether it shows in host memory alone, by where that lies.
    """

    def add(change: FaultyMove) -> FaultyMove:
        def add_to(move: Move, faults: Faults) -> None:
            _add(functools.partial(faults.call, by_address=by_address), move, name, sentence, roles, among)(
                lambda run, args: change(move, *move.seen(run, args))
            )

        _EVERY.append(add_to)
        for move in MOVES.values():
            add_to(move, to)
        return change

    return add


def faults_of(move: Move) -> Faults:
    """Return the faults that an op can have which copies, and is none of kvdock's: those of a call, for its move."""
    for name in ("pairs", "pairs_at_sizes", "many", "places"):  # which add to what every move can have
        importlib.import_module(f"kvdock_conformance.faults.{name}")
    found = Faults()
    for add_to in _EVERY:
        add_to(move, found)
    _add_kept(move, found)
    return found


def _add(to: Callable[..., Any], move: Move, name: str, sentence: str, roles: str, among: str = "") -> Callable[[Any], Any]:
    """Return what adds a fault of one move to a list, by one of the methods of `Faults`."""
    has = move.roles.split()
    wanted = [role for role in roles.split() if role.rstrip("!?") in has]
    if not wanted or (among and among not in has):
        return lambda change: change
    host_only = [role for role in wanted if role.endswith("!") or (role.endswith("?") and "gather" in move.op)]
    killers, host = (tuple(move.killer(role.rstrip("!?")) for role in some) for some in (wanted, host_only))
    added: Callable[[Any], Any] = to(
        move.op, f"{move.prefix}-{move.names.get(name, name)}", sentence, *killers, **({"host_only": host} if host else {})
    )
    return added


# Which places


def _as_padding(move: Move, run: BackendCall, args: Args, is_taken: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the call with some indices, and what goes with them, taken for padding."""

    def padded(index: torch.Tensor) -> torch.Tensor:
        taken = is_taken(index)
        return torch.where(taken.any(-1, keepdim=True) if move.index == "block_pairs" else taken, -1, index)

    move.with_index(run, args, padded)


@each("last-slot-is-beyond", "The last place of the pool is taken for one beyond it.", "ends")
def _last_is_beyond(move: Move, run: BackendCall, args: Args) -> None:
    _as_padding(move, run, args, lambda index: index == move.limit(args) - 1)


@each("slot-zero-is-padding", "Place 0 is taken for padding.", "ends")
def _zero_is_padding(move: Move, run: BackendCall, args: Args) -> None:
    _as_padding(move, run, args, lambda index: index == 0)


@each("last-token-dropped", "The last of several is dropped.", "first many")
def _last_dropped(move: Move, run: BackendCall, args: Args) -> None:
    last = move.count(args) - 1
    move.dropping(run, args, lambda places: (places.at == last) & (last > 0))


@each("tail-of-tokens-dropped", "What is behind the last multiple of 16 is dropped.", "many")
def _tail_dropped(move: Move, run: BackendCall, args: Args) -> None:
    move.dropping(run, args, lambda places: places.at >= max(move.count(args) // 16 * 16, 16))


@each("grid-limit", "What is behind the 65,535th is dropped.", "grid")
def _grid_limit(move: Move, run: BackendCall, args: Args) -> None:
    move.dropping(run, args, lambda places: (places.source[0] if move.prefix == "static" else places.at) >= 65_535)


def _offsets_cut(move: Move, run: BackendCall, args: Args, most: int) -> None:
    move.dropping(run, args, lambda places: move.reach(args, places) >= most)


for _name, _role, _bits in (("int32-offsets", "far", 31), ("offsets-of-24-bits", "parts", 24)):
    each(_name, f"What is more than 2**{_bits} elements into a tensor is dropped.", _role)(functools.partial(_offsets_cut, most=2**_bits))


@each("int32-indices-int32-offsets", "By indices of 32 bits, what is more than 2**31 elements into a tensor is dropped.", "far")
def _offsets_by_index(move: Move, run: BackendCall, args: Args) -> None:
    index = args[move.index]
    is_short = isinstance(index, torch.Tensor) and index.dtype == torch.int32
    move.dropping(run, args, lambda places: (move.reach(args, places) >= 2**31) & is_short)


@each("int32-indices-int32-rows", "By indices of 32 bits, what is more than 2**31 rows into a pool is dropped.", "far", among="batch")
def _rows_by_index(move: Move, run: BackendCall, args: Args) -> None:
    row, is_short = args["k_cache"][0, 0].numel() or 1, args[move.index].dtype == torch.int32
    move.dropping(run, args, lambda places: (move.reach(args, places) // row >= 2**31) & is_short)


@each("padding-ends-the-call", "What is behind the first padding is dropped.", "padding")
def _padding_ends(move: Move, run: BackendCall, args: Args) -> None:
    padding = (args[move.index].reshape(move.count(args), -1) < 0).any(1).nonzero()
    move.dropping(run, args, lambda places: places.at > (padding[0, 0] if len(padding) else move.count(args)))


@each("beyond-the-pool-clamped", "What is beyond the pool is taken for the last place.", "beyond returned host-read")
def _clamped(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, lambda index: index.clamp(max=move.limit(args) - 1))


@each("beyond-the-pool-silent", "What is beyond the pool is left out, and neither raised nor counted.", "beyond? host-read negative")
def _silent(move: Move, run: BackendCall, args: Args) -> None:
    move.left_out(run, args)


@each("error-after-a-partial-write", "What is good is written before the others are refused.", "beyond! host-read")
def _partial(move: Move, run: BackendCall, args: Args) -> None:
    if move.beyond(args):
        move.move(args)
    run(args)


@each("error-names-another-place", "The error names the last bad place instead of the first.", "beyond host-read")
def _another_place(move: Move, run: BackendCall, args: Args) -> None:
    bad = move.beyond(args)
    if bad:
        raise kvdock.IndexRangeError(f"{move.op}: {bad[-1]}", expected="a place of the pool", got="another", fix="correct it")
    run(args)


@each("error-names-another-op", "The error names another op.", "beyond host-read")
def _another_op(move: Move, run: BackendCall, args: Args) -> None:
    bad = move.beyond(args)
    if bad:
        raise kvdock.IndexRangeError(f"index_put_: {bad[0]}", expected="a place of the pool", got="another", fix="correct it")
    run(args)


@each("error-shows-another-value", "The error names the first bad place, and shows another value.", "beyond host-read")
def _another_value(move: Move, run: BackendCall, args: Args) -> None:
    bad = move.beyond(args)
    if bad:
        got = int(torch.as_tensor(args[move.index]).max()) + 1
        raise kvdock.IndexRangeError(f"{move.op}: {bad[0]}", expected="a place of the pool", got=got, fix="correct it")
    run(args)


@each("slots-cut-to-32-bits", "The upper half of an int64 index is ignored.", "beyond padding negative")
def _cut_to_32_bits(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, lambda index: index.to(torch.int32))


@each("runs-cut-to-32-bits", "The upper half of indices that seem to be a run is ignored.", "beyond padding", among="batch")
def _runs_cut(move: Move, run: BackendCall, args: Args) -> None:
    lower = args[move.index].to(torch.int32)
    is_run = lower.numel() > 8 and bool((lower.reshape(-1).diff() == 1).all()) and int(lower.amin()) >= 0
    move.with_index(run, args, lambda index: lower if is_run else index)


@each("slot-strides-ignored", "Indices are read as if they were dense.", "index")
def _index_strides_ignored(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, lambda index: restrided(index, dense(index.shape)))


@each("slots-clamped-in-place", "Padding in what says where is overwritten with -1.", "inputs", among="padding")
def _index_changed(move: Move, run: BackendCall, args: Args) -> None:
    run(args)
    args[move.index].clamp_(min=-1)


# Slots alone


@each("off-by-one-at-a-block-border", "The first slot of a block is taken for the last of the one before.", "ends", among="batch")
def _off_by_one(move: Move, run: BackendCall, args: Args) -> None:
    block, limit = args["k_cache"].shape[1], move.limit(args)
    move.with_index(run, args, lambda slots: slots - ((slots > 0) & (slots % block == 0) & (slots < limit)).long())


@each("negative-slot-wraps", "A negative slot counts from the end of the pool.", "padding", among="batch")
def _negative_wraps(move: Move, run: BackendCall, args: Args) -> None:
    limit = move.limit(args)
    move.with_index(run, args, lambda slots: torch.where((slots < 0) & (slots >= -limit), slots + limit, slots))


@each("only-minus-one-is-padding", "Negative slots other than -1 are taken modulo the pool.", "padding", among="batch")
def _only_minus_one(move: Move, run: BackendCall, args: Args) -> None:
    limit = max(move.limit(args), 1)
    move.with_index(run, args, lambda slots: torch.where((slots < -1) & (move.limit(args) > 0), slots % limit, slots))


@each("blocks-of-16-at-most", "The place within a block is taken modulo 16.", "blocks", among="batch")
def _blocks_of_16(move: Move, run: BackendCall, args: Args) -> None:
    block, limit = args["k_cache"].shape[1], move.limit(args)
    good = (args["slot_mapping"] >= 0) & (args["slot_mapping"] < limit)
    move.with_index(run, args, lambda slots: torch.where(good, slots // block * block + slots % block % 16, slots))


@each("slots-as-one-row", "Rows of slot_mapping are taken to follow each other.", "index", among="batch")
def _as_one_row(move: Move, run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    if slots.dim() == 2 and slots.stride(0) > slots.shape[1] * slots.stride(1) > 0:
        slots = restrided(slots, (slots.shape[1] * slots.stride(1), slots.stride(1)))
    run({**args, "slot_mapping": slots})


@each("one-slot-as-many", "A slot mapping with a step of 0 is read with a step of 1.", "equal index", among="batch")
def _one_slot_as_many(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, lambda slots: restrided(slots, [step or 1 for step in slots.stride()]))


# Sizes


@each("dim-rounded-down-to-16", "Elements behind the last multiple of 16 are left.", "dims")
def _dim_rounded_down(move: Move, run: BackendCall, args: Args) -> None:
    move.partly(run, args, lambda rows: rows[..., : rows.shape[-1] // 16 * 16] if rows.shape[-1] > 16 else rows)


@each("heads-past-512-threads-dropped", "Heads behind the 512th element are left.", "heads")
def _past_512(move: Move, run: BackendCall, args: Args) -> None:
    move.partly(run, args, lambda rows: rows[..., : max(512 // rows.shape[-1], 1), :])


@each("values-sized-like-keys", "Of values as much is moved as keys have: slots, heads and elements.", "unlike")
def _sized_like_keys(move: Move, run: BackendCall, args: Args) -> None:
    keys = move.arranged(args[move.pairs[0][1]])
    part = tuple(slice(size) for size in keys.shape[len(move.places(args).to) :])
    move.partly(run, args, lambda rows: rows[:, *part])


@each("keys-into-values", "Where keys and values have one shape, keys go to both.", "first")
def _keys_into_values(move: Move, run: BackendCall, args: Args) -> None:
    run(args)
    places, (keys, values) = move.places(args), move.written(args)
    if keys.shape == values.shape:
        values[places.to] = keys[places.to]


# Layout


def _is_pool(name: str) -> bool:
    return name.endswith("_cache")


def _as_dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if 0 in tensor.stride() else restrided(tensor, dense(tensor.shape))


@each("pool-strides-ignored", "Pools are taken to be dense.", "orders parts repeated")
def _pool_strides_ignored(move: Move, run: BackendCall, args: Args) -> None:
    move.again(run, args, lambda name, tensor: _as_dense(tensor) if _is_pool(name) else tensor)


@each("values-by-the-strides-of-keys", "Where strides differ, values are taken to be dense.", "orders", among="unlike")
def _strides_of_keys(move: Move, run: BackendCall, args: Args) -> None:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    unlike = k_cache.shape == v_cache.shape and k_cache.stride() != v_cache.stride()
    move.again(run, args, lambda name, tensor: _as_dense(tensor) if name == "v_cache" and unlike else tensor)


@each("block-stride-ignored", "Blocks, or rows of a cache, are taken to follow each other without a gap.", "parts bytes")
def _block_stride_ignored(move: Move, run: BackendCall, args: Args) -> None:
    def close(name: str, tensor: torch.Tensor) -> torch.Tensor:
        inner = max(size * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        return restrided(tensor, (inner, *tensor.stride()[1:])) if _is_pool(name) and tensor.stride(0) > inner else tensor

    move.again(run, args, close)


@each("token-strides-ignored", "Rows are taken to be dense.", "rows batch out-bytes", among="rows")
def _row_strides_ignored(move: Move, run: BackendCall, args: Args) -> None:
    move.again(run, args, lambda name, tensor: tensor if _is_pool(name) else _as_dense(tensor))


@each("addresses-rounded-to-16", "Rows begin at the multiple of 16 bytes at or before them.", "addresses")
def _rounded_addresses(move: Move, run: BackendCall, args: Args) -> None:
    is_of_pools = move.index == "block_pairs"
    move.again(run, args, lambda name, tensor: at_or_before(tensor) if is_of_pools or not _is_pool(name) else tensor)


@each(
    "storages-taken-for-even",
    "What lies at a multiple of 16 bytes of its storage is taken to be at such an address.",
    "addresses",
    by_address=True,
)
def _even_storages(move: Move, run: BackendCall, args: Args) -> None:
    move.again(run, args, lambda name, tensor: at_or_before(tensor, by_place=True))


@each("index-address-rounded-to-16", "Indices begin at the multiple of 16 bytes at or before them.", "addresses")
def _rounded_index(move: Move, run: BackendCall, args: Args) -> None:
    move.with_index(run, args, at_or_before)


@each("one-byte-past-the-row", "The byte behind the last row written is changed.", "bytes out-bytes")
def _byte_past(move: Move, run: BackendCall, args: Args) -> None:
    run(args)
    places, values = move.places(args), move.arranged(args[move.pairs[1][1]])
    if len(places.at):
        row = values[tuple(int(index[-1]) for index in places.to)]
        behind = row[(-1,) * (row.dim() - 1)]
        end = int(behind.storage_offset()) + len(behind)
        if len(values.untyped_storage()) > end * values.element_size():  # a new tensor has nothing behind it
            flip_byte(values, end)


@each("steps-of-one-matter", "A call does nothing where a size of 1 has a step of its own.", "orders rows")
def _steps_of_one_matter(move: Move, run: BackendCall, args: Args) -> None:
    if not any(_has_step_of_one(args[name]) for name in move.rows):
        run(args)


def _has_step_of_one(rows: torch.Tensor) -> bool:
    """Whether a size of 1 has another step than a dense tensor has."""
    usual, found = 1, False
    for size, step in zip(reversed(rows.shape), reversed(rows.stride()), strict=True):
        found = found or (size == 1 and step != usual)
        usual *= size
    return found and rows.is_contiguous()


@each("steps-of-one-projection", "Values right behind the first key are gone through in the steps of keys.", "rows", among="equal")
def of_one_projection(move: Move, run: BackendCall, args: Args) -> None:
    """Make a call of keys and values that lie side by side as if they were parts of one projection."""
    k, v = (args[name] for name, _ in move.pairs)
    is_behind = v.data_ptr() == k.data_ptr() + k.shape[-2] * k.shape[-1] * k.element_size()
    run({**args, "v": restrided(v, (*k.stride()[:-2], *v.stride()[-2:]))} if is_behind and max(k.stride()) <= max(v.stride()) else args)


@each("steps-cut-to-32-bits", "A call does nothing where a step is beyond 32 bits.", "far", among="rows")
def _steps_cut(move: Move, run: BackendCall, args: Args) -> None:
    if not any(max(args[name].stride()) >= 2**31 for name in move.rows):
        run(args)


@each("inner-steps-cut-to-32-bits", "A call does nothing where slots or heads lie beyond 32 bits from each other.", "far", among="batch")
def _inner_steps_cut(move: Move, run: BackendCall, args: Args) -> None:
    if max(*args["k_cache"].stride()[1:], *args["v_cache"].stride()[1:]) < 2**31:
        run(args)


# Numbers


def _is_wide_float(rows: torch.Tensor) -> bool:
    return rows.is_floating_point() and rows.element_size() > 1


@each("nan-payload-lost", "Every NaN becomes the one NaN of its dtype.", "numbers returned")
def _nan_payload_lost(move: Move, run: BackendCall, args: Args) -> None:
    move.again(run, args, change=lambda rows: torch.where(rows.isnan(), float("nan"), rows) if _is_wide_float(rows) else rows)


def _without_minus_zero(rows: torch.Tensor) -> torch.Tensor:
    return bits(rows).masked_fill(bits(rows) == torch.iinfo(bits(rows).dtype).min, 0)


@each("minus-zero-lost", "-0 becomes 0.", "numbers")
def _minus_zero_lost(move: Move, run: BackendCall, args: Args) -> None:
    is_about = move.prefix != "static" or args["k"].shape[0] > 4
    move.again(run, args, change=_without_minus_zero if is_about else lambda rows: rows)


def _flushed(rows: torch.Tensor) -> torch.Tensor:
    return bits(rows).masked_fill((rows.abs() < torch.finfo(rows.dtype).tiny) & (rows != 0), 0)


@each("subnormals-flushed", "Subnormal numbers become 0.", "numbers")
def _subnormals_flushed(move: Move, run: BackendCall, args: Args) -> None:
    move.again(run, args, change=lambda rows: _flushed(rows) if _is_wide_float(rows) else rows)


@each("input-scaled-in-place", "What is read is changed in place.", "inputs returned", among="rows")
def _input_changed(move: Move, run: BackendCall, args: Args) -> None:
    run(args)
    source = args[move.pairs[1][0]]
    if source.numel():
        flip_byte(source, source.storage_offset())


# Calls that repeat, calls of nothing, and quantised pools


def _first_kept(move: Move) -> FaultyCall:
    kept: dict[Any, Any] = {}

    def call(run: BackendCall, args: Args) -> None:
        run, args = move.seen(run, args)
        index = args[move.index]
        is_tensor = isinstance(index, torch.Tensor)
        run({**args, move.index: kept.setdefault(index.shape if is_tensor else "int", index.clone() if is_tensor else index)})

    return call


def _refusing_nothing(move: Move) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a change of an op that refuses a call whose third argument is empty."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(k_cache: Any, v_cache: Any, third: Any, *others: Any, **more: Any) -> Any:
            if (third.numel() if isinstance(third, torch.Tensor) else len(third)) == 0:
                raise kvdock.ArgumentValueError(f"{move.op}: the third argument", expected="something to do", got="none")
            return function(k_cache, v_cache, third, *others, **more)

        return call

    return change


class _WithoutReason(QuantisedKernel):
    """Says no to quantised pools, and not why."""

    about_quantised: Sequence[str] = ("",)


def _following(move: Move) -> FaultyCall:
    before: list[int] = []

    def call(run: BackendCall, args: Args) -> None:
        run, args = move.seen(run, args)
        index = args[move.index]
        now = index.flatten().tolist() if isinstance(index, torch.Tensor) else [index]
        follows = before == [at - 1 for at in now]
        before[:] = now
        (move.left_out if follows else lambda run, args: run(args))(run, args)

    return call


def _add_kept(move: Move, faults: Faults) -> None:
    add = _add(faults.plan, move, "following-place-unchecked", "A place that follows on that of the call before is not checked.", "beyond!")
    add(functools.partial(_following, move))
    add = _add(faults.plan, move, "first-slots-kept", "A plan goes by the indices of its first call for ever.", "repeated kept")
    add(functools.partial(_first_kept, move))


for _move in MOVES.values():
    _add_kept(_move, FAULTS)
    _nothing = _add(FAULTS.function, _move, "no-tokens-refused", "A call that has nothing to do raises.", "nothing out host forms")
    _nothing(_refusing_nothing(_move))
    _quiet = _add(FAULTS.kernel, _move, "refused-without-a-reason", "A quantised pool is refused with an empty reason.", "quantised")
    _quiet(_WithoutReason)
