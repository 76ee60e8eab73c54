"""Calls of `paged_attention` against the reference in float64, within `kvdock_conformance.checking.meaning.BOUNDS`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.checking.calls import expect_refusal
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import BOUNDS, compare_call, refer
from kvdock_conformance.checking.memory import BITS, Arenas, compare
from kvdock_conformance.checking.repeated import check_computed, memory_of
from kvdock_conformance.checking.target import Target
from kvdock_conformance.requirement import Capability, Check

__all__ = [
    "BATCH_INVARIANT",
    "check_alone",
    "check_index_values",
    "check_parts",
    "check_public",
    "check_repeatable",
    "why_not_invariant",
]

_OWN = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
"""Arguments of the function that have no keyword."""


def _args(memory: Arenas, call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: memory.tensor(spec) for name, spec in call["args"].items()}


def check_public(target: Target, data: Mapping[str, Any]) -> None:
    """Check calls as a user makes them: with an output or without, and with sums or without.

    Raises:
        NonconformanceError: something else comes back than was asked for, or it does not hold what the reference writes.
    """
    for call in data["calls"]:
        for given in (False, True):
            for return_lse in (False, True):
                memory = memory_of(target, data)
                expected, named = memory.copy(), {name: spec for name, spec in call["args"].items() if return_lse or name != "lse"}
                refer(expected, {**call, "args": named})
                _check_returned(target, memory, call, given=given, return_lse=return_lse)
                how = f"out {'given' if given else 'made'}, return_lse={return_lse}"
                compare_call(memory, expected, call, f"kvdock.ops.{call['op']}, {how}")


def _check_returned(target: Target, memory: Arenas, call: Mapping[str, Any], *, given: bool, return_lse: bool) -> None:
    """Call the public function, and put what it returns where the reference writes it."""
    args = _args(memory, call)
    out, lse = args.pop("out"), args.pop("lse")
    keywords = {name: value for name, value in args.items() if name not in _OWN} | ({"out": out} if given else {})
    with target.using(call["op"]):
        got = getattr(kvdock.ops, call["op"])(*(args[name] for name in _OWN), **keywords, return_lse=return_lse)
    found, sums = got if isinstance(got, tuple) else (got, None)
    wanted = f"{'the given tensor' if given else 'a new tensor'}{', and sums' if return_lse else ' alone'}"
    if (found is out) is not given or (sums is not None) is not return_lse:
        raise NonconformanceError(f"{call['op']}: what is returned", expected=wanted, got=f"{type(got).__name__}, {found is out}")
    out.copy_(found)
    if sums is not None:
        lse.copy_(sums)


def check_index_values(target: Target, data: Mapping[str, Any]) -> None:
    """Check the last call of a case, which has an index value that is out of range: refused on host memory, else not seen and counted.

    Raises:
        NonconformanceError: it does not raise where it must, says something else or has written something; or on a device a byte
            that is no output's has changed, or nothing was counted that could be.
    """
    memory, (*good, call) = memory_of(target, data), data["calls"]
    for each in good:
        with contextlib.suppress(*[kvdock.IndexRangeError] * (each == call)):  # it may be made twice
            target.call(each["op"], _args(memory, each))
    args = _args(memory, call)
    if target.must_raise:
        expect_refusal(target, memory, call, args, kvdock.IndexRangeError, [*data["texts"], "expected ", "got ", "Fix: "])
        return
    before, skipped = memory.copy(), target.skipped()
    with contextlib.suppress(kvdock.IndexRangeError):
        target.call(call["op"], args)
        if data["counted"] and target.skipped() == skipped:
            raise NonconformanceError(f"{call['op']} with {data['texts'][0]}: counted", expected="at least one more", got="none")
    outputs = {call["args"][name]["arena"] for name in ("out", "lse")}
    compare(memory, before, call["args"], f"{call['op']} with {data['texts'][0]}", set(range(len(memory.bytes))) - outputs)


def check_parts(target: Target, data: Mapping[str, Any]) -> None:
    """Check that results over parts of the keys, merged, are that over all: the first call's. The others are the parts.

    Raises:
        NonconformanceError: a number is further off than it may be.
    """
    memory = memory_of(target, data)
    expected = memory.copy()
    whole, *parts = data["calls"]
    refer(expected, whole)
    found = []
    for call in parts:
        args = _args(memory, call)
        target.call(call["op"], args)
        found.append((args["out"].clone(), args["lse"].clone()))
    for name, got in zip(("out", "lse"), kvdock.ops.merge_attention(found), strict=True):
        wanted = expected.tensor({**whole["args"][name], "values": None})
        bound = BOUNDS[wanted.dtype]
        if not torch.allclose(got.cpu().double(), wanted.double(), rtol=bound, atol=bound):
            off = float((got.cpu().double() - wanted.double()).abs().max())
            raise NonconformanceError(f"{whole['op']}: {name} of merged parts", expected=f"at most {bound} off", got=off)


def why_not_invariant(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against equal bits in any batch: it is not claimed, or somebody else serves the call."""
    claims = target.backend.capabilities().batch_invariant
    return [] if claims else [f"{target.name} does not claim batch_invariant"]


def check_repeatable(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check what holds without the claim too: within bounds, results are those of the reference.

    Raises:
        NonconformanceError: one is not.
    """
    check_computed(target, {**data, "calls": data["calls"][:1]})


BATCH_INVARIANT = Capability("gives a row the same bits in any batch", why_not_invariant, check_repeatable)


def check_alone(target: Target, data: Mapping[str, Any]) -> None:
    """Check that each sequence gets in the first call, which has all, what it gets in one of the others, bit for bit.

    Raises:
        NonconformanceError: a bit differs.
    """
    memory, (whole, *others) = memory_of(target, data), data["calls"]
    together = _args(memory, whole)
    target.call(whole["op"], together)
    for call, queries in zip(others, data["queries"], strict=True):
        args = _args(memory, call)
        target.call(call["op"], args)
        for name in [name for name in ("out", "lse") if name in args]:
            part, alone = together[name][slice(*queries)], args[name]
            bits = BITS[alone.element_size()]
            if not torch.equal(part.contiguous().view(bits), alone.contiguous().view(bits)):
                off = float((part.double() - alone.double()).abs().max())
                what = f"{call['op']}: {name} of queries {queries[0]} to {queries[1]} in a batch, and alone"
                raise NonconformanceError(what, expected="the same bits", got=f"numbers {off:.3g} apart")
