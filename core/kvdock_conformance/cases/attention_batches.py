"""Cases of `paged_attention`: batches in which every two properties meet, edges, garbage, mistakes and parts."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.addresses import at_any_address
from kvdock_conformance.cases.attention import OP, Attention
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.numbers import SPECIAL_BITS
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.requirement import Case, Extended, Level

__all__ = [
    "addresses",
    "edges",
    "every_two",
    "garbage",
    "groups",
    "growing",
    "heavy",
    "index_values",
    "joins",
    "mistakes",
    "nothing_seen",
    "parts",
    "shared",
]

_FACTORS: Mapping[str, Sequence[Any]] = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "pool": ("nhd", "hnd", "padded slots", "odd steps", "k and v unlike", "odd address", "padded blocks"),
    "source": ("contiguous", "odd address", "fused qkv", "odd steps"),
    "heads": ((4, 2), (3, 3), (6, 1), (17, 1), (1, 1), (130, 1)),
    "dims": ((16, 16), (64, 64), (24, 8), (5, 3)),
    "block": (16, 1, 3, 48),
    "counts": ("one each", "none or more", "all", "1 in sums", "none or one"),
    "causal": (True, False),
    "window": (None, 1, 5, 100, 2**32 + 1),
    "softcap": (None, 3.0),
    "scale": (None, 0.3, -0.5, 0.0),
    "sinks": (False, True),
    "starts": (False, True),
    "lse": (True, False),
    "index": ("int64", "int32"),
    "gap": (0, 3),
    "spare": (1, 0, 7),
    "garbage": ("nan", "inf", "numbers"),
}
_LONG: Mapping[str, Sequence[Any]] = {
    **_FACTORS,
    "heads": _FACTORS["heads"][:-1],  # of many heads with long rows a portable kernel takes minutes
    "dims": ((64, 64), (128, 128), (256, 256), (576, 512)),
    "counts": ("one each", "many"),
}
_OF_GROUPS: Mapping[str, Sequence[Any]] = {**_FACTORS, "heads": ((10, 2), (14, 2), (28, 4), (33, 3))}
"""Several heads of the cache, each with query heads of no power of two."""
_EDGES = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 0, 255, 256, 257, 511, 513, 1025)
_PROMPTS = (15, 17, 31, 34, 63, 66, 127, 129, 131, 140, 259)
"""As many queries as fill tiles of powers of two, all but one, or a few of the next."""


def _drawn(number: int, longest: int, **how: Any) -> Attention:
    """Return a batch with some properties, of sequences of which one in six is padding."""
    choose = random.Random(number)  # noqa: S311 - the same in every run
    options = {name: how.pop(name) for name in ("causal", "window", "softcap", "scale")}
    if options["scale"] is not None:  # said for heads of 16: rounding errors grow with scores, and bounds do not
        options["scale"] *= 4 * how["dims"][0] ** -0.5
    rows = choose.choice((1, 2, 5)) if longest < 100 else 2
    most = {"one each": (1,), "1 in sums": (1,), "none or one": (0, 1), "none or more": (0, 1, 2, 9), "all": (12,), "many": (1, 40, 70)}[
        how["counts"]
    ]
    counts = [choose.choice(most) for _ in range(rows)]
    lens = [choose.choice((0, *[choose.randint(max(count, 1), longest)] * 5)) for count in counts]
    if how["counts"] == "all":  # a prompt without anything before it
        lens = counts
    starts = [choose.randint(0, length) for length in lens] if how.pop("starts") else None
    ragged = None if how.pop("counts") == "one each" else counts
    return Attention(lens, ragged, starts=starts, options=options, seed=number, **how)


def every_two() -> Iterator[Case | Extended]:
    """Yield batches in which every two properties meet."""
    yield from _met("core", _FACTORS, 40, Level.CORE)
    for text, factors, longest in (("extended", _LONG, 1500), ("groups", _OF_GROUPS, 40)):
        yield Extended(functools.partial(_met, text, factors, longest, Level.EXTENDED))


def _met(text: str, factors: Mapping[str, Sequence[Any]], longest: int, level: Level) -> Iterator[Case]:
    for number, how in enumerate(covering(factors)):
        special = [f"{factor} {value}" for factor, value in how.items() if value != _FACTORS[factor][0]]
        yield Case(f"{text} {number}: {', '.join(special) or 'plain'}", _drawn(number, longest, **how).case(), level)


def addresses() -> Iterator[Case]:
    """Yield batches with rows of whole vectors, and each tensor at addresses that are no multiple of 16 bytes."""
    for dtype in ("float32", "bfloat16"):
        made = Attention([20, 0, 45, 1], [3, 0, 20, 1], dtype, dims=(64, 64), starts=[7, 0, 9, 0], sinks=True)
        yield from at_any_address(Case(dtype, made.case()))


def groups() -> Iterator[Case]:
    """Yield batches in which several heads of the cache each have many query heads, of no power of two, or few, or one."""
    factors = {
        "sinks": (True, False),
        "softcap": (None, 3.0),
        "window": (None, 7),
        "lse": (True, False),
        "dtype": ("float32", "bfloat16"),
        "counts": (None, (3, 2, 20, 1)),
        "starts": (None, (7, 0, 9, 0)),
    }
    odd, others = itertools.cycle(((14, 2), (10, 2), (28, 4), (33, 3))), itertools.cycle(((24, 8), (7, 7), (9, 3)))
    for how in covering(factors):  # twice, so that every two meet in groups of either kind
        options = {name: how[name] for name in ("softcap", "window")}
        rest = {name: value for name, value in how.items() if name not in options}
        for heads in (next(odd), next(others)):
            name = f"heads {heads}, {', '.join(f'{key} {value}' for key, value in how.items())}"
            yield Case(name, Attention([20, 0, 45, 1], heads=heads, options=options, **rest).case())


_READ = ("q", "block_table", "seq_lens", "starts")


def shared() -> Iterator[Case]:
    """Yield batches in which a tensor that is only read has one row in memory for all: samples of one prompt, or one head for several."""
    for counts, dtype in ((None, "float32"), ([1, 3, 2], "bfloat16")):
        made = Attention([37, 37, 37], counts, dtype, starts=[3, 3, 3], sinks=True, garbage="numbers")
        for name in _READ:
            data = made.case()
            args = data["calls"][0]["args"]
            view = View(**args[name])
            values = None if view.values is None else [*view.values][: math.prod(view.shape[1:])]
            args[name] = attrs.evolve(view.slice(0, 0, 1).expand(view.shape), values=values).spec()
            yield Case(f"one row of {name} for all, {dtype}", data)
        for pool in ("one head for all", "one block for all", "one slot for all", "values expanded from keys"):
            yield Case(f"{pool}, {dtype}", attrs.evolve(made, pool=pool).case())


def edges() -> Iterator[Case]:
    """Yield lengths around powers of two, and windows, in numbers: what is one place off is off by little."""
    plain = Attention(_EDGES, garbage="numbers", spare=0)
    special: Mapping[str, Mapping[str, Any]] = {
        "plain": {},
        "a window of 16": {"options": {"window": 16}},
        "a window of 200": {"options": {"window": 200}},
        "sinks": {"sinks": True},
        "soft cap": {"options": {"softcap": 2.0}},
        "starts": {"starts": [length // 3 for length in _EDGES]},
        "no cause": {"options": {"causal": False}},
        "chunks": {"counts": [min(length, 33) for length in _EDGES]},
        "prompts": {"lens": _PROMPTS, "counts": _PROMPTS},
        "prompts behind others": {"lens": [length + 150 for length in _PROMPTS], "counts": _PROMPTS},
        "chunks, capped": {"counts": [min(length, 5) for length in _EDGES], "options": {"softcap": 2.0}},
        "a long one alone": {"lens": [4097]},
        "a long one alone, of one head": {"lens": [4097], "heads": (1, 1)},
        # Almost all scores are at the cap: exp of it is beyond float32, and no rounding error is left.
        "scores at a cap of 100": {"lens": [33, 64, 129, 300], "options": {"softcap": 100.0, "scale": 1e4}},
        "scores at a cap of 100, negative scale": {"lens": [33, 64, 129, 300], "options": {"softcap": 100.0, "scale": -1e4}},
        "scores at a cap of 100, no sums": {"lens": [33, 64, 129, 300], "options": {"softcap": 100.0, "scale": 1e4}, "lse": False},
    }
    for (name, how), dtype in itertools.product(special.items(), ("float32", "bfloat16", "float16")):
        yield Case(f"{name}, {dtype}", attrs.evolve(plain, **{"dtype": dtype, "heads": (4, 2), **how}).case())


def growing() -> Iterator[Case]:
    """Yield calls of short contexts, and then of long ones: what suits the first calls of a plan is too little. So with queries."""
    for counts, dtype in itertools.product((None, [1, 2]), ("float32", "bfloat16")):
        made = Attention([2300, 700], counts, dtype, garbage="numbers", spare=0).case()
        (one,) = made["calls"]
        lens = ((5, 3), (6, 4), (7, 5), (8, 6), (600, 300), (2300, 700), (9, 2))
        calls = [{**one, "args": {**one["args"], "seq_lens": {**one["args"]["seq_lens"], "values": [*values]}}} for values in lens]
        yield Case(f"growing: {counts or 'one each'}, {dtype}", {**made, "calls": calls})
    drawing = Drawing(7)
    chunks = ([1, 2], [2, 1], [3, 1], [1, 1], [40, 3], [150, 60], [1, 2])
    batches = [Attention([150, 60], counts, garbage="numbers", seed=seed).batch(drawing) for seed, counts in enumerate(chunks)]
    yield Case("growing: queries", drawing.case(*(call(OP, **batch.args) for batch in batches), places=[]))


_JOINS = (
    # Queries whose windows begin in other tiles, some of which see nothing at all: a start lies among them.
    Attention([600, 333], [300, 300], starts=[450, 100], sinks=True, garbage="numbers"),
    # Of a few queries of a long sequence, one sees a last key that is a split of its own.
    Attention([4097, 2050, 5], [3, 2, 1], garbage="numbers"),
    # What a window or a start hides is whole splits, and the short ones have fewer of them than the longest.
    Attention([4097, 3000, 700, 5, 0], garbage="numbers"),
    Attention([4097, 3000, 700, 5, 0], starts=[3900, 2999, 0, 5, 0], garbage="numbers"),
)


def joins() -> Iterator[Case]:
    """Yield sequences of several tiles or splits of keys, however long those are, of some of which a query sees nothing."""
    for made, window, dtype in itertools.product(_JOINS, (None, 1, 40, 700), ("float32", "bfloat16")):
        text = f"{made.lens}, {made.counts or 'one each'}, starts {made.starts}, window {window}, {dtype}"
        yield Case(f"joined: {text}", attrs.evolve(made, dtype=dtype, options={"window": window}).case())
    wide = Attention([1100], [1100], heads=(8, 8), dims=(128, 128), options={"window": 2}, garbage="numbers")
    yield Case("joined: many queries of wide rows, window 2", wide.case())
    for window in (2500, 5000):  # whose beginnings lie on both sides of a border of tiles, and further ones in between
        made = Attention([8192 + 30 + window], [70], heads=(2, 1), options={"window": window}, garbage="numbers")
        yield Case(f"joined: windows of {window} that begin in two tiles", made.case())


def heavy() -> Iterator[Case]:
    """Yield tokens of which a few fill a tile: a block has more, and queries that attend together see nothing in several."""
    factors = {"dtype": ("float32", "bfloat16"), "block": (16, 300), "counts": (None, (200, 3)), "window": (None, 2)}
    for how in covering(factors):
        options = {"window": how.pop("window")}
        made = Attention([230, 40], heads=(32, 32), dims=(256, 256), garbage="numbers", options=options, **how)
        yield Case(", ".join(f"{name} {value}" for name, value in {**how, **options}.items()), made.case(), Level.EXTENDED)
    for dtype in ("float32", "bfloat16"):  # more tiles than may be joined at once
        long = Attention([20_000, 4500], heads=(8, 8), dims=(128, 128), garbage="numbers", dtype=dtype)
        yield Case(f"20,000 wide keys, {dtype}", long.case(), Level.EXTENDED)


def garbage() -> Iterator[Case]:
    """Yield garbage outside of sequences, and a NaN in what only the last queries see."""
    for kind, counts, block in itertools.product(("nan", "inf"), (None, [3, 0, 20, 1]), (16, 3)):
        made = Attention([20, 0, 45, 1], counts, garbage=kind, block=block, starts=[7, 0, 9, 0], sinks=True)
        yield Case(f"{kind} outside, blocks of {block}, {'chunks' if counts else 'one each'}", made.case())
    for window, part, dtype in itertools.product((None, 9), ("k_cache", "v_cache"), ("float32", "bfloat16")):
        made = Attention([45], [21], dtype=dtype, options={"window": window})
        data = made.case()
        place = View(**{**data["calls"][0]["args"][part], "values": [SPECIAL_BITS[dtype][0]]})
        column = data["calls"][0]["args"]["block_table"]["values"][2]
        late = place.slice(0, column, column + 1).slice(1, 5, 6)
        data["places"].append(late.spec())
        yield Case(f"nan in {part} of token 37, window {window}, {dtype}", data)
        if part == "v_cache":  # of keys, scores would be of NaN
            data, sign = made.case(), "" if window else "minus "
            data["places"].append(attrs.evolve(late, values=[SPECIAL_BITS[dtype][3 if sign else 2]]).spec())
            yield Case(f"{sign}infinities in {part} of token 37, window {window}, {dtype}", data)


def nothing_seen() -> Iterator[Case]:
    """Yield queries that see nothing."""
    for name, made in {
        "a table without columns": Attention([0, 0], spare=0),
        "no queries": Attention([5, 20], [0, 0]),
        "nothing at all": Attention([], []),
        "queries of padding alone": Attention([0, 0], [2, 1], spare=0, sinks=True),
        "padding": Attention([0, 5, 0]),
        "padding with several queries, and sinks": Attention([0, 5, 0], [2, 1, 3], sinks=True),
        "starts at the end": Attention([5, 20], [3, 1], starts=[5, 20]),
        "starts at the end, and sinks": Attention([5, 20], starts=[5, 20], sinks=True),
        "starts at the end of many keys": Attention([2000, 4097, 300], [3, 1, 2], starts=[2000, 4097, 300], spare=0),
        "starts at the end of many keys, one each": Attention([2000, 4097, 300], starts=[2000, 4097, 299], spare=0),
    }.items():
        yield Case(name, made.case())


_GOOD = Attention([5, 20, 33], [2, 1, 20], garbage="numbers", spare=0, starts=[0, 3, 2])


def _changed(name: str, values: Sequence[int], place: str, *, counted: bool, good: Attention = _GOOD) -> Iterator[Case]:
    """Yield a good call with other index values: alone, made again, and behind the good one, in the same memory."""
    data = good.case(texts=[place], counted=counted)
    data["calls"][0]["args"][name]["values"] = list(values)
    yield Case(f"{name} {list(values)}", data)
    yield Case(f"{name} {list(values)}, and again", {**data, "calls": data["calls"] * 2})
    yield Case(f"{name} {list(values)}, behind a good call", {**data, "calls": [good.case()["calls"][0], *data["calls"]]})


def index_values() -> Iterator[Case]:
    """Yield index values that are out of range."""
    yield from _changed("seq_lens", [5, 49, 33], "seq_lens[1]", counted=True)
    yield from _changed("seq_lens", [5, 20, 2**31 + 5], "seq_lens[2]", counted=True)
    yield from _changed("seq_lens", [-1, 20, 33], "seq_lens[0]", counted=True)
    yield from _changed("seq_lens", [1, 20, 33], "seq_lens[0]", counted=False)
    yield from _changed("cu_query_lens", [0, 2, 3, 22], "cu_query_lens[3]", counted=False)
    yield from _changed("cu_query_lens", [0, 4, 3, 23], "cu_query_lens[2]", counted=False)
    yield from _changed("cu_query_lens", [1, 2, 3, 23], "cu_query_lens[0]", counted=False)
    yield from _changed("cu_query_lens", [0, 0, 0, 23], "cu_query_lens[3]", counted=False)
    yield from _changed("starts", [6, 3, 2], "starts[0]", counted=False)
    yield from _changed("starts", [0, 3, -1], "starts[2]", counted=False)
    yield from _changed("starts", [0, 3], "starts[1]", counted=False, good=Attention([10, 0], starts=[0, 0], garbage="numbers", spare=0))
    yield from _beside_the_last()
    yield from _in_a_smaller_pool()
    data = _GOOD.case(texts=["cu_query_lens[3]"], counted=False)
    data["calls"][0]["args"]["max_query_len"] = 19
    yield Case("fewer than the most queries, behind a good call", {**data, "calls": [*_GOOD.case()["calls"], *data["calls"]]})
    # What adds up to what a good call brought.
    yield from _changed("seq_lens", [-1, 26, 33], "seq_lens[0]", counted=True)
    yield from _changed("cu_query_lens", [0, 3, 2, 23], "cu_query_lens[2]", counted=False)
    for outside in (-1, 8, 2**31 - 1):
        table = _GOOD.case()["calls"][0]["args"]["block_table"]["values"]
        yield from _changed("block_table", [*table[:7], outside, *table[8:]], "block_table[2, 1]", counted=True)
        if outside == -1:  # and what nobody looks at takes up the rest
            yield from _changed(
                "block_table", [*table[:2], table[2] + 1 + table[7], *table[3:7], -1, *table[8:]], "block_table[2, 1]", counted=True
            )


def _beside_the_last() -> Iterator[Case]:
    """Yield what is wrong for another query than a sequence's last, and a length one beyond those of the calls before it."""
    windowed = Attention([40, 20], [20, 1], garbage="numbers", spare=0, options={"window": 3})
    table = windowed.case()["calls"][0]["args"]["block_table"]["values"]  # the last query looks into the third block alone
    yield from _changed("block_table", [table[0], -1, *table[2:]], "block_table[0, 1]", counted=True, good=windowed)
    step = Attention([48], garbage="numbers", spare=0)
    data = step.case(texts=["seq_lens[0]"], counted=True)
    one = data["calls"][0]
    calls = [{**one, "args": {**one["args"], "seq_lens": {**one["args"]["seq_lens"], "values": [length]}}} for length in range(45, 50)]
    yield Case("decoding to the end of a table, and beyond", {**data, "calls": calls})


