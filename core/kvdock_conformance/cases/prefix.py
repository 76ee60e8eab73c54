"""Sequences of calls of a prefix cache as cases.

A step is a mapping: ``do``, what it does, and what that needs. Tokens are given in pieces, one small number per block, so
that blocks differ in one token only, at their beginning or end; and a ``rest`` of tokens behind the last whole block. Handles
are given by number, modulo how many there are. `kvdock_conformance.checking.prefix_play` plays them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvdock_conformance.checking.group_engine import GROUPED
from kvdock_conformance.requirement import Case, Level

__all__ = ["BAD_CALLS", "FORMS", "MIX", "Step", "grouped", "sequence", "sequences"]

Step = dict[str, Any]

FORMS = ("int32", "int64", "uint64", "big-endian", "strided", "row of a tensor", "torch int32", "list", "tuple")
"""Names of `kvdock_conformance.checking.containers.CONTAINERS`."""

BAD_CALLS = (
    *(f"blocks {kind}" for kind in ("short", "long", "negative", "twice", "owned", "high")),
    *(f"tokens {kind}" for kind in ("floats", "float array", "float tensor", "bools", "strings", "too big", "none", "text")),
    *(f"blocks {kind}" for kind in ("floats", "float array", "bools")),
    *(f"shape {kind}" for kind in ("of a table", "of a number", "of no rows")),
    *(f"namespace {kind}" for kind in ("list", "text", "none", "float", "nested list")),
    *(f"evict {kind}" for kind in ("negative", "float", "text", "none", "bool", "too much")),
    *(f"priority {kind}" for kind in ("float", "text", "none")),
    *(f"behind {kind}" for kind in ("owned", "elsewhere")),
    *(f"keep {kind}" for kind in ("negative", "float", "none")),
    *(f"record {kind}" for kind in ("negative", "float", "none")),
    "tokens on a device",
    "blocks on a device",
)
"""Calls with arguments that no prefix cache takes; `kvdock_conformance.checking.prefix_bad` makes them."""


_PIECES = (0, 0, 0, 3, 3, 4, 5)  # some often, so that prefixes are shared


def _tokens(choose: random.Random) -> Step:
    pieces = [choose.choice(_PIECES) for _ in range(choose.randrange(7))]
    return {"pieces": pieces, "rest": choose.randrange(16), "space": choose.choice((0, 0, 1)), "form": choose.choice(FORMS)}


def _insert(choose: random.Random) -> Step:
    """Return an insertion: ``own`` says for each block that is stored already whether it comes with its own id or another."""
    own = [choose.randrange(2) for _ in range(6)]
    return {**_tokens(choose), "blocks_form": choose.choice(FORMS), "own": own, "priority": choose.choice((0, 0, 1, -1, 5))}


def _evict(choose: random.Random) -> Step:
    """Return an eviction of so many blocks, or of a share of what can be evicted."""
    return {"count": choose.randrange(12)} if choose.randrange(2) else {"share": choose.choice((0, 0.25, 0.5, 1))}


def _handle(choose: random.Random) -> Step:
    """Return the number of a handle, of the latest more often than of others."""
    return {"handle": -1 - min(choose.randrange(12), choose.randrange(12))}


_MAKERS: Mapping[str, Callable[[random.Random], Step]] = MappingProxyType(
    {
        "match": lambda choose: {**_tokens(choose), "record": choose.randrange(3) > 0},
        "record": lambda choose: {**_handle(choose), "tokens": choose.randrange(40)},
        "lock": _handle,
        "unlock": _handle,
        "insert": _insert,
        "behind": lambda choose: {**_insert(choose), **_handle(choose)},
        "append": _insert,
        "partial": lambda choose: {**_tokens(choose), **_handle(choose), "skip": choose.choice((0, 0, 1, 5))},
        "evict": _evict,
        "discard": lambda choose: {**_handle(choose), "keep": choose.randrange(6)},
        "reset": lambda choose: {},
        "bad": lambda choose: {"call": choose.choice(BAD_CALLS), "pieces": _tokens(choose)["pieces"], "at": choose.randrange(6)},
        "foreign": lambda choose: {
            **_handle(choose),
            "unlock": choose.randrange(2) > 0,
            "whose": choose.choice(("equal", "naive", "none")),
            "call": choose.choice(("lock_handle", "record_match", "discard_prefix", "insert_prefix")),
        },
    }
)
"""What a step of each kind needs."""

MIX: Mapping[str, int] = MappingProxyType(
    {"match": 6, "record": 1, "lock": 4, "unlock": 4, "insert": 5, "behind": 4, "evict": 4, "discard": 1}
)
"""How often each kind of step comes, in an ordinary sequence."""


def sequence(seed: int, length: int, mix: Mapping[str, int] = MIX) -> list[Step]:
    """Return random steps, the same for the same arguments.

    Args:
        seed: of the choice.
        length: how many.
        mix: weight of each kind.
    """
    choose = random.Random(seed)  # noqa: S311 - the same in every run
    kinds = choose.choices(list(mix), list(mix.values()), k=length)
    return [{"do": kind, **_MAKERS[kind](choose)} for kind in kinds]


def sequences(
    about: str,
    mix: Mapping[str, int] = MIX,
    *,
    sizes: Sequence[int] = (1, 3, 16),
    length: int = 80,
    spaces: Sequence[Sequence[str]] = ((), ("a",), ("b",)),
    seeds: int = 2,
    **data: Any,
) -> Callable[[], Iterable[Case]]:
    """Return a function that makes random cases: some at the core level, ten times as many at the extended one.

    Args:
        about: what is compared: names that `kvdock_conformance.checking.prefix_play.Player` knows, with spaces between them.
        mix: weight of each kind of step.
        sizes: block sizes.
        length: steps of a case.
        spaces: the namespaces, each a list of parts; see `kvdock_conformance.checking.prefix_play.namespace_of`.
        seeds: how many per block size at the core level.
        data: what else the check needs to know.
    """

    def cases() -> Iterable[Case]:
        for seed in range(10 * seeds):
            for size in sizes:
                steps = sequence(1000 * size + seed, length, mix)
                made = {"block_size": size, "spaces": [list(space) for space in spaces], "steps": steps, "about": about.split(), **data}
                level = Level.CORE if seed < seeds else Level.EXTENDED
                yield Case(f"blocks of {size}, seed {seed}", made, level)

    return cases


def grouped() -> Iterable[Case]:
    """Return random engines on managers of several layer groups, or of one that lets tokens go: what `drive_engine` is told.

    Pools are small, so that prefixes are evicted and blocks of units let go.
    """
    for seed in range(10):
        for at, name in enumerate(GROUPED):
            blocks = (24, 40, 90)[(seed + at) % 3]
            yield _grouped(f"{name}, seed {seed}", name, blocks, seed, level=Level.EXTENDED if seed else Level.CORE)
    for name in ("a window", "states alone"):  # of which no group keeps all, so that there may be more units than blocks
        yield _grouped(f"{name}, more units than blocks", name, 90, 0, longest=200)


def _grouped(case: str, model: str, num_blocks: int, seed: int, *, longest: int = 30, level: Level = Level.CORE) -> Case:
    how = {"null_block": seed % 3 > 0, "seed": seed, "steps": 120, "longest": longest}
    return Case(case, {"model": model, "num_blocks": num_blocks, **how}, level)
