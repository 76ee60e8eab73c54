"""Prefix caches: ``KVD-PREFIX``. Checked on what `kvdock.create_prefix_cache` makes, against the slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdock_conformance.cases.prefix import BAD_CALLS, FORMS, MIX, sequences
from kvdock_conformance.checking.prefix_alike import STORES_AND_CHOOSES, check_alike
from kvdock_conformance.checking.prefix_calls import (
    ABOUT_ALL,
    DECLARES_AN_ORDER,
    FINDS_PARTS,
    STORES,
    check_block_sizes,
    check_calls,
    check_can_store,
    check_copies,
    check_late_reads,
    check_observers,
    check_threads,
)
from kvdock_conformance.checking.prefix_costs import check_costs, check_deep, check_leaves_nothing
from kvdock_conformance.checking.prefix_whole import CAN_BE_DAMAGED, check_notices_damage
from kvdock_conformance.requirement import Capability, Case, Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "prefix"
_SPACES: Mapping[str, Sequence[Sequence[Any]]] = {
    "an int and a bool": ([1], [True], []),
    "an int and a text": ([1], ["1"], []),
    "a text and bytes": (["1"], ["bytes:1"], []),
    "nested": ([[1]], [1], [[[1]]]),
    "joined parts": (["a", "b"], ["ab"], ["a,b"]),
    "a missing part": (["tenant", ""], ["tenant"], []),
    "an int and a negative one of its hash": ([-1], [-2], [2**61 - 3]),
}


def _require(
    number: int, sentence: str, check: Check, cases: Callable[[], Iterable[Case]], needs: Capability | None = STORES
) -> Requirement:
    return Requirement(f"KVD-PREFIX-{number:03}", sentence, AREA, check, cases, needs=needs, kind="prefix")


def _in_every_form() -> Iterable[Case]:
    for form in FORMS:
        for is_wide in (False, True):
            where = {"pieces": [1, 5, 2], "rest": 1, "space": 0, "form": form}
            matches = [{"do": "match", **where, "pieces": pieces, "record": True} for pieces in ([1, 5, 2, 3], [1, 0, 2], [1], [])]
            insert = {"do": "insert", **where, "blocks_form": form, "own": [0] * 6, "priority": 0}
            for size in (1, 2):
                data: dict[str, Any] = {
                    "block_size": size,
                    "spaces": [[]],
                    "steps": [insert, *matches, insert, *matches],
                    "wide": is_wide,
                    "about": ["match", "insert"],
                }
                yield Case(f"{form}, {'64' if is_wide else '32'}-bit tokens, blocks of {size}", data)


def _apart() -> Iterable[Case]:
    """Return sequences in namespaces that are easily mixed up."""
    for name, spaces in _SPACES.items():
        for case in sequences("match", {"match": 5, "insert": 5, "evict": 1}, sizes=(2,), length=60, spaces=spaces, seeds=1)():
            yield Case(f"{name}, {case.name}", case.data, case.level)


def _bad() -> Iterable[Case]:
    """Return every bad call, each on a cache with something in it."""
    fill = [
        {"do": "insert", "pieces": pieces, "rest": 0, "space": 0, "form": "list", "blocks_form": "list", "own": [0] * 6, "priority": 0}
        for pieces in ([1, 2, 3], [1, 4], [2, 2])
    ]
    for call in BAD_CALLS:
        steps = [
            *fill,
            {"do": "lock", "handle": 0},
            *({"do": "bad", "call": call, "pieces": [3, 2] if at else [1, 2], "at": at} for at in range(3)),
        ]
        yield Case(call, {"block_size": 3, "spaces": [[]], "steps": steps, "about": ["refused"]})


def _growing() -> Iterable[Case]:
    """Return a prefix that is stored block by block, cut off block by block as far as it is not locked, and stored anew."""
    how = {"rest": 0, "space": 0, "form": "list", "blocks_form": "list", "own": [0], "priority": 0, "record": False}
    pieces = [at % 6 for at in range(40)]
    grow = [{"do": "behind", **how, "pieces": [piece], "handle": -1} for piece in pieces]
    start, find = ({"do": "match", **how, "pieces": found} for found in ([], pieces))
    cut = [{"do": "lock", "handle": 20}, *[{"do": "evict", "count": 1}] * 21]
    anew = [{**grow[20], "handle": 20}, *grow[21:], find, *({"do": "lock", "handle": at} for at in range(62))]
    for size in (1, 3, 16):
        yield Case(
            f"blocks of {size}", {"block_size": size, "spaces": [[]], "steps": [start, *grow, find, *cut, *anew], "about": ABOUT_ALL}
        )


def _deep() -> Iterable[Case]:
    """Return chains of nodes that are deeper than any recursion goes."""
    yield Case("a chain of 3,000 nodes", {"block_size": 1, "depth": 3000})


def _alike() -> Iterable[Case]:
    """Return random sequences together, since each case starts two interpreters."""
    every = list(sequences("", {**MIX, "evict": 6, "partial": 2, "discard": 4})())
    for level in Level:
        played = [case.data for case in every if case.level is level]
        yield Case(f"{len(played)} sequences", {"played": played}, level)


def _sizes() -> Iterable[Case]:
    yield Case("the smallest and the largest", {"good": [1, 512], "bad": [0, -1, 513]})


_MORE_LOCKS = {**MIX, "lock": 12, "unlock": 8}

REQUIREMENTS = [
    _require(
        1,
        "A match returns the blocks of the longest stored prefix, as int32, their slots when asked, and a handle to its end.",
        check_calls,
        sequences("match", {"match": 10, "insert": 6, "evict": 2}),
    ),
    _require(
        2,
        "An insertion stores what is new, says how much was there, and returns the blocks that count: of what was there the stored ones.",
        check_calls,
        sequences("insert", {"match": 2, "insert": 10, "evict": 2}),
    ),
    _require(
        3,
        "Tokens and blocks may be numpy or torch integers of any width, order and strides, or lists, and nothing that is stored or "
        "returned shares their memory.",
        check_calls,
        _in_every_form,
    ),
    _require(4, "Equal tokens in namespaces whose parts differ in value or type are different prefixes.", check_calls, _apart),
    _require(
        5,
        "A lock protects every block from the first to the end of its handle until it is released, however often others lock them.",
        check_calls,
        sequences("locks", _MORE_LOCKS),
    ),
    _require(
        6,
        "Evicting n blocks frees exactly n, ends of prefixes before what they continue, and none that is locked.",
        check_calls,
        sequences("evict", {"match": 4, "insert": 6, "behind": 3, "evict": 6, "lock": 3, "unlock": 2}),
    ),
    _require(
        7,
        "What is evicted first follows the policy that the cache declares.",
        check_calls,
        sequences("order", {"match": 8, "record": 2, "insert": 6, "behind": 4, "evict": 5, "lock": 1, "unlock": 1}),
        DECLARES_AN_ORDER,
    ),
    _require(
        8,
        "A handle of another cache, one whose prefix was evicted or forgotten, and an unlock without a lock raise StaleHandleError and "
        "change nothing.",
        check_calls,
        sequences("refused locks", {**_MORE_LOCKS, "evict": 8, "record": 3, "reset": 1, "foreign": 12}),
        None,
    ),
    _require(
        9,
        "Tokens, blocks, namespaces, sizes and priorities that are none raise ArgumentTypeError or ArgumentValueError, a request beyond "
        "what is evictable OutOfBlocksError, and nothing has changed.",
        check_calls,
        _bad,
        None,
    ),
    _require(
        10,
        "Discarding frees the end of a prefix, all but so many blocks, as far as nobody has it locked and nothing is stored behind it.",
        check_calls,
        sequences("discard", {**MIX, "discard": 8, "lock": 1}),
    ),
    _require(
        11,
        "A reset forgets everything, locked or not, returns all blocks, and makes all handles stale.",
        check_calls,
        sequences("reset refused sizes", {**MIX, "reset": 2}),
    ),
    _require(
        12,
        "After every call, size_info and stored_blocks say what is stored, and check_integrity finds nothing wrong.",
        check_calls,
        sequences("sizes", {**MIX, "reset": 1}),
    ),
    _require(
        13,
        "Events tell what is stored where, in order, so that an observer knows what the cache knows.",
        check_calls,
        sequences("events", {**MIX, "reset": 1, "bad": 1}),
    ),
    _require(
        14,
        "Statistics count matches, their tokens, hits, and tokens that came and went; a match counts when it is recorded.",
        check_calls,
        sequences("stats", {**MIX, "match": 8, "record": 4, "reset": 1}),
        None,
    ),
    _require(
        15,
        "What a cache decides follows from the calls alone: two that are fed alike in two processes answer alike, whatever the time, "
        "chance, addresses or the seed of Python's hashes.",
        check_alike,
        _alike,
        STORES_AND_CHOOSES,
    ),
    _require(16, "A chain of nodes may be as deep as memory allows.", check_deep, _deep),
    _require(
        17,
        "A cache belongs to one thread: calls of another raise WrongThreadError and change nothing, until hand_over.",
        check_threads,
        sequences("", {"match": 1, "insert": 1}, sizes=(2,), length=4, seeds=1),
        None,
    ),
    _require(18, "A block has 1 to 512 tokens; other sizes raise ArgumentValueError.", check_block_sizes, _sizes, None),
    _require(
        19,
        "An observer is told of each event once the call has done its work, until its subscription ends, and one that raises breaks "
        "neither the call nor the others.",
        check_observers,
        lambda: (Case(f"blocks of {size}", {"block_size": size}) for size in (1, 3, 16)),
    ),
    _require(
        20,
        "What an insertion returns names the blocks of that moment, however late it is read and whatever came in between.",
        check_late_reads,
        sequences("late", {"match": 2, "insert": 10, "evict": 4, "reset": 1}),
    ),
    _require(
        21,
        "An insertion behind a handle does what inserting the whole prefix does, and returns the blocks from there on.",
        check_calls,
        sequences(" ".join(ABOUT_ALL), {**MIX, "insert": 3, "behind": 12, "discard": 2}),
    ),
    _require(
        22,
        "Storing a block behind a handle costs the same whatever is before it.",
        check_costs,
        lambda: (Case("behind 64 blocks and 8192", {"block_size": 16, "blocks": [64, 8192], "times": 100, "most": 4}),),
    ),
    _require(
        23,
        "What is stored block by block is found as one, is evicted from its end, and leaves handles to what is before as they are.",
        check_calls,
        _growing,
    ),
    _require(
        24,
        "A handle stands for its place until that is evicted, whatever is stored behind it, branches off before it or is stored "
        "again where it was.",
        check_calls,
        sequences("refused locks", {"match": 4, "insert": 3, "behind": 8, "lock": 12, "unlock": 6, "evict": 2, "discard": 2}, length=120),
    ),
    _require(
        25,
        "A cache and its handles are refused to copy and pickle with UnsupportedError, and nothing has changed.",
        check_copies,
        sequences("refused", {"match": 1, "insert": 1, "lock": 1}, sizes=(2,), length=12, seeds=1),
        None,
    ),
    _require(
        26,
        "A block behind a place is found that begins with at least half a block of the tokens that come next, of several the most "
        "alike, which is no use of it.",
        check_calls,
        sequences("partial stats sizes refused", {**MIX, "partial": 12}, wide=True),
        FINDS_PARTS,
    ),
    _require(27, "A cache says whether it stores anything at all.", check_can_store, lambda: (Case("one", {"block_size": 1}),), None),
    _require(
        28,
        "A block that is appended behind each of several locked prefixes is stored and its handle moved, or all is as it was.",
        check_calls,
        sequences(" ".join(about for about in ABOUT_ALL if about != "events"), {**MIX, "lock": 12, "append": 12, "evict": 2}),
    ),
    _require(
        29,
        "A check of integrity raises where the books of a cache were damaged so that size_info, stored_blocks and num_locks contradict "
        "one another.",
        check_notices_damage,
        lambda: (Case(f"blocks of {size}", {"block_size": size}) for size in (5, 16)),
        CAN_BE_DAMAGED,
    ),
    _require(
        30,
        "Statistics tell the ages of what went: of each block how many matches and insertions ago it was used last.",
        check_calls,
        sequences("ages", {"match": 6, "record": 3, "insert": 6, "behind": 4, "evict": 2, "discard": 8}, length=160),
    ),
    _require(
        31,
        "Matches, locks, insertions and evictions leave no memory behind once their handles are gone.",
        check_leaves_nothing,
        lambda: (Case("blocks of 2", {"block_size": 2, "times": 500}),),
        None,
    ),
]