def _in_a_smaller_pool() -> Iterator[Case]:
    """Yield a call on fewer blocks than the good one before it had, of which one was the last."""
    data = _GOOD.case(counted=True)
    good = data["calls"][0]
    named = {(row, column): block for row, blocks in enumerate(_GOOD.table(good)) for column, block in enumerate(blocks)}
    (row, column), last = max(named.items(), key=lambda item: item[1])
    smaller = {name: {**good["args"][name], "shape": [last, *good["args"][name]["shape"][1:]]} for name in ("k_cache", "v_cache")}
    calls = [good, {**good, "args": {**good["args"], **smaller}}]
    yield Case("fewer blocks, behind a good call", {**data, "calls": calls, "texts": [f"block_table[{row}, {column}]"]})


def mistakes() -> Iterator[Case]:
    """Yield what the schema's sizes and dtypes do not say."""
    for name, wrong, text in (
        *(("window", value, "at least 1 key") for value in (0, -3, 1.5, True)),
        *(("softcap", value, "a finite number above 0") for value in (0, -1.0, "3")),
        ("scale", "0.5", "a finite number"),
        ("causal", 1, "True or False"),
        ("causal", None, "True or False"),
        ("max_query_len", 2.0, "an int"),
    ):
        yield _mistake(f"{name} {wrong!r}", {name: wrong}, f": {name}: ", text, error="ArgumentTypeError" if name[0] == "m" else None)
    wrong_sizes: Mapping[str, Mapping[str, Any]] = {
        "heads that do not divide": {"heads": (5, 2)},
        "no sums": {"counts": None},
        "fewer sums": {"counts": [2, 21]},
    }
    for name, change in wrong_sizes.items():
        drawing = Drawing(1)
        args = _GOOD.batch(drawing).args
        other = attrs.evolve(_GOOD, **change).batch(drawing).args
        if name == "heads that do not divide":
            taken = {each: other[each] for each in ("q", "out", "lse")}
        else:
            taken = {"cu_query_lens": other["cu_query_lens"]}
        calls = [call(OP, **args), call(OP, **{**args, **taken})]
        yield Case(name, drawing.case(*calls, error="ArgumentValueError", texts=[""], meta=[], may_pass=False))


