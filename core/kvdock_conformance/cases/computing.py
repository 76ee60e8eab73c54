"""What an op that computes tells the kit, to be asked what ops that move bytes are asked: an entry of `COMPUTING`.

What it means, and how far its results may be off, is in `kvdock_conformance.checking.meaning`. How calls are made of an entry is in
`kvdock_conformance.cases.every_op`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.layouts import SOURCES, Geometry, Pair

__all__ = ["COMPUTING", "Chooser", "Computing", "Like"]

_T = TypeVar("_T")


class Chooser(Protocol):
    """Chooses."""

    def integer(self, least: int, most: int) -> int:
        """Return an integer; the least is the plainest."""
        ...

    def one_of(self, values: Sequence[_T]) -> _T:
        """Return one of some values; the first is the plainest."""
        ...


@attrs.frozen
class Like:
    """What a call is to be like.

    Args:
        count: how many tokens.
        source: name of one of `SOURCES`, for the rows.
        sizes: of the pools.
        seed: of indices.
        index: torch's name of their dtype.
        is_padded: whether some tokens are padding, or come in other numbers than most.
        more: what is for the op alone.
    """

    count: int
    source: str
    sizes: Geometry
    seed: int
    index: str
    is_padded: bool
    more: Mapping[str, Any]


@attrs.frozen
class Computing:
    """An op that computes.

    Args:
        fits: returns sizes that it can have, like some.
        arguments: returns the arguments of a call on two pools by name, the pools left out. Arenas that hold numbers say their dtype.
        rows: arguments that have a row for each token.
        indices: arguments that hold indices. Zeros in the first are padding.
        slots: values of the first index for slots from 0 to 31, of calls like ``of_slots``.
        of_slots: ``more`` of calls that go by slots.
        drawn: draws ``more`` for a random call.
        ways: ``more`` of calls that go another way than plain ones.
    """

    fits: Callable[[Geometry], Geometry]
    arguments: Callable[[Like, Drawing, Pair], dict[str, Any]]
    rows: Sequence[str]
    indices: Sequence[str]
    slots: Sequence[int]
    of_slots: Mapping[str, Any]
    drawn: Callable[[Chooser], Mapping[str, Any]]
    ways: Sequence[Mapping[str, Any]]


def _attend(like: Like, drawing: Drawing, pools: Pair) -> dict[str, Any]:
    """Return queries over contexts that reach into the first and the last block, one for each sequence, or where padded none or two.

    ``like.more`` has ``group``, ``width`` of the table, how many ``blocks`` it may name, ``starts``, ``sinks``, ``lse`` and options; and
    ``full`` where the last context takes all of its row, behind which the table ends.
    """
    more = {"group": 2, "width": 3, "blocks": pools[0].shape[0], "lse": True, "starts": False, "sinks": False, "full": False, **like.more}
    count, block, heads = like.count, pools[0].shape[1], like.sizes.hk * more["group"]
    rows = attrs.evolve(like.sizes, hk=heads, hv=heads)
    q = SOURCES[like.source](drawing, rows, (count,))[0]
    for view in (*pools, q):
        drawing.arenas[view.arena].setdefault("dtype", like.sizes.dtype)
    counts = [(2 if row + 1 < count else 1, 0, 1)[row % 3] for row in range(count)] if like.is_padded else [1] * count
    table, lens = _contexts(like.seed, counts, block, more)
    index = {"seq_lens": lens, "starts": [row % 3 % (length + 1) for row, length in enumerate(lens)] if more["starts"] else None}
    index["cu_query_lens"] = [0, *itertools.accumulate(counts)] if like.is_padded else None
    outside = [(pools[0].shape[0], -1)[row % 2] for row in range(count)]  # behind the pool, or in front of it
    columns = more["width"] + (not more["full"])
    values = [each for row, last in zip(table, outside, strict=True) for each in (*row, last)[:columns]]
    return {
        "q": q,
        "block_table": drawing.tensor("int32", (count, columns), values=values),
        **{name: values and drawing.tensor(like.index, (len(values),), values=values) for name, values in index.items()},
        "sinks": drawing.tensor("float32", (heads,), fill="numbers") if more["sinks"] else None,
        "max_query_len": max(counts),
        "causal": True,
        **{name: more[name] for name in ("causal", "window", "softcap", "scale") if name in more},
        "out": SOURCES[like.source](drawing, rows, (count,))[1],
        "lse": drawing.tensor("float32", (count, heads)) if more["lse"] else None,
    }


def _contexts(seed: int, counts: Sequence[int], block: int, more: Mapping[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Return the blocks and the length of each sequence; those of the first are the last block, and then the first."""
    choose = random.Random(seed)  # noqa: S311 - the same in every run
    blocks, width = more["blocks"], more["width"]
    table = [[choose.randrange(blocks) for _ in range(width)] for _ in counts]
    lens = [max(count, 1 + choose.randrange(width * block)) for count in counts]
    table[0] = [blocks - 1, *range(width - 1)] if seed % 2 else [0, blocks - 1, *range(width - 2)]
    lens[0] = max(counts[0], width * block - (seed + 1) % 2)
    lens[-1] = width * block if more["full"] else lens[-1]
    return [[each % blocks for each in row] for row in table], lens


def _attention_options(choose: Chooser) -> dict[str, Any]:
    return {
        "group": choose.one_of((1, 2)),
        "width": choose.one_of((3, 2, 5)),
        **{name: choose.one_of((False, True)) for name in ("lse", "starts", "sinks")},
        "causal": choose.one_of((True, False)),
        "window": choose.one_of((None, 1, 5, 100)),
        "softcap": choose.one_of((None, 3.0)),
        "scale": choose.one_of((None, 0.3, -0.5)),
    }


COMPUTING: Mapping[str, Computing] = {
    "paged_attention": Computing(
        fits=lambda g: attrs.evolve(g, hv=g.hk, dtype=g.dtype if "float" in g.dtype else "float32"),
        arguments=_attend,
        rows=("q", "block_table", "seq_lens", "out", "lse"),
        indices=("seq_lens", "block_table", "cu_query_lens", "starts"),
        slots=range(1, 33),
        of_slots={"width": 8},
        drawn=_attention_options,
        ways=({"lse": False}, {"starts": True, "sinks": True, "window": 20, "softcap": 3.3}),
    )
}
"""By op."""
