"""Cases in which every two properties of a call meet: faults live where two meet, and lists by hand try one thing at a time.

`covering` draws few combinations in which each pair of values occurs, greedily, as AETG does (Cohen, Dalal, Fredman and Patton,
"The AETG System: An Approach to Testing Based on Combinatorial Design", IEEE Transactions on Software Engineering 23(7), 1997).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kvdock_conformance.cases.copies import Copy, fanned
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.cases.paged import SlotCall, in_turn
from kvdock_conformance.cases.static import Update
from kvdock_conformance.requirement import Case, Extended, Level, at_level

__all__ = ["copies", "covering", "slot_calls", "updates"]

Factors = Mapping[str, Sequence[Any]]
Combination = dict[str, Any]
Value = tuple[str, Any]
"""A factor, and one of its values."""

_TRIES = 20
_REPEATS = 5  # so many calls that differ in addresses and values of indices alone, and are remembered by then
_BAD = 3  # which of them may be padded, or wrong: the last is good again
_PADDING = ("none", "some padding", "most padding", "beyond at the end")
_COMMON: Factors = {
    "dtype": ("bfloat16", "float32", "float16", "uint8", "float64"),
    "pool": ("nhd", "hnd", "padded slots", "odd steps", "k and v unlike", "odd address", "padded blocks"),
    "index": ("int64", "int32"),
    "is_repeated": (False, True),
}
_SLOTS: Factors = {
    **_COMMON,
    "sizes": ("2 x 64", "2 x 64 and 3 x 20"),
    "rows": ("contiguous", "odd address", "fused qkv", "odd steps", "k and v unlike"),
    "form": ("[T]", "[3, S]", "[17, S]", "[B, 4]"),
    "block": (16, 513, 1, 1024, 48),
    "index_order": ("rows", "longer rows"),
    "slots": ("scattered", "one run", "whole blocks", *_PADDING[1:]),
    "first": (0,),
}
_PAIRS: Factors = {
    **_COMMON,
    "sizes": ("1 x 8", "1 x 8 and 1 x 20"),
    "block": (16, 513, 1),
    "pair_gap": (0, 1),
    "padding": _PADDING,
    "order": ("none",),
}
_ROWS: Factors = {
    **_COMMON,
    "sizes": ("2 x 64", "2 x 64 and 3 x 20"),
    "source": ("[B, H, q, D]", "contiguous", "fused qkv", "odd steps", "odd address", "k and v unlike"),
    "form": ("[b]", "[b] in steps", "[1]", "[]", "int"),
    "rows": (1, 3, 17),
    "behind": (0, 2),
    "padding": ("none", "too long"),
    "first": (0,),
    "lengths": ("unlike",),
}
_ROWS_APART = ("k and v unlike", "contiguous / cut short", "cut short / contiguous", "[B, H, q, D] / contiguous")
_TOKENS_FIRST = ("[S, B, H, D]", "[S, B, H, D] / contiguous", "contiguous / [S, B, H, D]")
Apart = Sequence[tuple[Value, Value]]
"""What takes long together, and meets in few cases that are small otherwise: those of tiers in which a factor has one value."""
Tier = tuple[Level, Factors]
"""At which level an array of combinations runs, and factors in place of the ordinary ones."""


def _around(*powers: int) -> tuple[int, ...]:
    """Return powers of two by their logarithms, and the numbers on either side."""
    return tuple(2**power + edge for power in powers for edge in (-1, 0, 1))


_UNLIKE_STRIDES: Factors = {
    "pool": ("k and v unlike", "nhd / hnd", "hnd / nhd", "nhd / padded blocks", "padded blocks / nhd"),
    "sizes": ("2 x 64",),
}
"""Keys and values of one shape and unlike strides: with every other property, not with one that happens to be drawn."""
_ONCE: Factors = {
    "is_repeated": (False,),
    "pool": ("nhd", "hnd", "k and v unlike"),
    "dtype": ("bfloat16", "float32", "float16", "uint8", "float64"),
}
"""For what takes much memory: fewer properties beside it."""
_ROW_BYTES: Factors = {**_ONCE, "sizes": ("1 x 3", "64 x 128", "8 x 4104", "1 x 3 and 65 x 130", "64 x 130 and 1 x 3")}
"""Rows of less than a vector, and at 16 KiB, 64 KiB and beyond."""
_FAR: Factors = {**_ONCE, "sizes": ("1 x 8", "1 x 8 and 1 x 20"), "first": (2**15 - 9, 2**16 - 9)}
"""Places on both sides of what 15 and 16 bits can say."""
_ONE: Factors = {"count": (1,), "dtype": ("bfloat16",), "sizes": ("2 x 64", "1 x 1 and 1 x 20"), "is_repeated": (False,)}
"""For what has sizes of 1: in every order of a pool."""
_ALMOST = (
    *(f"one run, {how}" for how in ("two swapped", "one skipped", "backwards", "some padding")),
    *(f"whole blocks, {how}" for how in ("two swapped", "backwards", "some padding")),
)
"""What seems to be a run, by its ends, sum, order, beginning, or least and most, and is none."""
_LIKE_RUNS: Factors = {"pool": ("nhd", "k and v unlike"), "dtype": ("bfloat16",), "rows": ("contiguous",)}
_DENSE: Factors = {"is_repeated": (False,), "dtype": ("bfloat16",), "pool": ("nhd",)}
_PIECE: Factors = {**_DENSE, "rows": ("contiguous",), "form": ("[T]",), "index_order": ("rows",)}
_LONG: Factors = {**_DENSE, "pool": ("hnd",), "source": ("[B, H, q, D]",)}
"""For pieces of memory whose bytes are a power of two: rows, runs of them, and blocks."""
_SHARED: Factors = {
    "rows": ("one token for all", "one head for all", "contiguous / one token for all", "values of the first token"),
}
"""Rows that are one in memory, which outputs cannot be."""
_FEW_UNLIKE: Factors = {"index": ("int64",), "form": ("[2, S]",), "rows": ("contiguous / cut short",), "sizes": ("2 x 64",)}
"""A batch of a few values in other steps than the keys, both of its dimensions larger than 1."""
_GAPS: Factors = {"pool": ("padded blocks", "nhd / padded blocks"), "sizes": ("2 x 64",)}
"""For a few tokens, which may find their places in a way of their own: in blocks of any number of slots, with gaps."""
_ACROSS: Factors = {
    "pool": ("nhd", "nhd / hnd", "hnd / nhd"),
    "sizes": ("2 x 256",),
    "padding": ("none",),
    "pair_gap": (0,),
    "index": ("int64",),
}
"""Large blocks, in one piece in one pool and in pieces in the other."""
_KNOWN: Factors = {"is_repeated": (True,)}
"""For the plainest call, as an engine makes it at each step: known by then, and wrong all the same."""
_STEP: Factors = {"rows": (1,), "behind": (0,), "form": ("[b]", "int"), "padding": ("none",), "dtype": ("bfloat16", "float32")}
"""A step of one row, which may have a way of its own."""
_TINY: Factors = {"dtype": ("uint8",), "sizes": ("1 x 1",)}
_FARTHEST: Factors = {**_TINY, "first": (2**24 - 9,)}
"""Places on both sides of what the numbers of float32 can say."""
_TOKENS: Sequence[Tier] = (
    (Level.CORE, {"count": (1, 4, 17, 256, 1025), **_UNLIKE_STRIDES, "rows": ("contiguous", *_ROWS_APART)}),
    (Level.CORE, {"count": (1, 16, 17, *_around(8), 1025, *_around(12))}),
    (Level.CORE, {"count": (257, 4097), **_ONCE, "slots": ("one run", "whole blocks"), "form": ("[T]",), "block": (16, 1024)}),
    (Level.CORE, {"count": (1, 3, 17), **_ROW_BYTES, "block": (4, 1)}),
    (Level.CORE, {"count": (18, 64), **_FAR}),
    (Level.CORE, {"count": (18,), **_PIECE, **_FARTHEST, "slots": ("scattered",), "block": (16,)}),
    (Level.CORE, {"count": (256, 4096), **_PIECE, "sizes": ("2 x 64",), "slots": ("one run", "whole blocks"), "block": (16, 256, 4096)}),
    (
        Level.CORE,
        {"count": (1025, 2049), **_PIECE, "sizes": ("1 x 8",), "slots": ("one run", "whole blocks"), "block": (16, 1024)},
    ),
    (Level.CORE, {"count": (1, 2), **_PIECE, "sizes": ("8 x 4096", "64 x 8192"), "slots": ("scattered",), "block": (1,)}),
    (Level.CORE, {"count": (8, 17), **_PIECE, "sizes": ("8 x 4096", "8 x 4104"), "slots": ("one run",), "block": (4,)}),
    (Level.CORE, {"count": (1, 3), **_PIECE, **_GAPS, "slots": ("scattered",), "block": (3, 6, 48), "first": (100,)}),
    (Level.CORE, {"count": (16, 64), **_LIKE_RUNS, "slots": _ALMOST, "form": ("[T]", "[B, 4]"), "block": (4, 16)}),
    (
        Level.CORE,
        {
            "count": (4, 18),
            **_ONCE,
            "rows": ("cut short", *_TOKENS_FIRST),
            "form": ("[2, S]", "[3, S]", "[B, 4]"),
            "slots": ("scattered", *_PADDING[1:]),
            "block": (16,),
        },
    ),
    (Level.CORE, {"count": (4,), **_PIECE, **_FEW_UNLIKE, "slots": ("scattered",), "block": (16,)}),
    (Level.CORE, {"count": (164,), **_ONCE, "slots": ("the whole pool",), "form": ("[T]", "[B, 4]"), "block": (4, 41)}),
    (Level.CORE, {**_ONE, "first": (1,), "slots": ("scattered",), "form": ("[T]",), "block": (1,), "rows": ("contiguous", "odd steps")}),
    (Level.CORE, {"count": (1, 4), **_PIECE, **_KNOWN, "sizes": ("2 x 64", "1 x 3"), "slots": _PADDING[1:], "block": (16,)}),
    (
        Level.CORE,
        {
            "count": (1025, *_around(12)),
            **_PIECE,
            **_KNOWN,
            "index": ("int64",),
            "sizes": ("2 x 64",),
            "slots": ("scattered",),
            "block": (16,),
        },
    ),
    (Level.EXTENDED, {"count": (0, 2, 15, *_around(7, 9, 11), 1023, 1024)}),
    (Level.EXTENDED, {"count": _around(13, 14, 15, 16), **_ONCE, "sizes": ("1 x 8", "1 x 8 and 1 x 20")}),
)
"""At 256 and 4096 tokens of 256 bytes, a call has 64 KiB and 1 MiB. What repeats is slow with many more. Slots times 1 / 41, in 32 bits,
lead into the block before where one begins."""
_WRITTEN: Sequence[Tier] = (
    (Level.CORE, {"count": (8,), **_PIECE, **_SHARED, "sizes": ("2 x 64",), "slots": ("one run",), "block": (4,)}),
    *_TOKENS,
)
_ORDERS = ("one run", *(f"{which}, {how}" for which in ("sources", "destinations") for how in ("two swapped", "one skipped", "backwards")))
_COPIED: Sequence[Tier] = (
    (Level.CORE, {"count": (2, 17), **_UNLIKE_STRIDES, "sizes": ("2 x 8",)}),
    (Level.CORE, {"count": (1, 2, 16, 17, 65)}),
    (Level.CORE, {"count": (2,), **_ONCE, "sizes": ("1 x 64", "1 x 64 and 2 x 512"), "block": (513, 1023)}),
    (Level.CORE, {"count": (1, 2), **_DENSE, "padding": ("none",), "sizes": ("1 x 64", "1 x 64 and 2 x 512"), "block": (512,)}),
    (Level.CORE, {"count": (1,), **_DENSE, **_ACROSS, "block": (2049,)}),
    (Level.CORE, {"count": (1023, 1024, 1025), **_ONCE, "block": (1, 3)}),
    (Level.CORE, {"count": (4, 64), **_ONCE, "block": (1, 3), "padding": ("none",), "order": _ORDERS}),
    (Level.CORE, {**_ONE, "block": (1,), "padding": ("none",)}),
    (Level.CORE, {"count": (1,), **_DENSE, **_KNOWN, "sizes": ("1 x 64",), "padding": _PADDING[1:], "block": (16,)}),
    (Level.CORE, {"count": (65,), **_DENSE, **_KNOWN, "sizes": ("1 x 8",), "padding": ("none",), "block": (16,)}),
    (Level.EXTENDED, {"count": (0, 3, *_around(5, 7), 63, 64, 257)}),
    (Level.EXTENDED, {"count": _around(11, 12), **_ONCE, "block": (1, 3)}),
    (Level.EXTENDED, {"count": (1,), **_DENSE, **_ACROSS, "block": (4097, 8193)}),
)
"""A block of 513 slots of 64 elements of bfloat16 has a little more than 64 KiB, and one of 512 of them more than 1 MiB; those of
`_ACROSS` a little more than 2, 4 and 8 MiB."""
_UPDATED: Sequence[Tier] = (
    (Level.CORE, {"count": (16, 257), **_UNLIKE_STRIDES, "source": ("[B, H, q, D]", *_ROWS_APART)}),
    (Level.CORE, {"count": (1,), **_UNLIKE_STRIDES, **_KNOWN, **_STEP}),
    (Level.CORE, {"count": (1, 15, 16, 17, 257)}),
    (Level.CORE, {"count": (1, 3), **_ROW_BYTES, "rows": (1, 3)}),
    (Level.CORE, {"count": (1, 17), **_FAR, "rows": (1, 3)}),
    (Level.CORE, {"count": (17,), **_LONG, **_FAR, **_TINY, "rows": (17,), "behind": (0,)}),
    (Level.CORE, {"count": (2,), **_LONG, **_FARTHEST, "rows": (1,), "behind": (0,), "form": ("[b]", "int")}),
    (Level.CORE, {"count": (512, 1024), **_LONG, "sizes": ("1 x 64", "1 x 512"), "rows": (1, 3)}),
    (Level.CORE, {"count": (513, 1025, 2049, 4097), **_LONG, "sizes": ("1 x 8",), "rows": (3,), "form": ("[b]",)}),
    (Level.CORE, {"count": (17,), **_ONCE, "source": ("cut short",), "rows": (3,)}),
    (Level.CORE, {"count": (1, 5), **_ONCE, "lengths": ("alike at the ends", "alike but the last"), "rows": (5, 16), "form": ("[b]",)}),
    (Level.CORE, {"count": (1, 16), **_ONCE, "lengths": ("full",), "rows": (3,), "behind": (0,), "form": ("[b]", "int")}),
    (Level.CORE, {**_ONE, "rows": (1,), "form": ("[b]", "int"), "source": ("[B, H, q, D]", "contiguous")}),
    (Level.CORE, {"count": (257,), **_LONG, "sizes": ("2 x 64",), "rows": (17,), "behind": (0,), "form": ("[b]",)}),
    (Level.CORE, {"count": (1,), **_LONG, **_KNOWN, "sizes": ("1 x 64", "1 x 3"), "rows": (1,), "padding": ("too long", "negative")}),
    (Level.EXTENDED, {"count": (0, 2, *_around(5, 6, 7, 9, 10), 255, 256)}),
)


def covering(factors: Factors, seed: int = 0, apart: Collection[tuple[Value, Value]] = ()) -> list[Combination]:
    """Return combinations of values, one of each factor, so that every two values of two factors occur together.

    Args:
        factors: the values by the name of their factor.
        seed: of the order in which factors are settled. The same arguments give the same combinations.
        apart: pairs of values that occur together nowhere; each factor needs a value that may stand beside all others.
    """
    return [dict(made) for made in _covering(tuple((name, tuple(values)) for name, values in factors.items()), seed, frozenset(apart))]


@functools.cache
def _covering(named: tuple[tuple[str, tuple[Any, ...]], ...], seed: int, apart: frozenset[tuple[Value, Value]]) -> list[Combination]:
    """Return the combinations; kept, because two ops ask for the same ones."""
    values = [(name, value) for name, each in named for value in each]
    ends = itertools.accumulate(len(each) for _, each in named)
    factors = [range(end - len(each), end) for end, (_, each) in zip(ends, named, strict=True)]  # places in that list, which are bits too
    where = {value: place for place, value in enumerate(values)}
    choose = random.Random(seed)  # noqa: S311 - the same in every run
    never = [0] * len(values)
    for one, other in apart:
        if one in where and other in where:
            never[where[one]] |= 1 << where[other]
            never[where[other]] |= 1 << where[one]
    partners = [sum(1 << other for other, (name, _) in enumerate(values) if name != own) & ~never[at] for at, (own, _) in enumerate(values)]
    found: list[Combination] = []
    for (a, own), (b, others) in itertools.combinations(enumerate(factors), 2):
        left = [at for at in range(len(factors)) if at not in (a, b)]
        for first, second in itertools.product(own, others):
            if partners[first] >> second & 1:
                tried = [_settled(factors, left, partners, never, (first, second), choose) for _ in range(_TRIES)]
                best, every = max(tried, key=lambda made: sum((partners[each] & made[1]).bit_count() for each in made[0]))
                for each in best:
                    partners[each] &= ~every
                found.append(dict(values[each] for each in best))
    return found


def _settled(
    factors: Sequence[Sequence[int]],
    left: Sequence[int],
    partners: Sequence[int],
    never: Sequence[int],
    start: tuple[int, int],
    choose: random.Random,
) -> tuple[list[int], int]:
    """Return a combination with a pair that is missing, and with as many others as a greedy choice finds; and its bits."""
    made, every = [*start], 1 << start[0] | 1 << start[1]
    for factor in _shuffled(left, choose):
        best = most = -1
        for each in _shuffled(factors[factor], choose):
            met = -1 if never[each] & every else (partners[each] & every).bit_count()
            if met > most:
                best, most = each, met
        made.append(best)
        every |= 1 << best
    return made, every


def _shuffled(values: Sequence[int], choose: random.Random) -> list[int]:
    """Return values in the order that ``choose.sample`` gives: a third of all drawing is done here, and that asks much of its arguments."""
    left, found, draw = [*values], [], choose.getrandbits
    for count in range(len(left), 0, -1):
        at = draw(bits := count.bit_length())
        while at >= count:
            at = draw(bits)
        found.append(left[at])
        left[at] = left[count - 1]
    return found


def _repeated(*counts: int) -> Apart:
    """Return what keeps long calls from being repeated."""
    return [(("count", count), ("is_repeated", True)) for count in counts]


def _drawn(factors: Factors, tiers: Sequence[Tier], make: Callable[..., list[Any]], apart: Apart) -> Iterator[Case | Extended]:
    """Yield a case of each combination: calls one after the other."""
    names: set[str] = set()

    def tier(level: Level, others: Factors) -> Iterator[Case]:
        made = {**factors, **others}
        several = {name for name, values in made.items() if len(values) > 1}
        never = [pair for pair in apart if several.issuperset(name for name, _ in pair)]
        for number, one in enumerate(covering(made, apart=never)):
            name = ", ".join(f"{factor} {one[factor]}" for factor in (*factors, "count"))
            if name not in names:  # two arrays may have one combination
                names.add(name)
                yield Case(name, in_turn("", make(seed=number, **one)).data, level)

    for level, others in tiers:
        yield from at_level(level, functools.partial(tier, level, others))


def _geometry(sizes: str, dtype: str, **others: int) -> Geometry:
    """Return sizes from their name: heads x elements of keys, and of values if they have others."""
    k, _, v = sizes.partition(" and ")
    (hk, dk), (hv, dv) = (map(int, side.split(" x ")) for side in (k, v or k))
    return Geometry(hk=hk, dk=dk, hv=hv, dv=dv, dtype=dtype, **others)


def _padded(good: list[Any], padding: str, nothing: Any, beyond: Any) -> list[Any]:
    """Return indices, of which a share is padding, or the last one out of range."""
    if padding == "beyond at the end":
        return [*good[:-1], beyond] if good else []
    kept = {"some padding": (0, 1, 2, 4, 5, 6, 7), "most padding": (3,)}.get(padding, range(8))
    return [index if at % 8 in kept else nothing for at, index in enumerate(good)]


def _arranged(slots: str, first: int, g: Geometry, count: int, choose: random.Random, *, twice: bool) -> list[int]:
    """Return so many slots from one on: in no order, all, one behind the other from within a block, or block by block in no order."""
    kind, _, how = slots.partition(", ")
    if kind == "one run":
        start = first + choose.randrange(g.capacity - first - count)
        return _almost(list(range(start, start + count)), how, twice=twice)
    if kind == "whole blocks":
        blocks = choose.sample(range(first // g.block + 1, g.num_blocks), -(-count // g.block))
        return _almost([block * g.block + at for block in blocks for at in range(g.block)][:count], how, twice=twice)
    return list(range(count)) if kind == "the whole pool" else choose.sample(range(first, g.capacity), count)


def _almost(run: list[int], how: str, *, twice: bool) -> list[int]:
    """Return a run that is none any more; ``twice``: one place may come twice, so that the ends of one in order are those of a run."""
    if how == "two swapped":  # inside a vector of four
        return [*run[:-3], run[-2], run[-3], run[-1]]
    if how == "one skipped":
        return [*run[:-2], run[-3], run[-1]] if twice else [*run[:-1], run[-1] + 1]
    return run[::-1] if how == "backwards" else run


def _paired(order: str, num_blocks: int, count: int) -> list[tuple[int, int]]:
    """Return so many pairs in no order, or from a run of blocks to another one, of which one may be none."""
    if order == "none":
        return fanned(num_blocks, count)
    which, _, how = order.partition(", ")
    sources, destinations = (list(range(start, start + count)) for start in (1, num_blocks // 2))
    if which == "destinations":
        return list(zip(sources, _almost(destinations, how, twice=False), strict=True))
    return list(zip(_almost(sources, how, twice=True), destinations, strict=True))


def _taken(lengths: str, first: int, rows: int, turn: int) -> list[int]:
    """Return a length for each row, at most eight behind the first."""
    if lengths == "full":
        return [0] * rows
    if lengths == "unlike":
        return [first + (3 * row + turn) % 9 for row in range(rows)]
    one = first + 1 + turn % 6
    return [*[one] * (rows - 3), *((one + 1, one - 1, one) if lengths == "alike at the ends" else (one, one, one + 1))]


def slot_calls(op: str) -> Callable[[], Iterator[Case | Extended]]:
    """Return a function that makes calls of an op that goes by slots, in which every two properties meet."""

    def make(
        *, count: int, seed: int, form: str, block: int, slots: str, first: int, dtype: str, sizes: str, is_repeated: bool, **how: Any
    ) -> list[SlotCall]:
        lead = {
            "[T]": (count,),
            "[2, S]": (2, -(-count // 2)),
            "[3, S]": (3, -(-count // 3)),
            "[17, S]": (17, -(-count // 17)),
            "[B, 4]": (-(-count // 4), 4),
        }[form]
        tokens = lead[0] * (lead[1] if len(lead) > 1 else 1)
        room = tokens // block if slots == "the whole pool" else (first + tokens) // block + 2
        geometry, reads = _geometry(sizes, dtype, num_blocks=room, block=block), op == "gather_paged"
        choose = random.Random(seed)  # noqa: S311 - the same in every run
        lists = [_arranged(slots, first, geometry, tokens, choose, twice=reads) for _ in range(_REPEATS if is_repeated else 1)]
        lists[: _BAD + 1][-1][:] = _padded(lists[: _BAD + 1][-1], slots.rpartition(", ")[2], -1, geometry.capacity)
        return [SlotCall(op, "", each, lead, geometry, **how) for each in lists]

    return lambda: _drawn(_SLOTS, _TOKENS if op == "gather_paged" else _WRITTEN, make, _repeated(1025, *_around(12)))


def copies(of: Callable[..., Copy] = Copy) -> Iterator[Case | Extended]:
    """Yield copies of blocks, or other calls with as many arguments, in which every two properties meet."""

    def make(
        *, count: int, seed: int, block: int, padding: str, order: str, dtype: str, sizes: str, is_repeated: bool, **how: Any
    ) -> list[Copy]:
        geometry = _geometry(sizes, dtype, num_blocks=2 * count + 2, block=block)
        pairs = _paired(order, geometry.num_blocks, count)
        lists = [[(src, dst) for src, dst in pairs[turn:] + pairs[:turn]] for turn in range(_REPEATS if is_repeated else 1)]
        bad = lists[: _BAD + 1][-1]
        bad[:] = _padded(bad, padding, (-1, 0), (bad[-1][0] if bad else 0, geometry.num_blocks))
        return [of("", each, geometry=geometry, seed=seed, **how) for each in lists]

    return _drawn(_PAIRS, _COPIED, make, _repeated(65))


def updates() -> Iterator[Case | Extended]:
    """Yield updates of static caches in which every two properties meet."""

    def make(
        *,
        count: int,
        seed: int,
        form: str,
        rows: int,
        behind: int,
        padding: str,
        first: int,
        lengths: str,
        dtype: str,
        sizes: str,
        is_repeated: bool,
        **how: Any,
    ) -> list[Update]:
        geometry = _geometry(sizes, dtype, num_blocks=rows + behind, block=first + count + 8 * (lengths != "full"))
        made = []
        for turn in range(_REPEATS if is_repeated else 1):
            taken = _taken(lengths, first, rows, _REPEATS - 1 - turn if is_repeated else seed)  # the last is 0 where the first is
            if padding != "none" and turn == (_BAD if is_repeated else 0):
                taken[-1 if form.startswith("[b]") else 0] = -1 if padding == "negative" else first + 9
            given = taken[0] if form == "int" else taken[:1] if form in ("[1]", "[]") else taken
            shape = {"[]": (), "[1]": (1,)}.get(form)
            made.append(Update("", given, shape, rows, count, geometry, index_gap=int(form == "[b] in steps"), **how))
        return made

    return _drawn(_ROWS, _UPDATED, make, [(("count", 257), ("rows", 17))])
