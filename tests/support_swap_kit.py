"""What a new op that copies costs the kit: a list of requirements and an entry of the table of moves, for ``acme_swap_``.

The families do the rest: sizes, memory orders and values are theirs, and so are the faults.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvdock_conformance.cases.copies import Copy
from kvdock_conformance.cases.layouts import ANY_STEP, PARTS, SINGLE_SIZES
from kvdock_conformance.cases.paged import FORETOLD, foretold, in_turn
from kvdock_conformance.cases.places import apart
from kvdock_conformance.checking.calls import check_calls, check_inputs
from kvdock_conformance.checking.copies import pair_name
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults import families, moves
from kvdock_conformance.faults.fault import Args
from kvdock_conformance.requirement import Case
from kvdock_conformance.requirements.families import INT32_MAX, NO_BLOCKS, Area
from support_swap import OP, swap_reference

Swap = functools.partial(Copy, op=OP)
Pairs = Sequence[tuple[int, int]]


def check_swap(target: Target, data: Mapping[str, Any]) -> None:
    """Check swaps against the reference."""
    check_calls(target, data, swap_reference, pair_name)


def check_swap_inputs(target: Target, data: Mapping[str, Any]) -> None:
    """Check that pairs are not changed."""
    check_inputs(target, data, ("k_cache", "v_cache"))


AREA = Area("ACME", OP, Swap, check_swap)


def _in_turn(name: str, *lists: Pairs, pools: Sequence[str] = ()) -> Case:
    if pools:
        return in_turn(name, [Swap("", lists[0], pool=pool) for pool in pools], own_pools=True)
    return in_turn(name, [Swap("", pairs) for pairs in lists])


def _repeated() -> Iterable[Case]:
    yield _in_turn("other pairs", [(0, 5)], [(5, 0)], [(1, 5)], [(2, 3)], [(3, 0)], [(4, 1)])
    yield _in_turn("the same pairs", *[[(0, 5), (3, 4)]] * 5)
    yield foretold([Swap("", [(block, 5)]) for block in FORETOLD], "block_pairs")
    yield _in_turn("other pools", [(0, 5), (3, 4)], pools=("nhd", "hnd", "padded blocks", "nhd", "odd address"))


def _neighbours(count: int) -> list[tuple[int, int]]:
    return [(2 * number, 2 * number + 1) for number in range(count)]


_GOOD: Pairs = ((0, 5), (3, 2), (1, 4))
REQUIREMENTS = [
    AREA.require(
        1,
        "The blocks of each pair hold each other's content afterwards, in k_cache and in v_cache.",
        [Swap("one pair", [(0, 5)]), Swap("several", _GOOD), Swap("with itself", [(2, 2)])],
    ),
    AREA.require(
        2,
        "No byte outside the blocks is written, neither in the pool nor around it.",
        [Swap(name, pool=name) for name in ("nhd", "padded slots", "padded heads", "padded blocks", "odd steps")],
        [Swap("last of the pool", [(0, 3), (1, 5)])],
    ),
    AREA.require(
        3,
        "A pair with a negative id is padding.",
        [Swap("some", [(-1, 3), (2, 3), (0, -1), (-7, -9)]), Swap("2**32 below", [(-(2**32) + 2, 4), (2, 3)])],
        [Swap("pool without blocks", [(-1, -1)], geometry=NO_BLOCKS)],
    ),
    AREA.require(
        4,
        "A block beyond the pool is neither read nor written, and in host memory the call raises before it swaps anything.",
        [
            *(Swap(f"{pair}", [(0, 1), pair, (2, 7)]) for pair in ((6, 3), (3, 6), (2**32 + 3, 4), (3, 2**40))),
            *(Swap(f"{bad} in int32", [(0, 1), (2, bad)], index="int32") for bad in (6, INT32_MAX)),
        ],
        lambda: [_in_turn("to the end and beyond", *([(at, at + 2)] for at in range(5)))],
    ),
    AREA.require(5, "The first and the last block are blocks like any other.", [Swap("ends", [(0, 5)]), Swap("near", [(4, 5), (1, 0)])]),
    AREA.require(
        6,
        "Pairs are read as int32 and as int64, by the stride between them.",
        [Swap(f"{index}, {gap} behind", _GOOD, index=index, pair_gap=gap) for index in ("int32", "int64") for gap in (0, 1, 2)],
    ),
    AREA.require(7, "A call without pairs changes nothing.", [Swap("int64", []), Swap("no blocks", [], geometry=NO_BLOCKS)]),
    AREA.require(8, "When blocks are swapped, heads may have any number of elements.", AREA.dims()),
    AREA.require(9, "When blocks are swapped, a slot may have any number of heads.", AREA.heads()),
    AREA.require(10, "When blocks are swapped, keys and values may differ in heads and elements.", AREA.unlike()),
    AREA.require(
        11,
        "Any number of pairs may be swapped.",
        [
            Swap(f"N = {count}", _neighbours(count), geometry=AREA.sizes(1, num_blocks=600, block=1))
            for count in (1, 2, 15, 16, 17, 33, 257)
        ],
    ),
    AREA.require(
        12,
        "When blocks are swapped, each pool has strides of its own.",
        AREA.orders(),
        [Swap(text, [(0, sizes.num_blocks - 1)], geometry=sizes, pool=ANY_STEP) for text, sizes in SINGLE_SIZES.items()],
    ),
    AREA.require(
        13,
        "When blocks are swapped, a pool may be part of a larger tensor.",
        [Swap(name, pool=name) for name in PARTS],
        AREA.packed(),
        functools.partial(apart, OP),
    ),
    AREA.require(14, "When blocks are swapped, pools may begin at any address of an element.", AREA.addresses),
    AREA.require(15, "When blocks are swapped, elements of every dtype arrive bit for bit.", AREA.numbers()),
    AREA.require(16, "When blocks are swapped, pairs are not changed.", [Swap("padding", [(-3, 3), (2, 4)])], check=check_swap_inputs),
    AREA.require(17, "Swaps that differ from those before them are served as if they were the first.", _repeated),
]


def _places(args: Args) -> moves.Places:
    """Return both directions of each good pair."""
    one = moves.COPY.places(args)
    (a,), (b,) = one.source, one.to
    return moves.Places(torch.cat([one.at, one.at]), (torch.cat([a, b]),), (torch.cat([b, a]),))


SWAP = moves.Move(
    OP,
    "acme",
    "first bytes padding beyond ends index nothing dims heads unlike many orders parts addresses numbers inputs repeated",
    moves.COPY.pairs,
    "block_pairs",
    _places,
    moves.COPY.limit,
    moves.COPY.count,
    moves.COPY.beyond,
    moves.COPY.left_out,
)
FAULTS = families.faults_of(SWAP)
