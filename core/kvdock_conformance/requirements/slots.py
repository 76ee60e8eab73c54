"""What the ops that go by slots have in common: one list of cases drives writes into a pool and reads from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, Geometry
from kvdock_conformance.cases.paged import SlotCall, in_turn, shuffled
from kvdock_conformance.cases.places import apart
from kvdock_conformance.requirement import Case, Level, Requirement
from kvdock_conformance.requirements.families import INT32_MAX, INT32_MIN, NO_BLOCKS, SIZES_UNLIKE, Area, Cases

__all__ = ["SlotArea"]

_BIG = Geometry.even(num_blocks=96, block=16, heads=1)
_STRIDED_ROWS = ("fused qkv", "fused qvk", "fused kv", "[B, H, q, D]", "every other token", "padded tokens", "padded heads", "odd steps")
_INDICES = (
    ("dense", 0, (13,), None, "rows"),
    ("strided", 2, (13,), None, "rows"),
    ("strided batch", 1, (3, 4), None, "rows"),
    ("strided, with padding", 2, (4,), [3, -1, 9, -1], "rows"),
    ("strided, one token", 3, (1,), None, "rows"),
    ("transposed batch", 0, (3, 4), None, "columns"),
    ("rows of a longer batch", 0, (3, 4), None, "longer rows"),
    ("two tokens of a longer batch", 0, (2, 1), None, "longer rows"),
)
"""How slots lie in memory: name, free elements behind each, leading sizes, slots, and order."""


@attrs.frozen
class SlotArea(Area):
    """An op that goes by slots.

    Args:
        tokens: what its rows are called: ``"tokens"``, or ``"outputs"``.
        batch: what rows of a batch are cut out of: ``"projection"``, or ``"output"``.
    """

    tokens: str = "tokens"
    batch: str = "projection"

    def requirements(
        self, sentences: Sequence[str], own: Mapping[int, Sequence[Cases]], how: Mapping[int, Mapping[str, Any]]
    ) -> list[Requirement]:
        """Return the requirements from 1 on that all ops like this have.

        Args:
            sentences: one for each.
            own: cases that an op has beside those that all have, by number.
            how: what else `Area.require` is told, by number.
        """
        shared = self.shared()
        levels: Mapping[int, Mapping[str, Any]] = {15: {"level": Level.EXTENDED}}
        return [
            self.require(number, sentence, *shared.get(number, ()), *own.get(number, ()), **{**levels, **how}.get(number, {}))
            for number, sentence in enumerate(sentences, 1)
        ]

    def shared(self) -> Mapping[int, Sequence[Cases]]:
        """Return the cases of all ops like this, by number."""
        return {**self._slots(), **self._sizes(), **self._layouts()}

    def _again(self, slots: Sequence[int], name: str) -> Callable[[], Iterable[Case]]:
        """Return calls of as many good slots, which differ in addresses alone, and then one with these slots."""
        lists = [*(shuffled(24, seed) for seed in range(4)), slots, shuffled(24, 4)]
        return lambda: [in_turn(name, [self.make("", values, lead=(len(slots),)) for values in lists])]

    def _slots(self) -> Mapping[int, Sequence[Cases]]:
        make = self.make
        return {
            1: (
                [
                    make("in order", range(13)),
                    make("reversed", range(12, -1, -1)),
                    make("random order"),
                    make("one token", [7]),
                    make("every slot of the pool", lead=(24,)),
                    make("keys and values of other sizes", geometry=Geometry(hk=2, dk=8, hv=3, dv=4)),
                ],
            ),
            3: (
                [
                    make("some -1", [3, -1, 5, -1, 8, 0]),
                    make("all -1", [-1] * 13),
                    make("other negatives", [-2, 4, -24, -25, 6, -1]),
                    make("padding in front", [-1, -1, -1, *range(10)]),
                    make("padding behind", [*range(10), -1, -1, -1]),
                    make("smallest int64", [-(2**63), 11, -(2**62), 2, -(2**32), -(2**32) + 5]),
                    make("a run in the lower halves", [at - 2**32 for at in range(16)]),
                    make("smallest int32", [INT32_MIN, 11, INT32_MIN + 1, 2], index="int32"),
                    make("one token", [-1]),
                    make("pool without blocks", [-1, -7, -1], geometry=NO_BLOCKS),
                    make("every other of many", [each for slot in range(1100) for each in (slot, -1)], geometry=_BIG),
                    make("long, scattered", [*range(100), -1, *range(200, 300), -5, *range(400, 500)], geometry=_BIG),
                ],
                self._again([3, -1, 5, -7], "padding in a call that repeats others"),
            ),
            4: (
                [
                    make("capacity", [24]),
                    make("capacity + 1", [25]),
                    make("behind good ones", [0, 5, 24, 7, 30]),
                    make("before good ones", [24, 0, 5]),
                    make("beside padding", [-1, 3, 24, -1]),
                    make("2**32 + 3", [2**32 + 3, 1]),
                    make("2**40", [1, 2**40]),
                    make("a run in the lower halves", [2**32 + at for at in range(16)]),
                    make("as if in a run", [*range(8), 2**32 + 8, *range(9, 16)]),
                    make("largest int64", [2**63 - 1]),
                    make("largest int32", [2, INT32_MAX], index="int32"),
                    make(
                        "largest int32 and then smallest, as if in a run",
                        [INT32_MAX, *range(INT32_MIN, INT32_MIN + 4), 0, 1, 2],
                        index="int32",
                    ),
                    make("second row of a batch", [0, 1, 2, 3, 99, 5], (2, 3)),
                    make("second row of a padded batch", [0, -1, 2, 3, 99, 5], (2, 3)),
                    make("third row of a padded batch", [*range(9), -1, *range(10, 20), 99, -1, 22, -1], (3, 8)),
                    make("in a pool with gaps", [2, 24], pool="padded blocks"),
                    make("in a pool without blocks", [-1, 0], geometry=NO_BLOCKS),
                    make("behind many good ones", [*range(300), 96 * 16], geometry=_BIG),
                ],
                [
                    make(f"the last of {lead}", [*range(math.prod(lead) - 1), 96 * 16], lead, geometry=_BIG)
                    for lead in ((9,), (33,), (1025,), (9, 1), (33, 2), (2, 600), (1025, 1))
                ],
                self._again([3, 24, 5, 99], "in a call that repeats others"),
                lambda: [in_turn("a token at a time, to the end and beyond", [make("", [slot]) for slot in range(19, 25)])],
            ),
            5: (
                [
                    make("first of the pool", [0]),
                    make("last of the pool", [23]),
                    make("across a border", [3, 4]),
                    make("last of each block", range(3, 24, 4)),
                    make("first of each block", range(0, 24, 4)),
                    make("across borders in a pool with gaps", range(2, 22), pool="padded blocks"),
                    make("last of the pool, hnd", [23, 0], pool="hnd"),
                ],
            ),
            6: (
                [
                    make(f"{index}, {text}", slots, lead, index=index, index_gap=gap, index_order=order)
                    for index in ("int32", "int64")
                    for text, gap, lead, slots, order in _INDICES
                ],
            ),
        }

    def _ends(self, blocks: tuple[int, int]) -> SlotCall:
        """Return a call of the first and the last slot of each of some blocks: how many there are, and of how many slots."""
        count, size = blocks
        slots = [at + end for at in range(0, count * size, size) for end in (0, size - 1)]
        made: SlotCall = self.make(f"ends of {count} blocks of {size}", slots, geometry=self.sizes(1, 1, num_blocks=count, block=size))
        return made

    def _sizes(self) -> Mapping[int, Sequence[Cases]]:
        make, even = self.make, self.sizes
        blocks = ((24, 1), (8, 3), (5, 16), (3, 48), (2, 256), (2, 512), (1, 16), (1, 13), (13, 1))
        far = ((90, 784), (130, 513), (170, 400))  # with more than 2**16 slots, as of hybrid models
        counts, many = (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 127, 128, 129, 513, 1024), (65_535, 65_536, 65_537)
        wide = even(1, 2, num_blocks=4200, block=16)
        return {
            7: (
                [
                    make("one row", lead=(1, 13)),
                    make("one token in each row", lead=(13, 1)),
                    make("one token in each row, of one element", lead=(13, 1), geometry=even(1, 1)),
                    make("three rows", lead=(3, 4)),
                    make(f"rows of a transposed {self.batch}", lead=(3, 4), rows="[B, H, q, D]"),
                    make(f"rows of a fused {self.batch}", lead=(2, 5), rows="fused qkv"),
                    make("rows with gaps", lead=(4, 3), rows="padded tokens"),
                    *(make(f"two rows of {count}", lead=(2, count), geometry=_BIG) for count in counts if 1 < count < 513),
                    *(make(f"{count} rows of two", lead=(count, 2), geometry=_BIG) for count in counts if 1 < count < 513),
                ],
            ),
            8: (
                [
                    make("T = 0", [], (0,)),
                    make("B = 0", [], (0, 4)),
                    make("S = 0", [], (3, 0)),
                    make("int32", [], (0,), index="int32"),
                    make("pool without blocks", [], (0,), geometry=NO_BLOCKS),
                ],
            ),
            10: (
                [make(f"{count} blocks of {size}", geometry=even(num_blocks=count, block=size)) for count, size in blocks],
                list(map(self._ends, far)),
            ),
            11: (self.dims(),),
            12: (self.heads(),),
            13: (self.unlike(),),
            14: (
                [make(f"T = {count}", lead=(count,), geometry=_BIG) for count in counts],
                [make("1,100 tokens of 60 elements", lead=(1100,), geometry=even(1, 60, num_blocks=80, block=16))],
                [make(f"lead {lead}", lead=lead, geometry=wide, level=Level.EXTENDED) for lead in ((65_537,), (2, 32_769), (32_769, 2))],
            ),
            15: (
                [make(f"T = {count}", lead=(count,), geometry=wide) for count in many],
                [
                    make(f"{lead} of {heads} heads", lead=lead, geometry=even(heads, 1, num_blocks=80, block=16))
                    for lead, heads in (((1100,), 60), ((300,), 256), ((3,), 22_000), ((11, 100), 60), ((100, 11), 60), ((3, 1), 22_000))
                ],
            ),
        }

    def _layouts(self) -> Mapping[int, Sequence[Cases]]:
        make = self.make
        return {
            16: (self.orders(), self.any_step("pool")),
            17: (
                [make(f"{name}, {count} tokens", lead=(count,), pool=name) for name in PARTS for count in (2, 13)],
                self.packed(),
                functools.partial(apart, self.op),
            ),
            18: (
                self.in_rows_and_batches(_STRIDED_ROWS),
                [make(f"fused kv, {name}", rows="fused kv", geometry=attrs.evolve(self.base, **g)) for name, g in SIZES_UNLIKE.items()],
                self.any_step("rows"),
                [make(f"{text}, whatever its step", lead=lead, rows=ANY_STEP) for text, lead in (("one token", (1,)), ("one row", (1, 5)))],
            ),
            19: (self.addresses,),
            20: (self.numbers(lead=(24,)),),
        }

    def in_rows_and_batches(self, names: Sequence[str]) -> list[SlotCall]:
        """Return calls with tokens in some memory orders, each in a row and as a batch."""
        leads = {"row": (13,), "batch": (2, 6)}
        return [self.make(f"{name}, {text}", lead=lead, rows=name) for name in names for text, lead in leads.items()]
