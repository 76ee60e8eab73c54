"""Random calls: any dtype, order, form, sizes, indices, offsets and padding, keys unlike values or in one tensor with them, and repeats.

Whoever draws passes a `Chooser`: a generator of random numbers for cases that are the same in every run, or Hypothesis, which makes
a failing case smaller. The first choice of each kind is the plainest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvdock.ops.catalog import CATALOG
from kvdock_conformance.cases.computing import COMPUTING, Chooser
from kvdock_conformance.cases.drawing import ITEMSIZE, Drawing, View, call
from kvdock_conformance.cases.every_op import EVERY, OPS, OpCall
from kvdock_conformance.cases.layouts import PACKED, POOLS, SOURCES, Geometry, Pair
from kvdock_conformance.cases.numbers import finite
from kvdock_conformance.cases.quantised import FORMS, QUANTISED, finite_bytes, scales
from kvdock_conformance.cases.random_any import BY_SCHEMA, random_any

__all__ = ["FUZZABLE", "Chooser", "SeededChooser", "described", "random_case"]

FUZZABLE = (*EVERY, *BY_SCHEMA)
"""Names of all ops of which random calls can be drawn."""

_T = TypeVar("_T")
_DTYPES = ("bfloat16", "float16", "float32", "float64", "uint8")
_EDGES = tuple(sorted({0, *(edge + by for power in range(1, 17) for edge in (1 << power,) for by in (-1, 0, 1))}))
"""Sizes: one below, at and one above powers of two."""
_ROWS = ("contiguous", "fused qkv", "padded heads", "odd steps", "odd address", "padded tokens")
"""Sources of an op that computes."""
_SHARING = ("one head for all", "one token for all", "values behind one token")
"""Sources in which tokens or heads share memory: nothing can be written there."""
_DRAWN = tuple(name for name in SOURCES if name not in ("values of the first token", "[S, B, H, D]"))
"""Sources that are drawn. Rows are turned by a choice of their own."""
_MOST_BYTES = 1 << 21
"""Of a pool."""
_INDICES = ("slot_mapping", "cache_lengths", "block_pairs")


class SeededChooser:
    """Chooses by a generator of random numbers.

    Args:
        seed: its seed.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - the same in every run

    def integer(self, least: int, most: int) -> int:
        """Return an integer."""
        return self._random.randint(least, most)

    def one_of(self, values: Sequence[_T]) -> _T:
        """Return one of some values."""
        return self._random.choice(values)


def random_case(choose: Chooser, ops: Sequence[str] = OPS, *, is_plain: bool = False) -> dict[str, Any]:
    """Return the data of a case: one call or several of an op, on pools that they share, in the main thread or ``elsewhere``.

    Args:
        choose: what chooses.
        ops: names of the ops to choose from.
        is_plain: every index is in range, every output is passed, and no pool is quantised.
    """
    drawing, op = Drawing(choose.integer(0, 3)), choose.one_of(ops)
    if op in BY_SCHEMA:
        return random_any(choose, BY_SCHEMA[op], **({"elsewhere": True} if choose.one_of((False, False, True)) else {}))
    if op in COMPUTING:
        return drawing.case(*_computed(choose, drawing, op), **({"elsewhere": True} if choose.one_of((False, False, True)) else {}))
    by_slots = op in ("paged_caching_", "gather_paged")
    if by_slots and not is_plain and choose.one_of((False,) * 15 + (True,)):
        return drawing.case(_quantised(choose, drawing, op))
    geometry = _geometry(choose)
    pools = _pools(choose, drawing, geometry)
    form = _Form.drawn(choose, geometry, op)
    # A call whose like was made before takes another way than the first: the same form comes again, then another.
    forms = [form] * choose.one_of((1, 2, 4, 6)) + [_Form.drawn(choose, geometry, op) for _ in range(choose.integer(0, 2))]
    # Nor does one of other sizes that is like it in all else.
    forms += [attrs.evolve(form, lead=_Form.drawn(choose, geometry, op, len(form.lead)).lead) for _ in range(choose.integer(0, 2))]
    calls = [made for each in forms for made in _calls(choose, drawing, attrs.evolve(each, in_range=is_plain), pools)]
    more = {"returned": True} if op == "gather_paged" and not is_plain and choose.one_of((False, False, True)) else {}
    more |= {"elsewhere": True} if choose.one_of((False, False, True)) else {}
    return drawing.case(*calls, **more)


