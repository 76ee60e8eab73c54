"""Random calls of ops that are asked by their schemas alone: on latents, and swaps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvdock_conformance.cases.any_op import SIZES, AnyCall, Drawable, factors_of, in_turn, static_words
from kvdock_conformance.cases.computing import Chooser
from kvdock_conformance.cases.latents import DRAWN as LATENTS
from kvdock_conformance.cases.swaps import DRAWN as SWAP

__all__ = ["BY_SCHEMA", "random_any"]

BY_SCHEMA: Mapping[str, Drawable] = MappingProxyType({**LATENTS, SWAP.schema.name: SWAP})
"""By name."""

_INDICES = {"slot_mapping", "block_pairs"}


def random_any(choose: Chooser, op: Drawable, **more: Any) -> dict[str, Any]:
    """Return the data of a case: a call, and behind it the same again, others on its pools, or others altogether."""
    factors = factors_of(op.schema, *SIZES)
    first = _one(choose, op, {factor: choose.one_of(values) for factor, values in factors.items()}, {}) or AnyCall(op).settled()
    assert first is not None  # noqa: S101 - without sizes that are given it raises
    calls, pools = [first], choose.one_of((True, False))
    own = {arg.name for arg in op.schema.args} - {arg.name for arg in op.schema.static_args}
    free = [factor for factor in factors if not pools or factor == "lead" or _is_of(factor, own)]
    static = {word: first.sizes[word] for word in static_words(op.schema) if pools and word in first.sizes}
    for _ in range(choose.integer(0, 5)):
        kind = choose.one_of(("the same", "other values", "other"))
        if kind == "the same":
            calls.append(calls[-1])
        elif kind == "other values":
            calls.append(attrs.evolve(calls[-1], seed=choose.integer(0, 999)))
        else:
            how = {**first.how, **{factor: choose.one_of(factors[factor]) for factor in free}}
            calls += [made] if (made := _one(choose, op, how, static)) is not None else []
    data = in_turn(calls, pools=pools, **more)
    for arena in data["arenas"]:  # they move bytes: any bits will do
        if arena.get("fill") == "numbers":
            arena["fill"] = "random"
    for each in data["calls"]:
        for name in _INDICES & each["args"].keys():
            _turn(choose, each["args"][name]["values"])
    return data


def _turn(choose: Chooser, values: list[int]) -> None:
    """Let padding be other negative numbers, and now and then an index far out of range."""
    for place, value in enumerate(values):
        values[place] = -1 - place % 3 if value < 0 else value
    if choose.one_of((False,) * 7 + (True,)) and values:
        values[choose.integer(0, len(values) - 1)] = 2**30


def _is_of(factor: str, names: set[str]) -> bool:
    """Whether a factor is how an argument of these comes or lies: neither its dtype nor its place, which go with the pools'."""
    name, _, what = factor.partition(" ")
    return name in names and what in ("form", "memory")


def _one(choose: Chooser, op: Drawable, how: Mapping[str, Any], sizes: Mapping[str, int]) -> AnyCall | None:
    """Return a call that has sizes; None where there are none."""
    return AnyCall(op, how, seed=choose.integer(0, 999)).settled(**sizes)
