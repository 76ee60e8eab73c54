"""Calls that repeat the one before but for addresses and index values, and such as do not in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, call, each_elsewhere
from kvdock_conformance.cases.every_op import INDEX, OPS, OpCall, roomy
from kvdock_conformance.cases.layouts import Geometry, Pair
from kvdock_conformance.requirement import Case, Level

__all__ = ["alignments", "repeats", "very_often"]

_SMALL = Geometry(num_blocks=8, block=8)
_ROW = _SMALL.hk * _SMALL.dk
_INDICES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "paged_caching_": (5, 0, 63, 7),
        "gather_paged": (5, 0, 63, 5),
        "static_update_": (4, 0, 4, 1, 2, 3, 0, 4),
        "copy_blocks_": (0, 1, 2, 3, 4, 5, 0, 7),
    }
)
"""By op: indices with the first place and the last."""
_PADDED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"paged_caching_": (5, -1, 63, -7), "gather_paged": (5, 0, -1, -7), "copy_blocks_": (0, 1, 2, 3, -1, 5, 6, -1)}
)
"""By op: indices that begin like those, with padding, where there is any."""
_COUNTS = (1, 1, 1, 1, 5, 18, 84, 2)
_LONG_ROW = Geometry.even(1, 8, num_blocks=1, block=128)
_UNLIKE = (Geometry(num_blocks=8, block=8, hk=2, dk=8, hv=2, dv=16), Geometry(num_blocks=8, block=8, hk=3, dk=16, hv=1, dv=8))
"""Values in longer rows than keys, and in shorter ones."""


def repeats() -> Iterator[Case]:
    """Yield, for each op, calls on the same caches, and calls on caches of their own."""
    for op in OPS:
        for text, is_shared in (("the same caches", True), ("caches of their own", False)):
            drawing = Drawing()
            caches = OpCall(op, tokens=4, geometry=_SMALL).caches(drawing)
            yield Case(f"{op}, {text}", drawing.case(*_calls(op, drawing, caches if is_shared else None)))
        drawing, most = Drawing(), OpCall(op, geometry=roomy(op, max(_COUNTS)))
        caches = most.caches(drawing)
        counts = [attrs.evolve(most, tokens=count, seed=seed).call(drawing, caches) for seed, count in enumerate(_COUNTS)]
        yield Case(f"{op}, ever more", drawing.case(*counts))
        for text, sizes in zip(("longer", "shorter"), _UNLIKE, strict=True):
            drawing, one = Drawing(), OpCall(op, tokens=1, geometry=sizes)
            caches = one.caches(drawing)
            calls = [attrs.evolve(one, seed=seed).call(drawing, caches) for seed in range(6)]
            yield Case(f"{op}, one token, values in {text} rows", drawing.case(*calls))
        if op == "static_update_":  # which is known by its steps, and those of whole rows change with their length
            yield Case(f"{op}, ever more of one row", _of_one_row())
        drawing, one = Drawing(), OpCall(op, tokens=4, geometry=_SMALL)
        turned = each_elsewhere(one.arguments(drawing), attrs.evolve(one, seed=2).arguments(drawing))
        yield Case(f"{op}, each argument in turn from elsewhere", drawing.case(*(call(op, **args) for args in turned)))
        if op in _PADDED:
            yield Case(f"{op}, indices written anew where they lie", _in_place(op))


def very_often() -> Iterator[Case]:
    """Yield a call of each op that is to be made again and again, of one token, and of three."""
    for op, (times, most_s, level) in itertools.product(OPS, ((270, 2.0, Level.CORE), (65_550, 15.0, Level.EXTENDED))):
        for tokens in (1, 3)[: 1 if level is Level.EXTENDED else 2]:
            drawing = Drawing()
            made = OpCall(op, tokens=tokens, geometry=_SMALL).call(drawing)
            yield Case(f"{op}, {tokens} tokens, {times} times", drawing.case(made, times=times, most_s=most_s), level)


def alignments() -> Iterator[Case]:
    """Yield calls at multiples of 16 bytes, followed by others at addresses that are not, and the other way round."""
    for op in OPS:
        for dtype, size in (("bfloat16", 2), ("float32", 4))[: 1 if op == "copy_blocks_" else 2]:
            first = OpCall(op, tokens=3, geometry=attrs.evolve(_SMALL, dtype=dtype))
            for order in (1, -1):
                drawing, calls = Drawing(), []
                caches = first.caches(drawing)
                for past in (0, *(step for step in (2, 4, 8) if step >= size), 0)[::order]:
                    for names in (("k_cache", "v_cache"), ("k", "v", "k_out", "v_out"))[: 1 if op == "copy_blocks_" else 2]:
                        calls.append(_moved_by(op, first.arguments(drawing, caches), names, past))
                yield Case(f"{op}, {dtype}, {'aligned first' if order == 1 else 'aligned last'}", drawing.case(*_roomy(drawing, calls)))


def _moved_by(op: str, args: dict[str, Any], names: Sequence[str], past: int) -> dict[str, Any]:
    """Return a call with some of its tensors moved by so many bytes."""
    moved = {name: attrs.evolve(value, offset=value.offset + past) if name in names else value for name, value in args.items()}
    return {"op": op, "args": {name: value.spec() for name, value in moved.items()}}


def _roomy(drawing: Drawing, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make room behind what was moved, and return the calls."""
    for arena in drawing.arenas:
        arena["bytes"] += 16
    return calls


