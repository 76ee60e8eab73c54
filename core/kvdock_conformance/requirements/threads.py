"""Threads that share a pool, each with places of its own. ``KVD-THREAD``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.drawing import Drawing, call
from kvdock_conformance.cases.every_op import EVERY, INDEX, OpCall, few
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.checking.plans import check_prepare
from kvdock_conformance.checking.pool_thread import MADE_BY
from kvdock_conformance.checking.pools_shared import check_first_calls, check_inside, check_new_threads, check_shared_pools
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS", "met"]

AREA = "threads"
Made = Callable[[Drawing, Any, OpCall], dict[str, Any]]
"""Draws a call like one, into pools that are there."""

_SIZES = (
    ("rows of 32 bytes", OpCall("", geometry=Geometry(num_blocks=16, block=16)), Level.CORE),
    (
        "rows in blocks whole rows apart",
        OpCall("", pool="padded blocks", geometry=Geometry.even(1, 8, num_blocks=16, block=16)),
        Level.CORE,
    ),
    ("rows of one byte", OpCall("", geometry=Geometry.even(1, 1, num_blocks=40, block=7, dtype="uint8"), index="int32"), Level.CORE),
    ("rows of six bytes", OpCall("", geometry=Geometry.even(1, 3, num_blocks=16, block=16)), Level.EXTENDED),
)
_FEW_ROWS = (("few rows", OpCall("", geometry=Geometry(num_blocks=3, block=16)), Level.CORE),)
_MANY_BLOCKS = (("many blocks", OpCall("", geometry=Geometry(num_blocks=288, block=2)), Level.CORE),)
_FIRST = 18  # so many pairs: of the first two, the steps are counted
_EVEN, _ODD = list(range(0, 64, 2)), list(range(1, 64, 2))


def _require(number: int, sentence: str, cases: Callable[[], Iterable[Case]], check: Check = check_shared_pools) -> Requirement:
    # Those that must be alone come last, in a row: what runs beside waits once.
    return Requirement(f"KVD-THREAD-{number:03}", sentence, AREA, check, lambda: sorted(cases(), key=lambda case: case.alone), needs=SERVED)


def _of(op: str, count: int, values: Sequence[int]) -> Made:
    """Return what draws a call of so many tokens, with some values of its index."""

    def made(drawing: Drawing, pools: Any, like: OpCall) -> dict[str, Any]:
        seen = tuple(pool.transpose(1, 2) for pool in pools) if op == "static_update_" else pools
        args: Any = attrs.evolve(like, op=op, tokens=count).arguments(drawing, seen)
        return call(op, **(args | {INDEX[op]: attrs.evolve(args[INDEX[op]], values=list(values))}))

    return made


def _slots(op: str, values: Sequence[int]) -> Made:
    return _of(op, len(values), values)


def _pairs(*pairs: int) -> Made:
    return _of("copy_blocks_", len(pairs) // 2, pairs)


def _lengths(length: int, new: int = 3) -> Made:
    """Return what draws an update of every row of a static cache behind a length."""
    return _of("static_update_", new, [length])


def _computes(op: str, seed: int) -> Made:
    """Return what draws a call of an op that computes from the first blocks of pools that are there."""
    return lambda drawing, pools, like: attrs.evolve(like, op=op, seed=seed, more={"blocks": 8}).call(drawing, pools)


def _at_once(name: str, *threads: Made, fits: Callable[[Geometry], Geometry] = lambda g: g, sizes: Any = _SIZES) -> Iterator[Case]:
    """Yield calls on one pair of pools of sizes that fit, one for each thread."""
    for text, like, level in sizes:
        drawing = Drawing()
        pools = attrs.evolve(like, op="paged_caching_").caches(drawing)
        if fits(like.geometry) == like.geometry:
            yield from met(f"{name}, {text}", drawing.case(*(thread(drawing, pools, like) for thread in threads)), level)


def met(name: str, data: Mapping[str, Any], level: Level = Level.CORE) -> Iterator[Case]:
    """Yield calls of several threads as two cases: one in the middle of another, and all at full speed."""
    yield Case(name, {**data, "at_full_speed": False}, level)
    # Threads at full speed meet where they have a processor each.
    yield Case(f"{name}, at full speed", {**data, "at_full_speed": True}, level, alone=True)


def _other_blocks() -> Iterator[Case]:
    yield from _at_once("writes", _slots("paged_caching_", range(64)), _slots("paged_caching_", range(128, 192)))
    yield from _at_once("copies", _pairs(0, 1, 4, 5), _pairs(2, 3, 4, 6))
    yield from _at_once("copies of many", _pairs(*range(140)), _pairs(*range(140, 280)), sizes=_MANY_BLOCKS)
    yield from _at_once("a write and a copy", _slots("paged_caching_", range(64)), _pairs(12, 13, 14, 15))


def _same_blocks() -> Iterator[Case]:
    yield from _at_once("every other slot", _slots("paged_caching_", _EVEN), _slots("paged_caching_", _ODD))
    yield from _at_once("few slots", _slots("paged_caching_", [0, 5]), _slots("paged_caching_", [1, 4]))
    yield from _at_once("one slot", _slots("paged_caching_", [0]), _slots("paged_caching_", [5]))
    padded = (_slots("paged_caching_", [*half[:9], -1, *half[10:]]) for half in (_EVEN, _ODD))
    yield from _at_once("every other slot, with padding", *padded, sizes=_SIZES[:1])
    yield from _at_once("positions of one row", _lengths(0), _lengths(3))
    yield from _at_once("many positions of one row", _lengths(0, 8), _lengths(8, 8), sizes=_SIZES[:1])
    yield from _at_once("one position of each row", _lengths(0, 1), _lengths(3, 1), sizes=(*_SIZES[:1], *_FEW_ROWS))


def _reads() -> Iterator[Case]:
    yield from _at_once("a gather between the slots of a write", _slots("gather_paged", _EVEN), _slots("paged_caching_", _ODD))
    yield from _at_once("a gather beside a copy", _slots("gather_paged", range(64)), _pairs(12, 13, 14, 15))
    for op, own in COMPUTING.items():
        yield from _at_once(f"{op} beside a write", _computes(op, 1), _slots("paged_caching_", range(128, 192)), fits=own.fits)
        yield from _at_once(f"two calls of {op}", _computes(op, 1), _computes(op, 2), fits=own.fits)
    yield from _at_once("two gathers", _slots("gather_paged", _EVEN), _slots("gather_paged", range(64)))
    yield from _at_once(
        "two gathers of many", _slots("gather_paged", range(128)), _slots("gather_paged", range(128, 256)), sizes=_SIZES[:1]
    )
    yield from _at_once("two gathers of as many slots", _slots("gather_paged", _EVEN), _slots("gather_paged", _ODD))
    padded = (_slots("gather_paged", [*half[:9], -1, *half[10:]]) for half in (_EVEN, range(64)))
    yield from _at_once("two gathers with padding", *padded, sizes=_SIZES[:1])


def _each_op() -> Iterator[Case]:
    # Five rounds of these are more than tables of 128 have room for, and of 256.
    for op, (threads, level) in itertools.product(EVERY, ((32, Level.CORE), (80, Level.EXTENDED))):
        drawing = Drawing()
        yield Case(f"{op} by {threads} threads", drawing.case(OpCall(op, tokens=3).call(drawing), threads=threads), level)


def _two(op: str, count: int) -> tuple[Made, Made]:
    """Return two calls of so many tokens at places of their own, or that only read."""
    if op in COMPUTING:
        return _computes(op, 1), _computes(op, 2)
    if op == "copy_blocks_":
        return _pairs(*range(2 * count)), _pairs(*range(2 * count, 4 * count))
    if op == "static_update_":
        return _lengths(0, count), _lengths(count, count)
    return _slots(op, range(count)), _slots(op, range(128, 128 + count))


def _inside() -> Iterator[Case]:
    for op, by in itertools.product(EVERY, MADE_BY):
        drawing, like = Drawing(), OpCall("paged_caching_", geometry=Geometry(num_blocks=32, block=16))
        pools = like.caches(drawing)
        calls = [made(drawing, pools, like) for made in _two(op, 3)]
        yield Case(f"{op} by {by}", drawing.case(*calls, by=by))


def _first() -> Iterator[Case]:
    for op, anew in itertools.product(EVERY, (True, False)):
        drawing, calls, pools = Drawing(), [], None
        for count in range(40 + _FIRST * anew, 40 + _FIRST * (1 + anew)):
            blocks, block = (300, 1) if op == "copy_blocks_" else (8, 121)
            like = OpCall("paged_caching_", geometry=Geometry(num_blocks=blocks, block=block + count * anew))
            pools = like.caches(drawing) if anew or pools is None else pools
            calls += [made(drawing, pools, like) for made in _two(op, few(op, count))]
        yield Case(f"{op}, {'plans and ' * anew}numbers of tokens", drawing.case(*calls, anew=anew))


def _asked_before() -> Iterator[Case]:
    for op in EVERY:
        drawing = Drawing()
        sizes = [Geometry.even(2, dim, num_blocks=8, block=8) for dim in (3, 16, 7, 8)]
        yield Case(op, drawing.case(*(OpCall(op, tokens=3, geometry=each).call(drawing) for each in sizes)))


REQUIREMENTS = [
    _require(1, "Threads may write to other blocks of one pool at once.", _other_blocks),
    _require(2, "Threads may write to other slots of one block at once, or to other positions of one row.", _same_blocks),
    _require(
        3,
        "A gather is exact while other threads write elsewhere in its pool, or read, and so is what is computed of it within bounds.",
        _reads,
    ),
    _require(
        4, "However many threads come, call and go, each is served like the first, and leaves nothing behind.", _each_op, check_new_threads
    ),
    _require(
        5,
        "A call in the middle of another one, by its own thread, as a signal or a finalizer makes it, or by a process that is forked "
        "there, neither disturbs it nor waits for it.",
        _inside,
        check_inside,
    ),
    _require(
        6,
        "Calls whose like was never made, by two threads, one in the middle of the other, are right, and so is what both use later.",
        _first,
        check_first_calls,
    ),
    _require(
        7,
        "Kernel.prepare goes by the request that it is given, whatever other requests Kernel.supports was asked about before, as by "
        "threads that share the kernel.",
        _asked_before,
        check_prepare,
    ),
]
