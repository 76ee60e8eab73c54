"""What a call may read: its tensors, byte by byte, until it returns. ``KVD-READ``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.drawing import Drawing, call
from kvdock_conformance.cases.every_op import EVERY, OpCall, ways
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.checking.fences import FENCED, check_fenced, check_inputs_released
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Extended, Level, Requirement
from kvdock_conformance.requirements.fuzz import of_computing, random_cases

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "reads"
_CORE, _EXTENDED = 32, 120
_ROWS = (
    Geometry(num_blocks=2, block=5, hk=1, dk=5, hv=1, dv=3),
    Geometry(num_blocks=2, block=5, hk=3, dk=8, hv=2, dv=12),
    Geometry.even(num_blocks=2, block=5, dtype="uint8", heads=1, dim=1),
    Geometry.even(num_blocks=2, block=5, dtype="float32", heads=2, dim=7),
    Geometry.even(num_blocks=2, block=5, dtype="float32", heads=2, dim=16),
    Geometry.even(num_blocks=2, block=67, dtype="float32", heads=2, dim=16),
)
"""Rows that end within a vector of 8, 16 or 32 bytes; and such of whole vectors, of which the square root is a power of two, few and
many."""
_KNOWN = 6
"""So many calls like one another, of which the last are known."""
_FORMS = (
    ("nhd", "contiguous", Level.CORE),
    ("hnd", "padded heads", Level.CORE),
    ("padded slots", "every other token", Level.EXTENDED),
    ("odd steps", "odd steps", Level.EXTENDED),
)


def _full(op: str) -> Iterator[Case]:
    """Yield calls of an op that computes, in which the last context is its whole row of the table, behind which that ends."""
    factors = {"starts": (True, False), "sinks": (True, False), "lse": (True, False), "window": (None, 20), "is_padded": (True, False)}
    drawing, calls = Drawing(), []
    for how in covering(factors):
        plain = OpCall(op, is_padded=how.pop("is_padded"), index="int32", more={"full": True, **how})
        calls += [attrs.evolve(plain, tokens=count).call(drawing) for count in (1, 3, 9)]
    yield Case(f"{op}, rows of a table that are full", drawing.case(*calls))


def _to_the_ends() -> Iterator[Case]:
    """Yield, for each op, calls that reach the first and the last row of each tensor."""
    for op in EVERY:
        for pool, source, level in _FORMS:
            for geometry in _ROWS:
                drawing, plain = Drawing(), OpCall(op, pool=pool, source=source, geometry=geometry)
                whole = [{"width": geometry.num_blocks}] if op in COMPUTING else []  # a context that is the whole pool
                calls = [each for more in (*ways(op), *whole) for each in _calls(drawing, attrs.evolve(plain, more=more))]
                yield Case(
                    f"{op}, {geometry.dtype} {geometry.k_shape}, {pool}, {source}",
                    drawing.case(*calls),
                    Level.CORE if geometry is _ROWS[4] else level,
                )
        drawing, step = Drawing(), OpCall(op, tokens=1, index="int32")
        caches = step.caches(drawing)
        calls = [attrs.evolve(step, seed=seed).call(drawing, caches) for seed in range(_KNOWN)]
        yield Case(f"{op}, a step that is known", drawing.case(*calls))
        yield from _full(op) if op in COMPUTING else ()


def _calls(drawing: Drawing, plain: OpCall) -> Iterator[dict[str, Any]]:
    """Yield calls with few tokens and with as many as there is room for."""
    g = plain.geometry
    room = {"copy_blocks_": g.num_blocks // 2, "static_update_": g.block}.get(plain.op, g.capacity)
    for seed, count in enumerate((1, min(3, room), room)):
        made: Any = attrs.evolve(plain, tokens=count, seed=seed).arguments(drawing)
        if "slot_mapping" in made and count <= 3:
            made["slot_mapping"] = attrs.evolve(made["slot_mapping"], values=[g.capacity - 1, -1, 0])
        if "block_pairs" in made and seed == 2:
            made["block_pairs"] = attrs.evolve(made["block_pairs"], values=[-1, 0])
        yield call(plain.op, **made)
        for shape in ((), (1,)) if "cache_lengths" in made else ():
            yield call(plain.op, **(made | {"cache_lengths": drawing.tensor("int64", shape, values=[0])}))


def _in_turn() -> Iterable[Case]:
    """Yield, for each op, two calls on the same memory with other indices."""
    for op in EVERY:
        for count in (1, 5):
            drawing = Drawing()
            plain = OpCall(op, tokens=count, geometry=Geometry(num_blocks=16, block=16))
            first: Any = plain.arguments(drawing)
            other: Any = attrs.evolve(plain, seed=2).arguments(Drawing())
            if op == "copy_blocks_":  # from and to other blocks: back again would change nothing
                other["block_pairs"] = attrs.evolve(first["block_pairs"], values=[block + 5 for block in first["block_pairs"].values])
            indices = {name: attrs.evolve(first[name], values=other[name].values) for name in _INDICES if name in first}
            yield Case(f"{op}, {count}", drawing.case(call(op, **first), call(op, **(first | indices))))


def _drawn() -> Iterator[Case | Extended]:
    """Yield random calls."""
    yield from random_cases(_CORE, _EXTENDED, is_plain=True)
    yield from of_computing(_CORE // 5, _EXTENDED // 4)


_INDICES = ("slot_mapping", "cache_lengths", "block_pairs", *(name for op in COMPUTING.values() for name in op.indices))

REQUIREMENTS = [
    Requirement(
        "KVD-READ-001",
        "Nothing is read in front of a tensor or behind it, where memory may be that nobody may read, and no input is written, "
        "which may be memory that nobody may write.",
        AREA,
        check_fenced,
        _to_the_ends,
        needs=FENCED,
    ),
    Requirement(
        "KVD-READ-002",
        "What a call reads may be changed as soon as it has returned, in the order of its stream.",
        AREA,
        check_inputs_released,
        _in_turn,
        needs=SERVED,
    ),
    Requirement(
        "KVD-READ-003",
        "Random calls read and write their tensors, and nothing in front of them or behind them.",
        AREA,
        check_fenced,
        _drawn,
        needs=FENCED,
    ),
]
