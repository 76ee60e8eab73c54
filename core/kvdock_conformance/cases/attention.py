"""Calls of `paged_attention` as cases: batches whose pools hold garbage wherever no query may look."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.ops.attention import PAGED_ATTENTION
from kvdock.ops.schema import OpSchema
from kvdock.plugin import QUANTISED_DTYPES
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.layouts import READ_POOLS, SOURCES, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS

__all__ = ["ATTENTION", "OP", "Attention", "Batch", "Drawn"]

OP = PAGED_ATTENTION.name


@attrs.frozen
class Batch:
    """The data of one call.

    Args:
        args: its arguments.
        places: what is written into the pools before it.
    """

    args: Mapping[str, Any]
    places: Sequence[View]


@attrs.frozen
class Attention:
    """A good call, with something that is special about it.

    Args:
        lens: tokens of each sequence.
        counts: queries of each sequence; None for one each, without ``cu_query_lens``.
        dtype: torch's name of the dtype.
        heads: of queries, and of the cache.
        dims: elements of keys, and of values.
        block: tokens of a block.
        pool: name of one of `kvdock_conformance.cases.layouts.READ_POOLS`.
        source: name of one of `kvdock_conformance.cases.layouts.SOURCES`, for queries and for the output.
        starts: first token of each sequence that is seen.
        sinks: whether there are sinks.
        lse: whether sums are returned.
        index: dtype of lengths, sums and starts.
        gap: free elements behind each row of the table, and behind each length, sum and start.
        spare: columns of the table behind those that the longest sequence needs.
        before: blocks of nobody in front of all others.
        garbage: what lies where nobody may look: ``"nan"``, ``"inf"`` or ``"numbers"``.
        options: other arguments of the op.
        seed: of numbers, and of blocks.
    """

    lens: Sequence[int]
    counts: Sequence[int] | None = None
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    block: int = 16
    pool: str = "nhd"
    source: str = "contiguous"
    starts: Sequence[int] | None = None
    sinks: bool = False
    lse: bool = True
    index: str = "int64"
    gap: int = 0
    spare: int = 1
    before: int = 0
    garbage: str = "nan"
    options: Mapping[str, Any] = MappingProxyType({})
    seed: int = 0

    @property
    def queries(self) -> int:
        """How many queries there are."""
        return len(self.lens) if self.counts is None else sum(self.counts)

    def _blocks(self) -> list[int]:
        """Return how many blocks each sequence has."""
        return [-(-length // self.block) for length in self.lens]

    def batch(self, drawing: Drawing) -> Batch:
        """Return the call on memory of its own."""
        needed, choose = self._blocks(), random.Random(self.seed)  # noqa: S311 - the same in every run
        (hq, hk), (dk, dv) = self.heads, self.dims
        g = Geometry(self.before + sum(needed) + 2, self.block, hk, dk, hk, dv, self.dtype)
        k_cache, v_cache = READ_POOLS[self.pool](drawing, g)
        rows = attrs.evolve(g, hk=hq, hv=hq)
        q = SOURCES[self.source](drawing, rows, (self.queries,))[0]
        for arena in drawing.arenas:
            arena |= {"fill": "numbers", "dtype": self.dtype}
        out = SOURCES[self.source](drawing, rows, (self.queries,))[1]
        owned = iter(choose.sample(range(self.before, g.num_blocks), sum(needed)))
        table = [list(itertools.islice(owned, count)) for count in needed]
        views = [k_cache, v_cache] if self.garbage != "numbers" else []
        places = [place for view in views for place in self._places(view, table)]
        args: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": self._table(drawing, table, choose)}
        args |= {"seq_lens": self._index(drawing, self.lens), "cu_query_lens": self._sums(drawing)}
        args |= {"starts": None if self.starts is None else self._index(drawing, self.starts)}
        args["sinks"] = drawing.tensor("float32", (hq,), fill="numbers") if self.sinks else None
        args["max_query_len"] = 1 if self.counts is None else max([*self.counts, 1])
        args |= {"causal": True, **self.options, "out": out}
        args["lse"] = drawing.tensor("float32", (self.queries, hq)) if self.lse else None
        return Batch(args, places)

    def _index(self, drawing: Drawing, values: Sequence[int]) -> View:
        view = drawing.tensor(self.index, (len(values), 1 + self.gap)).select(1, 0)
        return attrs.evolve(view, values=values or [0])

    def _sums(self, drawing: Drawing) -> View | None:
        return None if self.counts is None else self._index(drawing, [0, *itertools.accumulate(self.counts)])

    def _table(self, drawing: Drawing, table: Sequence[Sequence[int]], choose: random.Random) -> View:
        """Return block ids, of no block where no query looks."""
        width = max([*map(len, table), 0]) + self.spare
        rows = [[*row, *(choose.choice((-1, -(2**31), 2**31 - 1)) for _ in range(width - len(row)))] for row in table]
        for row, start in zip(rows, self.starts or [0] * len(rows), strict=True):
            row[: start // self.block] = [2**31 - 1] * (start // self.block)
        return drawing.tensor("int32", (len(rows), width), gaps=(0, self.gap), values=[block for row in rows for block in row] or [0])

    def _places(self, cache: View, table: Sequence[Sequence[int]]) -> Iterator[View]:
        """Yield garbage in a pool: blocks of nobody, what is behind the end of a sequence, and what is before its start."""
        bits = [SPECIAL_BITS[self.dtype][0 if self.garbage == "nan" else 2]]
        taken = {block for row in table for block in row}
        for block in set(range(cache.shape[0])) - taken:
            yield attrs.evolve(cache.slice(0, block, block + 1), values=bits)
        for row, (blocks, length) in enumerate(zip(table, self.lens, strict=True)):
            start = self.starts[row] if self.starts else 0
            for number, block in enumerate(blocks):
                seen = (min(max(start - number * self.block, 0), self.block), min(length - number * self.block, self.block))
                one = cache.slice(0, block, block + 1)
                yield from (
                    attrs.evolve(one.slice(1, *part), values=bits) for part in ((0, seen[0]), (seen[1], self.block)) if part[0] < part[1]
                )

    def table(self, made: Mapping[str, Any]) -> list[list[int]]:
        """Return the blocks of each sequence, of a call that was made."""
        values, width = made["args"]["block_table"]["values"], made["args"]["block_table"]["shape"][1]
        return [list(values[row * width : row * width + count]) for row, count in enumerate(self._blocks())]

    def case(self, **more: Any) -> dict[str, Any]:
        """Return the data of a case of this call; ``more`` is for its check."""
        drawing = Drawing(self.seed)
        batch = self.batch(drawing)
        return drawing.case(call(OP, **batch.args), places=[place.spec() for place in batch.places], **more)


@attrs.frozen
class Drawn:
    """An op of kvdock's own whose calls are drawn as those of a plugin's op are: see `kvdock_conformance.cases.any_op`.

    Args:
        schema: what it takes and writes.
        draw: returns values of what the schema cannot say.
    """

    schema: OpSchema
    draw: Any


def _values(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Any]:
    """Return index values and options for some sizes; there are as many queries as sequences."""
    batch, room = sizes["B"], sizes["W"] * sizes["block"]
    counts = [1] * batch
    for row in range(batch - 1) if "C" in sizes and room > 1 else ():
        if counts[row] == counts[row + 1] == 1 and choose.random() < 0.3:
            counts[row : row + 2] = (2, 0)
    lens = [choose.choice((0, *range(count, min(room, 9) + 1))) if room else 0 for count in counts]
    return {
        "block_table": choose.choices(range(sizes["NB"]), k=batch * sizes["W"]),
        "seq_lens": lens,
        "cu_query_lens": [0, *itertools.accumulate(counts)],
        "starts": [choose.randint(0, length) for length in lens],
        "max_query_len": max([*counts, 1]) if "C" in sizes else 1,
        "scale": choose.choice((None, 0.3)),
        "causal": choose.random() < 0.7,
        "window": choose.choice((None, 3)),
        "softcap": choose.choice((None, 3.0)),
    }


ATTENTION = Drawn(
    attrs.evolve(
        PAGED_ATTENTION,
        args=tuple(attrs.evolve(arg, dtypes=tuple(d for d in arg.dtypes if d not in QUANTISED_DTYPES)) for arg in PAGED_ATTENTION.args),
    ),
    _values,
)
"""`paged_attention`, without quantised caches."""
