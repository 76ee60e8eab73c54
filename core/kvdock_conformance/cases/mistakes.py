"""Calls with one mistake each, and the error that must come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import ITEMSIZE, Drawing, View
from kvdock_conformance.cases.every_op import INDEX, OPS, OpCall
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.requirement import Case

__all__ = [
    "Mistake",
    "destinations_that_share",
    "mistakes",
    "no_tensors",
    "no_tokens",
    "other_devices",
    "other_dtypes_than_the_cache",
    "other_lengths",
    "other_ranks_and_sizes",
    "out_of_range",
    "overlapping_sources",
    "pairs_in_no_order",
    "scales_for_nothing",
    "served_or_refused",
    "strides_within_rows",
    "wrong_dtypes",
]

TYPE, VALUE, RANGE, UNSUPPORTED = "ArgumentTypeError", "ArgumentValueError", "IndexRangeError", "UnsupportedError"
_CALL = {op: OpCall(op, tokens=3, geometry=Geometry(num_blocks=8, block=8, hk=2, dk=8, hv=2, dv=16)) for op in OPS}
_ROWS = {"paged_caching_": ("k", "v"), "static_update_": ("k", "v"), "gather_paged": ("k_out", "v_out"), "copy_blocks_": ()}
Change = Callable[[Drawing, dict[str, Any]], Mapping[str, Any]]
"""Given the arguments of a good call, returns those to replace."""


@attrs.frozen
class Mistake:
    """A call that is good but for one thing.

    Args:
        op: name of the op.
        name: what is wrong.
        change: returns the wrong arguments.
        error: name of the class of `kvdock.errors` that must be raised.
        texts: what its text must contain: the value that came.
        meta: names of the arguments that lie on another device.
        may_pass: whether the call raises on host memory only.
    """

    op: str
    name: str
    change: Change
    error: str = VALUE
    texts: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()
    may_pass: bool = False

    def case(self) -> Case:
        """Return it as a case: the good call, and the wrong one."""
        drawing = Drawing()
        good = _CALL[self.op].arguments(drawing)
        wrong = {**good, **self.change(drawing, good)}
        calls = [{"op": self.op, "args": _data(args)} for args in (good, wrong)]
        more = {"error": self.error, "texts": self.texts or _texts(good, wrong), "meta": self.meta, "may_pass": self.may_pass}
        return Case(f"{self.op}, {self.name}", drawing.case(*calls, **{key: _plain(value) for key, value in more.items()}))


def _plain(value: Any) -> Any:
    """Return what JSON gives back."""
    return list(value) if isinstance(value, tuple) else value


def _data(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.spec() if isinstance(value, View) else value for name, value in args.items()}


def _texts(good: Mapping[str, Any], wrong: Mapping[str, Any]) -> list[str]:
    """Return how an error shows the shape of the first argument that is wrong."""
    name = next(name for name in wrong if wrong[name] is not good.get(name))
    return [f": {name}: ", f"shape {list(wrong[name].shape)}"]


def mistakes(*makers: Callable[[], Iterable[Mistake]]) -> Callable[[], Iterable[Case]]:
    """Return a function that makes cases of mistakes."""
    return lambda: (mistake.case() for make in makers for mistake in make())


def _new(name: str, shape: Callable[[tuple[int, ...]], Sequence[int]]) -> Change:
    return lambda drawing, good: {name: drawing.tensor(good[name].dtype, shape(good[name].shape))}


def _resized(name: str, dim: int, size: int) -> Change:
    return _new(name, lambda shape: [size if d == dim % len(shape) else own for d, own in enumerate(shape)])


def _retyped(name: str, dtype: str) -> Change:
    return lambda drawing, good: {name: drawing.tensor(dtype, good[name].shape)}


def other_ranks_and_sizes() -> Iterator[Mistake]:
    """Yield tensors of the wrong rank, or with a size that others do not have."""
    for op in OPS:
        names = ("k_cache", "v_cache", *_ROWS[op])
        for name in names:
            yield Mistake(op, f"{name} without its first dim", _new(name, lambda shape: shape[1:]))
            yield Mistake(op, f"{name} with a dim too many", _new(name, lambda shape: (*shape[:-1], 1, 1, 1, shape[-1])))
        for name in names[1:]:
            size = 9 if op == "static_update_" and name != "v_cache" else 5
            yield Mistake(op, f"{name} with other leading sizes", _resized(name, 0, size), texts=("shape [",))  # it may be the others
        yield Mistake(op, f"{INDEX[op]} with three dims", _new(INDEX[op], lambda shape: (*shape, 1, 1)))
        for name in _ROWS[op]:
            heads = 1 if op == "static_update_" else -2
            yield Mistake(op, f"{name} with one head for all", _resized(name, heads, 1))
            yield Mistake(op, f"{name} with a head too many", _resized(name, heads, 4))
            yield Mistake(op, f"{name} with fewer elements", _resized(name, -1, 4))
    for op in ("paged_caching_", "gather_paged"):
        yield Mistake(op, "v_cache with another block size", _resized("v_cache", 1, 4))
    yield Mistake("static_update_", "v with other positions than k", _resized("v", 2, 2))
    yield Mistake("static_update_", "v with fewer rows than k", _resized("v", 0, 7))
    yield Mistake("static_update_", "v_cache of other positions", _resized("v_cache", 2, 4))
    yield Mistake("copy_blocks_", "triples", _resized("block_pairs", 1, 3))


def other_lengths() -> Iterator[Mistake]:
    """Yield indices for more or fewer tokens, or rows, than there are."""
    for op, few, many in (("paged_caching_", 2, 4), ("gather_paged", 2, 4), ("static_update_", 7, 9)):
        # A gather's outputs are bound behind its slots: they are what does not fit.
        texts = ("shape [3, ",) if op == "gather_paged" else ()
        yield Mistake(op, "one too few", _resized(INDEX[op], 0, few), texts=texts)
        yield Mistake(op, "one too many", _resized(INDEX[op], 0, many), texts=texts)
        yield Mistake(op, "none", _resized(INDEX[op], 0, 0), texts=texts)
    yield Mistake("paged_caching_", "one for all", _resized("slot_mapping", 0, 1))
    yield Mistake("paged_caching_", "rows of a batch for tokens in a row", _new("slot_mapping", lambda shape: (1, *shape)))


def wrong_dtypes() -> Iterator[Mistake]:
    """Yield dtypes that an argument may not have."""
    for op in OPS:
        for dtype in ("float32", "int8"):
            yield Mistake(op, f"{INDEX[op]} in {dtype}", _retyped(INDEX[op], dtype), TYPE, (f": {INDEX[op]}: ", f"torch.{dtype}"))
        for name in ("k_cache", *_ROWS[op]):
            yield Mistake(op, f"{name} in int32", _retyped(name, "int32"), TYPE, (f": {name}: ", "torch.int32"))


def other_dtypes_than_the_cache() -> Iterator[Mistake]:
    """Yield rows, and value caches, in another dtype than their cache's."""
    for op in OPS:
        for name in ("v_cache", *_ROWS[op]):
            for dtype in ("float16", "float32"):
                yield Mistake(op, f"{name} in {dtype}", _retyped(name, dtype), TYPE, (f": {name}: ", f"torch.{dtype}", "torch.bfloat16"))
    for op in ("paged_caching_", "static_update_"):
        for dtype in ("float8_e4m3fn", "int8"):
            yield Mistake(op, f"a cache in {dtype} without a scale", _caches_in(dtype), UNSUPPORTED, (": k_cache: ", f"torch.{dtype}"))


