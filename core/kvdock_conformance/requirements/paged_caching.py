"""Writing new tokens into a paged cache: ``KVD-WRITE``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdock_conformance.cases import quantised
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, POOLS, SINGLE_SIZES, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS
from kvdock_conformance.cases.paged import Write, shuffled
from kvdock_conformance.cases.places import beside_the_pool, far_writes
from kvdock_conformance.checking.calls import check_calls, check_inputs
from kvdock_conformance.checking.quantised import check_quantised
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.checking.target import Target
from kvdock_conformance.reference import paged_caching_
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["OP", "REQUIREMENTS", "check_write", "check_write_inputs", "slot_name"]

OP = "paged_caching_"
_EVEN = Geometry.even
_BIG = _EVEN(num_blocks=96, block=16, heads=1)
_NO_BLOCKS = Geometry(num_blocks=0)
_TWO_ROWS, _THREE_ROWS = range(1000, 1032), range(1000, 1048)  # elements of two or three rows, which tokens hold in turns
_INT32_MAX, _INT32_MIN = 2**31 - 1, -(2**31)


def slot_name(place: Sequence[int]) -> str:
    """Return how an error names a token's slot: ``slot_mapping[0, 3]``."""
    return f"slot_mapping{list(place)}"


def check_write(target: Target, data: Mapping[str, Any]) -> None:
    """Check writes against the reference."""
    check_calls(target, data, paged_caching_, slot_name)


def check_write_inputs(target: Target, data: Mapping[str, Any]) -> None:
    """Check that what is written is not changed itself."""
    check_inputs(target, data, ("k_cache", "v_cache"))


def _require(
    number: int, sentence: str, cases: Iterable[Write] | Callable[[], Iterable[Case]], level: Level = Level.CORE, check: Check = check_write
) -> Requirement:
    made = cases if callable(cases) else _cases(tuple(cases))
    return Requirement(f"KVD-WRITE-{number:03}", sentence, OP, check, made, level, SERVED)


def _cases(writes: Sequence[Write]) -> Callable[[], Iterable[Case]]:
    return lambda: (write.case() for write in writes)


def _with(writes: Iterable[Write], *makers: Callable[[], Iterable[Case]]) -> Callable[[], Iterable[Case]]:
    listed = tuple(writes)
    return lambda: (*(write.case() for write in listed), *(case for make in makers for case in make()))


def _again(slots: Sequence[int], name: str) -> Iterable[Case]:
    """Return calls of as many good slots, which differ in addresses alone, and then one with these slots."""
    drawing, first = Drawing(), Write("")
    pools = POOLS["nhd"](drawing, first.geometry)
    lists = [*(shuffled(24, seed) for seed in range(4)), slots, shuffled(24, 4)]
    yield Case(name, drawing.case(*[Write("", values, lead=(len(slots),)).call(drawing, pools) for values in lists]))


def _repeated() -> Iterable[Case]:
    """Return calls whose pools have the same shape, and strides of their own."""
    names = ("nhd", "hnd", "padded blocks", "nhd", "k and v unlike", "odd address", "padded slots")
    for name, order in (("other strides at each call", names), ("the same at each call", ("nhd",) * 4)):
        drawing, write = Drawing(), Write("")
        yield Case(name, drawing.case(*[write.call(drawing, POOLS[pool](drawing, write.geometry)) for pool in order]))
    drawing, write = Drawing(), Write("")
    pools = POOLS["nhd"](drawing, write.geometry)
    changing = [Write("", lead=lead, slots=shuffled(24, seed)) for seed, lead in enumerate([(5,), (13,), (1,), (2, 3), (24,), (13,)])]
    yield Case("other tokens and slots at each call", drawing.case(*[write.call(drawing, pools) for write in changing]))


