"""Cases in which every two properties of a call meet: faults live where two meet, and lists by hand try one thing at a time.

`covering` draws few combinations in which each pair of values occurs, greedily, as AETG does (Cohen, Dalal, Fredman and Patton,
"The AETG System: An Approach to Testing Based on Combinatorial Design", IEEE Transactions on Software Engineering 23(7), 1997).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvdock_conformance.cases.copies import Copy, fanned
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.cases.paged import SlotCall, in_turn
from kvdock_conformance.cases.static import Update
from kvdock_conformance.requirement import Case, Level

__all__ = ["copies", "covering", "slot_calls", "updates"]

Factors = Mapping[str, Sequence[Any]]
Combination = dict[str, Any]
Pair = tuple[str, Any, str, Any]

_TRIES = 20
_COMMON: Factors = {
    "dtype": ("bfloat16", "float32", "float16", "uint8"),
    "pool": ("nhd", "hnd", "padded slots", "odd steps", "k and v unlike", "odd address", "padded blocks"),
    "index": ("int64", "int32"),
    "is_unlike": (False, True),
    "is_repeated": (False, True),
}
_SLOTS: Factors = {
    **_COMMON,
    "rows": ("contiguous", "odd address", "fused qkv", "odd steps"),
    "form": ("[T]", "[3, S]", "[17, S]", "[B, 4]"),
    "block": (16, 513, 1, 1024),
    "index_order": ("rows", "longer rows"),
    "padding": ("none", "some", "most", "beyond at the end"),
}
_PAIRS: Factors = {**_COMMON, "block": (16, 513, 1), "pair_gap": (0, 1), "padding": ("none", "some", "most", "beyond at the end")}
_ROWS: Factors = {
    **_COMMON,
    "source": ("[B, H, q, D]", "contiguous", "fused qkv", "odd steps", "odd address"),
    "form": ("[b]", "[b] in steps", "[1]", "[]", "int"),
    "rows": (1, 3, 17),
    "behind": (0, 2),
    "padding": ("none", "too long"),
}
Tier = tuple[Level, Factors]
"""At which level an array of combinations runs, and factors in place of the ordinary ones."""


def _around(*powers: int) -> tuple[int, ...]:
    """Return powers of two by their logarithms, and the numbers on either side."""
    return tuple(2**power + edge for power in powers for edge in (-1, 0, 1))


_UNLIKE_STRIDES: Factors = {"pool": ("k and v unlike",), "is_unlike": (False,)}
"""Keys and values of one shape and unlike strides: with every other property, not with one that happens to be drawn."""
_TOKENS: Sequence[Tier] = (
    (Level.CORE, {"count": (17, 256, 1025), **_UNLIKE_STRIDES}),
    (Level.CORE, {"count": (1, 16, 17, *_around(8), 1025, *_around(12))}),
    (Level.EXTENDED, {"count": (0, 2, 15, *_around(7, 9, 11), 1023, 1024)}),
    (Level.EXTENDED, {"count": _around(13, 14, 15, 16), "pool": ("nhd", "hnd", "k and v unlike"), "is_repeated": (False,)}),
)
"""At 256 and 4096 tokens of 256 bytes, a call has 64 KiB and 1 MiB. What repeats is slow with many more."""


def covering(factors: Factors, seed: int = 0) -> list[Combination]:
    """Return combinations of values, one of each factor, so that every two values of two factors occur together.

    Args:
        factors: the values by the name of their factor.
        seed: of the order in which factors are settled. The same arguments give the same combinations.
    """
    choose = random.Random(seed)  # noqa: S311 - the same in every run
    missing: dict[Pair, None] = {
        (a, x, b, y): None for a, b in itertools.combinations(factors, 2) for x, y in itertools.product(factors[a], factors[b])
    }
    found: list[Combination] = []
    while missing:
        start = next(iter(missing))
        tried = [_settled(factors, missing, start, choose) for _ in range(_TRIES)]
        best = max(tried, key=lambda combination: len(missing.keys() & _pairs_of(factors, combination)))
        for pair in _pairs_of(factors, best):
            missing.pop(pair, None)
        found.append(best)
    return found


def _settled(factors: Factors, missing: Mapping[Pair, None], start: Pair, choose: random.Random) -> Combination:
    """Return a combination with a pair that is missing, and with as many others as a greedy choice finds."""
    made = {start[0]: start[1], start[2]: start[3]}
    for factor in choose.sample([name for name in factors if name not in made], len(factors) - len(made)):
        values = choose.sample(list(factors[factor]), len(factors[factor]))
        made[factor] = max(values, key=lambda value: sum(_ordered(factors, factor, value, *old) in missing for old in made.items()))
    return made


def _ordered(factors: Factors, a: str, x: Any, b: str, y: Any) -> Pair:
    names = list(factors)
    return (a, x, b, y) if names.index(a) < names.index(b) else (b, y, a, x)


def _pairs_of(factors: Factors, made: Combination) -> set[Pair]:
    return {(a, made[a], b, made[b]) for a, b in itertools.combinations(factors, 2)}


def _drawn(factors: Factors, tiers: Sequence[Tier], make: Callable[..., list[Any]]) -> Callable[[], Iterator[Case]]:
    """Return a function that makes a case of each combination: calls one after the other."""

    def cases() -> Iterator[Case]:
        names: set[str] = set()
        for level, others in tiers:
            for number, one in enumerate(covering({**factors, **others})):
                name = ", ".join(f"{factor} {one[factor]}" for factor in (*factors, "count"))
                if name not in names:  # two arrays may have one combination
                    names.add(name)
                    yield Case(name, in_turn("", make(seed=number, **one)).data, level)

    return cases


def _geometry(count: int, dtype: str, *, is_unlike: bool, **sizes: int) -> Geometry:
    """Return sizes of 256 bytes a row in bfloat16, or smaller ones for many rows."""
    is_large = count > 4097
    heads, dim = (1, 8) if is_large else (2, 64)
    values = {"hv": 1 if is_large else 3, "dv": 20} if is_unlike else {"hv": heads, "dv": dim}
    return Geometry(hk=heads, dk=dim, **values, dtype=dtype, **sizes)


def _padded(good: list[Any], padding: str, nothing: Any, beyond: Any) -> list[Any]:
    """Return indices, of which a share is padding, or the last one out of range."""
    if padding == "beyond at the end":
        return [*good[:-1], beyond] if good else []
    kept = {"none": range(8), "some": (0, 1, 2, 4, 5, 6, 7), "most": (3,)}[padding]
    return [index if at % 8 in kept else nothing for at, index in enumerate(good)]


_REPEATS = 4  # so many calls that differ in addresses and values of indices alone, and are remembered by then


def slot_calls(op: str) -> Callable[[], Iterator[Case]]:
    """Return a function that makes calls of an op that goes by slots, in which every two properties meet."""

    def make(
        *, count: int, seed: int, form: str, block: int, padding: str, dtype: str, is_unlike: bool, is_repeated: bool, **how: Any
    ) -> list[SlotCall]:
        lead = {"[T]": (count,), "[3, S]": (3, -(-count // 3)), "[17, S]": (17, -(-count // 17)), "[B, 4]": (-(-count // 4), 4)}[form]
        tokens = lead[0] * (lead[1] if len(lead) > 1 else 1)
        geometry = _geometry(count, dtype, is_unlike=is_unlike, num_blocks=tokens // block + 2, block=block)
        choose = random.Random(seed)  # noqa: S311 - the same in every run
        lists = [choose.sample(range(geometry.capacity), tokens) for _ in range(_REPEATS if is_repeated else 1)]
        lists[-1] = _padded(lists[-1], padding, -1, geometry.capacity)
        return [SlotCall(op, "", slots, lead, geometry, **how) for slots in lists]

    return _drawn(_SLOTS, _TOKENS, make)


def copies() -> Iterator[Case]:
    """Yield copies of blocks in which every two properties meet."""

    def make(*, count: int, seed: int, block: int, padding: str, dtype: str, is_unlike: bool, is_repeated: bool, **how: Any) -> list[Copy]:
        geometry = _geometry(8192, dtype, is_unlike=is_unlike, num_blocks=2 * count + 2, block=block)
        pairs = fanned(geometry.num_blocks, count)
        lists = [[(src, dst) for src, dst in pairs[turn:] + pairs[:turn]] for turn in range(_REPEATS if is_repeated else 1)]
        lists[-1] = _padded(lists[-1], padding, (-1, 0), (0, geometry.num_blocks))
        return [Copy("", each, geometry=geometry, seed=seed, **how) for each in lists]

    yield from _drawn(
        _PAIRS,
        (
            (Level.CORE, {"count": (2, 17), **_UNLIKE_STRIDES}),
            (Level.CORE, {"count": (1, 2, 16, 17, 65)}),
            (Level.EXTENDED, {"count": (0, 3, *_around(5, 7), 63, 64, 257)}),
        ),
        make,
    )()


def updates() -> Iterator[Case]:
    """Yield updates of static caches in which every two properties meet."""

    def make(
        *,
        count: int,
        seed: int,
        form: str,
        rows: int,
        behind: int,
        padding: str,
        dtype: str,
        is_unlike: bool,
        is_repeated: bool,
        **how: Any,
    ) -> list[Update]:
        length = count + 8
        geometry = _geometry(count, dtype, is_unlike=is_unlike, num_blocks=rows + behind, block=length)
        made = []
        for turn in range(_REPEATS if is_repeated else 1):
            lengths = [(3 * row + turn + seed) % 9 for row in range(rows)]
            if padding == "too long" and turn == (_REPEATS - 1 if is_repeated else 0):
                lengths[-1 if form.startswith("[b]") else 0] = 9
            given = lengths[0] if form == "int" else lengths[:1] if form in ("[1]", "[]") else lengths
            shape = {"[]": (), "[1]": (1,)}.get(form)
            made.append(Update("", given, shape, rows, count, geometry, index_gap=int(form == "[b] in steps"), **how))
        return made

    yield from _drawn(
        _ROWS,
        (
            (Level.CORE, {"count": (16, 257), **_UNLIKE_STRIDES}),
            (Level.CORE, {"count": (1, 15, 16, 17, 257)}),
            (Level.EXTENDED, {"count": (0, 2, *_around(5, 6, 7, 9, 10), 255, 256)}),
        ),
        make,
    )()
