"""Cases of `paged_attention` with outliers: numbers of a size that few models have, of which results follow exactly all the same.

Scores are equal, or so far apart that the lower ones weigh nothing: whatever is rounded, a query's result is the mean of the values of
the keys that score highest. So bounds need not grow with the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvdock_conformance.cases.attention import Attention
from kvdock_conformance.checking.memory import BITS
from kvdock_conformance.requirement import Case

__all__ = ["outliers"]

_LOW, _HIGH, _BOTH = (-256.0, -512.0, -256.0), (256.0, 512.0, 512.0), (256.0, -512.0, -256.0, 512.0, 0.0)
_KINDS: Mapping[str, tuple[Sequence[float], Sequence[float], Mapping[str, Any]]] = {
    "all scores far below 0": ((1024.0,), _LOW, {}),
    "all scores far above 0": ((1024.0,), _HIGH, {}),
    "scores of both signs": ((1024.0,), _BOTH, {}),
    "a negative scale": ((1024.0,), _BOTH, {"scale": -(2.0**-4)}),
    "queries of unlike sizes": ((1024.0, 0.0, -1024.0, 0.25), _BOTH, {}),
    "a low cap": ((1024.0,), _BOTH, {"softcap": 1.0}),
    "a cap of 50": ((1024.0, -1024.0), _BOTH, {"softcap": 50.0}),
    "a window": ((1024.0,), _LOW, {"window": 5}),
}
"""First elements of queries, one after the other, and of keys; the others are 0. Products are beyond float16."""

_SINKS = (100.0, -30_000.0, 30_000.0, -math.inf)
_COUNTS = (None, [3, 0, 20, 1])


def outliers() -> Iterator[Case]:
    """Yield decoding and chunks, with sinks far off or without."""
    for number, (name, (queries, keys, options)) in enumerate(_KINDS.items()):
        for dtype in ("float32", "float16", "bfloat16"):
            counts, others = _COUNTS if number % 2 == 0 else _COUNTS[::-1]
            made = Attention([20, 0, 45, 1], counts, dtype, garbage="numbers", options={"scale": 2.0**-4, **options})
            yield Case(f"{name}, {dtype}", _with(made, queries, keys))
            yield Case(f"{name}, {dtype}, and sinks", _with(attrs.evolve(made, counts=others, sinks=True), queries, keys))
    for counts in _COUNTS:  # a sum of weighted values is beyond float16, and their mean is not
        many = Attention([2100, 0, 1500, 33], counts, "float16", garbage="numbers")
        data = _with(many, (0.0,), (0.0,))
        data["calls"][0]["args"]["v_cache"]["values"] = _bits("float16", [100.0])
        yield Case(f"many large values alike, {'chunks' if counts else 'one each'}", data)
    for dtype in ("float32", "bfloat16"):
        plain = Attention([20, 0, 45, 1], dtype=dtype, garbage="numbers", sinks=True)
        yield Case(f"sinks alone, {dtype}", _with(plain, None, None))


def _with(made: Attention, queries: Sequence[float] | None, keys: Sequence[float] | None) -> dict[str, Any]:
    """Return the data of a call with these first elements of queries and keys, and with sinks that are far off."""
    data = made.case()
    args = data["calls"][0]["args"]
    for name, firsts, rows in (("q", queries, made.heads[0]), ("k_cache", keys, 1)):  # of a query in all heads
        if firsts is not None:
            zeros = [0.0] * (made.dims[0] - 1)
            args[name]["values"] = _bits(made.dtype, [number for first in firsts for number in [first, *zeros] * rows])
    if made.sinks:
        args["sinks"]["values"] = _bits("float32", _SINKS)
    return data


def _bits(dtype: str, numbers: Sequence[float]) -> list[int]:
    made = torch.tensor(numbers, dtype=getattr(torch, dtype))
    bits: list[int] = made.view(BITS[made.element_size()]).tolist()
    return bits