def _of_one_row() -> dict[str, Any]:
    """Return updates of one row by an int with the first of one row of new positions, some and then more and fewer."""
    drawing, like = Drawing(), OpCall("static_update_", tokens=84, geometry=_LONG_ROW, is_padded=True)
    args: dict[str, Any] = like.arguments(drawing)
    cut = [{name: args[name].slice(2, 0, count) for name in ("k", "v")} for count in (3, 3, 3, 3, 3, 18, 2, 84)]
    return drawing.case(*(call(like.op, **{**args, **rows, "cache_lengths": 5 * turn}) for turn, rows in enumerate(cut)))


def _in_place(op: str) -> dict[str, Any]:
    """Return calls with one token each, whose index lies in one tensor: a place, padding, and places again."""
    drawing, first = Drawing(), OpCall(op, tokens=1, geometry=_SMALL)
    caches, count = first.caches(drawing), len(_INDICES[op]) // 4
    index: Any = first.arguments(drawing, caches)[INDEX[op]]
    calls = []
    for seed, place in enumerate((5, 0, 4, -1, 7, -5, -(2**31), 3)):
        args: dict[str, Any] = attrs.evolve(first, seed=seed).arguments(drawing, caches)
        calls.append(call(op, **(args | {INDEX[op]: attrs.evolve(index, values=[place, 1][:count])})))
    return drawing.case(*calls)


def _calls(op: str, drawing: Drawing, caches: Pair | None) -> Iterator[dict[str, Any]]:
    """Yield calls that are remembered, and between them those that look like them and are not."""
    first, name, good = OpCall(op, tokens=4, geometry=_SMALL), INDEX[op], _INDICES[op]

    def made(seed: int, *, past: int = 0, index: dict[str, Any] | None = None, last: int | None = None, **other: Any) -> dict[str, Any]:
        args: dict[str, Any] = attrs.evolve(first, seed=seed, **other).arguments(drawing, caches)
        rows = {key: _moved(drawing, args[key], past) for key in ("k", "v", "k_out", "v_out") if key in args}
        if last is not None:  # a row of one number, and one of another
            rows = {key: attrs.evolve(row, values=[5] * _ROW + [last] * _ROW) for key, row in rows.items()}
        changed: Any = attrs.evolve(args[name], **(index or {}))
        return call(op, **(args | rows | {name: changed}))

    yield from (made(seed) for seed in range(4))
    yield made(4, index={"values": good})
    yield made(5, index={"values": _PADDED.get(op, good)})
    yield from (made(5, index={"values": good}, last=last) for last in (6, 7))
    yield made(5)
    yield made(6, index={"dtype": "int32"})
    yield made(7, past=2)
    yield from (made(seed) for seed in range(8, 10))
    yield from (made(10, source=source) for source in ("padded heads", "padded heads", "contiguous"))
    yield from (made(seed, tokens=2) for seed in range(11, 14))
    yield from (made(seed) for seed in range(14, 17))


def _moved(drawing: Drawing, view: Any, past: int) -> Any:
    """Return a tensor of rows so many bytes further on."""
    if past:
        drawing.arenas[view.arena]["bytes"] += past
    return attrs.evolve(view, offset=view.offset + past)