def _calls(choose: Chooser, drawing: Drawing, form: _Form, pools: Pair) -> Iterator[dict[str, Any]]:
    """Yield a call, and now and then another with the same tensors, whose memory has changed."""
    args = _arguments(choose, drawing, form, pools)
    yield call(form.op, **args)
    if choose.one_of((False, True)):
        others: Any = _arguments(choose, Drawing(), form, pools)  # in memory that nobody makes: what its indices hold is wanted
        yield {**call(form.op, **(args | {name: _other(args[name], others[name]) for name in _INDICES if name in args})), "again": True}


def _computed(choose: Chooser, drawing: Drawing, op: str) -> Iterator[dict[str, Any]]:
    """Yield calls of an op that computes, each several times with one set of indices and another at the same addresses."""
    own, geometry = COMPUTING[op], COMPUTING[op].fits(_geometry(choose))
    pools = _pools(choose, drawing, geometry)
    for _ in range(choose.integer(1, 2)):
        like = OpCall(op, choose.one_of((3, 1, 2, 6)), "", choose.one_of(_ROWS), geometry, 1, choose.one_of(("int64", "int32")))
        like = attrs.evolve(like, is_padded=choose.one_of((False, True)), more=own.drawn(choose))
        args: Any = like.arguments(drawing, pools)
        aside = Drawing()
        aside.arenas = [*map(dict, drawing.arenas)]
        others: Any = attrs.evolve(like, seed=2).arguments(aside, pools)
        indices = {name: attrs.evolve(args[name], values=others[name].values) for name in own.indices if name in args}
        for _ in range(choose.one_of((1, 2, 3))):
            yield from (call(op, **args), call(op, **(args | indices)))


def _other(index: Any, other: Any) -> View | int:
    """Return an index in the place of the first with the values of the other; a length may be an int."""
    values = [other] if isinstance(other, int) else other.values
    return int(values[0]) if isinstance(index, int) else attrs.evolve(index, values=values)


def _quantised(choose: Chooser, drawing: Drawing, op: str) -> dict[str, Any]:
    """Return a write to quantised pools, or a read of them into float32, of slots in a row."""
    g = attrs.evolve(_geometry(choose), dtype=choose.one_of(QUANTISED))
    dtype = "float32" if op == "gather_paged" else choose.one_of(("bfloat16", "float32"))
    form = attrs.evolve(_Form.drawn(choose, attrs.evolve(g, dtype=dtype), op), lead=(choose.integer(1, min(g.capacity, 40)),))
    k_cache, v_cache = (attrs.evolve(pool, values=finite_bytes()) for pool in _pools(choose, drawing, g))
    k, v = (attrs.evolve(rows, values=None if op == "gather_paged" else finite(dtype)) for rows in _rows(drawing, form))
    slots = random.Random(choose.integer(0, 99)).sample(range(g.capacity), form.lead[0])  # noqa: S311 - the same for the same choice
    slots = [-1 if place * 5 % 8 < form.padding else slot for place, slot in enumerate(slots)]
    index = drawing.tensor(form.index, form.lead, values=slots)
    k_scale, v_scale = scales(drawing, choose.one_of(("", *FORMS)), form.lead, (g.hk, g.hv))
    args = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale, "slot_mapping": index}
    rows = {"k_out": k, "v_out": v} if op == "gather_paged" else {"k": k, "v": v}
    return call(op, **{name: value for name in CATALOG[op].arg_names for value in [(args | rows).get(name)]})


