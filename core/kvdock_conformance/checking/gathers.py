"""Reads from a paged pool: into outputs that are given, and into new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.checking.calls import check_range_error
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import BITS, Arenas, compare, text_of
from kvdock_conformance.checking.quantised import per_element
from kvdock_conformance.checking.target import Target
from kvdock_conformance.reference import gather_paged

__all__ = ["check_dequantised", "check_returned", "check_returns_out", "gathered_slot"]


def gathered_slot(place: Sequence[int]) -> str:
    """Return how an error names a slot: ``slot_mapping[0, 3]``."""
    return f"slot_mapping{list(place)}"


def check_returns_out(target: Target, data: Mapping[str, Any]) -> None:
    """Check that the outputs that were given come back themselves, as a pair.

    Raises:
        NonconformanceError: something else comes back.
    """
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        got = target.call(call["op"], args)
        _check_is_pair(call["op"], got)
        for name, tensor in zip(("k_out", "v_out"), got, strict=True):
            if tensor is not args[name]:
                raise NonconformanceError(f"{call['op']}: what is returned for {name}", expected="the tensor of out= itself", got="another")


def _check_is_pair(op: str, got: Any) -> None:
    if not isinstance(got, tuple) or len(got) != 2 or not all(isinstance(part, torch.Tensor) for part in got):
        raise NonconformanceError(f"{op}: the result", expected="a tuple of two tensors", got=repr(got)[:200])


def check_returned(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case without ``out=``: new tensors must come back, which stay as they are, and nothing else changes.

    The outputs in the case are not passed: they say what must come back, and their memory must stay as it was too.

    Raises:
        NonconformanceError: a result differs, has other sizes, or shares memory with something; or a byte has changed.
    """
    memory = Arenas(data["arenas"], target.device)
    results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for call in data["calls"]:
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        before = memory.copy()
        expected = before.copy()
        twins = {name: expected.tensor(spec) for name, spec in call["args"].items()}
        beyond = [gathered_slot(place) for place in gather_paged(*twins.values())]
        got = _returned(target, call, args, beyond)
        compare(memory, before, call["args"], f"{call['op']} without out=")
        if got is not None:
            results += [(f"{call['op']}: returned {name}", part, twins[f"{name}_out"]) for name, part in zip("kv", got, strict=True)]
        for what, part, right in results:  # those of earlier calls too: what was returned belongs to the caller
            _check_result(target, what, part, right)
    before = memory.copy()
    for _, part, _ in results:
        part.view(BITS[part.element_size()]).bitwise_not_()
    compare(memory, before, data["calls"][-1]["args"], "a write to what was returned")


def _returned(target: Target, call: Mapping[str, Any], args: dict[str, Any], beyond: list[str]) -> tuple[torch.Tensor, ...] | None:
    """Make a call without its outputs; returns the pair, or None if it raised as it must with a slot out of range."""
    op = call["op"]
    try:
        got = target.call(op, {name: value for name, value in args.items() if not name.endswith("_out")})
    except kvdock.IndexRangeError as error:
        check_range_error(target, op, error, beyond)
        return None
    check_range_error(target, op, None, beyond)
    _check_is_pair(op, got)
    pair: tuple[torch.Tensor, ...] = got
    return pair


def _check_result(target: Target, what: str, got: torch.Tensor, right: torch.Tensor) -> None:
    """Compare a tensor that was returned with what it should be, bit for bit."""
    about, wanted = ((tuple(x.shape), x.dtype, device) for x, device in ((got, got.device), (right, target.device)))
    if about != wanted:
        raise NonconformanceError(f"{what}: shape, dtype and device", expected=wanted, got=about)
    wrong = (got.cpu().view(BITS[got.element_size()]) != right.view(BITS[right.element_size()])).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise NonconformanceError(f"{what}{list(place)}", expected=text_of(right[place]), got=text_of(got[place]))


def check_dequantised(target: Target, data: Mapping[str, Any]) -> None:
    """Check reads of slots of quantised pools, or of padding, into float32, one after the other.

    Raises:
        NonconformanceError: a byte differs.
    """
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        _check_read(target, memory, call)


def _check_read(target: Target, memory: Arenas, call: Mapping[str, Any]) -> None:
    expected = memory.copy()
    twins = {name: expected.tensor(spec) for name, spec in call["args"].items()}
    slots = twins["slot_mapping"].long()
    for name in ("k", "v"):
        pool, scale = twins[f"{name}_cache"], per_element(twins[f"{name}_scale"])
        rows = pool.float()[slots // pool.shape[1], slots % pool.shape[1]] * scale
        twins[f"{name}_out"].copy_(torch.where(slots[:, None, None] < 0, 0, rows))
    target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
    compare(memory, expected, call["args"], call["op"])
