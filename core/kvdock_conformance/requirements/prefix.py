"""Prefix caches: ``KVD-PREFIX``. Checked on what `kvdock.create_prefix_cache` makes, against the slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdock_conformance.cases.prefix import BAD_CALLS, FORMS, MIX, grouped, sequences
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
from kvdock_conformance.checking.prefix_groups import check_groups
from kvdock_conformance.checking.prefix_whole import CAN_BE_DAMAGED, check_notices_damage
from kvdock_conformance.requirement import Case, Level, Requirement

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


def _alike() -> Iterable[Case]:
    """Return random sequences together, since each case starts two interpreters."""
    every = list(sequences("", {**MIX, "evict": 6, "partial": 2, "discard": 4})())
    for level in Level:
        played = [case.data for case in every if case.level is level]
        yield Case(f"{len(played)} sequences", {"played": played}, level)


def _of(*sizes: int, **data: Any) -> Callable[[], Iterable[Case]]:
    """Return a function that makes a case for each block size."""
    return lambda: (Case(f"blocks of {size}", {"block_size": size, **data}) for size in sizes)


_SENTENCES = """
 1 A match returns the blocks of the longest stored prefix, as int32, their slots when asked, and a handle to its end.
 2 An insertion stores what is new, says how much was there, and returns the blocks that count: of what was there the stored ones.
 3 Tokens and blocks may be numpy or torch integers of any width, order and strides, or lists, and nothing that is stored or returned
   shares their memory.
 4 Equal tokens in namespaces whose parts differ in value or type are different prefixes.
 5 A lock protects every block from the first to the end of its handle until it is released, however often others lock them.
 6 Evicting n blocks frees exactly n, ends of prefixes before what they continue, and none that is locked.
 7 What is evicted first follows the policy that the cache declares.
 8 A handle of another cache, one whose prefix was evicted or forgotten, and an unlock without a lock raise StaleHandleError and change
   nothing.
 9 Tokens, blocks, namespaces, sizes and priorities that are none raise ArgumentTypeError or ArgumentValueError, a request beyond what is
   evictable OutOfBlocksError, and nothing has changed.
10 Discarding frees the end of a prefix, all but so many blocks, as far as nobody has it locked and nothing is stored behind it.
11 A reset forgets everything, locked or not, returns all blocks, and makes all handles stale.
12 After every call, size_info and stored_blocks say what is stored, and check_integrity finds nothing wrong.
13 Events tell what is stored where, in order, so that an observer knows what the cache knows.
14 Statistics count matches, their tokens, hits, and tokens that came and went; a match counts when it is recorded.
15 What a cache decides follows from the calls alone: two that are fed alike in two processes answer alike, whatever the time, chance,
   addresses or the seed of Python's hashes.
16 A chain of nodes may be as deep as memory allows.
17 A cache belongs to one thread: calls of another raise WrongThreadError and change nothing, until hand_over.
18 A block has 1 to 512 tokens; other sizes raise ArgumentValueError.
19 An observer is told of each event once the call has done its work, until its subscription ends, and one that raises breaks neither the
   call nor the others.
20 What an insertion returns names the blocks of that moment, however late it is read and whatever came in between.
21 An insertion behind a handle does what inserting the whole prefix does, and returns the blocks from there on.
22 Storing a block behind a handle costs the same whatever is before it.
23 What is stored block by block is found as one, is evicted from its end, and leaves handles to what is before as they are.
24 A handle stands for its place until that is evicted, whatever is stored behind it, branches off before it or is stored again where it
   was.
25 A cache and its handles are refused to copy and pickle with UnsupportedError, and nothing has changed.
26 A block behind a place is found that begins with at least half a block of the tokens that come next, of several the most alike, which is
   no use of it.
27 A cache says whether it stores anything at all.
28 A block that is appended behind each of several locked prefixes is stored and its handle moved, or all is as it was.
29 A check of integrity raises where the books of a cache were damaged so that size_info, stored_blocks and num_locks contradict one
   another.
30 Statistics tell the ages of what went: of each block how many matches and insertions ago it was used last.
31 Matches, locks, insertions and evictions leave no memory behind once their handles are gone.
32 A manager of several layer groups, whose block numbers are those of units, is served as one of a single group: it finds all that is
   stored, reads what was written, adds up after each call, and decides as another that is called alike.