def _geometry(choose: Chooser) -> Geometry:
    dtype = choose.one_of(_DTYPES)
    hk, dk = choose.one_of((1, 2, 3, 4, 8)), choose.one_of((8, 1, 2, 3, 5, 16, 24, 64, 80, 128))
    alike = choose.one_of((True, False))
    hv, dv = (hk, dk) if alike else (choose.one_of((1, 2, 3, 4)), choose.one_of((8, 1, 3, 4, 16, 20, 64)))
    row = max(hk * dk, hv * dv) * ITEMSIZE[dtype]
    slots = max(2, min(choose.one_of((4096,) * 7 + (70_000,)), _MOST_BYTES // row))
    block = choose.one_of([size for size in (4, 1, 2, 3, 5, 8, 16, 17, 64, 272, 400, 513, 784, 1024) if size <= slots // 2])
    blocks = choose.integer(2, max(2, min(24 if slots <= 4096 else slots, slots // block)))
    return Geometry(num_blocks=blocks, block=block, hk=hk, dk=dk, hv=hv, dv=dv, dtype=dtype)


def _pool(choose: Chooser, drawing: Drawing, shape: Sequence[int], dtype: str) -> View:
    """Return a pool in any order, with any gaps, at any offset."""
    gaps = [0 if choose.one_of((True, True, False)) else choose.integer(1, 9) for _ in shape[:-1]]
    order = choose.one_of(((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)))
    offset = choose.one_of((0, 0, 1, 2, 4, 8)) * ITEMSIZE[dtype]
    return drawing.tensor(dtype, shape, order=order, gaps=(0, *gaps), offset=offset)


def _pools(choose: Chooser, drawing: Drawing, g: Geometry) -> Pair:
    if choose.one_of((True, False)):  # both in one tensor
        return POOLS[choose.one_of((*PACKED, *(["values inside keys"] if g.dk == g.dv else [])))](drawing, g)
    return _pool(choose, drawing, g.k_shape, g.dtype), _pool(choose, drawing, g.v_shape, g.dtype)


@attrs.frozen
class _Form:
    """What calls that repeat one another have in common.

    Args:
        op: name of the op.
        geometry: sizes of the pools.
        lead: leading sizes of the tokens; ``(rows, positions)`` of a static cache, ``(pairs,)`` of a copy.
        index: dtype of what holds indices.
        gaps: free elements behind tokens, heads and rows.
        offset: of the rows, in elements.
        sources: of keys and of values: one of `SOURCES`; empty for rows with those gaps at that offset.
        turned: of keys, values and slots, whether the last of two leading sizes is the outermost in memory.
        padding: which share of the slots is padding, in eighths.
        strided: free elements between slots.
        in_range: whether every index is.
    """

    op: str
    geometry: Geometry
    lead: tuple[int, ...]
    index: str
    gaps: tuple[int, int]
    offset: int
    padding: int
    strided: int
    sources: tuple[str, str] = ("", "")
    turned: tuple[bool, bool, bool] = (False, False, False)
    in_range: bool = False

    @classmethod
    def drawn(cls, choose: Chooser, g: Geometry, op: str, rank: int | None = None) -> _Form:
        """Return one; of so many leading sizes, if that is said."""
        if op == "static_update_":
            lead: tuple[int, ...] = (choose.integer(1, g.num_blocks), choose.integer(1, g.block))
        elif op == "copy_blocks_":
            lead = (choose.integer(1, max(1, g.num_blocks // 2)),)
        else:
            most = 2 * g.capacity if op == "gather_paged" else g.capacity
            count = choose.one_of([edge for edge in _EDGES if 0 < edge <= most])
            rows = choose.one_of([1, *(size for size in (2, 3, 4, 17) if size <= count)])
            lead = (count,) if (choose.one_of((True, False)) if rank is None else rank == 1) else (rows, count // rows)
        gaps = choose.one_of(((0, 0), (0, 8), (3, 0), (1, 5)))
        offset, strided = choose.one_of((0, 0, 1, 3, 4)), choose.one_of((0, 0, 1))
        own, padding = ("",) * 2 * len(_DRAWN), choose.one_of((0, 0, 1, 4, 7, 8))
        names = (*own, *(name for name in _DRAWN if op != "gather_paged" or name not in _SHARING))
        sources = choose.one_of(names), choose.one_of(names)
        turned = tuple(choose.one_of((False, False, True)) for _ in range(3)) if len(lead) > 1 else (False,) * 3
        return cls(op, g, lead, choose.one_of(("int64", "int32")), gaps, offset, padding, strided, sources, turned)  # type: ignore[arg-type] # of three


def _rows(drawing: Drawing, form: _Form) -> Pair:
    """Return rows of keys and of values, each of its own kind."""
    if form.sources[0] and form.sources[0] == form.sources[1]:
        return SOURCES[form.sources[0]](drawing, form.geometry, form.lead)  # as they come together
    return _rows_of(drawing, form, 0), _rows_of(drawing, form, 1)


def _rows_of(drawing: Drawing, form: _Form, which: int) -> View:
    """Return rows of keys, or of values."""
    g, source = form.geometry, form.sources[which]
    if source:
        return drawing.take(SOURCES[source](aside := Drawing(), g, form.lead)[which], aside)
    heads, dim = (g.hk, g.dk) if which == 0 else (g.hv, g.dv)
    every = range(len(form.lead) + 2)
    order, gaps = (1, 0, *every[2:]) if form.turned[which] else every, (*[0] * (len(form.lead) - 1), 0, *form.gaps)
    return drawing.tensor(g.dtype, (*form.lead, heads, dim), order=order, gaps=gaps, offset=form.offset * ITEMSIZE[g.dtype])


def _rows_together(choose: Chooser, drawing: Drawing, form: _Form) -> Pair:
    """Return rows of keys and of values that lie in one tensor: one behind the other, token by token, or head by head."""
    g, lead = form.geometry, form.lead
    last = len(lead)
    order = choose.one_of(((0, *range(1, last + 3)), (*range(1, last + 1), 0, last + 1, last + 2), (*range(1, last + 2), 0, last + 2)))
    both = drawing.tensor(g.dtype, (2, *lead, g.hk, g.dk), order=order, offset=form.offset * ITEMSIZE[g.dtype])
    return both.select(0, 0), both.select(0, 1)


def _arguments(choose: Chooser, drawing: Drawing, form: _Form, pools: Pair) -> dict[str, Any]:
    """Return the arguments of a call in the schema's order."""
    if form.op == "copy_blocks_":
        return {"k_cache": pools[0], "v_cache": pools[1], "block_pairs": _pairs(choose, drawing, form)}
    together = form.geometry.k_shape == form.geometry.v_shape and choose.one_of((False, True))
    k, v = _rows_together(choose, drawing, form) if together else _rows(drawing, form)
    if form.op == "static_update_":
        named = dict(zip(("k_cache", "v_cache"), (pool.transpose(1, 2) for pool in pools), strict=True))
        return {**named, "k": k.transpose(1, 2), "v": v.transpose(1, 2), "cache_lengths": _lengths(choose, drawing, form)}
    slots = _slots(choose, drawing, form)
    if form.op == "gather_paged":
        return {"k_cache": pools[0], "v_cache": pools[1], "slot_mapping": slots, "k_out": k, "v_out": v}
    return {"k_cache": pools[0], "v_cache": pools[1], "k": k, "v": v, "slot_mapping": slots}


def _slots(choose: Chooser, drawing: Drawing, form: _Form) -> View:
    """Return slots: in a row or in no order, some of them padding, and now and then one that is out of range."""
    count, capacity = math.prod(form.lead), form.geometry.capacity
    values = list(range(capacity))
    if choose.one_of((True, False)):
        random.Random(choose.integer(0, 99)).shuffle(values)  # noqa: S311 - the same for the same choice
    slots = (values * (count // capacity + 1))[:count]
    slots = [-1 - place % 3 if place * 5 % 8 < form.padding else slot for place, slot in enumerate(slots)]
    if not form.in_range and choose.one_of((False,) * 7 + (True,)):
        slots[choose.integer(0, count - 1)] = capacity + choose.one_of((0, 1, 2**20))
    every = range(len(form.lead) + 1)
    order = (1, 0, *every[2:]) if form.turned[2] else every
    return drawing.tensor(form.index, (*form.lead, form.strided + 1), order=order, values=slots).select(len(form.lead), 0)


def _lengths(choose: Chooser, drawing: Drawing, form: _Form) -> View | int:
    """Return the length of each row, or one for all: in a tensor, or as an int."""
    rows, room = form.lead[0], form.geometry.block - form.lead[1]
    shape, step = choose.one_of(((rows,), (1,), ())), choose.integer(0, 7)
    values = [(row * step + step) % (room + 1) for row in range(rows)]
    if not shape:
        return values[0]
    # One length for all is named as such by an error.
    if not form.in_range and shape[0] > 1 and choose.one_of((False,) * 7 + (True,)):
        values[choose.integer(0, rows - 1)] = room + 1
    return drawing.tensor(form.index, shape, values=values[: shape[0]])


def _pairs(choose: Chooser, drawing: Drawing, form: _Form) -> View:
    """Return pairs from the first half of the blocks to the second, no destination twice, some of them padding."""
    blocks, count = form.geometry.num_blocks, form.lead[0]
    half = blocks - blocks // 2
    step = choose.integer(0, 7)
    pairs: list[int] = []
    for number in range(count):
        source = -1 if number * 5 % 8 < form.padding else (number * step) % half
        pairs += [source, half + number if number < blocks // 2 else -1]
    return drawing.tensor(form.index, (count, 2), gaps=(0, form.strided), values=pairs)


def described(data: Mapping[str, Any]) -> str:
    """Return what a case is, in a line."""
    first = data["calls"][0]
    return f"{first['op']}, {len(data['calls'])} calls"
