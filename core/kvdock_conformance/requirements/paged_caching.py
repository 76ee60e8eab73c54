"""Writing new tokens into a paged cache: ``KVD-WRITE``. What reads have too is in `slots`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvdock_conformance.cases import pairs, quantised
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.cases.paged import FORETOLD, Write, foretold, in_turn, shuffled
from kvdock_conformance.cases.places import beside_the_pool, far_slots, many_slots
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.checking.quantised import check_quantised
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements.families import Cases
from kvdock_conformance.requirements.slots import SlotArea

__all__ = ["OP", "REQUIREMENTS"]

OP = "paged_caching_"
_TWO_ROWS, _THREE_ROWS = range(1000, 1032), range(1000, 1048)  # elements of two or three rows, which tokens hold in turns


def _repeated() -> Iterable[Case]:
    """Return calls whose pools have the same shape, and strides of their own; and calls of other tokens into the same."""
    names = ("nhd", "hnd", "padded blocks", "nhd", "k and v unlike", "odd address", "padded slots")
    for name, order in (("other strides at each call", names), ("the same at each call", ("nhd",) * 4)):
        yield in_turn(name, [Write("", pool=pool) for pool in order], own_pools=True)
    leads = [(5,), (13,), (1,), (2, 3), (24,), (13,)]
    yield in_turn("other tokens and slots at each call", [Write("", shuffled(24, seed), lead) for seed, lead in enumerate(leads)])
    yield foretold([Write("", [slot]) for slot in FORETOLD], "slot_mapping")


def _far() -> Iterable[Case]:
    """Return writes to places far into a huge pool, and in huge steps."""
    for blocks, size in ((2**18 + 2, 2**13), (2**19 + 2, 2**13)):
        geometry = Geometry(num_blocks=blocks, block=16, hk=8, dk=64, hv=1, dv=8)
        slots = [blocks * 16 - 1, 0, blocks * 8]
        for index in ("int64", "int32"):
            name = f"{blocks} blocks of {size} elements, {index}"
            yield Write(name, slots, geometry=geometry, pool="untouched memory", index=index).case()
    steps = [Write("", [slot], geometry=geometry, pool="untouched memory") for slot in (1, 2, 3, 4, slots[0])]
    yield in_turn("a token at a time, the last far into a pool", steps)
    yield from far_slots(OP)
    yield from many_slots(OP)


AREA = SlotArea("WRITE", OP, Write)
_SENTENCES = (
    "Each token's key and value are written to the slot that slot_mapping names for it, keys to k_cache and values to v_cache.",
    "No byte outside the addressed slots is written, neither in the pool nor around it.",
    "A negative slot is padding: its token is written nowhere, whichever negative number it is.",
    "A slot beyond the pool is never written: in host memory the call raises before it writes anything and names the first such "
    "position, on a device the token is skipped and counted.",
    "The first and the last slot of the pool, and those on either side of a border between blocks, are slots like any other.",
    "Slots are read as int32 and as int64, by the strides of slot_mapping.",
    "Tokens come as [T, H, D] or as [B, S, H, D], and slot_mapping with the same leading sizes.",
    "A call without tokens changes nothing and raises nothing.",
    "Tokens with equal slots are allowed: where they hold the same, the slot holds it afterwards.",
    "Blocks may have any number of slots, and a pool any number of blocks.",
    "Heads may have any number of elements.",
    "A token may have any number of heads, also where heads times elements is no power of two or more than a thread block holds.",
    "Keys and values may differ in heads and in elements.",
    "A call may bring any number of tokens.",
    "More tokens than a launch grid has rows are all written, and more tokens and heads together.",
    "Each pool is written by its own strides, whatever the order of its dimensions in memory.",
    "A pool may be part of a larger tensor: one of two halves, one layer of many, or blocks with something behind them.",
    "Keys and values of tokens are read by their own strides, without being made contiguous first.",
    "Tensors may begin at any address that is a multiple of their element's size.",
    "Elements of every dtype arrive bit for bit: NaN with its payload, infinities, subnormals and -0.",
)
_OWN: Mapping[int, Sequence[Cases]] = {
    2: (
        [
            Write("one slot, neighbours kept", [9]),
            Write("gaps behind slots", pool="padded slots"),
            Write("gaps behind heads", pool="padded heads"),
            Write("gaps behind blocks", pool="padded blocks"),
            Write("last slot of the pool, memory behind kept", [23]),
            Write("first slot of the pool, memory before kept", [0]),
            Write("rows of odd length", geometry=AREA.sizes(1, 5)),
            Write("other layers of a pool", pool="page-first"),
        ],
    ),
    3: ([Write("rows of a batch", [0, 1, -1, 8, -1, -1, 16, 17, 18], (3, 3))],),
    6: (
        [
            Write(f"{index}, one slot for all", [5], (13,), rows="one token for all", index=index, index_order="one")
            for index in ("int32", "int64")
        ],
    ),
    9: (
        [
            Write("one slot for all", [5] * 13, rows="one token for all"),
            Write("pairs", [0, 0, 7, 7, 23, 23], rows="one token for all"),
            Write("many", [i % 3 for i in range(130)], rows="one token for all"),
            Write("one slot for all, one in memory too", [5], (13,), rows="one token for all", index_order="one"),
            Write("two slots in turns", [5, 9] * 6, values=_TWO_ROWS),
            Write("three slots in turns", [5, 1, 9] * 3, values=_THREE_ROWS),
            Write("apart from each other", [5, 2, 7, 5, 23, 0, 4, 5, 2], values=_THREE_ROWS[:16]),
            Write("rows of a batch", [5, 1, 9] * 4, (4, 3), values=_THREE_ROWS),
        ],
    ),
    17: (beside_the_pool,),
    18: (AREA.in_rows_and_batches(("one head for all", "one token for all", "values behind one token", "values of the first token")),),
}

REQUIREMENTS = [
    *AREA.requirements(_SENTENCES, _OWN, {}),
    AREA.require(
        21,
        "Tokens and slot_mapping are not changed.",
        [
            Write("all inputs compared", lead=(13,)),
            Write("with padding", [3, -1, -7, 9]),
            Write("shared among heads", rows="one head for all"),
            Write("cut out of a projection", rows="fused qkv"),
            Write("int32 slots", index="int32"),
        ],
        check=check_only_written,
    ),
    AREA.require(
        22,
        "A quantised cache holds x / scale, rounded to nearest and clamped to the range of its dtype, or is refused with a reason.",
        quantised.writes,
        check=check_quantised,
    ),
    AREA.require(23, "Places more than 2**31 and 2**32 elements into a pool are reached.", _far, level=Level.EXTENDED),
    AREA.require(
        24,
        "Calls that differ in addresses, strides, token counts or slots from those before them are served as if they were the first.",
        _repeated,
    ),
    AREA.together(25, "a write", pairs.slot_calls(OP)),
]
