"""Reading tokens from a paged cache: ``KVD-GATHER``. What writes have too is in `slots`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvdock_conformance.cases import pairs, quantised
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.layouts import READ_POOLS, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS
from kvdock_conformance.cases.paged import FORETOLD, Gather, foretold, in_turn, shuffled
from kvdock_conformance.cases.places import far_slots, many_slots
from kvdock_conformance.checking import gathers
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.checking.refusals import check_refusal
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements.families import NO_BLOCKS, Cases, Refusal, refusals
from kvdock_conformance.requirements.slots import SlotArea

__all__ = ["OP", "REQUIREMENTS"]

OP = "gather_paged"
_UNLIKE = Geometry(hk=2, dk=8, hv=3, dv=4)


def _repeated() -> Iterable[Case]:
    """Return calls one after the other, which differ in one thing."""
    names = ("nhd", "hnd", "padded blocks", "nhd", "k and v unlike", "one slot for all")
    for name, order in (("other pools at each call", names), ("the same at each call", ("nhd",) * 4)):
        yield in_turn(name, [Gather("", shuffled(24, seed), pool=pool) for seed, pool in enumerate(order)], own_pools=True)
    orders = ("contiguous", "padded heads", "every other token", "contiguous")
    yield in_turn("other outputs at each call", [Gather("", rows=order) for order in orders])
    leads = ((5,), (13,), (2, 3), (24,), (13,))
    yield in_turn("other tokens and slots at each call", [Gather("", shuffled(24, len(lead)), lead) for lead in leads])
    yield foretold([Gather("", [slot]) for slot in FORETOLD], "slot_mapping")
    yield in_turn("padding now and then", [Gather("", slots) for slots in ([1, 2], [-1, 2], [1, -1], [-1, -1], [2, 1])])


def _far() -> Iterable[Case]:
    """Return reads of the few places of a huge pool that are not zero."""
    geometry = Geometry(num_blocks=2**19 + 2, block=16, hk=8, dk=64, hv=1, dv=8)
    for index in ("int64", "int32"):
        slots = [geometry.capacity - 1, 5, geometry.capacity // 2]
        gather = Gather("", slots, geometry=geometry, pool="untouched memory", index=index)
        drawing = Drawing()
        pools, places = gather.pools(drawing), [(2**19 + 1, 15), (0, 5), (2**18 + 1, 0)]
        filled = [
            attrs.evolve(pool.select(0, block).select(0, offset), values={"first": 1 + 1000 * number, "step": 1})
            for pool in pools
            for number, (block, offset) in enumerate(places)
        ]
        steps = [attrs.evolve(gather, slots=[slot]) for slot in (5, 5, 5, 5, geometry.capacity - 1)]
        data = drawing.case(*(each.call(drawing, pools) for each in (gather, *steps)), places=[view.spec() for view in filled])
        yield Case(f"2**19 + 2 blocks of 2**13 elements, {index}", data)
    yield from far_slots(OP)
    yield from many_slots(OP)


_TYPE, _VALUE = "ArgumentTypeError", "ArgumentValueError"
REFUSED: Sequence[Refusal] = (
    ("an output of another dtype", _TYPE, ["v_out: ", "bfloat16", "float32"], lambda d, _: {"v_out": d.tensor("float32", (3, 2, 8))}),
    ("an output of fewer tokens", _VALUE, ["k_out: ", "T=3", "[2, 2, 8]"], lambda _, a: {"k_out": a["k_out"].slice(0, 0, 2)}),
    ("an output of fewer heads", _VALUE, ["k_out: ", "Hk=2", "[3, 1, 8]"], lambda _, a: {"k_out": a["k_out"].slice(1, 0, 1)}),
    ("one output only", _TYPE, ["out: ", "a pair", "tuple"], lambda _, a: {"v_out": None}),
)
"""What `kvdock_conformance.cases.mistakes` does not have of every op, or with less in the text."""

AREA = SlotArea("GATHER", OP, Gather, tokens="outputs", batch="output")
_SENTENCES = (
    "Each slot's key and value are read to the token's place in the outputs, keys from k_cache and values from v_cache.",
    "No byte outside the outputs is written, neither between their rows nor around them.",
    "A negative slot is padding: it reads as zeros, whichever negative number it is.",
    "A slot beyond the pool is never read: in host memory the call raises before it writes anything and names the first such "
    "position, on a device it reads as zeros.",
    "When tokens are read, the first and the last slot of the pool, and those on either side of a border between "
    "blocks, are slots like any other.",
    "When tokens are read, slots are read as int32 and as int64, by the strides of slot_mapping.",
    "Slots come as [T] or as [B, S], and outputs with the same leading sizes.",
    "A call without slots raises nothing, changes nothing, and returns tensors without tokens.",
    "A slot may be read by any number of tokens.",
    "When tokens are read, blocks may have any number of slots, and a pool any number of blocks.",
    "When tokens are read, heads may have any number of elements.",
    "When tokens are read, a token may have any number of heads, also where heads times elements is no power of "
    "two or more than a thread block holds.",
    "When tokens are read, keys and values may differ in heads and in elements.",
    "A call may ask for any number of tokens.",
    "More tokens than a launch grid has rows are all read, and more tokens and heads together.",
    "Each pool is read by its own strides, whatever the order of its dimensions in memory.",
    "When tokens are read, a pool may be part of a larger tensor: one of two halves, one layer of many, or blocks "
    "with something behind them.",
    "Each output is written by its own strides.",
    "When tokens are read, tensors may begin at any address that is a multiple of their element's size.",
    "When tokens are read, elements of every dtype arrive bit for bit: NaN with its payload, infinities, subnormals and -0.",
)
_OWN: Mapping[int, Sequence[Cases]] = {
    2: (
        [
            Gather("gaps behind tokens", rows="padded tokens"),
            Gather("gaps behind heads", rows="padded heads"),
            Gather("gaps behind heads, padding", [-1, 5, -1], rows="padded heads"),
            Gather("tokens in between kept", rows="every other token"),
            Gather("the rest of a projection kept", rows="fused qkv"),
            Gather("the rest of a projection kept, padding", [-1] * 4, rows="fused qkv"),
            Gather("rows of odd length", geometry=AREA.sizes(1, 5)),
            Gather("one row", [9], geometry=AREA.sizes(1, 3)),
        ],
    ),
    3: (
        [
            Gather("rows of a batch", [0, 1, -1, 8, -1, -1, 16, 17, 18], (3, 3), rows="[B, H, q, D]"),
            Gather("outputs with gaps", [-1, 3, -1, -1, 0], rows="padded heads"),
        ],
    ),
    6: (
        [
            Gather(f"{index}, one slot for {text}, {slot}", [slot], lead, index=index, index_order="one")
            for index in ("int32", "int64")
            for slot in (7, -1, 24)
            for text, lead in (("all", (13,)), ("a batch", (3, 4)))
        ],
    ),
    7: ([Gather("rows of every other token", lead=(4, 3), rows="every other token")],),
    8: ([Gather("keys and values of other sizes", [], (0,), geometry=_UNLIKE)],),
    9: (
        [
            Gather("one slot for all", [5] * 13),
            Gather("pairs", [0, 0, 7, 7, 23, 23]),
            Gather("apart from each other", [5, 1, 5, -1, 2, 5]),
            Gather("many", [i % 3 for i in range(130)]),
            Gather("rows of a batch", [1, 2, 3, 1, 2, 3], (2, 3)),
        ],
    ),
    19: ([Gather("both, with padding", [-1, 5, 6], pool="odd address", rows="odd address", geometry=AREA.sizes(dim=64))],),
    20: ([Gather("special values beside padding", [3, -1, 5], values=SPECIAL_BITS["bfloat16"])],),
}

REQUIREMENTS = [
    *AREA.requirements(_SENTENCES, _OWN, {8: {"check": gathers.check_returned}}),
    AREA.require(
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
        check=check_only_written,
    ),
    AREA.require(
        22,
        "A pool may be expanded, since it is only read: blocks, slots or heads of it may be one in memory.",
        [
            Gather(f"{name}, {text}", slots, rows=order, pool=name)
            for name in [name for name in READ_POOLS if name.startswith("one ") or "expanded" in name]
            for text, slots, order in (
                ("every slot", range(24), "contiguous"),
                ("some slots", [5, -1, 0, 23], "padded heads"),
                ("one slot", [13], "contiguous"),
            )
        ],
    ),
    AREA.require(
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
            Gather("keys and values of other sizes", geometry=_UNLIKE),
            Gather("pool without blocks", [-1, -1], geometry=NO_BLOCKS),
            *(Gather(dtype, geometry=AREA.sizes(dtype=dtype), values=bits) for dtype, bits in SPECIAL_BITS.items()),
        ],
        check=gathers.check_returned,
    ),
    AREA.require(
        24,
        "The tensors that out= gives come back themselves, as a pair.",
        [
            Gather("a row"),
            Gather("a batch", lead=(3, 4), rows="[B, H, q, D]"),
            Gather("outputs with gaps", rows="odd steps"),
            Gather("no tokens", [], (0,)),
        ],
        check=gathers.check_returns_out,
    ),
    AREA.require(25, "Places more than 2**31 and 2**32 elements into a pool are read.", _far, level=Level.EXTENDED),
    AREA.require(
        26,
        "When tokens are read, calls that differ in addresses, strides, token counts or slots from those before them "
        "are served as if they were the first.",
        _repeated,
    ),
    AREA.require(27, "What new tensors hold stays as it is when later calls return others.", _repeated, check=gathers.check_returned),
    AREA.require(
        28,
        "A quantised pool reads as its elements times their scale, or is refused with a reason.",
        quantised.reads,
        check=gathers.check_dequantised,
    ),
    AREA.require(
        29,
        "Arguments that are wrong whatever they hold are refused with an error that names the argument, what came and how to fix it, "
        "and nothing has changed.",
        refusals(OP, Gather("", [4, -1, 23]), REFUSED),
        check=check_refusal,
    ),
    AREA.together(30, "a read", pairs.slot_calls(OP)),
]
