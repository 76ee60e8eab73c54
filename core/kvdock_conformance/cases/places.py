"""Calls on memory that no table of memory orders has: tensors side by side, and places that are far from each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from kvdock.ops.catalog import CATALOG
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.cases.paged import shuffled
from kvdock_conformance.requirement import Case, Level

__all__ = ["apart", "beside_the_pool", "far_slots", "far_updates", "many_slots"]

_BEYOND_24, _BEYOND_31 = 2**24 + 64, 2**31 + 64
"""Steps in elements that 24 bits, and the integers of float32, cannot say; and 32 bits."""
_FEW = Geometry(num_blocks=2, block=4)
_TWO = Geometry(num_blocks=2, block=2)
_THIN = Geometry.even(1, 1, num_blocks=2, block=4, dtype="uint8")
"""Rows of one element: as many rows apart as elements."""
_ROW = _FEW.hk * _FEW.dk


def beside_the_pool() -> Iterator[Case]:
    """Yield writes of tokens that lie in one tensor with their pool, right in front of it or right behind it."""
    g = Geometry()
    for count in (1, 3, 13):
        for is_behind in (False, True):
            drawing = Drawing()
            (k_cache, k), (v_cache, v) = (_side_by_side(drawing, g, count, is_behind=is_behind) for _ in range(2))
            slots = drawing.tensor("int64", (count,), values=shuffled(g.capacity))
            made = call("paged_caching_", k_cache=k_cache, v_cache=v_cache, k=k, v=v, slot_mapping=slots)
            yield Case(f"{count} tokens right {'behind' if is_behind else 'in front of'} their pool", drawing.case(made))


def _side_by_side(drawing: Drawing, g: Geometry, count: int, *, is_behind: bool) -> tuple[View, View]:
    both = drawing.tensor(g.dtype, (g.capacity + count, g.hk, g.dk))
    pool, tokens = (0, g.capacity) if is_behind else (count, 0)
    return both.slice(0, pool, pool + g.capacity).split(0, (g.num_blocks, g.block)), both.slice(0, tokens, tokens + count)


def _pool(drawing: Drawing, step: int, g: Geometry = _FEW, outer: int = 0) -> View:
    """Return a pool of few blocks so many elements apart, or of slots or heads where ``outer`` is 1 or 2."""
    gaps = [0, 0, 0, 0]
    order = [outer, *(dim for dim in range(4) if dim != outer)]
    gaps[order[1]] = step - math.prod(g.k_shape) // g.k_shape[outer]
    return drawing.tensor(g.dtype, g.k_shape, order=order, gaps=gaps, fill="zeros")


def _rows(drawing: Drawing, step: int, *lead: int) -> View:
    """Return few rows so many elements apart."""
    gaps = [0] * (len(lead) - 1) + [0, step - _ROW, 0]
    return drawing.tensor(_FEW.dtype, (*lead, _FEW.hk, _FEW.dk), gaps=gaps, fill="zeros")


def far_slots(op: str, step: int = _BEYOND_31, level: Level = Level.EXTENDED) -> Iterator[Case]:
    """Yield writes to few blocks or of few tokens, or reads of them, in steps that so many bits cannot say."""
    is_read = op == "gather_paged"
    rows = ("k_out", "v_out") if is_read else ("k", "v")
    wide = [(name, "int64", _FEW, 0) for name in ("k_cache", rows[0], "v_cache", rows[1])]
    inner = [(name, "int64", _TWO, outer) for name in ("k_cache", "v_cache") for outer in (1, 2)]
    for name, index, g, outer in (*wide, *inner, ("k_cache", "int32", _THIN, 0), ("v_cache", "int32", _THIN, 0)):
        drawing = Drawing()
        args = dict(zip(("k_cache", "v_cache"), POOLS["nhd"](drawing, g), strict=True))
        args |= zip(rows, SOURCES["contiguous"](drawing, g, (2,)), strict=True)
        args["slot_mapping"] = drawing.tensor(index, (2,), values=[g.capacity - 1, 2])
        distant = _pool(drawing, step, g, outer) if name.endswith("_cache") else _rows(drawing, step, 2)
        if name.endswith("_cache") == is_read:  # all that is read but these is zero
            distant = attrs.evolve(distant, values={"first": 1, "step": 1})
        made = call(op, **{argument: args[argument] for argument in CATALOG[op].arg_names if argument in args} | {name: distant})
        text = {(_TWO, 1): " from slot to slot", (_TWO, 2): " from head to head", (_THIN, 0): ", of rows of one"}.get((g, outer), "")
        yield Case(f"{name} in steps of {step} elements{text}", drawing.case(made), level)


def many_slots(op: str) -> Iterator[Case]:
    """Yield a write, or a read, of slots behind 2**24 others, in blocks whose steps are no multiple of those of slots."""
    g = Geometry.even(1, 2, num_blocks=2**20 + 1, block=17, dtype="uint8")
    drawing, lead = Drawing(), (4,)
    args = {f"{name}_cache": drawing.tensor(g.dtype, g.k_shape, gaps=(0, 1, 0, 0), fill="zeros") for name in "kv"}
    if op == "gather_paged":  # all that is read but the keys is zero
        args["k_cache"] = attrs.evolve(args["k_cache"], values={"first": 1, "step": 1})
    args |= zip(("k_out", "v_out") if op == "gather_paged" else ("k", "v"), SOURCES["contiguous"](drawing, g, lead), strict=True)
    args["slot_mapping"] = drawing.tensor("int64", lead, values=[g.capacity - 1, g.capacity - 17, 2**24 + 1, 16])
    made = call(op, **{name: args[name] for name in CATALOG[op].arg_names if name in args})
    yield Case(f"behind 2**24 slots, in {g.num_blocks} blocks of {g.block}", drawing.case(made), Level.EXTENDED)


def far_updates(step: int = _BEYOND_31, level: Level = Level.EXTENDED) -> Iterator[Case]:
    """Yield updates of few rows of a cache, and of few new positions, in steps that so many bits cannot say."""
    for name in ("k_cache", "k", "v_cache", "v"):
        drawing = Drawing()
        (k_cache, v_cache), (k, v) = POOLS["nhd"](drawing, _FEW), SOURCES["contiguous"](drawing, _FEW, (2, 2))
        is_pool = name.endswith("_cache")
        far = _pool(drawing, step) if is_pool else attrs.evolve(_rows(drawing, step, 2, 2), values={"first": 1, "step": 1})
        args = {name: view.transpose(1, 2) for name, view in {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, name: far}.items()}
        lengths = drawing.tensor("int64", (2,), values=[2, 0])
        yield Case(f"{name} in steps of {step} elements", drawing.case(call("static_update_", **args, cache_lengths=lengths)), level)


def apart(op: str) -> Iterator[Case]:
    """Yield calls on few blocks, or with few rows, whose steps 24 bits cannot say."""
    if op == "static_update_":
        yield from far_updates(_BEYOND_24, Level.CORE)
    elif op in ("paged_caching_", "gather_paged"):
        yield from far_slots(op, _BEYOND_24, Level.CORE)
    else:
        yield from _far_blocks(op, _BEYOND_24)


def _far_blocks(op: str, step: int) -> Iterator[Case]:
    for name in ("k_cache", "v_cache"):
        drawing = Drawing()
        pools = dict(zip(("k_cache", "v_cache"), POOLS["nhd"](drawing, _FEW), strict=True))
        pools[name] = attrs.evolve(_pool(drawing, step), values={"first": 1, "step": 1})
        made = [call(op, **pools, block_pairs=drawing.tensor("int64", (1, 2), values=pair)) for pair in ((1, 0), (0, 1))]
        yield Case(f"{name} in steps of {step} elements", drawing.case(*made))
