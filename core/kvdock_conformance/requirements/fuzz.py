"""Random calls, the same in every run; ``kvdock conformance --fuzz`` draws on from here. ``KVD-FUZZ``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.random_calls import SeededChooser, described, random_case
from kvdock_conformance.checking.drawn import check_drawn
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS", "of_computing"]

AREA = "fuzz"
_CORE, _EXTENDED = 48, 200


def _cases() -> Iterator[Case]:
    for seed in range(_EXTENDED):
        data = random_case(SeededChooser(seed))
        yield Case(f"draw {seed}: {described(data)}", data, Level.CORE if seed < _CORE else Level.EXTENDED)
    yield from of_computing(_CORE // 6, _EXTENDED // 4)


def of_computing(core: int, extended: int) -> Iterator[Case]:
    """Yield random calls of ops that compute: so many of each, of which the first are core."""
    for op, seed in itertools.product(COMPUTING, range(extended)):
        data = random_case(SeededChooser(seed), (op,), is_plain=True)
        yield Case(f"draw {seed}: {described(data)}", data, Level.CORE if seed < core else Level.EXTENDED)


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
