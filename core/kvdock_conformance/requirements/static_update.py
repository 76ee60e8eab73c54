"""Writing new positions into a static cache: ``KVD-STATIC``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases import pairs
from kvdock_conformance.cases.layouts import PARTS, Geometry
from kvdock_conformance.cases.paged import FORETOLD, foretold, in_turn
from kvdock_conformance.cases.places import apart, far_updates
from kvdock_conformance.cases.static import STATIC, Update
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements.families import INT32_MAX, INT32_MIN, ORDERS, SIZES_UNLIKE, Area

__all__ = ["OP", "REQUIREMENTS"]

OP = "static_update_"


def _of(batch: int = 3, length: int = 16, heads: int = 2, dim: int = 8, dtype: str = "bfloat16") -> Geometry:
    """Return the sizes of a static cache whose keys and values have the same heads and elements."""
    return Geometry.even(heads, dim, num_blocks=batch, block=length, dtype=dtype)


AREA = Area("STATIC", OP, functools.partial(Update, lengths=[3, 0, 11]), base=STATIC)
_UNLIKE_LENGTHS = attrs.evolve(AREA, make=functools.partial(Update, lengths=[0, 11, 5]))
_STRIDED = ("contiguous", "fused qkv", "fused qvk", "every other token", "padded tokens", "padded heads", "odd steps")


def _few_and_many(argument: str, names: Sequence[str]) -> list[Update]:
    """Return updates of few and of many rows with caches, or new positions, in some memory orders."""
    return [
        AREA.make(f"{name}, {rows} rows", lengths=[(5 * row) % 12 for row in range(rows)], geometry=_of(batch=rows), **{argument: name})
        for name in names
        for rows in (3, 6)
    ]


def _last_of_many(length: int) -> list[Update]:
    """Return updates of many rows, of which the last has a length."""
    return [
        Update(
            f"the last of {rows} rows, {new} new, {index}",
            [*[3] * (rows - 1), length],
            new=new,
            index=index,
            index_gap=gap,
            geometry=_of(rows, heads=1),
        )
        for rows in (9, 33, 1025)
        for new, index, gap in ((5, "int64", 0), (5, "int32", 1), (1, "int64", 1), (1, "int32", 0))
    ]


def _products() -> Iterable[Update]:
    """Yield updates of more rows, heads and new positions together than a launch grid has rows: of each alone, and of several."""
    for rows, heads, new in ((1, 1, 65_537), (1, 65_537, 1), (3, 22_000, 1), (257, 256, 1), (3, 1, 22_000), (2, 190, 190)):
        for lengths, dtype, source in (([1, 0], "uint8", "contiguous"), (1, "bfloat16", "[B, H, q, D]")):
            name = f"{rows} rows of {heads} heads, {new} new, {'their own lengths' if dtype == 'uint8' else 'one length'}"
            shape = (rows,) if isinstance(lengths, list) else None
            yield Update(name, lengths, shape=shape, new=new, source=source, geometry=_of(rows, new + 2, heads, dim=1, dtype=dtype))


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
        steps = [Update("", form(length), new=new) for length, new in ((0, 5), (5, 1), (6, 1), (7, 1), (8, 8))]
        yield in_turn(f"a prompt and its continuation, {text}", steps)
    yield foretold([Update("", [length] * 3, new=1) for length in FORETOLD], "cache_lengths")
    pools = ("hnd", "nhd", "padded slots", "hnd", "k and v unlike", "odd address")
    yield in_turn("other strides at each call", [Update("", [2, 5, 0], pool=pool) for pool in pools], own_pools=True)
    changing = ((3, 3, 5), ([1, 9], 2, 4), (0, 1, 16), ([7, 3, 5], 3, 5))
    yield in_turn("other rows and lengths at each call", [Update("", lengths, rows=rows, new=new) for lengths, rows, new in changing])


def _far() -> Iterable[Case]:
    """Return updates of large caches, and of few positions far apart."""
    for batch, length in ((1, 2**22 + 2), (2, 2**21 + 2)):
        sizes = Geometry(num_blocks=batch, block=length, hk=8, dk=64, hv=1, dv=8)
        for index in ("int64", "int32"):
            name = f"{batch} rows of {length}, {index}"
            yield Update(name, [length - 2] * batch, new=2, geometry=sizes, pool="untouched memory", index=index).case()
    yield from far_updates()


REQUIREMENTS = [
    AREA.require(
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
    AREA.require(
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
    AREA.require(
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
    AREA.require(
        4,
        "Each row is written behind its own length, however many rows there are.",
        [
            Update(f"{batch} rows", [(7 * row + 3) % 12 for row in range(batch)], geometry=_of(batch=batch))
            for batch in (2, 3, 4, 5, 6, 8, 17, 64, 300)
        ],
    ),
    AREA.require(
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
    AREA.require(
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
            Update("2**32 of many rows", [2**32 + row for row in range(6)], geometry=_of(batch=6)),
            Update("largest int64", [3, 2**63 - 1, 3]),
            Update("largest int32", [3, INT32_MAX, 3], index="int32"),
            Update("in a cache with gaps", [3, 12, 3], pool="padded blocks"),
            Update("rows with heads outermost", [3, 3, 13], pool="heads outermost"),
            *_last_of_many(16),
        ],
        lambda: [in_turn("a position at a time, to the end and beyond", [Update("", at, new=1) for at in range(11, 17)])],
    ),
    AREA.require(
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
            Update("smallest int32", [INT32_MIN, 3, 3], index="int32"),
            *_last_of_many(-1),
        ],
    ),
    AREA.require(
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
    AREA.require(
        9,
        "A call with fewer rows than the cache has writes the first rows, and leaves those behind them as they are.",
        [
            *(Update(f"{rows} of 6, int", 4, rows=rows, geometry=_of(batch=6)) for rows in (1, 2, 5)),
            *(Update(f"{rows} of 6, [b]", range(rows), rows=rows, geometry=_of(batch=6)) for rows in (1, 2, 3, 5)),
            Update("5 of 6 in a cache with gaps", [4, 0, 3, 2, 1], rows=5, geometry=_of(batch=6), pool="padded blocks"),
            Update("2 of 6 behind the last", [12, 0], rows=2, geometry=_of(batch=6)),
        ],
    ),
    AREA.require(
        10,
        "A call may bring any number of new positions.",
        [
            Update(f"s = {new}, {text}", lengths, new=new, geometry=_of(length=600, heads=1))
            for new in (1, 2, 15, 16, 17, 31, 32, 33, 127, 129, 513)
            for text, lengths in (("one length", 41), ("one for each row", [87, 0, 5]))
        ],
    ),
    AREA.require(
        11,
        "Heads of a static cache may have any number of elements.",
        AREA.dims(),
    ),
    AREA.require(
        12,
        "A position may have any number of heads, also where heads times elements is no power of two or more than a thread block holds.",
        AREA.heads(),
    ),
    AREA.require(
        13,
        "Keys and values of a static cache may differ in heads and in elements.",
        [
            Update(f"{name}, {text}", lengths, geometry=Geometry(num_blocks=5, block=16, **sizes))
            for name, sizes in SIZES_UNLIKE.items()
            for text, lengths in (("one length", 3), ("one for each row", [3, 0, 11, 5, 2]))
        ],
    ),
    AREA.require(
        14,
        "Each cache is written by its own strides, whatever the order of its dimensions in memory.",
        _few_and_many("pool", ORDERS),
        AREA.any_step("pool", lengths=0, new=1),
    ),
    AREA.require(
        15,
        "A cache may be part of a larger tensor: one of two halves, one layer of many, or rows with something behind them.",
        _few_and_many("pool", PARTS),
        AREA.packed(),
        functools.partial(apart, OP),
    ),
    AREA.require(
        16,
        "New keys and values are read by their own strides, without being made contiguous first.",
        _few_and_many("source", (*_STRIDED, "one head for all", "one token for all", "values of the first token")),
        AREA.any_step("source", lengths=0, new=1),
    ),
    AREA.require(
        17,
        "Caches and new positions may begin at any address that is a multiple of their element's size.",
        AREA.addresses,
        [
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
    AREA.require(
        18,
        "Elements of every dtype arrive in every row bit for bit: NaN with its payload, infinities, subnormals and -0.",
        _UNLIKE_LENGTHS.numbers(),
        AREA.special_values("special values in many rows", lengths=[0, 11, 5, 3, 2], num_blocks=5),
    ),
    AREA.require(
        19,
        "New keys and values and cache_lengths are not changed.",
        [
            *_forms([3, 9, 0], "all inputs compared"),
            Update("many rows", [3, 9, 0, 2, 5, 1], geometry=_of(batch=6)),
            Update("shared among heads", [3, 9, 0], source="one head for all"),
            Update("cut out of a projection", [3, 9, 0], source="fused qkv"),
            Update("int32 lengths", [3, 9, 0], index="int32"),
        ],
        check=check_only_written,
    ),
    AREA.require(
        20,
        "Calls that differ in addresses, strides, rows or lengths from those before them are served as if they were the first.",
        _repeated,
    ),
    AREA.require(
        21,
        "Places more than 2**31 elements into a cache are reached, by their position and by their row.",
        _far,
        level=Level.EXTENDED,
    ),
    AREA.require(
        22,
        "More rows than a launch grid has are all written, and more rows, heads and new positions together.",
        [
            Update(f"{batch} rows", [0, 1, 2], shape=(batch,), new=1, geometry=_of(batch=batch, length=4, heads=1, dim=2))
            for batch in (65_535, 65_537)
        ],
        _products(),
        level=Level.EXTENDED,
    ),
    AREA.together(23, "an update", pairs.updates),
]