def _caches_in(dtype: str) -> Change:
    return lambda drawing, good: {name: drawing.tensor(dtype, good[name].shape) for name in ("k_cache", "v_cache")}


def other_devices() -> Iterator[Mistake]:
    """Yield tensors that lie elsewhere than the first one."""
    for op in OPS:
        for name in ("v_cache", *_ROWS[op], INDEX[op]):
            yield Mistake(op, f"{name} elsewhere", lambda drawing, good: {}, texts=(f": {name}: ", "on meta"), meta=(name,))


def strides_within_rows() -> Iterator[Mistake]:
    """Yield rows whose elements do not follow each other."""
    for op in OPS:
        for name in ("k_cache", "v_cache", *_ROWS[op]):
            yield Mistake(op, f"{name} with every other element", _strided(name), texts=(f": {name}: ", ", 2] for shape"))
            yield Mistake(op, f"{name} with its last dims swapped", _swapped(name), texts=(f": {name}: ", "strides ["))


def _strided(name: str) -> Change:
    """Return a change of an argument to every other element of a larger one."""
    return lambda drawing, good: {name: drawing.tensor(good[name].dtype, (*good[name].shape, 2)).select(len(good[name].shape), 0)}


def _swapped(name: str) -> Change:
    """Return a change of an argument to one of the same shape with the two last dims swapped in memory."""

    def change(drawing: Drawing, good: dict[str, Any]) -> dict[str, Any]:
        *lead, a, b = good[name].shape
        return {name: drawing.tensor(good[name].dtype, (*lead, b, a)).transpose(len(lead), len(lead) + 1)}

    return change


