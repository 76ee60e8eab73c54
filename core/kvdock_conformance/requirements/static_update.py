"""Writing new positions into a static cache: ``KVD-STATIC``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, SINGLE_SIZES, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS
from kvdock_conformance.cases.places import far_updates
from kvdock_conformance.cases.static import Update
from kvdock_conformance.checking.calls import check_calls, check_inputs
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.checking.target import Target
from kvdock_conformance.reference import static_update_
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["OP", "REQUIREMENTS", "check_update", "check_update_inputs", "length_name"]

OP = "static_update_"
_INT32_MAX, _INT32_MIN = 2**31 - 1, -(2**31)


def _of(batch: int = 3, length: int = 16, heads: int = 2, dim: int = 8, dtype: str = "bfloat16") -> Geometry:
    """Return the sizes of a static cache whose keys and values have the same heads and elements."""
    return Geometry.even(heads, dim, num_blocks=batch, block=length, dtype=dtype)


def length_name(is_one: bool, place: Sequence[int]) -> str:
    """Return how an error names the length of a row: ``cache_lengths[2]``, or ``cache_lengths`` where there is one for all."""
    return "cache_lengths" if is_one else f"cache_lengths[{place[0]}]"


def check_update(target: Target, data: Mapping[str, Any]) -> None:
    """Check updates against the reference."""
    lengths = [call["args"]["cache_lengths"] for call in data["calls"]]
    is_one = all(isinstance(given, int) or given["shape"] in ([], [1]) for given in lengths)
    check_calls(target, data, static_update_, functools.partial(length_name, is_one))


def check_update_inputs(target: Target, data: Mapping[str, Any]) -> None:
    """Check that what is written is not changed itself."""
    check_inputs(target, data, ("k_cache", "v_cache"))


def _require(
    number: int,
    sentence: str,
    cases: Iterable[Update] | Callable[[], Iterable[Case]],
    level: Level = Level.CORE,
    check: Check = check_update,
) -> Requirement:
    made = cases if callable(cases) else _cases(tuple(cases))
    return Requirement(f"KVD-STATIC-{number:03}", sentence, OP, check, made, level, SERVED)


def _cases(updates: Sequence[Update]) -> Callable[[], Iterable[Case]]:
    return lambda: (update.case() for update in updates)


def _forms(lengths: Sequence[int], text: str, **settings: Any) -> list[Update]:
    """Return one update for each way to pass lengths: those of a case, the first of them where there is one for all rows."""
    one = lengths[0]
    return [
        Update(f"{text}, int", one, **settings),
        Update(f"{text}, []", [one], shape=(), **settings),
        Update(f"{text}, [1]", [one], **settings),
        Update(f"{text}, [{len(lengths)}]", lengths, **settings),
    ]


def _repeated() -> Iterable[Case]:
    """Return calls one after the other, as decoding makes them, and calls that differ in what may be kept of a call."""
    for text, form in (("an int", int), ("a tensor", lambda length: [length] * 3)):
        drawing, first = Drawing(), Update("")
        caches = first.caches(drawing)
        steps = [Update("", form(length), new=new) for length, new in ((0, 5), (5, 1), (6, 1), (7, 1), (8, 8))]
        yield Case(f"a prompt and its continuation, {text}", drawing.case(*[step.call(drawing, caches) for step in steps]))
    pools = ("hnd", "nhd", "padded slots", "hnd", "k and v unlike", "odd address")
    drawing = Drawing()
    updates = [Update("", [2, 5, 0], pool=pool) for pool in pools]
    yield Case("other strides at each call", drawing.case(*[update.call(drawing, update.caches(drawing)) for update in updates]))
    drawing, first = Drawing(), Update("")
    caches = first.caches(drawing)
    updates = [Update("", lengths, rows=rows, new=new) for lengths, rows, new in ((3, 3, 5), ([1, 9], 2, 4), (0, 1, 16), ([7, 3, 5], 3, 5))]
    yield Case("other rows and lengths at each call", drawing.case(*[update.call(drawing, caches) for update in updates]))


def _far() -> Iterable[Case]:
    """Return updates of large caches, and of few positions far apart."""
    for batch, length in ((1, 2**22 + 2), (2, 2**21 + 2)):
        sizes = Geometry(num_blocks=batch, block=length, hk=8, dk=64, hv=1, dv=8)
        yield Update(f"{batch} rows of {length}", [length - 2] * batch, new=2, geometry=sizes, pool="untouched memory").case()
    yield from far_updates()


REQUIREMENTS = [
    _require(
        1,
        "The new keys and values of each row are written behind the length that cache_lengths gives for it, keys to k_cache and values "
        "to v_cache.",
        [
            *_forms([3, 3, 3], "rows of one length"),
            Update("one row", 4, geometry=_of(batch=1)),
            Update("one position", [6], new=1),
            Update("keys and values of other sizes", 2, geometry=Geometry(num_blocks=3, block=16, hk=2, dk=8, hv=3, dv=4)),
        ],
    ),
    _require(
        2,
        "No byte outside the addressed positions is written, neither in the cache nor around it.",
        [
            Update("one position, neighbours kept", [7, 0, 15], new=1),
            Update("gaps behind positions", [3, 9, 1], pool="padded slots"),
            Update("gaps behind heads", [3, 9, 1], pool="padded heads"),
            Update("gaps behind rows", [11, 0, 11], pool="padded blocks"),
            Update("the end of the cache, memory behind kept", [11, 11, 11]),
            Update("the start of the cache, memory before kept", 0),
            Update("positions of odd length", [2, 3, 4], geometry=_of(heads=1, dim=5)),
            Update("other layers of a cache", 5, pool="page-first"),
        ],
    ),
    _require(
        3,
        "Lengths come as an int, or as a tensor [], [1] or [b] of int32 or int64, read by its own stride.",
        [
            *(
                Update(f"{index}, {text}", lengths, shape=shape, index=index, index_gap=gap)
                for index in ("int32", "int64")
                for text, lengths, shape, gap in (
                    ("[]", [4], (), 0),
                    ("[1]", [4], (1,), 0),
                    ("[b]", [4, 9, 0], (3,), 0),
                    ("[b], strided", [4, 9, 0], (3,), 1),
                    ("[], cut out", [4], (), 3),
                )
            ),
            Update("int", 4),
            Update("[1] for a cache of one row", [4], geometry=_of(batch=1)),
        ],
    ),
    _require(
        4,
        "Each row is written behind its own length, however many rows there are.",
        [
            Update(f"{batch} rows", [(7 * row + 3) % 12 for row in range(batch)], geometry=_of(batch=batch))
            for batch in (2, 3, 4, 5, 6, 8, 17, 64, 300)
        ],
    ),
    _require(
        5,
        "A row may be filled from its first position, and up to its last.",
        [
            *_forms([0, 0, 0], "empty"),
            *_forms([11, 11, 11], "exactly full"),
            Update("from empty to full", 0, new=16),
            Update("the last position", [15, 15, 15], new=1),
            Update("one row empty, one full, one between", [0, 11, 5]),
            Update("a cache of one position", 0, new=1, geometry=_of(length=1)),
        ],
    ),
    _require(
        6,
        "A row that would end beyond the cache is written nowhere: lengths in host memory raise before anything is written and name the "
        "first such row, on a device the row is skipped whole and its positions are counted.",
        [
            *_forms([12, 12, 12], "one past full"),
            *_forms([16, 16, 16], "behind a full row"),
            Update("only the last row", [0, 11, 12]),
            Update("only the first row", [12, 0, 11]),
            Update("two of many rows", [0, 3, 14, 2, 12, 1], geometry=_of(batch=6)),
            Update("more positions than the cache has", [0, 0, 0], new=17),
            Update("more positions than the cache has, int", 0, new=17),
            Update("2**32 + 3", [2**32 + 3, 3, 3]),
            Update("largest int64", [3, 2**63 - 1, 3]),
            Update("largest int32", [3, _INT32_MAX, 3], index="int32"),
            Update("in a cache with gaps", [3, 12, 3], pool="padded blocks"),
            Update("rows with heads outermost", [3, 3, 13], pool="heads outermost"),
        ],
    ),
    _require(
        7,
        "A negative length is no padding: its row is treated as one that would end beyond the cache.",
        [
            *_forms([-1, -1, -1], "-1"),
            Update("only the second row", [3, -1, 3]),
            Update("as many as there are new positions", [3, 3, -5]),
            Update("a whole row", [-16, 3, 3]),
            Update("two of many rows", [0, 3, -2, 2, -17, 1], geometry=_of(batch=6)),
            Update("one position", [-1, 0, 0], new=1),
            Update("smallest int64", [3, -(2**63), 3]),
            Update("-2**32 + 3", [3, -(2**32) + 3, 3]),
            Update("smallest int32", [_INT32_MIN, 3, 3], index="int32"),
        ],
    ),
    _require(
        8,
        "A call without new positions or without rows changes nothing and raises nothing, whatever the lengths.",
        [
            *_forms([3, 9, 0], "s = 0", new=0),
            Update("s = 0, full rows", [16, 16, 16], new=0),
            Update("s = 0, a length beyond", 99, new=0),
            Update("b = 0, int", 3, rows=0),
            Update("b = 0, [1]", [3], rows=0),
            Update("b = 0, [b]", [], shape=(0,), rows=0),
        ],
    ),
    _require(
        9,
        "A call with fewer rows than the cache has writes the first rows, and leaves those behind them as they are.",
        [
            *(Update(f"{rows} of 6, int", 4, rows=rows, geometry=_of(batch=6)) for rows in (1, 2, 5)),
            *(Update(f"{rows} of 6, [b]", range(rows), rows=rows, geometry=_of(batch=6)) for rows in (1, 2, 3, 5)),
            Update("5 of 6 in a cache with gaps", [4, 0, 3, 2, 1], rows=5, geometry=_of(batch=6), pool="padded blocks"),
            Update("2 of 6 behind the last", [12, 0], rows=2, geometry=_of(batch=6)),
        ],
    ),
    _require(
        10,
        "A call may bring any number of new positions.",
        [
            Update(f"s = {new}, {text}", lengths, new=new, geometry=_of(length=600, heads=1))
            for new in (1, 2, 15, 16, 17, 31, 32, 33, 127, 129, 513)
            for text, lengths in (("one length", 41), ("one for each row", [87, 0, 5]))
        ],
    ),
    _require(
        11,
        "Heads of a static cache may have any number of elements.",
        [Update(f"D = {dim}", [3, 0, 11], geometry=_of(dim=dim)) for dim in (1, 2, 3, 46, 64, 80, 96, 100, 128, 192, 256, 576)],
    ),
    _require(
        12,
        "A position may have any number of heads, also where heads times elements is no power of two or more than a thread block holds.",
        [
            Update(f"{heads} x {dim}", [3, 0, 11], geometry=_of(heads=heads, dim=dim))
            for heads, dim in ((1, 64), (3, 64), (5, 80), (8, 128), (9, 128), (17, 64), (32, 128), (129, 8))
        ],
    ),
    _require(
        13,
        "Keys and values of a static cache may differ in heads and in elements.",
        [
            Update(f"{hk} x {dk} and {hv} x {dv}, {text}", lengths, geometry=Geometry(num_blocks=5, block=16, hk=hk, dk=dk, hv=hv, dv=dv))
            for hk, dk, hv, dv in ((2, 192, 2, 128), (1, 576, 1, 512), (4, 8, 2, 8), (2, 8, 4, 8), (1, 16, 3, 24), (2, 1, 1, 2))
            for text, lengths in (("one length", 3), ("one for each row", [3, 0, 11, 5, 2]))
        ],
    ),
    _require(
        14,
        "Each cache is written by its own strides, whatever the order of its dimensions in memory.",
        [
            Update(f"{name}, {rows} rows", [(5 * row) % 12 for row in range(rows)], pool=name, geometry=_of(batch=rows))
            for name in (
                *("nhd", "hnd", "heads outermost", "slots outermost", "padded slots", "padded heads", "odd steps"),
                *("k and v unlike", "k and v unlike, in whole vectors"),
            )
            for rows in (3, 6)
        ]
        + [Update(f"{text}, whatever its step", 0, new=1, geometry=sizes, pool=ANY_STEP) for text, sizes in SINGLE_SIZES.items()],
    ),
    _require(
        15,
        "A cache may be part of a larger tensor: one of two halves, one layer of many, or rows with something behind them.",
        [
            Update(f"{name}, {rows} rows", [(5 * row) % 12 for row in range(rows)], pool=name, geometry=_of(batch=rows))
            for name in PARTS
            for rows in (3, 6)
        ],
    ),
    _require(
        16,
        "New keys and values are read by their own strides, without being made contiguous first.",
        [
            Update(f"{name}, {rows} rows", [(5 * row) % 12 for row in range(rows)], source=name, geometry=_of(batch=rows))
            for name in (
                "contiguous",
                "fused qkv",
                "every other token",
                "padded tokens",
                "padded heads",
                "odd steps",
                "one head for all",
                "one token for all",
            )
            for rows in (3, 6)
        ]
        + [Update(f"{text}, whatever its step", 0, new=1, geometry=sizes, source=ANY_STEP) for text, sizes in SINGLE_SIZES.items()],
    ),
    _require(
        17,
        "Caches and new positions may begin at any address that is a multiple of their element's size.",
        [
            *(Update(f"cache at an {name}", pool=name) for name in ("odd address", "even address in an odd storage")),
            *(Update(f"positions at an {name}", source=name) for name in ("odd address", "even address in an odd storage")),
            *(
                Update(
                    f"both, {dtype}, {rows} rows",
                    [2] * rows,
                    pool="odd address",
                    source="odd address",
                    geometry=_of(rows, dim=64, dtype=dtype),
                )
                for dtype in ("bfloat16", "float32")
                for rows in (3, 6)
            ),
        ],
    ),
    _require(
        18,
        "Elements of every dtype arrive in every row bit for bit: NaN with its payload, infinities, subnormals and -0.",
        [
            *(Update(f"{dtype}, random bits", [0, 11, 5], geometry=_of(dim=64, dtype=dtype)) for dtype in SPECIAL_BITS),
            *(
                Update(f"{dtype}, special values", [0, 11, 5], geometry=_of(dtype=dtype), values=bits)
                for dtype, bits in SPECIAL_BITS.items()
            ),
            *(
                Update(f"{dtype}, special values in many rows", [0, 11, 5, 3, 2], geometry=_of(batch=5, dtype=dtype), values=bits)
                for dtype, bits in SPECIAL_BITS.items()
            ),
        ],
    ),
    _require(
        19,
        "New keys and values and cache_lengths are not changed.",
        [
            *_forms([3, 9, 0], "all inputs compared"),
            Update("many rows", [3, 9, 0, 2, 5, 1], geometry=_of(batch=6)),
            Update("shared among heads", [3, 9, 0], source="one head for all"),
            Update("cut out of a projection", [3, 9, 0], source="fused qkv"),
            Update("int32 lengths", [3, 9, 0], index="int32"),
        ],
        check=check_update_inputs,
    ),
    _require(
        20,
        "Calls that differ in addresses, strides, rows or lengths from those before them are served as if they were the first.",
        _repeated,
    ),
    _require(
        21,
        "Places more than 2**31 elements into a cache are reached, by their position and by their row.",
        _far,
        Level.EXTENDED,
    ),
    _require(
        22,
        "More rows than a launch grid has are all written.",
        [
            Update(f"{batch} rows", [0, 1, 2], shape=(batch,), new=1, geometry=_of(batch=batch, length=4, heads=1, dim=2))
            for batch in (65_535, 65_537)
        ],
        Level.EXTENDED,
    ),
]
