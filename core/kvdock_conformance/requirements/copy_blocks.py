"""Copying whole blocks within a paged cache: ``KVD-COPY``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import attrs

from kvdock_conformance.cases import pairs
from kvdock_conformance.cases.copies import PRODUCTS, Copy, every_other, fanned, last_of_many
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, SINGLE_SIZES, Geometry
from kvdock_conformance.cases.paged import FORETOLD, foretold, in_turn
from kvdock_conformance.cases.places import apart
from kvdock_conformance.cases.quantised import QUANTISED
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.checking.copies import check_copy_forms, check_pairs_refused
from kvdock_conformance.checking.refusals import check_refusal
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements.families import INT32_MAX, INT32_MIN, NO_BLOCKS, Area, Refusal, refusals

__all__ = ["OP", "REQUIREMENTS"]

OP = "copy_blocks_"
AREA = Area("COPY", OP, Copy)
_EVEN = AREA.sizes
_RANGE, _TYPE, _VALUE = "IndexRangeError", "ArgumentTypeError", "ArgumentValueError"
_FLOAT_IDS = (0, 0x40A00000, 0x40400000, 0x40000000)  # 0.0, 5.0, 3.0, 2.0
Pairs = Sequence[tuple[int, int]]


_MANY = [(block, 1200 + block) for block in range(1100)]


def _readable(error: str, cases: Iterable[tuple[str, Pairs, Sequence[str]]], num_blocks: int = 6) -> Callable[[], Iterable[Case]]:
    """Return a function that draws copies which must raise: name, pairs, and what the error must say."""
    made = [
        (Copy(name, pairs, host=True, geometry=Geometry.even(1, 1, num_blocks=num_blocks, block=1)), texts) for name, pairs, texts in cases
    ]
    return lambda: (each.case(error=error, texts=[f"{OP}: ", *texts, "Fix: "]) for each, texts in made)


def _repeated() -> Iterable[Case]:
    """Return calls one after the other, which differ in one thing."""
    names = ("nhd", "hnd", "padded blocks", "nhd", "k and v unlike", "odd address", "padded slots")
    for name, order in (("other pools at each call", names), ("the same at each call", ("nhd",) * 4)):
        yield in_turn(name, [Copy("", [(number % 3, 5), (3, 4)], pool=pool) for number, pool in enumerate(order)], own_pools=True)
    for name, lists in (
        ("other pairs at each call", ([(0, 5)], [(5, 0), (4, 1)], [(1, 5)], [(2, 3), (0, 4), (1, 5)], [(3, 0), (4, 2)])),
        ("what was written is copied on", ([(0, 1)], [(1, 2)], [(2, 3)], [(3, 0)])),
        ("padding now and then", ([(0, 5), (1, 4)], [(-1, 5), (2, 4)], [(3, 5), (1, -1)], [(2, 5), (3, 4)])),
    ):
        yield in_turn(name, [Copy("", pairs) for pairs in lists])
    yield foretold([Copy("", [(block, 5)]) for block in FORETOLD], "block_pairs")


def _again(last: Pairs, name: str) -> Callable[[], Iterable[Case]]:
    """Return calls of as many good pairs, which differ in addresses alone, and then one with these pairs."""
    lists = [[(number % 3, 5), (3, 4)] for number in range(4)]
    return lambda: [in_turn(name, [Copy("", pairs) for pairs in (*lists, last, lists[0])])]


def _far() -> Iterable[Case]:
    """Return copies from and to places far into a huge pool, of which all but the sources is zero."""
    geometry = Geometry(num_blocks=2**19 + 2, block=16, hk=8, dk=64, hv=1, dv=8)
    for index in ("int64", "int32"):
        pairs = [(5, 2**19 + 1), (2**19, 1), (2**18 + 1, 2**18 + 3), (7, 2**18 + 5)]
        copy = Copy("", pairs, geometry=geometry, pool="untouched memory", index=index)
        drawing = Drawing()
        pools = copy.pools(drawing)
        filled = [
            attrs.evolve(pool.select(0, src), values={"first": 1 + 1000 * number, "step": 1})
            for pool in pools
            for number, (src, _) in enumerate(copy.pairs)
        ]
        data = drawing.case(copy.call(drawing, pools), places=[view.spec() for view in filled])
        yield Case(f"2**19 + 2 blocks of 2**13 elements, {index}", data)


REFUSED: Sequence[Refusal] = (
    (
        "a flat list of ids",
        _VALUE,
        ["block_pairs: ", "[N, 2]", "[4]"],
        lambda d, _: {"block_pairs": d.tensor("int64", (4,), values=range(4))},
    ),
    (
        "pairs with an inner stride",
        _VALUE,
        ["block_pairs: ", "innermost stride of 1", "[1, 2]"],
        lambda drawing, _: {"block_pairs": drawing.tensor("int64", (2, 2), order=(1, 0), values=[0, 5, 3, 2])},
    ),
    ("pools of unlike blocks", _VALUE, ["v_cache: ", "NB=6", "[5, 4, 2, 8]"], lambda _, a: {"v_cache": a["v_cache"].slice(0, 0, 5)}),
    ("one pool for both", _VALUE, ["v_cache: ", "k_cache"], lambda _, a: {"v_cache": a["k_cache"]}),
)
"""What `kvdock_conformance.cases.mistakes` does not have of every op, or with less in the text."""

REQUIREMENTS = [
    AREA.require(
        1,
        "For each pair (src, dst) block dst holds what block src holds, in k_cache and in v_cache.",
        [
            Copy("one pair", [(0, 5)]),
            Copy("several pairs", [(5, 0), (2, 1)]),
            Copy("one source for many", [(4, 0), (4, 1), (4, 2), (4, 3), (4, 5)]),
            Copy("forwards and backwards", [(1, 3), (4, 2)]),
            Copy("neighbours", [(0, 1), (3, 2), (4, 5)]),
            Copy("half of the pool to the other", [(0, 3), (1, 4), (2, 5)]),
            Copy("keys and values of other sizes", geometry=Geometry(hk=2, dk=8, hv=3, dv=4)),
        ],
    ),
    AREA.require(
        2,
        "No byte outside the destinations is written, neither in the pool nor around it.",
        [
            Copy("one block, neighbours kept", [(0, 3)]),
            Copy("last of the pool, memory behind kept", [(0, 5)]),
            Copy("first of the pool, memory before kept", [(5, 0)]),
            Copy("gaps behind slots", pool="padded slots"),
            Copy("gaps behind heads", pool="padded heads"),
            Copy("gaps behind blocks", pool="padded blocks"),
            Copy("odd gaps", pool="odd steps"),
            Copy("blocks of odd length", geometry=_EVEN(heads=1, dim=5, block=3)),
            Copy("keys beside values", pool="k and v side by side"),
            Copy("blocks between each other", pool="heads outermost"),
        ],
    ),
    AREA.require(
        3,
        "A pair with a negative id is padding: it copies nothing, whichever negative number it is and whatever the other id.",
        [
            Copy("both -1", [(-1, -1)]),
            Copy("source -1", [(-1, 3), (2, 4)]),
            Copy("destination -1", [(0, -1), (2, 3)]),
            Copy("some among others", [(-1, 3), (2, 3), (0, -1), (-7, -9), (4, 1)]),
            Copy("other negatives", [(-2, 0), (1, -6), (-5, 2), (3, 4)]),
            Copy("beside ids beyond the pool", [(-1, 99), (99, -1), (2, 3)]),
            Copy("beside the others' ids", [(1, -1), (0, 1), (-1, 1), (-1, 2), (0, 2), (2, -1)]),
            Copy("smallest int64", [(-(2**63), 1), (2, -(2**62) + 5), (-(2**32) + 2, 4), (2, 3)]),
            Copy("smallest int32", [(INT32_MIN, 0), (1, INT32_MIN + 1), (2, 3)], index="int32"),
            Copy("pool without blocks", [(-1, -1), (-1, 4)], geometry=NO_BLOCKS),
            Copy("every other of many", every_other(1100), geometry=_EVEN(num_blocks=2200, block=1, heads=1), level=Level.EXTENDED),
            Copy("many", [*fanned(64, 20), *[(-1, 40)] * 30, (3, 63)], geometry=_EVEN(num_blocks=64)),
        ],
        _again([(-1, 2), (3, -9)], "padding in a call that repeats others"),
    ),
    AREA.require(
        4,
        "A block beyond the pool is neither read nor written: in host memory the call raises before it copies anything and names the "
        "first such position, on a device the pair is skipped whole and counted.",
        [
            Copy("source", [(6, 0)]),
            Copy("destination", [(0, 6)]),
            Copy("both", [(7, 8)]),
            Copy("behind good ones", [(0, 1), (2, 3), (2, 6), (4, 5)]),
            Copy("before good ones", [(6, 0), (2, 3)]),
            Copy("several", [(0, 1), (2, 9), (8, 3)]),
            Copy("beside padding", [(-1, 6), (6, -1), (0, 1), (6, 2)]),
            Copy("2**32 + 3", [(2**32 + 3, 1), (0, 2)]),
            Copy("2**40", [(0, 1), (2, 2**40)]),
            Copy("largest int64", [(2**63 - 1, 0)]),
            Copy("largest int32", [(0, 1), (2, INT32_MAX)], index="int32"),
            Copy("in a pool with gaps", [(0, 1), (2, 6)], pool="padded blocks"),
            Copy("in a pool without blocks", [(-1, 0), (0, 1)], geometry=NO_BLOCKS),
            Copy("behind many good ones", [*fanned(64, 30), (64, 63)], geometry=_EVEN(num_blocks=64)),
        ],
        [
            Copy(f"the last of {count}, {pairs[-1]}", pairs, geometry=_EVEN(num_blocks=blocks, block=1, heads=1))
            for count in (9, 33, 1025)
            for blocks, both in [last_of_many(count)]
            for pairs in both
        ],
        _again([(1, 6), (3, 2)], "in a call that repeats others"),
        lambda: [in_turn("a pair at a time, to the end and beyond", [Copy("", [(at, at + 2)]) for at in range(5)])],
    ),
    AREA.require(
        5,
        "The first and the last block of the pool are blocks like any other.",
        [
            Copy("first to last", [(0, 5)]),
            Copy("last to first", [(5, 0)]),
            Copy("first as a source", [(0, 2)]),
            Copy("last as a source", [(5, 2)]),
            Copy("first as a destination", [(2, 0)]),
            Copy("last as a destination", [(2, 5)]),
            Copy("of two blocks", [(0, 1)], geometry=Geometry(num_blocks=2)),
            Copy("in a pool with gaps", [(0, 5)], pool="padded blocks"),
            Copy("hnd", [(5, 0)], pool="hnd"),
        ],
    ),
    AREA.require(
        6,
        "Two pairs with one destination are an error wherever the host can read the pairs, and nothing is copied.",
        _readable(
            _VALUE,
            [
                ("two sources", [(0, 5), (1, 4), (2, 5)], ["block_pairs[2]", "destination 5"]),
                ("the same pair twice", [(0, 5), (0, 5)], ["block_pairs[1]", "destination 5"]),
                ("behind padding", [(-1, 5), (1, 5), (-1, -1), (2, 5)], ["block_pairs[3]", "destination 5"]),
                ("block 0", [(1, 0), (2, 0)], ["block_pairs[1]", "destination 0"]),
            ],
        ),
        _readable(_VALUE, [("behind many", [*_MANY, (1101, 1205)], ["block_pairs[1100]", "destination 1205"])], 2400),
        check=check_pairs_refused,
    ),
    AREA.require(
        7,
        "A destination that is also a source is an error wherever the host can read the pairs, also in one pair, and nothing is copied.",
        _readable(
            _VALUE,
            [
                ("chained", [(0, 1), (1, 2)], ["block_pairs[0]", "destination 1"]),
                ("chained backwards", [(1, 2), (0, 1)], ["block_pairs[1]", "destination 1"]),
                ("chained, far apart", [(0, 5), (1, 2), (5, 3)], ["block_pairs[0]", "destination 5"]),
                ("swapped", [(0, 1), (1, 0)], ["block_pairs[0]", "destination 1"]),
                ("onto itself", [(3, 3)], ["block_pairs[0]", "destination 3"]),
                ("onto itself behind good ones", [(0, 1), (4, 4)], ["block_pairs[1]", "destination 4"]),
            ],
        ),
        _readable(_VALUE, [("behind many", [*_MANY, (1205, 1101)], ["block_pairs[5]", "destination 1205"])], 2400),
        check=check_pairs_refused,
    ),
    AREA.require(
        8,
        "A block beyond the pool is an error wherever the host can read the pairs, which names the first such position and its id, and "
        "nothing is copied.",
        _readable(
            _RANGE,
            [
                ("source", [(0, 1), (6, 2)], ["block_pairs[1, 0]", "6"]),
                ("destination", [(0, 1), (2, 17)], ["block_pairs[1, 1]", "17"]),
                ("several", [(-1, 9), (2, 8), (9, 3)], ["block_pairs[1, 1]", "8"]),
                ("2**40", [(2**40, 1)], ["block_pairs[0, 0]", str(2**40)]),
            ],
        ),
        _readable(_RANGE, [("behind many", [*_MANY, (1101, 2400)], ["block_pairs[1100, 1]", "2400"])], 2400),
        check=check_pairs_refused,
    ),
    AREA.require(
        9,
        "Pairs are read as int32 and as int64, by the stride between them.",
        [
            Copy(f"{index}, {text}", pairs, index=index, pair_gap=gap)
            for index in ("int32", "int64")
            for text, gap, pairs in (
                ("dense", 0, [(0, 5), (3, 2), (1, 4)]),
                ("strided", 2, [(0, 5), (3, 2), (1, 4)]),
                ("strided, odd", 1, [(0, 5), (3, 2), (1, 4)]),
                ("strided, with padding", 2, [(0, 5), (-1, 2), (1, 4)]),
                ("strided, one pair", 3, [(0, 5)]),
            )
        ],
    ),
    AREA.require(
        10,
        "Pairs in host memory serve a pool on any device.",
        [
            Copy("a tensor", host=True),
            Copy("int32", index="int32", host=True),
            Copy("strided", pair_gap=2, host=True),
            Copy("with padding", [(-1, 3), (2, 4), (0, -7)], host=True),
            Copy("no pairs", [], host=True),
        ],
    ),
    AREA.require(
        11,
        "Pairs may be a list or a numpy array instead of a tensor.",
        [
            Copy("two pairs", host=True),
            Copy("int32", index="int32", host=True),
            Copy("with padding", [(-1, 3), (2, 4), (0, -7)], host=True),
            Copy("strided", [(0, 5), (3, 2), (1, 4)], pair_gap=2, host=True),  # an array has the strides of memory on the host
            Copy("no pairs", [], host=True),
        ],
        check=check_copy_forms,
    ),
    AREA.require(
        12,
        "A call without pairs changes nothing and raises nothing.",
        [
            Copy("int64", []),
            Copy("int32", [], index="int32"),
            Copy("pool without blocks", [], geometry=NO_BLOCKS),
        ],
    ),
    AREA.require(
        13,
        "When blocks are copied, blocks may have any number of slots, and a pool any number of blocks.",
        [
            *(
                Copy(f"{blocks} blocks of {block}", [(0, blocks - 1)], geometry=_EVEN(num_blocks=blocks, block=block))
                for blocks, block in ((24, 1), (8, 3), (5, 16), (3, 48), (2, 256), (2, 512), (2, 1), (13, 1))
            ),
            Copy("one block", [(-1, 0)], geometry=_EVEN(num_blocks=1)),
        ],
    ),
    AREA.require(
        14,
        "When blocks are copied, heads may have any number of elements.",
        AREA.dims(),
    ),
    AREA.require(
        15,
        "A slot may have any number of heads, also where heads times elements is no power of two or more than a thread block holds.",
        AREA.heads(),
    ),
    AREA.require(
        16,
        "Keys and values may differ in heads, in elements, and in the slots of a block.",
        [
            *AREA.unlike(),
            *(
                Copy(f"{k} and {v} slots, {pool}", geometry=_EVEN(block=k), values_geometry=_EVEN(block=v, heads=3, dim=5), pool=pool)
                for k, v in ((4, 7), (7, 4), (1, 16))
                for pool in ("nhd", "hnd")
            ),
            Copy("4 and 7 slots, in whole vectors", geometry=_EVEN(block=4), values_geometry=_EVEN(block=7, heads=3, dim=16)),
        ],
    ),
    AREA.require(
        17,
        "A call may bring any number of pairs.",
        [
            Copy(f"N = {count}", fanned(2100, count), geometry=_EVEN(num_blocks=2100, block=1, heads=1))
            for count in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 513, 1024)
        ],
    ),
    AREA.require(
        18,
        "More pairs than a launch grid has rows are all copied.",
        [Copy(f"N = {count}", neighbours=count, geometry=_EVEN(num_blocks=131_080, block=1, heads=1, dim=2)) for count in (65_535, 65_537)],
        level=Level.EXTENDED,
    ),
    AREA.require(
        19,
        "Each pool is read and written by its own strides, whatever the order of its dimensions in memory.",
        AREA.orders(),
        [
            Copy(f"{text}, whatever its step", [(0, blocks - 1)] if (blocks := g.num_blocks) > 1 else [(-1, 0)], geometry=g, pool=ANY_STEP)
            for text, g in SINGLE_SIZES.items()
        ],
    ),
    AREA.require(
        20,
        "When blocks are copied, a pool may be part of a larger tensor: one of two halves, one layer of many, or "
        "blocks with something behind them.",
        [Copy(f"{name}, {len(pairs)} pairs", pairs, pool=name) for name in PARTS for pairs in ([(1, 4)], [(0, 5), (3, 2), (1, 4)])],
        AREA.packed(),
        functools.partial(apart, OP),
    ),
    AREA.require(
        21,
        "Pools may begin at any address that is a multiple of their element's size.",
        AREA.addresses,
        [
            Copy("rows of odd length", geometry=_EVEN(dim=5, heads=3), pool="odd address"),
            Copy("keys and values at unlike addresses", geometry=_EVEN(dim=64), pool="k and v unlike"),
        ],
    ),
    AREA.require(
        22,
        "When blocks are copied, elements of every dtype arrive bit for bit: NaN with its payload, infinities, subnormals and -0.",
        AREA.numbers(),
    ),
    AREA.require(
        23,
        "Blocks of a quantised pool are copied bit for bit, or refused with a reason.",
        [Copy(f"{dtype}, {pool}", geometry=_EVEN(dim=64, dtype=dtype), pool=pool) for dtype in QUANTISED for pool in ("nhd", "odd steps")],
    ),
    AREA.require(
        24,
        "Pairs are not changed.",
        [
            Copy("all compared"),
            Copy("with padding", [(-1, 3), (2, 4), (0, -7)]),
            Copy("int32", index="int32"),
            Copy("strided", pair_gap=2),
            Copy("in host memory", [(-5, 3), (2, 4)], host=True),
        ],
        check=check_only_written,
    ),
    AREA.require(25, "Blocks more than 2**31 and 2**32 elements into a pool are read and written.", _far, level=Level.EXTENDED),
    AREA.require(
        26,
        "Calls that differ in addresses, strides or pairs from those before them are served as if they were the first.",
        _repeated,
    ),
    AREA.require(
        27,
        "Pools and pairs that are wrong whatever they hold are refused with an error that names the argument, what came and the fix, "
        "and nothing has changed.",
        refusals(OP, Copy(""), REFUSED),
        check=check_refusal,
    ),
    AREA.together(28, "a copy", pairs.copies),
    AREA.require(
        29,
        "More pairs, slots and heads together than a launch grid has rows are all copied.",
        [
            Copy(
                f"{count} blocks of {block} slots and {heads} heads",
                neighbours=count,
                geometry=_EVEN(num_blocks=2 * count, block=block, heads=heads, dim=1, dtype="uint8"),
            )
            for count, block, heads in PRODUCTS
        ],
        level=Level.EXTENDED,
    ),
]