def overlapping_sources() -> Iterator[Mistake]:
    """Yield sources in the memory of a destination."""
    for op, destinations in (("gather_paged", ("k_out", "v_out")), *((op, ("k_cache", "v_cache")) for op in OPS if op != "gather_paged")):
        sources = ("k_cache", "v_cache") if op == "gather_paged" else (*_ROWS[op], INDEX[op])
        for name in sources:
            for to in destinations:
                wrong, put = (to, name) if op == "gather_paged" else (name, to)
                yield Mistake(op, f"{name} in {to}", _placed(wrong, put), texts=("address 0x", name))
                yield Mistake(op, f"{name} from the last row of {to} on", _reaching(wrong, put), texts=("address 0x", name))


def _placed(name: str, where: str) -> Change:
    """Return a change of an argument to one that begins where another does."""
    return lambda drawing, good: {name: attrs.evolve(good[name], arena=good[where].arena, offset=good[where].offset, values=None)}


def _reaching(name: str, where: str) -> Change:
    """Return a change of an argument to one that begins in the last 16 bytes of another, and goes on behind it."""

    def change(drawing: Drawing, good: dict[str, Any]) -> dict[str, Any]:
        there, own = good[where], good[name]
        last = sum((size - 1) * step for size, step in zip(there.shape, there.strides, strict=True))
        offset = there.offset + (last + 1) * ITEMSIZE[there.dtype] - 16
        drawing.arenas[there.arena]["bytes"] += drawing.arenas[own.arena]["bytes"]
        return {name: attrs.evolve(own, arena=there.arena, offset=offset, values=None)}

    return change


def destinations_that_share() -> Iterator[Mistake]:
    """Yield destinations that are one, or whose places are."""
    for op in OPS:
        pair = ("k_out", "v_out") if op == "gather_paged" else ("k_cache", "v_cache")
        yield Mistake(op, f"{pair[0]} begins where {pair[1]} does", _placed(*pair), texts=("address 0x",))
        for name in pair:
            yield Mistake(op, f"{name} with one place for all", _expanded(name), texts=(f": {name}: ", "strides [0, "))


def _expanded(name: str) -> Change:
    """Return a change of an argument to one whose first dim is repeated."""
    return lambda drawing, good: {name: drawing.tensor(good[name].dtype, (1, *good[name].shape[1:])).expand(good[name].shape)}


def scales_for_nothing() -> Iterator[Mistake]:
    """Yield scales for caches that hold no quantised numbers."""
    for op in ("paged_caching_", "gather_paged"):
        for name in ("k_scale", "v_scale"):
            for shape in ((), (2,)):
                yield Mistake(op, f"{name} {list(shape)}", _scaled(name, shape), texts=(f": {name}: ", f"float32 {list(shape)}"))
        yield Mistake(
            op,
            "both",
            lambda drawing, good: {**_scaled("k_scale", ())(drawing, good), **_scaled("v_scale", ())(drawing, good)},
            texts=("_scale: ", "float32 []"),
        )


def _scaled(name: str, shape: tuple[int, ...]) -> Change:
    return lambda drawing, good: {name: drawing.tensor("float32", shape)}


def no_tensors() -> Iterator[Mistake]:
    """Yield what is no tensor."""
    for op in OPS:
        for name in ("v_cache", *_ROWS[op]):
            yield Mistake(op, f"{name} None", _replaced(name, None), TYPE, (f": {name}: ", "NoneType"))
            yield Mistake(op, f"{name} a number", _replaced(name, 1.5), TYPE, (f": {name}: ", "float 1.5"))
    for op in ("paged_caching_", "gather_paged", "static_update_"):
        yield Mistake(op, "a list of indices", _replaced(INDEX[op], [0, 1, 2]), TYPE, (f": {INDEX[op]}: ", "list [0, 1, 2]"))
    yield Mistake("static_update_", "a length that is a float", _replaced("cache_lengths", 1.5), TYPE, (": cache_lengths: ", "float 1.5"))
    yield Mistake("static_update_", "a length that is a bool", _replaced("cache_lengths", True), TYPE, (": cache_lengths: ", "bool True"))
    yield Mistake("copy_blocks_", "pairs of unlike length", _replaced("block_pairs", [[0, 1], [2]]), VALUE, ("[[0, 1], [2]]",))