REQUIREMENTS = [
    _require(
        1,
        "Each token's key and value are written to the slot that slot_mapping names for it, keys to k_cache and values to v_cache.",
        [
            Write("in order", range(13)),
            Write("reversed", range(12, -1, -1)),
            Write("random order"),
            Write("one token", [7]),
            Write("every slot of the pool", lead=(24,)),
            Write("keys and values of other sizes", geometry=Geometry(hk=2, dk=8, hv=3, dv=4)),
        ],
    ),
    _require(
        2,
        "No byte outside the addressed slots is written, neither in the pool nor around it.",
        [
            Write("one slot, neighbours kept", [9]),
            Write("gaps behind slots", pool="padded slots"),
            Write("gaps behind heads", pool="padded heads"),
            Write("gaps behind blocks", pool="padded blocks"),
            Write("last slot of the pool, memory behind kept", [23]),
            Write("first slot of the pool, memory before kept", [0]),
            Write("rows of odd length", geometry=_EVEN(heads=1, dim=5)),
            Write("other layers of a pool", pool="page-first"),
        ],
    ),
    _require(
        3,
        "A negative slot is padding: its token is written nowhere, whichever negative number it is.",
        _with(
            [
                Write("some -1", [3, -1, 5, -1, 8, 0]),
                Write("all -1", [-1] * 13),
                Write("other negatives", [-2, 4, -24, -25, 6, -1]),
                Write("padding in front", [-1, -1, -1, *range(10)]),
                Write("padding behind", [*range(10), -1, -1, -1]),
                Write("smallest int64", [-(2**63), 11, -(2**62), 2, -(2**32), -(2**32) + 5], lead=(6,)),
                Write("smallest int32", [_INT32_MIN, 11, _INT32_MIN + 1, 2], index="int32"),
                Write("one token", [-1]),
                Write("rows of a batch", [0, 1, -1, 8, -1, -1, 16, 17, 18], lead=(3, 3)),
                Write("pool without blocks", [-1, -7, -1], geometry=_NO_BLOCKS),
                Write("long, scattered", [*range(100), -1, *range(200, 300), -5, *range(400, 500)], lead=(302,), geometry=_BIG),
            ],
            lambda: _again([3, -1, 5, -7], "padding in a call that repeats others"),
        ),
    ),
    _require(
        4,
        "A slot beyond the pool is never written: in host memory the call raises before it writes anything and names the first such "
        "position, on a device the token is skipped and counted.",
        _with(
            [
                Write("capacity", [24]),
                Write("capacity + 1", [25]),
                Write("behind good ones", [0, 5, 24, 7, 30]),
                Write("before good ones", [24, 0, 5]),
                Write("beside padding", [-1, 3, 24, -1]),
                Write("2**32 + 3", [2**32 + 3, 1], lead=(2,)),
                Write("2**40", [1, 2**40], lead=(2,)),
                Write("largest int64", [2**63 - 1], lead=(1,)),
                Write("largest int32", [2, _INT32_MAX], index="int32"),
                Write("second row of a batch", [0, 1, 2, 3, 99, 5], lead=(2, 3)),
                Write("in a pool with gaps", [2, 24], pool="padded blocks"),
                Write("in a pool without blocks", [-1, 0], geometry=_NO_BLOCKS),
                Write("behind many good ones", [*range(300), 96 * 16], lead=(301,), geometry=_BIG),
            ],
            lambda: _again([3, 24, 5, 99], "in a call that repeats others"),
        ),
    ),
    _require(
        5,
        "The first and the last slot of the pool, and those on either side of a border between blocks, are slots like any other.",
        [
            Write("first of the pool", [0]),
            Write("last of the pool", [23]),
            Write("across a border", [3, 4]),
            Write("last of each block", range(3, 24, 4)),
            Write("first of each block", range(0, 24, 4)),
            Write("across borders in a pool with gaps", range(2, 22), pool="padded blocks"),
            Write("last of the pool, hnd", [23, 0], pool="hnd"),
        ],
    ),
    _require(
        6,
        "Slots are read as int32 and as int64, by the strides of slot_mapping.",
        [
            Write(f"{index}, {text}", slots, lead, index=index, index_gap=gap, index_order=order)
            for index in ("int32", "int64")
            for text, gap, lead, slots, order in (
                ("dense", 0, (13,), None, "rows"),
                ("strided", 2, (13,), None, "rows"),
                ("strided batch", 1, (3, 4), None, "rows"),
                ("strided, one token", 3, (1,), None, "rows"),
                ("transposed batch", 0, (3, 4), None, "columns"),
                ("rows of a longer batch", 0, (3, 4), None, "longer rows"),
                ("two tokens of a longer batch", 0, (2, 1), None, "longer rows"),
            )
        ],
    ),
    _require(
        7,
        "Tokens come as [T, H, D] or as [B, S, H, D], and slot_mapping with the same leading sizes.",
        [
            Write("one row", lead=(1, 13)),
            Write("one token in each row", lead=(13, 1)),
            Write("three rows", lead=(3, 4)),
            Write("rows of a transposed projection", lead=(3, 4), source="[B, H, q, D]"),
            Write("rows of a fused projection", lead=(2, 5), source="fused qkv"),
            Write("rows with gaps", lead=(4, 3), source="padded tokens"),
        ],
    ),
    _require(
        8,
        "A call without tokens changes nothing and raises nothing.",
        [
            Write("T = 0", [], lead=(0,)),
            Write("B = 0", [], lead=(0, 4)),
            Write("S = 0", [], lead=(3, 0)),
            Write("int32", [], lead=(0,), index="int32"),
            Write("pool without blocks", [], lead=(0,), geometry=_NO_BLOCKS),
        ],
    ),
    _require(
        9,
        "Tokens with equal slots are allowed: where they hold the same, the slot holds it afterwards.",
        [
            Write("one slot for all", [5] * 13, source="one token for all"),
            Write("pairs", [0, 0, 7, 7, 23, 23], source="one token for all"),
            Write("many", [i % 3 for i in range(60)], source="one token for all"),
            Write("one slot for all, one in memory too", [5], lead=(13,), source="one token for all", index_order="one"),
            Write("two slots in turns", [5, 9] * 6, values=_TWO_ROWS),
            Write("three slots in turns", [5, 1, 9] * 3, values=_THREE_ROWS),
            Write("apart from each other", [5, 2, 7, 5, 23, 0, 4, 5, 2], values=_THREE_ROWS[:16]),
            Write("rows of a batch", [5, 1, 9] * 4, lead=(4, 3), values=_THREE_ROWS),
        ],
    ),
    _require(
        10,
        "Blocks may have any number of slots, and a pool any number of blocks.",
        [
            Write(f"{blocks} blocks of {block}", geometry=_EVEN(num_blocks=blocks, block=block))
            for blocks, block in ((24, 1), (8, 3), (5, 16), (3, 48), (2, 256), (2, 512), (1, 16), (1, 13), (13, 1))
        ],
    ),
    _require(
        11,
        "Heads may have any number of elements.",
        [Write(f"D = {dim}", geometry=_EVEN(dim=dim)) for dim in (1, 2, 3, 46, 64, 80, 96, 100, 128, 192, 256, 576)],
    ),
    _require(
        12,
        "A token may have any number of heads, also where heads times elements is no power of two or more than a thread block holds.",
        [
            Write(f"{heads} x {dim}", geometry=_EVEN(heads=heads, dim=dim))
            for heads, dim in ((1, 64), (3, 64), (5, 80), (8, 128), (9, 128), (17, 64), (32, 128), (129, 8))
        ],
    ),
    _require(
        13,
        "Keys and values may differ in heads and in elements.",
        [
            Write(f"{hk} x {dk} and {hv} x {dv}", geometry=Geometry(hk=hk, dk=dk, hv=hv, dv=dv))
            for hk, dk, hv, dv in ((2, 192, 2, 128), (1, 576, 1, 512), (4, 8, 2, 8), (2, 8, 4, 8), (1, 16, 3, 24), (2, 1, 1, 2))
        ],
    ),
    _require(
        14,
        "A call may bring any number of tokens.",
        [Write(f"T = {count}", lead=(count,), geometry=_BIG) for count in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 513, 1024)],
    ),
    _require(
        15,
        "More tokens than a launch grid has rows are all written.",
        [
            Write(f"T = {count}", lead=(count,), geometry=_EVEN(num_blocks=4200, block=16, heads=1, dim=2))
            for count in (65_535, 65_536, 65_537)
        ],
        Level.EXTENDED,
    ),
    _require(
        16,
        "Each pool is written by its own strides, whatever the order of its dimensions in memory.",
        [
            Write(name, pool=name)
            for name in (
                *("nhd", "hnd", "heads outermost", "slots outermost", "padded slots", "padded heads", "odd steps"),
                *("k and v unlike", "k and v unlike, in whole vectors"),
            )
        ]
        + [Write(f"{text}, whatever its step", geometry=sizes, pool=ANY_STEP) for text, sizes in SINGLE_SIZES.items()],
    ),
    _require(
        17,
        "A pool may be part of a larger tensor: one of two halves, one layer of many, or blocks with something behind them.",
        _with(
            [Write(f"{name}, {count} tokens", lead=(count,), pool=name) for name in PARTS for count in (2, 13)],
            beside_the_pool,
        ),
    ),
    _require(
        18,
        "Keys and values of tokens are read by their own strides, without being made contiguous first.",
        [
            Write(f"{name}, {'batch' if len(lead) == 2 else 'row'}", lead=lead, source=name)
            for name in (
                "fused qkv",
                "[B, H, q, D]",
                "every other token",
                "padded tokens",
                "padded heads",
                "odd steps",
                "one head for all",
                "one token for all",
            )
            for lead in ((13,), (2, 6))
        ]
        + [Write(f"{text}, whatever its step", geometry=sizes, source=ANY_STEP) for text, sizes in SINGLE_SIZES.items()]
        + [Write(f"{text}, whatever its step", lead=lead, source=ANY_STEP) for text, lead in (("one token", (1,)), ("one row", (1, 5)))],
    ),
    _require(
        19,
        "Tensors may begin at any address that is a multiple of their element's size.",
        [
            *(Write(f"pool at an {name}", pool=name) for name in ("odd address", "even address in an odd storage")),
            *(Write(f"tokens at an {name}", source=name) for name in ("odd address", "even address in an odd storage")),
            Write("both", pool="odd address", source="odd address", geometry=_EVEN(dim=64)),
            Write("both, float32", pool="odd address", source="odd address", geometry=_EVEN(dim=64, dtype="float32")),
        ],
    ),
    _require(
        20,
        "Elements of every dtype arrive bit for bit: NaN with its payload, infinities, subnormals and -0.",
        [
            *(Write(f"{dtype}, random bits", geometry=_EVEN(dim=64, dtype=dtype), lead=(24,)) for dtype in SPECIAL_BITS),
            *(Write(f"{dtype}, special values", geometry=_EVEN(dtype=dtype), values=bits) for dtype, bits in SPECIAL_BITS.items()),
        ],
    ),
    _require(
        21,
        "Tokens and slot_mapping are not changed.",
        [
            Write("all inputs compared", lead=(13,)),
            Write("with padding", [3, -1, -7, 9]),
            Write("shared among heads", source="one head for all"),
            Write("cut out of a projection", source="fused qkv"),
            Write("int32 slots", index="int32"),
        ],
        check=check_write_inputs,
    ),
    _require(
        22,
        "A quantised cache holds x / scale, rounded to nearest and clamped to the range of its dtype, or is refused with a reason.",
        quantised.writes,
        check=check_quantised,
    ),
    _require(
        23,
        "Places more than 2**31 and 2**32 elements into a pool are reached.",
        _with(
            [
                Write(
                    f"{blocks} blocks of {size} elements",
                    [blocks * 16 - 1, 0, blocks * 8],
                    lead=(3,),
                    geometry=Geometry(num_blocks=blocks, block=16, hk=8, dk=64, hv=1, dv=8),
                    pool="untouched memory",
                )
                for blocks, size in ((2**18 + 2, 2**13), (2**19 + 2, 2**13))
            ],
            far_writes,
        ),
        Level.EXTENDED,
    ),
    _require(
        24,
        "Calls that differ in addresses, strides, token counts or slots from those before them are served as if they were the first.",
        _repeated,
    ),
]
