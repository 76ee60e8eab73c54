"""Copying whole blocks from one pool to another: ``KVD-SWAP``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvdock_conformance.cases.copies import fanned
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, SINGLE_SIZES
from kvdock_conformance.cases.paged import in_turn
from kvdock_conformance.cases.swaps import DRAWN, Swap
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.checking.copies import check_pairs_refused
from kvdock_conformance.checking.refusals import check_refusal
from kvdock_conformance.requirement import Case
from kvdock_conformance.requirements.families import INT32_MAX, NO_BLOCKS, Area, refusals
from kvdock_conformance.requirements.latents import of_any_op

__all__ = ["REQUIREMENTS"]

OP = "swap_blocks_"
AREA = Area("SWAP", OP, Swap)
_GOOD = ((0, 5), (3, 2), (1, 1), (3, 4))
_VALUE = "ArgumentValueError"


def _readable(error: str, *cases: tuple[list[tuple[int, int]], list[str]]) -> Callable[[], Iterable[Case]]:
    """Return a function that draws calls which must raise: pairs, and what the error must say."""
    return lambda: (Swap(f"{pairs}", pairs, host=True).case(error=error, texts=[f"{OP}: ", *texts, "Fix: "]) for pairs, texts in cases)


def _repeated() -> Iterable[Case]:
    lists = ([(0, 5)], [(5, 0), (1, 4)], [(1, 5)], [(-1, 3), (2, 2)], [(3, 0)], [(4, 1)])
    yield in_turn("other pairs at each call", [Swap("", pairs) for pairs in lists])
    names = ("nhd", "hnd", "nhd / hnd", "padded blocks", "nhd", "odd address", "hnd / nhd", "padded blocks / nhd")
    for order in (names, names[:1] * 5):
        pools = [Swap("", [(number % 3, 5), (3, 4)], pool=pool) for number, pool in enumerate(order)]
        yield in_turn(f"{len({*order})} kinds of pools", pools, own_pools=True)


REQUIREMENTS = [
    AREA.require(
        1,
        "For each pair (src, dst) block dst of dst_cache holds what block src of src_cache holds, whatever other number it has there.",
        [
            Swap("one", [(0, 5)]),
            Swap("several", _GOOD),
            Swap("crosswise", [(0, 1), (1, 0)]),
            Swap("one for many", [(2, 0), (2, 2), (2, 5)]),
        ],
    ),
    AREA.require(
        2,
        "When blocks are swapped, no byte outside the destinations is written, neither in a pool nor around it.",
        [Swap(name, pool=name) for name in ("nhd", "padded slots", "padded heads", "padded blocks", "odd steps", "heads outermost")],
    ),
    AREA.require(
        3,
        "When blocks are swapped, a pair with a negative id is padding, whichever negative number it is and whatever the other id.",
        [Swap("some", [(-1, 3), (2, 3), (0, -1), (-7, -9)]), Swap("2**32 below", [(-(2**32) + 2, 4), (2, 3), (1, -(2**32) + 5)])],
        [
            Swap("beside ids beyond", [(-1, 99), (99, -1), (2, 3)]),
            Swap("all", [(-1, -1), (0, -2)]),
            Swap("none", [(-1, 0)], geometry=NO_BLOCKS),
        ],
    ),
    AREA.require(
        4,
        "A block beyond its own pool is neither read nor written: in host memory the call raises before it swaps anything and names the "
        "first such position, on a device the pair is skipped and counted.",
        [Swap(f"{pair}", [(0, 1), pair, (2, 7)], blocks=9) for pair in ((6, 3), (3, 9), (2**32 + 3, 4), (3, 2**40))],
        [Swap(f"{bad} in int32", [(0, 1), (2, bad)], index="int32") for bad in (6, INT32_MAX)],
        [Swap("fewer blocks there", [(0, 1), (5, 4), (2, 0)], blocks=4), Swap("none to read", [(0, 1)], geometry=NO_BLOCKS, blocks=3)],
    ),
    AREA.require(
        5,
        "The first and the last block of each pool are blocks like any other when blocks are swapped.",
        [
            Swap(f"{pair} of 6 and {blocks}", [pair], blocks=blocks)
            for blocks in (6, 9)
            for pair in ((0, blocks - 1), (5, 0), (5, blocks - 1))
        ],
    ),
    AREA.require(
        6,
        "When blocks are swapped, two pairs with one destination are an error wherever the host can read the pairs, and nothing is copied.",
        _readable(_VALUE, ([(0, 5), (1, 4), (2, 5)], ["block_pairs[2]", "destination 5"]), ([(-1, 0), (1, 0), (1, 0)], ["block_pairs[2]"])),
        check=check_pairs_refused,
    ),
    AREA.require(
        7,
        "When blocks are swapped, a block beyond its pool is an error wherever the host can read the pairs, which names it.",
        _readable(
            "IndexRangeError", ([(0, 1), (6, 2), (9, 9)], ["block_pairs[1, 0]", "6"]), ([(-1, 9), (2, 17)], ["block_pairs[1, 1]", "17"])
        ),
        check=check_pairs_refused,
    ),
    AREA.require(
        8,
        "When blocks are swapped, pairs are read as int32 and as int64, by the stride between them, on the device and in host memory.",
        [
            Swap(f"{i}, {gap} behind", _GOOD, index=i, pair_gap=gap, host=h)
            for i in ("int32", "int64")
            for gap in (0, 1, 2)
            for h in (False, True)
        ],
    ),
    AREA.require(9, "A swap without pairs changes nothing.", [Swap("int64", []), Swap("no blocks", [], geometry=NO_BLOCKS)]),
    AREA.require(10, "When blocks are swapped, heads may have any number of elements.", AREA.dims()),
    AREA.require(11, "When blocks are swapped, a slot may have any number of heads.", AREA.heads()),
    AREA.require(
        12,
        "Any number of pairs may be swapped.",
        [Swap(f"N = {n}", fanned(600, n), geometry=AREA.sizes(1, num_blocks=600, block=1)) for n in (1, 2, 15, 16, 17, 33, 257)],
    ),
    AREA.require(
        13,
        "When blocks are swapped, each pool has strides of its own.",
        AREA.orders(),
        [
            Swap(name, pool=name)
            for name in ("nhd / hnd", "hnd / nhd", "heads outermost / nhd", "nhd / slots outermost", "padded heads / hnd")
        ],
        [Swap(name, pool=f"{name} / nhd") for name in ("one block for all", "one slot for all", "one row")],
        [Swap(text, [(0, sizes.num_blocks - 1)], geometry=sizes, pool=ANY_STEP) for text, sizes in SINGLE_SIZES.items()],
    ),
    AREA.require(14, "When blocks are swapped, a pool may be part of a larger tensor.", [Swap(name, pool=name) for name in PARTS]),
    AREA.require(15, "When blocks are swapped, pools may begin at any address of an element.", AREA.addresses),
    AREA.require(16, "When blocks are swapped, elements of every dtype arrive bit for bit.", AREA.numbers()),
    AREA.require(
        17,
        "When blocks are swapped, their source and the pairs are not changed.",
        [Swap("padding", [(-3, 3), (2, 4)])],
        check=check_only_written,
    ),
    AREA.require(18, "Swaps that differ from those before them are served as if they were the first.", _repeated),
    AREA.require(
        19,
        "Whatever the device, each of the two pools may lie in host memory.",
        [
            Swap(f"{', '.join(on)}, {order}", [*_GOOD, (-1, 0)], pool=order, sides=on)
            for on in (("src",), ("dst",))
            for order in ("nhd", "nhd / hnd")
        ],
        [Swap(f"pairs on the host, {side}", _GOOD, host=True, sides=(side,)) for side in ("src", "dst")],
    ),
    AREA.require(
        20,
        "Pools that do not fit each other, or are one, are refused with an error that says what came and the fix, and nothing has changed.",
        refusals(
            OP,
            Swap(""),
            [
                ("one pool", _VALUE, ["src_cache: ", "copy_blocks_"], lambda _, args: {"src_cache": args["dst_cache"]}),
                ("parts of one", _VALUE, ["copy_blocks_"], lambda _, args: {"src_cache": args["dst_cache"].slice(0, 1, 6)}),
                ("other heads", _VALUE, ["dst_cache: ", "Hk=2"], lambda _, args: {"dst_cache": args["dst_cache"].slice(2, 0, 1)}),
            ],
        ),
        check=check_refusal,
    ),
    *of_any_op(OP, DRAWN),
]
