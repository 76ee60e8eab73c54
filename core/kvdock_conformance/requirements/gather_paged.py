"""Reading tokens from a paged cache: ``KVD-GATHER``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from kvdock_conformance.cases import quantised
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.gathers import READ_POOLS, Gather
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, SINGLE_SIZES, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS
from kvdock_conformance.cases.paged import shuffled
from kvdock_conformance.cases.places import far_reads
from kvdock_conformance.checking.gathers import (
    check_dequantised,
    check_gather,
    check_gather_inputs,
    check_returned,
    check_returns_out,
)
from kvdock_conformance.checking.refusals import check_refusal
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["OP", "REQUIREMENTS"]

OP = "gather_paged"
_EVEN = Geometry.even
_BIG = _EVEN(num_blocks=96, block=16, heads=1)
_NO_BLOCKS = Geometry(num_blocks=0)
_INT32_MAX, _INT32_MIN = 2**31 - 1, -(2**31)


def _require(
    number: int,
    sentence: str,
    cases: Iterable[Gather] | Callable[[], Iterable[Case]],
    level: Level = Level.CORE,
    check: Check = check_gather,
) -> Requirement:
    """Return a requirement of this area whose cases are reads, or what a function returns."""
    made = cases if callable(cases) else _cases(tuple(cases))
    return Requirement(f"KVD-GATHER-{number:03}", sentence, OP, check, made, level, SERVED)


def _cases(gathers: Sequence[Gather]) -> Callable[[], Iterable[Case]]:
    """Return a function that draws reads as cases."""
    return lambda: (gather.case() for gather in gathers)


def _repeated() -> Iterable[Case]:
    """Return calls one after the other, which differ in one thing."""
    names = ("nhd", "hnd", "padded blocks", "nhd", "k and v unlike", "one slot for all")
    for name, order in (("other pools at each call", names), ("the same at each call", ("nhd",) * 4)):
        drawing = Drawing()
        gathers = [Gather("", shuffled(24, seed), pool=pool) for seed, pool in enumerate(order)]
        yield Case(name, drawing.case(*[gather.call(drawing, gather.pools(drawing)) for gather in gathers]))
    for name, changing in (
        ("other outputs at each call", [Gather("", out=out) for out in ("contiguous", "padded heads", "every other token", "contiguous")]),
        (
            "other tokens and slots at each call",
            [Gather("", shuffled(24, len(lead)), lead) for lead in ((5,), (13,), (2, 3), (24,), (13,))],
        ),
        ("padding now and then", [Gather("", slots) for slots in ([1, 2], [-1, 2], [1, -1], [-1, -1], [2, 1])]),
    ):
        drawing = Drawing()
        pools = changing[0].pools(drawing)
        yield Case(name, drawing.case(*[gather.call(drawing, pools) for gather in changing]))


def _again(slots: Sequence[int], name: str) -> Iterable[Case]:
    """Return calls of as many good slots, which differ in addresses alone, and then one with these slots."""
    drawing, first = Drawing(), Gather("")
    pools = first.pools(drawing)
    lists = [*(shuffled(24, seed) for seed in range(4)), slots, shuffled(24, 4)]
    yield Case(name, drawing.case(*[Gather("", values, (len(slots),)).call(drawing, pools) for values in lists]))


def _with(gathers: Iterable[Gather], *makers: Callable[[], Iterable[Case]]) -> Callable[[], Iterable[Case]]:
    """Return a function that draws reads as cases, and then makes those that are drawn by hand."""
    listed = tuple(gathers)
    return lambda: (*(gather.case() for gather in listed), *(case for make in makers for case in make()))


def _far() -> Iterable[Case]:
    """Return a read of the few places of a huge pool that are not zero."""
    geometry = Geometry(num_blocks=2**19 + 2, block=16, hk=8, dk=64, hv=1, dv=8)
    gather = Gather("", [geometry.capacity - 1, 5, geometry.capacity // 2], geometry=geometry, pool="untouched memory")
    drawing = Drawing()
    pools, places = gather.pools(drawing), [(2**19 + 1, 15), (0, 5), (2**18 + 1, 0)]
    filled = [
        attrs.evolve(pool.select(0, block).select(0, offset), values={"first": 1 + 1000 * number, "step": 1})
        for pool in pools
        for number, (block, offset) in enumerate(places)
    ]
    yield Case("2**19 + 2 blocks of 2**13 elements", drawing.case(gather.call(drawing, pools), places=[view.spec() for view in filled]))
    yield from far_reads()


Change = Callable[[Drawing, dict[str, View]], dict[str, View | None]]


def _refused() -> Iterable[Case]:
    """Return a good call with a bad one each, with the error and what it must say: the argument, what came, how to fix it."""
    for name, error, texts, change in REFUSED:
        drawing, gather = Drawing(), Gather("", [4, -1, 23])
        args = gather.args(drawing, gather.pools(drawing))
        bad = call(OP, **{**args, **change(drawing, args)})
        yield Case(name, drawing.case(call(OP, **args), bad, error=error, texts=[f"{OP}: ", *texts, "Fix: "]))


_TYPE, _VALUE = "ArgumentTypeError", "ArgumentValueError"
REFUSED: Sequence[tuple[str, str, Sequence[str], Change]] = (
    (
        "an output of another dtype",
        _TYPE,
        ["v_out: ", "bfloat16", "float32"],
        lambda drawing, _: {"v_out": drawing.tensor("float32", (3, 2, 8))},
    ),
    ("an output of fewer tokens", _VALUE, ["k_out: ", "T=3", "[2, 2, 8]"], lambda _, a: {"k_out": a["k_out"].slice(0, 0, 2)}),
    ("an output of more tokens", _VALUE, ["k_out: ", "T=3", "[4, 2, 8]"], lambda d, _: {"k_out": d.tensor("bfloat16", (4, 2, 8))}),
    ("an output of fewer heads", _VALUE, ["k_out: ", "Hk=2", "[3, 1, 8]"], lambda _, a: {"k_out": a["k_out"].slice(1, 0, 1)}),
    ("an output of a smaller dim", _VALUE, ["v_out: ", "Dv=8", "[3, 2, 4]"], lambda _, a: {"v_out": a["v_out"].slice(2, 0, 4)}),
    (
        "an output with an inner stride",
        _VALUE,
        ["k_out: ", "innermost stride of 1", "[16, 1, 2]"],
        lambda drawing, _: {"k_out": drawing.tensor("bfloat16", (3, 2, 8), order=(0, 2, 1))},
    ),
    (
        "an output that overlaps itself",
        _VALUE,
        ["v_out: ", "memory of its own", "[0, 8, 1]"],
        lambda drawing, _: {"v_out": drawing.tensor("bfloat16", (1, 2, 8)).expand((3, 2, 8))},
    ),
    ("an output within its pool", _VALUE, ["k_cache: ", "k_out"], lambda _, a: {"k_out": a["k_cache"].select(0, 2).slice(0, 0, 3)}),
    ("an output within the other pool", _VALUE, ["v_cache: ", "k_out"], lambda _, a: {"k_out": a["v_cache"].select(0, 2).slice(0, 0, 3)}),
    ("one output for both", _VALUE, ["v_out: ", "k_out"], lambda _, a: {"v_out": a["k_out"]}),
    ("one output only", _TYPE, ["out: ", "a pair", "tuple"], lambda _, a: {"v_out": None}),
    ("slots of rank 3", _VALUE, ["slot_mapping: ", "[1, 1, 3]"], lambda _, a: {"slot_mapping": a["slot_mapping"].split(0, (1, 1, 3))}),
    ("slots of floats", _TYPE, ["slot_mapping: ", "int64", "float32"], lambda d, _: {"slot_mapping": d.tensor("float32", (3,))}),
    ("a pool of rank 3", _VALUE, ["k_cache: ", "[NB, block, Hk, Dk]", "[4, 2, 8]"], lambda _, a: {"k_cache": a["k_cache"].select(0, 0)}),
    ("pools of unlike blocks", _VALUE, ["v_cache: ", "NB=6", "[5, 4, 2, 8]"], lambda _, a: {"v_cache": a["v_cache"].slice(0, 0, 5)}),
    (
        "pools of unlike dtypes",
        _TYPE,
        ["v_cache: ", "bfloat16", "float16"],
        lambda drawing, _: {"v_cache": drawing.tensor("float16", (6, 4, 2, 8)), "v_out": drawing.tensor("float16", (3, 2, 8))},
    ),
    (
        "a scale for a pool that is not quantised",
        _VALUE,
        ["k_scale: ", "None", "bfloat16"],
        lambda drawing, _: {"k_scale": drawing.tensor("float32", (), values=[0x3F800000])},
    ),
)
"""Bad input: name, class of the error, what it must say, and how good arguments are spoilt."""

REQUIREMENTS = [
    _require(
        1,
        "Each slot's key and value are read to the token's place in the outputs, keys from k_cache and values from v_cache.",
        [
            Gather("in order", range(13)),
            Gather("reversed", range(12, -1, -1)),
            Gather("random order"),
            Gather("one token", [7]),
            Gather("every slot of the pool", lead=(24,)),
            Gather("keys and values of other sizes", geometry=Geometry(hk=2, dk=8, hv=3, dv=4)),
        ],
    ),
    _require(
        2,
        "No byte outside the outputs is written, neither between their rows nor around them.",
        [
            Gather("gaps behind tokens", out="padded tokens"),
            Gather("gaps behind heads", out="padded heads"),
            Gather("gaps behind heads, padding", [-1, 5, -1], out="padded heads"),
            Gather("tokens in between kept", out="every other token"),
            Gather("the rest of a projection kept", out="fused qkv"),
            Gather("the rest of a projection kept, padding", [-1] * 4, out="fused qkv"),
            Gather("rows of odd length", geometry=_EVEN(heads=1, dim=5)),
            Gather("one row", [9], geometry=_EVEN(heads=1, dim=3)),
        ],
    ),
    _require(
        3,
        "A negative slot is padding: it reads as zeros, whichever negative number it is.",
        _with(
            [
                Gather("some -1", [3, -1, 5, -1, 8, 0]),
                Gather("all -1", [-1] * 13),
                Gather("other negatives", [-2, 4, -24, -25, 6, -1]),
                Gather("padding in front", [-1, -1, -1, *range(10)]),
                Gather("padding behind", [*range(10), -1, -1, -1]),
                Gather("smallest int64", [-(2**63), 11, -(2**62), 2, -(2**32), -(2**32) + 5]),
                Gather("smallest int32", [_INT32_MIN, 11, _INT32_MIN + 1, 2], index="int32"),
                Gather("one token", [-1]),
                Gather("rows of a batch", [0, 1, -1, 8, -1, -1, 16, 17, 18], (3, 3), out="[B, H, q, D]"),
                Gather("outputs with gaps", [-1, 3, -1, -1, 0], out="padded heads"),
                Gather("pool without blocks", [-1, -7, -1], geometry=_NO_BLOCKS),
                Gather("long, scattered", [*range(100), -1, *range(200, 300), -5, *range(400, 500)], geometry=_BIG),
            ],
            lambda: _again([3, -1, 5, -7], "padding in a call that repeats others"),
        ),
    ),
    _require(
        4,
        "A slot beyond the pool is never read: in host memory the call raises before it writes anything and names the first such "
        "position, on a device it reads as zeros.",
        _with(
            [
                Gather("capacity", [24]),
                Gather("capacity + 1", [25]),
                Gather("behind good ones", [0, 5, 24, 7, 30]),
                Gather("before good ones", [24, 0, 5]),
                Gather("beside padding", [-1, 3, 24, -1]),
                Gather("2**32 + 3", [2**32 + 3, 1]),
                Gather("2**40", [1, 2**40]),
                Gather("largest int64", [2**63 - 1]),
                Gather("largest int32", [2, _INT32_MAX], index="int32"),
                Gather("second row of a batch", [0, 1, 2, 3, 99, 5], (2, 3)),
                Gather("in a pool with gaps", [2, 24], pool="padded blocks"),
                Gather("in a pool without blocks", [-1, 0], geometry=_NO_BLOCKS),
                Gather("behind many good ones", [*range(300), 96 * 16], geometry=_BIG),
            ],
            lambda: _again([3, 24, 5, 99], "in a call that repeats others"),
        ),
    ),
    _require(
        5,
        "When tokens are read, the first and the last slot of the pool, and those on either side of a border between "
        "blocks, are slots like any other.",
        [
            Gather("first of the pool", [0]),
            Gather("last of the pool", [23]),
            Gather("across a border", [3, 4]),
            Gather("last of each block", range(3, 24, 4)),
            Gather("first of each block", range(0, 24, 4)),
            Gather("across borders in a pool with gaps", range(2, 22), pool="padded blocks"),
            Gather("last of the pool, hnd", [23, 0], pool="hnd"),
        ],
    ),
    _require(
        6,
        "When tokens are read, slots are read as int32 and as int64, by the strides of slot_mapping.",
        [
            Gather(f"{index}, {text}", slots, lead, index=index, index_gap=gap, index_order=order)
            for index in ("int32", "int64")
            for text, gap, lead, slots, order in (
                ("dense", 0, (13,), None, "rows"),
                ("strided", 2, (13,), None, "rows"),
                ("strided batch", 1, (3, 4), None, "rows"),
                ("strided, with padding", 2, (4,), [3, -1, 9, -1], "rows"),
                ("strided, one token", 3, (1,), None, "rows"),
                ("transposed batch", 0, (3, 4), None, "columns"),
                ("rows of a longer batch", 0, (3, 4), None, "longer rows"),
                ("one slot for all", 0, (13,), [7], "one"),
                ("one slot for a batch", 0, (3, 4), [7], "one"),
            )
        ],
    ),
    _require(
        7,
        "Slots come as [T] or as [B, S], and outputs with the same leading sizes.",
        [
            Gather("one row", lead=(1, 13)),
            Gather("one token in each row", lead=(13, 1)),
            Gather("three rows", lead=(3, 4)),
            Gather("rows of a transposed output", lead=(3, 4), out="[B, H, q, D]"),
            Gather("rows of a fused output", lead=(2, 5), out="fused qkv"),
            Gather("rows with gaps", lead=(4, 3), out="padded tokens"),
            Gather("rows of every other token", lead=(4, 3), out="every other token"),
        ],
    ),
    _require(
        8,
        "A call without slots raises nothing, changes nothing, and returns tensors without tokens.",
        [
            Gather("T = 0", [], (0,)),
            Gather("B = 0", [], (0, 4)),
            Gather("S = 0", [], (3, 0)),
            Gather("int32", [], (0,), index="int32"),
            Gather("keys and values of other sizes", [], (0,), geometry=Geometry(hk=2, dk=8, hv=3, dv=4)),
            Gather("pool without blocks", [], (0,), geometry=_NO_BLOCKS),
        ],
        check=check_returned,
    ),
    _require(
        9,
        "A slot may be read by any number of tokens.",
        [
            Gather("one slot for all", [5] * 13),
            Gather("pairs", [0, 0, 7, 7, 23, 23]),
            Gather("apart from each other", [5, 1, 5, -1, 2, 5]),
            Gather("many", [i % 3 for i in range(60)]),
            Gather("rows of a batch", [1, 2, 3, 1, 2, 3], (2, 3)),
        ],
    ),
    _require(
        10,
        "When tokens are read, blocks may have any number of slots, and a pool any number of blocks.",
        [
            Gather(f"{blocks} blocks of {block}", geometry=_EVEN(num_blocks=blocks, block=block))
            for blocks, block in ((24, 1), (8, 3), (5, 16), (3, 48), (2, 256), (2, 512), (1, 16), (1, 13), (13, 1))
        ],
    ),
    _require(
        11,
        "When tokens are read, heads may have any number of elements.",
        [Gather(f"D = {dim}", geometry=_EVEN(dim=dim)) for dim in (1, 2, 3, 46, 64, 80, 96, 100, 128, 192, 256, 576)],
    ),
    _require(
        12,
        "When tokens are read, a token may have any number of heads, also where heads times elements is no power of "
        "two or more than a thread block holds.",
        [
            Gather(f"{heads} x {dim}", geometry=_EVEN(heads=heads, dim=dim))
            for heads, dim in ((1, 64), (3, 64), (5, 80), (8, 128), (9, 128), (17, 64), (32, 128), (129, 8))
        ],
    ),
    _require(
        13,
        "When tokens are read, keys and values may differ in heads and in elements.",
        [
            Gather(f"{hk} x {dk} and {hv} x {dv}", geometry=Geometry(hk=hk, dk=dk, hv=hv, dv=dv))
            for hk, dk, hv, dv in ((2, 192, 2, 128), (1, 576, 1, 512), (4, 8, 2, 8), (2, 8, 4, 8), (1, 16, 3, 24), (2, 1, 1, 2))
        ],
    ),
    _require(
        14,
        "A call may ask for any number of tokens.",
        [Gather(f"T = {count}", lead=(count,), geometry=_BIG) for count in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 513, 1024)],
    ),
    _require(
        15,
        "More tokens than a launch grid has rows are all read.",
        [
            Gather(f"T = {count}", lead=(count,), geometry=_EVEN(num_blocks=4200, block=16, heads=1, dim=2))
            for count in (65_535, 65_536, 65_537)
        ],
        Level.EXTENDED,
    ),
    _require(
        16,
        "Each pool is read by its own strides, whatever the order of its dimensions in memory.",
        [
            Gather(name, pool=name)
            for name in (
                *("nhd", "hnd", "heads outermost", "slots outermost", "padded slots", "padded heads", "odd steps"),
                *("k and v unlike", "k and v unlike, in whole vectors"),
            )
        ]
        + [Gather(f"{text}, whatever its step", geometry=sizes, pool=ANY_STEP) for text, sizes in SINGLE_SIZES.items()],
    ),
    _require(
        17,
        "When tokens are read, a pool may be part of a larger tensor: one of two halves, one layer of many, or blocks "
        "with something behind them.",
        [Gather(f"{name}, {count} tokens", lead=(count,), pool=name) for name in PARTS for count in (2, 13)],
    ),
    _require(
        18,
        "Each output is written by its own strides.",
        [
            Gather(f"{name}, {'batch' if len(lead) == 2 else 'row'}", lead=lead, out=name)
            for name in ("fused qkv", "[B, H, q, D]", "every other token", "padded tokens", "padded heads", "odd steps")
            for lead in ((13,), (2, 6))
        ]
        + [Gather(f"{text}, whatever its step", geometry=sizes, out=ANY_STEP) for text, sizes in SINGLE_SIZES.items()]
        + [Gather(f"{text}, whatever its step", lead=lead, out=ANY_STEP) for text, lead in (("one token", (1,)), ("one row", (1, 5)))],
    ),
    _require(
        19,
        "When tokens are read, tensors may begin at any address that is a multiple of their element's size.",
        [
            *(Gather(f"pool at an {name}", pool=name) for name in ("odd address", "even address in an odd storage")),
            *(Gather(f"outputs at an {name}", out=name) for name in ("odd address", "even address in an odd storage")),
            Gather("both", pool="odd address", out="odd address", geometry=_EVEN(dim=64)),
            Gather("both, float32", pool="odd address", out="odd address", geometry=_EVEN(dim=64, dtype="float32")),
            Gather("both, with padding", [-1, 5, 6], pool="odd address", out="odd address", geometry=_EVEN(dim=64)),
        ],
    ),
    _require(
        20,
        "When tokens are read, elements of every dtype arrive bit for bit: NaN with its payload, infinities, subnormals and -0.",
        [
            *(Gather(f"{dtype}, random bits", geometry=_EVEN(dim=64, dtype=dtype), lead=(24,)) for dtype in SPECIAL_BITS),
            *(Gather(f"{dtype}, special values", geometry=_EVEN(dtype=dtype), values=bits) for dtype, bits in SPECIAL_BITS.items()),
            Gather("special values beside padding", [3, -1, 5], values=SPECIAL_BITS["bfloat16"]),
        ],
    ),
    _require(
        21,
        "Pools and slot_mapping are not changed.",
        [
            Gather("all inputs compared"),
            Gather("with padding", [3, -1, -7, 9]),
            Gather("one slot for all", pool="one slot for all"),
            Gather("halves", pool="halves [NB, 2, ...]"),
            Gather("int32 slots", index="int32"),
            Gather("strided slots with padding", [3, -1, -7, 9], index_gap=2),
        ],
        check=check_gather_inputs,
    ),
    _require(
        22,
        "A pool may be expanded, since it is only read: blocks, slots or heads of it may be one in memory.",
        [
            Gather(f"{name}, {text}", slots, out=out, pool=name)
            for name in [name for name in READ_POOLS if name.startswith("one ") or "expanded" in name]
            for text, slots, out in (
                ("every slot", range(24), "contiguous"),
                ("some slots", [5, -1, 0, 23], "padded heads"),
                ("one slot", [13], "contiguous"),
            )
        ],
    ),
    _require(
        23,
        "Without out= new tensors come back, in shape, dtype and device as the outputs would be, which hold what is read and share "
        "memory with nothing.",
        [
            Gather("a row"),
            Gather("a batch", lead=(3, 4)),
            Gather("one token", [7]),
            Gather("consecutive slots", range(4, 12)),
            Gather("a whole block", range(8, 12)),
            Gather("every slot in order", range(24)),
            Gather("some padding", [3, -1, 5, -1]),
            Gather("padding only", [-1, -2, -(2**31)]),
            Gather("beyond the pool", [3, -1, 24]),
            Gather("int32", index="int32"),
            Gather("hnd", pool="hnd"),
            Gather("padded blocks", pool="padded blocks"),
            Gather("one slot for all", pool="one slot for all"),
            Gather("keys and values of other sizes", geometry=Geometry(hk=2, dk=8, hv=3, dv=4)),
            Gather("pool without blocks", [-1, -1], geometry=_NO_BLOCKS),
            *(Gather(dtype, geometry=_EVEN(dtype=dtype), values=bits) for dtype, bits in SPECIAL_BITS.items()),
        ],
        check=check_returned,
    ),
    _require(
        24,
        "The tensors that out= gives come back themselves, as a pair.",
        [
            Gather("a row"),
            Gather("a batch", lead=(3, 4), out="[B, H, q, D]"),
            Gather("outputs with gaps", out="odd steps"),
            Gather("no tokens", [], (0,)),
        ],
        check=check_returns_out,
    ),
    _require(25, "Places more than 2**31 and 2**32 elements into a pool are read.", _far, Level.EXTENDED),
    _require(
        26,
        "When tokens are read, calls that differ in addresses, strides, token counts or slots from those before them "
        "are served as if they were the first.",
        _repeated,
    ),
    _require(
        27,
        "What new tensors hold stays as it is when later calls return others.",
        _repeated,
        check=check_returned,
    ),
    _require(
        28,
        "A quantised pool reads as its elements times their scale, or is refused with a reason.",
        quantised.reads,
        check=check_dequantised,
    ),
    _require(
        29,
        "Arguments that are wrong whatever they hold are refused with an error that names the argument, what came and how to fix it, "
        "and nothing has changed.",
        _refused,
        check=check_refusal,
    ),
]
