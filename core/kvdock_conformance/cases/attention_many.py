"""Cases of `paged_attention` with many sequences, blocks, keys or elements; with what is wrong behind many; and with sequences alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.attention import OP, Attention
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.requirement import Case, Extended, Level, at_level

__all__ = ["alone", "behind_many", "many", "products"]


def many() -> Iterator[Case | Extended]:
    """Yield more sequences and blocks than some bits can say, and rows of latents, with values in the rows of keys."""
    small = Attention([1 + row % 2 for row in range(1030)], heads=(1, 1), dims=(4, 4), block=2, garbage="numbers")
    yield Case("1,030 sequences", small.case())
    ragged = attrs.evolve(small, lens=[2] * 4100, counts=[row % 3 for row in range(4100)])
    yield from at_level(Level.EXTENDED, lambda: [Case("4,100 sequences, chunks", ragged.case(), Level.EXTENDED)])
    for before in (2**15, 2**16):
        made = Attention([9, 0, 5], block=1, dims=(8, 8), before=before, garbage="numbers")
        yield Case(f"blocks behind {before}", made.case())
    yield Case("a table of 5,000 columns", Attention([5000, 2050], block=1, heads=(1, 1), dims=(4, 4), garbage="numbers").case())
    for dims in ((33, 33), (65, 40), (80, 80), (96, 96), (129, 127), (192, 128), (257, 250), (300, 300), (513, 80)):
        for counts in (None, [2, 1, 7]):
            made = Attention([20, 5, 45], counts, dims=dims, heads=(2, 1), garbage="numbers")
            yield Case(f"{dims[0]} and {dims[1]} elements, {counts or 'one each'}", made.case())
    for block in (272, 784):  # as the blocks of hybrid models have
        yield Case(f"blocks of {block}", Attention([900, 300], [2, 1], block=block, dims=(8, 8), garbage="numbers").case())
    # More keys than 16 bits can say, or a table of so many splits has room for.
    yield Case("70,000 keys", Attention([70_000], heads=(1, 1), dims=(4, 4), block=256, garbage="numbers").case())
    factors = {
        "pool": ("values end keys", "values begin keys", "nhd"),
        "dims": ((576, 512), (24, 8)),
        "heads": ((4, 1), (4, 2)),
        "dtype": ("float32", "bfloat16"),
        "counts": (None, (1, 0, 3)),
        "lse": (False, True),
    }
    for how in covering(factors):
        made = Attention([20, 5, 45], garbage="numbers", options={"scale": how["dims"][0] ** -0.5}, **how)
        yield Case(", ".join(f"{name} {value}" for name, value in how.items()), made.case())


def products() -> Iterator[Case]:
    """Yield more queries and heads together than a launch grid has rows, also of heads of the cache.

    Not of queries alone: so many take the reference ten seconds.
    """
    for rows, heads, counts in ((1100, (60, 60), 0), (300, (256, 2), 0), (3, (22_000, 2), 0), (100, (10, 10), 66)):
        made = Attention([max(counts, 1 + row % 2) for row in range(rows)], heads=heads, dims=(4, 4), block=2, garbage="numbers")
        made = attrs.evolve(made, counts=[counts] * rows if counts else None)
        yield Case(f"{rows} sequences of {heads} heads, {counts or 'one'} each", made.case())


def behind_many() -> Iterator[Case]:
    """Yield index values that are out of range for the last of many sequences."""
    for rows in (9, 33, 1025):
        counts = [20, *[1] * (rows - 1)]
        good = Attention(counts, counts, heads=(1, 1), dims=(4, 4), block=32, garbage="numbers", spare=0, starts=[0] * rows)
        last: Mapping[str, Sequence[tuple[int, int, bool]]] = {  # by name: where, what is there, and whether it is counted
            "seq_lens": [(rows - 1, -1, True), (rows - 1, 33, True)],
            "block_table": [(rows - 1, -1, True), (rows - 1, rows + 9, True)],
            "starts": [(rows - 1, -1, False), (rows - 1, 2, False)],
            "cu_query_lens": [(rows - 1, rows + 15, False)],
        }
        for name, wrong in last.items():
            for at, value, counted in wrong:
                data = good.case(texts=[f"{name}[{at}{', 0' * (name == 'block_table')}]"], counted=counted)
                data["calls"][0]["args"][name]["values"][at] = value
                yield Case(f"{name}[{at}] = {value}, behind many good ones", data)


def alone() -> Iterator[Case | Extended]:
    """Yield batches, then some of their sequences alone: few that are long, and more than are attended to at once."""
    for dtype, counts, dims in itertools.product(("float32", "bfloat16"), (None, [1, 3, 70, 1, 1]), ((64, 64), (24, 8))):
        made = Attention([20, 5, 300, 1, 1100], counts, dtype=dtype, dims=dims, garbage="numbers")
        yield _alone(f"{dtype}, {dims[0]} and {dims[1]}, {'chunks' if counts else 'one each'}", made, range(5))
    for dtype, (rows, most) in itertools.product(("float32", "bfloat16"), ((17, 0), (65, 0), (300, 0), (17, 3), (65, 2))):
        counts = [1 + row % most for row in range(rows)] if most else None
        made = Attention([3 + row * 7 % 40 for row in range(rows)], counts, dtype=dtype, garbage="numbers")
        yield _alone(f"{dtype}, {rows} sequences, {'chunks' if most else 'one each'}", made, (0, rows // 2, rows - 1))
    yield Extended(_of_many)


_OF_MANY: Mapping[str, Sequence[Any]] = {
    "rows": (17, 33, 65, 300),
    "longest": (20, 700),
    "most": (0, 3),
    "heads": ((4, 2), (10, 2), (6, 1), (3, 3)),
    "dims": ((16, 16), (64, 64), (24, 8)),
    "dtype": ("float32", "bfloat16", "float16"),
    "window": (None, 9),
    "softcap": (None, 3.0),
    "causal": (True, False),
    "sinks": (False, True),
    "starts": (False, True),
    "lse": (True, False),
    "index": ("int64", "int32"),
}


def _of_many() -> Iterator[Case]:
    """Yield batches of many sequences in which every two properties meet, then some of their sequences alone."""
    for how in covering(_OF_MANY):
        name = ", ".join(f"{key} {value}" for key, value in how.items())
        rows, longest, most = (how.pop(key) for key in ("rows", "longest", "most"))
        lens = [*(3 + row * 7 % 20 for row in range(rows - 1)), longest]
        counts = [1 + row % most for row in range(rows)] if most else None
        starts = [row % 3 for row in range(rows)] if how.pop("starts") else None
        options = {key: how.pop(key) for key in ("window", "softcap", "causal")}
        made = Attention(lens, counts, starts=starts, options=options, garbage="numbers", **how)
        yield attrs.evolve(_alone(name, made, (0, rows // 2, rows - 1)), level=Level.EXTENDED)


def _alone(name: str, made: Attention, rows: Sequence[int]) -> Case:
    """Return a batch, and then some of its sequences alone."""
    drawing = Drawing(5)
    args = made.batch(drawing).args
    ends = [0, *itertools.accumulate(made.counts or [1] * len(made.lens))]
    calls, queries = [args], [[ends[row], ends[row + 1]] for row in rows]
    for row, (begin, end) in zip(rows, queries, strict=True):
        by_row = {key: args[key].slice(0, row, row + 1) for key in ("block_table", "seq_lens", "starts") if args[key] is not None}
        own: dict[str, View] = {key: attrs.evolve(view, values=None) for key, view in by_row.items()}
        own |= {"q": args["q"].slice(0, begin, end), "out": drawing.tensor(made.dtype, (end - begin, made.heads[0], made.dims[1]))}
        own |= {"lse": drawing.tensor("float32", (end - begin, made.heads[0]))} if made.lse else {}
        own |= {"cu_query_lens": drawing.tensor(made.index, (2,), values=[0, end - begin])} if made.counts else {}
        calls.append({**args, **own})
    return Case(name, drawing.case(*(call(OP, **one) for one in calls), places=[], queries=queries))