"""
"""By number; what is indented goes on with the line before."""

_MORE_LOCKS = {**MIX, "lock": 12, "unlock": 8}
_ROWS: Mapping[int, Sequence[Any]] = {
    1: (check_calls, sequences("match", {"match": 10, "insert": 6, "evict": 2})),
    2: (check_calls, sequences("insert", {"match": 2, "insert": 10, "evict": 2})),
    3: (check_calls, _in_every_form),
    4: (check_calls, _apart),
    5: (check_calls, sequences("locks", _MORE_LOCKS)),
    6: (check_calls, sequences("evict", {"match": 4, "insert": 6, "behind": 3, "evict": 6, "lock": 3, "unlock": 2})),
    7: (
        check_calls,
        sequences("order", {"match": 8, "record": 2, "insert": 6, "behind": 4, "evict": 5, "lock": 1, "unlock": 1}),
        DECLARES_AN_ORDER,
    ),
    8: (check_calls, sequences("refused locks", {**_MORE_LOCKS, "evict": 8, "record": 3, "reset": 1, "foreign": 12}), None),
    9: (check_calls, _bad, None),
    10: (check_calls, sequences("discard", {**MIX, "discard": 8, "lock": 1})),
    11: (check_calls, sequences("reset refused sizes", {**MIX, "reset": 2})),
    12: (check_calls, sequences("sizes", {**MIX, "reset": 1})),
    13: (check_calls, sequences("events", {**MIX, "reset": 1, "bad": 1})),
    14: (check_calls, sequences("stats", {**MIX, "match": 8, "record": 4, "reset": 1}), None),
    15: (check_alike, _alike, STORES_AND_CHOOSES),
    16: (check_deep, lambda: (Case("a chain of 3,000 nodes", {"block_size": 1, "depth": 3000}),)),
    17: (check_threads, sequences("", {"match": 1, "insert": 1}, sizes=(2,), length=4, seeds=1), None),
    18: (check_block_sizes, lambda: (Case("the smallest and the largest", {"good": [1, 512], "bad": [0, -1, 513]}),), None),
    19: (check_observers, _of(1, 3, 16)),
    20: (check_late_reads, sequences("late", {"match": 2, "insert": 10, "evict": 4, "reset": 1})),
    21: (check_calls, sequences(" ".join(ABOUT_ALL), {**MIX, "insert": 3, "behind": 12, "discard": 2})),
    22: (check_costs, lambda: (Case("behind 64 blocks and 8192", {"block_size": 16, "blocks": [64, 8192], "times": 100, "most": 4}),)),
    23: (check_calls, _growing),
    24: (
        check_calls,
        sequences("refused locks", {"match": 4, "insert": 3, "behind": 8, "lock": 12, "unlock": 6, "evict": 2, "discard": 2}, length=120),
    ),
    25: (check_copies, sequences("refused", {"match": 1, "insert": 1, "lock": 1}, sizes=(2,), length=12, seeds=1), None),
    26: (check_calls, sequences("partial stats sizes refused", {**MIX, "partial": 12}, wide=True), FINDS_PARTS),
    27: (check_can_store, _of(1), None),
    28: (
        check_calls,
        sequences(" ".join(about for about in ABOUT_ALL if about != "events"), {**MIX, "lock": 12, "append": 12, "evict": 2}),
    ),
    29: (check_notices_damage, _of(5, 16), CAN_BE_DAMAGED),
    30: (check_calls, sequences("ages", {"match": 6, "record": 3, "insert": 6, "behind": 4, "evict": 2, "discard": 8}, length=160)),
    31: (check_leaves_nothing, _of(2, times=500), None),
    32: (check_groups, grouped, None),
}
"""By number the check, its cases, and the capability that it needs, where that is not `STORES`."""


def _required(line: str) -> Requirement:
    number, _, sentence = line.strip().partition(" ")
    check, cases, needs = (*_ROWS[int(number)], STORES)[:3]
    return Requirement(f"KVD-PREFIX-{int(number):03}", sentence, AREA, check, cases, needs=needs, kind="prefix")


REQUIREMENTS = [_required(line) for line in _SENTENCES.strip("\n").replace("\n   ", " ").split("\n")]
