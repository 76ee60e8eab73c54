"""Random calls, the same in every run; ``kvdock conformance --fuzz`` draws on from here. ``KVD-FUZZ``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.random_calls import SeededChooser, described, random_case
from kvdock_conformance.checking.drawn import check_drawn
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Extended, Level, Requirement, at_level

__all__ = ["AREA", "REQUIREMENTS", "of_computing", "random_cases"]

AREA = "fuzz"
_CORE, _EXTENDED = 40, 200


def random_cases(core: int, extended: int, **how: Any) -> Iterator[Case | Extended]:
    """Yield so many random calls, of which the first are core."""
    for level, seeds in ((Level.CORE, range(core)), (Level.EXTENDED, range(core, extended))):
        yield from at_level(level, functools.partial(_drawn, level, seeds, how))


def of_computing(core: int, extended: int) -> Iterator[Case | Extended]:
    """Yield random calls of ops that compute: so many of each, of which the first are core."""
    for op in COMPUTING:
        yield from random_cases(core, extended, ops=(op,), is_plain=True)


def _drawn(level: Level, seeds: Iterable[int], how: Mapping[str, Any]) -> Iterator[Case]:
    for seed in seeds:
        data = random_case(SeededChooser(seed), **how)
        yield Case(f"draw {seed}: {described(data)}", data, level)


def _cases() -> Iterator[Case | Extended]:
    yield from random_cases(_CORE, _EXTENDED)
    yield from of_computing(_CORE // 6, _EXTENDED // 4)


REQUIREMENTS = [
    Requirement(
        "KVD-FUZZ-001",
        "Random calls do what the reference says, within bounds where they compute, each time that they are made.",
        AREA,
        check_drawn,
        _cases,
        needs=SERVED,
    )
]