def _replaced(name: str, value: Any) -> Change:
    return lambda drawing, good: {name: value}


def no_tokens() -> Iterator[Mistake]:
    """Yield mistakes in calls that have nothing to do."""
    for op in ("paged_caching_", "static_update_"):
        at = 2 if op == "static_update_" else 0
        for name, change, error, text in (
            ("k in float32", _retyped("k", "float32"), TYPE, "torch.float32"),
            ("v with other heads", _resized("v", 1, 5), VALUE, "shape ["),
            ("a slot that is a float", _retyped(INDEX[op], "float32"), TYPE, "torch.float32"),
        ):
            yield Mistake(op, name, _emptied(change, op, at), error, (text,))


def _emptied(change: Change, op: str, at: int) -> Change:
    """Return a change that is made after all tokens have been taken away."""

    def both(drawing: Drawing, good: dict[str, Any]) -> dict[str, Any]:
        names = ("k", "v") if op == "static_update_" else ("k", "v", "slot_mapping")
        empty = {**good, **{name: good[name].slice(at, 0, 0) for name in names}}
        changed = {**empty, **change(drawing, empty)}
        return {name: value for name, value in changed.items() if value is not good[name]}

    return both


def out_of_range() -> Iterator[Mistake]:
    """Yield indices that no place stands for. In a tensor on a device they are skipped instead."""
    for op, most in (("paged_caching_", 64), ("gather_paged", 64)):
        for slot in (most, 2**40):
            yield Mistake(op, f"slot {slot}", _second("slot_mapping", slot), RANGE, ("slot_mapping[1]", f"got {slot}"), may_pass=True)
    for length in (6, -1, 2**40):
        yield Mistake(
            "static_update_",
            f"a length of {length}",
            _second("cache_lengths", length),
            RANGE,
            ("cache_lengths[1]", f"got {length}"),
            may_pass=True,
        )
        yield Mistake("static_update_", f"{length} for all", _replaced("cache_lengths", length), RANGE, ("cache_lengths", f"got {length}"))
    for block in (8, 2**40):
        yield Mistake(
            "copy_blocks_", f"block {block}", _second("block_pairs", block), RANGE, ("block_pairs[0, 1]", f"got {block}"), may_pass=True
        )


def _second(name: str, value: int) -> Change:
    """Return a change of the second number of an index tensor."""

    def change(drawing: Drawing, good: dict[str, Any]) -> dict[str, Any]:
        values = good[name].values if isinstance(good[name].values, list) else [0, 1, 2]
        return {name: drawing.tensor("int64", good[name].shape, values=[values[0], value, *values[2:]])}

    return change


def pairs_in_no_order() -> Iterator[Mistake]:
    """Yield pairs whose outcome would depend on the order of copies."""
    for name, pairs, text in (
        ("one destination twice", [0, 1, 2, 1, 4, 5], "destination 1 twice"),
        ("a destination that is a source", [0, 1, 1, 2, 4, 5], "destination 1 also as a source"),
        ("a swap", [0, 1, 1, 0, 4, 5], "also as a source"),
        ("a block onto itself", [0, 0, 2, 3, 4, 5], "destination 0 also as a source"),
    ):
        texts = (": block_pairs[", text)
        yield Mistake("copy_blocks_", f"{name}, a list", _replaced("block_pairs", [pairs[i : i + 2] for i in (0, 2, 4)]), texts=texts)
        yield Mistake("copy_blocks_", name, _pairs_on_host(pairs), texts=texts)


def _pairs_on_host(pairs: list[int]) -> Change:
    return lambda drawing, good: {"block_pairs": drawing.tensor("int64", (len(pairs) // 2, 2), values=pairs, host=True)}


def served_or_refused() -> Iterator[Case]:
    """Yield good calls over dtypes and layouts."""
    for op in OPS:
        for dtype in ("bfloat16", "float16", "float32"):
            for pool in ("nhd", "hnd", "odd steps", "odd address", "heads outermost", "k and v unlike"):
                for dim in (1, 5, 64):
                    drawing = Drawing()
                    geometry = Geometry.even(2, dim, num_blocks=4, block=4, dtype=dtype)
                    call = OpCall(op, tokens=2, pool=pool, geometry=geometry).call(drawing)
                    yield Case(f"{op}, {dtype}, {pool}, D = {dim}", drawing.case(call))
