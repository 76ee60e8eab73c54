"""Copying whole blocks from one pool to another: ``KVD-SWAP``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.copies import PRODUCTS, every_other, fanned, last_of_many
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, SINGLE_SIZES, Geometry
from kvdock_conformance.cases.paged import FORETOLD, foretold, in_turn
from kvdock_conformance.cases.pairs import copies
from kvdock_conformance.cases.swaps import DRAWN, Swap
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.checking.copies import check_pairs_refused
from kvdock_conformance.checking.pools_shared import check_shared_pools
from kvdock_conformance.checking.refusals import check_refusal
from kvdock_conformance.checking.repeated import check_repeated
from kvdock_conformance.requirement import Case, Check, Level
from kvdock_conformance.requirements.families import INT32_MAX, NO_BLOCKS, Area, Cases, refusals
from kvdock_conformance.requirements.latents import of_any_op
from kvdock_conformance.requirements.threads import met

__all__ = ["REQUIREMENTS", "ROLES"]

AREA = Area("SWAP", "swap_blocks_", Swap)
_GOOD = ((0, 5), (3, 2), (1, 1), (3, 4))
_VALUE, _RANGE = "ArgumentValueError", "IndexRangeError"
_DOUBLED = (([(0, 5), (1, 4), (2, 5)], ["block_pairs[2]", "destination 5"]), ([(-1, 0), (1, 0), (1, 0)], ["block_pairs[2]"]))
_BEYOND = (([(0, 1), (6, 2), (9, 9)], ["block_pairs[1, 0]", "6"]), ([(-1, 9), (2, 17)], ["block_pairs[1, 1]", "17"]))
_MANY = [(at, 1200 + at) for at in range(1100)]
_ORDERS = ("nhd / hnd", "hnd / nhd", "heads outermost / nhd", "nhd / slots outermost", "padded heads / hnd", "one row / nhd")
_APART = ("halves [2, NB, ...]", "values before keys")
"""Pools in one tensor of which neither reaches into the other."""
_UNFIT = [
    ("one pool", _VALUE, ["src_cache: ", "copy_blocks_"], lambda _, args: {"src_cache": args["dst_cache"]}),
    ("parts of one", _VALUE, ["copy_blocks_"], lambda _, args: {"src_cache": args["dst_cache"].slice(0, 1, 6)}),
    ("other heads", _VALUE, ["dst_cache: ", "Hk=2"], lambda _, args: {"dst_cache": args["dst_cache"].slice(2, 0, 1)}),
]


def _readable(error: str, listed: Iterable[tuple[list[tuple[int, int]], list[str]]], num_blocks: int = 6) -> Iterable[Case]:
    """Yield calls that must raise: pairs, and what the error must say."""
    sizes = AREA.sizes(1, 1, num_blocks=num_blocks, block=1)
    for pairs, texts in listed:
        made = Swap(f"{pairs[-3:]} of {len(pairs)}", pairs, host=True, geometry=sizes)
        yield made.case(error=error, texts=[f"{AREA.op}: ", *texts, "Fix: "])


def _repeated() -> Iterable[Case]:
    lists = ([(0, 5)], [(5, 0), (1, 4)], [(1, 5)], [(-1, 3), (2, 2)], [(3, 0)], [(4, 1)])
    yield in_turn("other pairs at each call", [Swap("", pairs) for pairs in lists])
    yield foretold([Swap("", [(block, 5)]) for block in FORETOLD], "block_pairs")
    names = ("nhd", "hnd", "nhd / hnd", "padded blocks", "nhd", "odd address", "hnd / nhd", "padded blocks / nhd")
    for order in (names, names[:1] * 5):
        pools = [Swap("", [(number % 3, 5), (3, 4)], pool=pool) for number, pool in enumerate(order)]
        yield in_turn(f"{len({*order})} kinds of pools", pools, own_pools=True)
    drawing, swaps = Drawing(), [Swap("", [(at, at + 1), (5 - at, 0)]) for at in range(5)]
    one, other = swaps[0].pools(drawing)
    ways = ((one, other), (one, other), (other, one), (other, one))
    yield Case("there and back", drawing.case(*(each.call(drawing, way) for each in swaps for way in ways)))


def _of_one_size(name: str, pairs: Sequence[tuple[int, int]], *, geometry: Geometry, **how: Any) -> Swap:
    return Swap(name, pairs, geometry=attrs.evolve(geometry, hv=geometry.hk, dv=geometry.dk), **how)


def _far() -> Iterable[Case]:
    """Return swaps to, and from, what lies further into a pool than 32 bits count bytes."""
    wide = AREA.sizes(8, 64, num_blocks=2**18 + 2, block=16)
    few = attrs.evolve(wide, num_blocks=6)
    to = Swap("", [(0, 2**18 + 1), (3, 5), (2, 2**18)], geometry=few, pool="nhd / untouched memory", blocks=2**18 + 2)
    yield Case("far into a pool of more than 2**32 bytes", to.case().data)
    drawing, back = Drawing(), Swap("", [(2**18 + 1, 0), (5, 3), (2**18, 2)], geometry=wide, pool="untouched memory / nhd", blocks=6)
    pools = back.pools(drawing)
    filled = [attrs.evolve(pools[0].select(0, src), values={"first": 1 + src % 999, "step": 1}).spec() for src, _ in back.pairs]
    yield Case("from far in one", drawing.case(back.call(drawing, pools), places=filled), Level.EXTENDED)


def _in_and_out() -> Iterable[Case]:
    """Return two calls with the pools exchanged, which read nothing that the other one writes."""
    drawing, out, back = Drawing(), Swap("", [(0, 1), (2, 3)]), Swap("", [(4, 5), (0, 1)])
    pools = out.pools(drawing)
    yield from met("two calls", drawing.case(out.call(drawing, pools), back.call(drawing, pools[::-1])))


def _told() -> Iterable[tuple[str, str, Cases]]:
    """Yield what each requirement is about, what must be so when blocks are swapped, and its cases."""
    one = [("one", [(0, 5)]), ("several", _GOOD), ("crosswise", [(0, 1), (1, 0)]), ("one for many", [(2, 0), (2, 2), (2, 5)])]
    yield "moved", "block dst of dst_cache holds what block src of src_cache holds, for each pair", [Swap(*each) for each in one]
    gaps = ("nhd", "padded slots", "padded heads", "padded blocks", "odd steps", "heads outermost")
    yield "bytes", "no byte outside the destinations is written", [Swap(name, pool=name) for name in gaps]
    many = Swap("every other of many", every_other(1100), geometry=AREA.sizes(1, num_blocks=2200, block=1), level=Level.EXTENDED)
    low = ([(-1, 3), (2, 3), (0, -1), (-7, -9)], [(-(2**32) + 2, 4), (2, 3)], [(-1, 99), (99, -1), (2, 3)], [(-1, -1), (0, -2)])
    yield "padding", "a pair with a negative id is padding, whatever the other id", [*(Swap(f"{pairs}", pairs) for pairs in low), many]
    wrong = [Swap(f"{pair}", [(0, 1), pair, (2, 7)], blocks=9) for pair in ((6, 3), (3, 9), (2**32 + 3, 4), (3, 2**40))]
    wrong += [Swap(f"{bad} in int32", [(0, 1), (2, bad)], index="int32") for bad in (6, INT32_MAX)]
    wrong += [Swap("fewer there", [(0, 1), (5, 4), (2, 0)], blocks=4), Swap("none here", [(0, 1)], geometry=NO_BLOCKS, blocks=3)]
    for blocks, both in map(last_of_many, (9, 33, 1025)):
        wrong += [
            Swap(f"the last of {len(pairs)}, {pairs[-1]}", pairs, geometry=AREA.sizes(1, num_blocks=blocks, block=1)) for pairs in both
        ]
    steps = [Swap("", [(at, at)]) for at in range(7)]
    text = "a block beyond its own pool is left, and its pair: the call raises before it writes, or on a device skips and counts it"
    yield "beyond", text, lambda: [*(one.case() for one in wrong), in_turn("a pair at a time, to the end and beyond", steps)]
    ends = [
        Swap(f"{pair} of {blocks}", [pair], blocks=blocks) for blocks in (6, 9, 4) for pair in ((0, blocks - 1), (5, 0), (5, blocks - 1))
    ]
    yield "ends", "the first and the last block of each pool are blocks like any other", ends
    yield (
        "doubled",
        "one destination twice is an error wherever the host can read the pairs",
        lambda: (
            *_readable(_VALUE, _DOUBLED),
            *_readable(_VALUE, [([*_MANY, (3, 1205)], ["block_pairs[1100]", "destination 1205"])], 2400),
        ),
    )
    yield (
        "host-read",
        "a block beyond its pool is an error wherever the host can read the pairs",
        lambda: (
            *_readable(_RANGE, _BEYOND),
            *_readable(_RANGE, [([*_MANY, (3, 2400)], ["block_pairs[1100, 1]", "2400"])], 2400),
        ),
    )
    forms = [(index, gap, host) for index in ("int32", "int64") for gap in (0, 1, 2) for host in (False, True)]
    read = [
        Swap(f"{index}, {gap} behind{', on the host' * host}", _GOOD, index=index, pair_gap=gap, host=host) for index, gap, host in forms
    ]
    yield "index", "pairs are read as int32 and int64, by the stride between them, on the device and in host memory", read
    yield "nothing", "a call without pairs changes nothing", [Swap("none", []), Swap("no blocks", [], geometry=NO_BLOCKS)]
    yield "dims", "heads may have any number of elements", AREA.dims()
    yield "heads", "a slot may have any number of heads", AREA.heads()
    counts = [Swap(f"N = {n}", fanned(600, n), geometry=AREA.sizes(1, num_blocks=600, block=1)) for n in (1, 2, 15, 16, 17, 33, 257)]
    yield "many", "there may be any number of pairs", counts
    orders = [*AREA.orders(), *(Swap(name, pool=name) for name in _ORDERS)]
    single = [Swap(text, [(0, sizes.num_blocks - 1)], geometry=sizes, pool=ANY_STEP) for text, sizes in SINGLE_SIZES.items()]
    yield "orders", "each pool has strides of its own", [*orders, *single]
    far = Swap("far into a pool", [(0, 2**18 + 1), (3, 5), (2, 2**18)], pool="nhd / untouched memory", blocks=2**18 + 2)
    parts = [Swap(name, pool=name) for name in PARTS]
    parts += [Swap(f"{name}, between its parts", _GOOD, pool=name, are_parts=True) for name in _APART]
    yield "parts", "a pool may be large, or part of a larger tensor", lambda: [*(each.case() for each in (far, *parts)), *_far()]
    yield "addresses", "pools may begin at any address of an element", AREA.addresses
    yield "numbers", "elements of every dtype arrive bit for bit", AREA.numbers()
    yield "inputs", "the source and the pairs are not changed", [Swap("with padding", [(-3, 3), (2, 4)])]
    yield "repeated", "calls that differ from those before them are served as if they were the first", _repeated
    sides = [(side, order, host) for side in ("src", "dst") for order in ("nhd", "nhd / hnd") for host in (False, True)]
    hosted = [
        Swap(f"{side}, {order}{', pairs' * host}", [*_GOOD, (-1, 0)], pool=order, sides=(side,), host=host) for side, order, host in sides
    ]
    yield "sides", "either pool may lie in host memory, whatever the device", hosted
    yield "refused", "pools that do not fit, or are one, are refused, and nothing has changed", refusals(AREA.op, Swap(""), _UNFIT)
    text = (
        "it does not matter which two properties meet, of dtype, memory orders, sizes, index, padding and order, nor whether they are known"
    )
    yield "meeting", text, lambda: copies(_of_one_size)
    yield "in-and-out", "one thread may swap out while another one swaps in, between the same pools", _in_and_out
    products = [
        Swap(
            f"{n} of {block} slots, {heads} heads",
            neighbours=n,
            geometry=AREA.sizes(heads, 1, num_blocks=2 * n, block=block, dtype="uint8"),
        )
        for n, block, heads in (*PRODUCTS, (4100, 1, 1), (65_537, 1, 1))
    ]
    yield "products", "pairs, slots and heads may be more together than a launch grid has rows", products


_CHECKS: dict[str, Check] = dict.fromkeys(("doubled", "host-read"), check_pairs_refused)
_CHECKS |= {"in-and-out": check_shared_pools, "meeting": check_repeated, "inputs": check_only_written, "refused": check_refusal}
_LEVELS = {"meeting": Level.EXTENDED, "products": Level.EXTENDED}
ROLES = " ".join(role for role, *_ in _told())
REQUIREMENTS = [
    *of_any_op(AREA.op, DRAWN),
    *(
        AREA.require(number, f"When blocks are swapped, {text}.", cases, level=_LEVELS.get(role, Level.CORE), check=_CHECKS.get(role))
        for number, (role, text, cases) in enumerate(_told(), 1)
    ),
]
