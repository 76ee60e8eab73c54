"""What the requirements of all copying ops have in common: lists of sizes, memory orders and values, and how they become cases.

An op that copies is an `Area`: its name, how its calls are described, and what checks one. Its requirements are entries of its
own module; what they share is here, and what those ops share that go by slots is in `slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.addresses import at_any_address
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.layouts import ANY_STEP, PACKED, SINGLE_SIZES, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS
from kvdock_conformance.checking.repeated import check_called, check_repeated
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Check, Extended, Level, Requirement

__all__ = ["INT32_MAX", "INT32_MIN", "NO_BLOCKS", "ORDERS", "SIZES_UNLIKE", "Area", "Refusal", "refusals"]

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
_SMALL = Geometry()
NO_BLOCKS = Geometry(num_blocks=0)
ORDERS = (
    *("nhd", "hnd", "heads outermost", "slots outermost", "padded slots", "padded heads", "odd steps"),
    *("k and v unlike", "k and v unlike, in whole vectors"),
)
"""Pools of their own in every order."""

SIZES_UNLIKE: Mapping[str, Mapping[str, Any]] = {
    f"{hk} x {dk} and {hv} x {dv}": {"hk": hk, "dk": dk, "hv": hv, "dv": dv}
    for hk, dk, hv, dv in ((2, 192, 2, 128), (1, 576, 1, 512), (4, 8, 2, 8), (2, 8, 4, 8), (1, 16, 3, 24), (2, 1, 1, 2))
}
"""Sizes of keys and of values that differ, by name."""

_DIMS = (1, 2, 3, 46, 64, 80, 96, 100, 128, 192, 256, 576)
_HEADS = ((1, 64), (3, 64), (5, 80), (8, 128), (9, 128), (17, 64), (32, 128), (129, 8))

Cases = Iterable[Any] | Callable[[], Iterable[Case | Extended]]
"""Calls, each with a method ``case``; or a function that makes cases."""


@attrs.frozen
class Area:
    """An op that copies.

    Args:
        code: what its requirements are called: ``"WRITE"``.
        op: its name.
        make: describes a call: takes a name and whatever is special, at least ``geometry``, ``pool`` and ``values``.
        check: checks a case, unless a requirement has a check of its own.
        base: sizes of an ordinary call.
    """

    code: str
    op: str
    make: Callable[..., Any]
    check: Check = check_called
    base: Geometry = _SMALL

    def require(self, number: int, sentence: str, *cases: Cases, level: Level = Level.CORE, check: Check | None = None) -> Requirement:
        """Return a requirement of this area."""
        listed = [part if callable(part) else tuple(part) for part in cases]
        return Requirement(f"KVD-{self.code}-{number:03}", sentence, self.op, check or self.check, lambda: _made(listed), level, SERVED)

    def together(self, number: int, call: str, cases: Callable[[], Iterable[Case | Extended]]) -> Requirement:
        """Return the requirement about properties of a call that meet."""
        sentence = (
            f"Whatever two properties meet in {call}, of dtype, memory orders, form, size, index, padding and unlike sizes of keys and "
            "values, it does what it does with each of them alone, the first time and once it is known."
        )
        return self.require(number, sentence, cases, check=check_repeated)

    def sizes(self, heads: int = 2, dim: int = 8, **others: Any) -> Geometry:
        """Return sizes whose keys and values have the same heads and elements, otherwise those of an ordinary call."""
        return attrs.evolve(self.base, hk=heads, dk=dim, hv=heads, dv=dim, **others)

    def dims(self) -> list[Any]:
        """Return calls with heads of any number of elements."""
        return [self.make(f"D = {dim}", geometry=self.sizes(dim=dim)) for dim in _DIMS]

    def heads(self) -> list[Any]:
        """Return calls with any number of heads."""
        return [self.make(f"{heads} x {dim}", geometry=self.sizes(heads, dim)) for heads, dim in _HEADS]

    def unlike(self) -> list[Any]:
        """Return calls whose keys and values have unlike sizes."""
        return [self.make(name, geometry=attrs.evolve(self.base, **sizes)) for name, sizes in SIZES_UNLIKE.items()]

    def orders(self) -> list[Any]:
        """Return calls on pools in every memory order."""
        return [self.make(name, pool=name) for name in ORDERS]

    def packed(self) -> list[Any]:
        """Return calls on pools in one tensor whose keys and values have unlike sizes."""
        return [
            self.make(f"{name}, {text}", pool=name, geometry=attrs.evolve(self.base, **g))
            for name in PACKED
            for text, g in SIZES_UNLIKE.items()
        ]

    def any_step(self, argument: str, **others: Any) -> list[Any]:
        """Return calls where the steps of sizes of 1 mean nothing: in the pool, or in the rows."""
        return [self.make(f"{text}, whatever its step", geometry=g, **{argument: ANY_STEP}, **others) for text, g in SINGLE_SIZES.items()]

    def addresses(self) -> Iterator[Case]:
        """Yield calls on rows of whole vectors with each tensor, and all of them, at addresses that are no multiple of 16 bytes."""
        for dtype in ("bfloat16", "float32"):
            yield from at_any_address(self.make(dtype, geometry=self.sizes(dim=64, dtype=dtype)).case())

    def numbers(self, **others: Any) -> list[Any]:
        """Return calls on random bits and on special values of every dtype; ``others`` is for random bits."""
        return [
            *(self.make(f"{dtype}, random bits", geometry=self.sizes(dim=64, dtype=dtype), **others) for dtype in SPECIAL_BITS),
            *self.special_values(),
        ]

    def special_values(self, text: str = "special values", num_blocks: int | None = None, **others: Any) -> list[Any]:
        """Return calls on special values of every dtype."""
        blocks = self.base.num_blocks if num_blocks is None else num_blocks
        return [
            self.make(f"{dtype}, {text}", geometry=self.sizes(dtype=dtype, num_blocks=blocks), values=bits, **others)
            for dtype, bits in SPECIAL_BITS.items()
        ]


def _made(listed: Sequence[Cases]) -> Iterator[Case | Extended]:
    for part in listed:
        yield from part() if callable(part) else (one.case() for one in part)


# Refusals

Change = Callable[[Drawing, dict[str, View]], Mapping[str, View | None]]
"""Given the arguments of a good call, returns those to replace."""

Refusal = tuple[str, str, Sequence[str], Change]
"""Bad input: name, class of the error, what it must say, and how good arguments are spoilt."""


def refusals(op: str, good: Any, table: Sequence[Refusal]) -> Callable[[], Iterable[Case]]:
    """Return a function that makes a case of each mistake: a good call, and a bad one with the error and what it must say."""

    def cases() -> Iterator[Case]:
        for name, error, texts, change in table:
            drawing = Drawing()
            args = good.args(drawing, good.pools(drawing))
            bad = call(op, **{**args, **change(drawing, args)})
            yield Case(name, drawing.case(call(op, **args), bad, error=error, texts=[f"{op}: ", *texts, "Fix: "]))

    return cases
