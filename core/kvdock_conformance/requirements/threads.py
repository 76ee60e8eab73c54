"""Threads that share a pool, each with places of its own. ``KVD-THREAD``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.drawing import Drawing, call
from kvdock_conformance.cases.every_op import EVERY, OpCall
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.checking.pools_shared import check_new_threads, check_shared_pools
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "threads"
_SIZES = (
    ("rows of 32 bytes", Geometry(num_blocks=16, block=16), Level.CORE),
    ("rows of one byte", Geometry.even(1, 1, num_blocks=16, block=16, dtype="uint8"), Level.CORE),
    ("rows of six bytes", Geometry.even(1, 3, num_blocks=16, block=16), Level.EXTENDED),
)
_EVEN, _ODD = list(range(0, 64, 2)), list(range(1, 64, 2))


def _require(number: int, sentence: str, cases: Callable[[], Iterable[Case]], check: Check = check_shared_pools) -> Requirement:
    return Requirement(f"KVD-THREAD-{number:03}", sentence, AREA, check, cases, needs=SERVED)


def _slots(op: str, values: Sequence[int]) -> Callable[[Drawing, Any, Geometry], dict[str, Any]]:
    """Return what draws a call of an op of slots into pools that are there."""

    def made(drawing: Drawing, pools: Any, geometry: Geometry) -> dict[str, Any]:
        args: Any = OpCall(op, tokens=len(values), geometry=geometry).arguments(drawing, pools)
        return call(op, **(args | {"slot_mapping": attrs.evolve(args["slot_mapping"], values=list(values))}))

    return made


def _pairs(*pairs: int) -> Callable[[Drawing, Any, Geometry], dict[str, Any]]:
    """Return what draws a copy of blocks in pools that are there."""

    def made(drawing: Drawing, pools: Any, geometry: Geometry) -> dict[str, Any]:
        args: Any = OpCall("copy_blocks_", tokens=len(pairs) // 2, geometry=geometry).arguments(drawing, pools)
        return call("copy_blocks_", **(args | {"block_pairs": attrs.evolve(args["block_pairs"], values=list(pairs))}))

    return made


def _lengths(length: int) -> Callable[[Drawing, Any, Geometry], dict[str, Any]]:
    """Return what draws an update of every row of a static cache behind a length."""

    def made(drawing: Drawing, pools: Any, geometry: Geometry) -> dict[str, Any]:
        seen = tuple(pool.transpose(1, 2) for pool in pools)
        args: Any = OpCall("static_update_", tokens=3, geometry=geometry).arguments(drawing, seen)
        return call("static_update_", **(args | {"cache_lengths": attrs.evolve(args["cache_lengths"], values=[length])}))

    return made


def _computes(op: str, seed: int) -> Callable[[Drawing, Any, Geometry], dict[str, Any]]:
    """Return what draws a call of an op that computes from the first blocks of pools that are there."""
    return lambda drawing, pools, geometry: OpCall(op, geometry=geometry, seed=seed, more={"blocks": 8}).call(drawing, pools)


def _at_once(
    name: str, *threads: Callable[[Drawing, Any, Geometry], dict[str, Any]], fits: Callable[[Geometry], Geometry] = lambda g: g
) -> Iterator[Case]:
    """Yield calls on one pair of pools of sizes that fit, one for each thread."""
    for text, geometry, level in _SIZES:
        drawing = Drawing()
        pools = OpCall("paged_caching_", geometry=geometry).caches(drawing)
        if fits(geometry) == geometry:
            yield Case(f"{name}, {text}", drawing.case(*(thread(drawing, pools, geometry) for thread in threads)), level)


def _other_blocks() -> Iterator[Case]:
    yield from _at_once("writes", _slots("paged_caching_", range(64)), _slots("paged_caching_", range(128, 192)))
    yield from _at_once("copies", _pairs(0, 1, 4, 5), _pairs(2, 3, 4, 6))
    yield from _at_once("a write and a copy", _slots("paged_caching_", range(64)), _pairs(8, 9, 10, 11))


def _same_blocks() -> Iterator[Case]:
    yield from _at_once("every other slot", _slots("paged_caching_", _EVEN), _slots("paged_caching_", _ODD))
    yield from _at_once("few slots", _slots("paged_caching_", [0, 5]), _slots("paged_caching_", [1, 4]))
    yield from _at_once("positions of one row", _lengths(0), _lengths(3))


def _reads() -> Iterator[Case]:
    yield from _at_once("a gather between the slots of a write", _slots("gather_paged", _EVEN), _slots("paged_caching_", _ODD))
    yield from _at_once("a gather beside a copy", _slots("gather_paged", range(64)), _pairs(4, 5, 6, 7))
    for op, own in COMPUTING.items():
        yield from _at_once(f"{op} beside a write", _computes(op, 1), _slots("paged_caching_", range(128, 192)), fits=own.fits)
        yield from _at_once(f"two calls of {op}", _computes(op, 1), _computes(op, 2), fits=own.fits)
    yield from _at_once("two gathers", _slots("gather_paged", _EVEN), _slots("gather_paged", range(64)))


def _each_op() -> Iterator[Case]:
    for op in EVERY:
        drawing = Drawing()
        yield Case(op, drawing.case(OpCall(op, tokens=3).call(drawing)))


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
]