def _mistake(name: str, change: Mapping[str, Any], *texts: str, error: str | None) -> Case:
    data = _GOOD.case(error=error or "ArgumentValueError", texts=[*texts], meta=[], may_pass=False)
    good = data["calls"][0]
    args = {key: value for key, value in {**good["args"], **change}.items() if value is not None}
    return Case(name, {**data, "calls": [good, {**good, "args": args}]})


def parts() -> Iterator[Case]:
    """Yield batches whose keys are cut in two, or three."""
    for name, cuts, dtype in (("two", ([18, 0, 7],), "float32"), ("three", ([18, 0, 7], [19, 3, 60]), "float16")):
        lens = [20, 5, 130]
        made = Attention(lens, dtype=dtype, options={"causal": False})
        drawing = Drawing(3)
        args = made.batch(drawing).args
        sides = [[0] * 3, *cuts, lens]
        parts = []
        for first, end in itertools.pairwise(sides):
            ends = [last if last > begin else 0 for begin, last in zip(first, end, strict=True)]
            starts = [begin if last else 0 for begin, last in zip(first, ends, strict=True)]
            index = {"seq_lens": ends, "starts": starts}
            parts.append({**args, **{key: drawing.tensor("int64", (3,), values=values) for key, values in index.items()}})
        yield Case(f"{name} parts, {dtype}", drawing.case(*(call(OP, **one) for one in (args, *parts)), places=[]))
