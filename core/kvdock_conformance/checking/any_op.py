"""Calls of an op that a plugin brings, whoever serves it: the backend's own kernel or the plugin's portable one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvdock
from kvdock import runtime
from kvdock_conformance.checking.calls import check_inputs, check_refused
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import compare_call, in_order, kernel_of, refer, schema_of
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.served import first_call
from kvdock_conformance.checking.target import Target
from kvdock_conformance.checking.watch import watched
from kvdock_conformance.requirement import Capability, Check

__all__ = ["BY_ANYBODY", "check_explained", "check_made_anew", "check_nothing_to_do", "check_only_written"]


def _reasons_of_all(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return why nobody serves a case's first call; empty when the backend does, or a portable kernel."""
    try:
        runtime.default().dispatcher.explain(data["calls"][0]["op"], first_call(target, data), target.name)
    except kvdock.UnsupportedError as error:
        return [str(error)]
    return []


def _check_refused_by_all(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that what nobody serves is refused when asked for all the same, and changes nothing."""
    check_refused(target, data, kvdock.UnsupportedError, [target.name, *reasons])


BY_ANYBODY = Capability("serves the call, or a portable kernel does", _reasons_of_all, _check_refused_by_all)


def check_only_written(target: Target, data: Mapping[str, Any]) -> None:
    """Check that neither the op nor its reference changes what it reads.

    Raises:
        NonconformanceError: a byte of an input has changed.
    """
    call = data["calls"][0]
    written = [arg.name for arg in schema_of(call["op"]).mutated]
    check_inputs(target, data, written)
    memory = Arenas(data["arenas"], torch.device("cpu"))
    before, pools = memory.copy(), {call["args"][name]["arena"] for name in written if name in call["args"]}
    for name in call["args"]:
        before.tensor(call["args"][name])
    refer(memory, call)
    compare(memory, before, call["args"], f"the reference of {call['op']}: an input", set(range(len(memory.bytes))) - pools)


def check_nothing_to_do(target: Target, data: Mapping[str, Any]) -> None:
    """Check that calls without tokens write what the reference writes, which may be nothing.

    Raises:
        NonconformanceError: a byte differs.
    """
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        expected = memory.copy()
        refer(expected, call)
        target.call(call["op"], args)
        compare_call(memory, expected, call, f"{call['op']} with a size of 0")


def check_explained(target: Target, data: Mapping[str, Any]) -> None:
    """Check that the kernel that explain names prepares the plan, and that explaining prepares and changes nothing.

    Raises:
        NonconformanceError: it is not so.
    """
    memory, call = Arenas(data["arenas"], target.device), data["calls"][0]
    op, args = call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()}
    before, kernel = memory.copy(), kernel_of(target, op)
    explain = runtime.default().dispatcher.explain
    said = [explain(op, in_order(op, args), target.name) for _ in range(2)]
    by = target.name if op in target.kernels and not target.reasons_against(op, in_order(op, args)) else "portable"
    if said[0] != said[1] or said[0].served_by != by:
        raise NonconformanceError(f"{op}: explain, asked twice", expected=f"served by {by}, both times", got=f"{said[0]}, {said[1]}")
    name = f"{type(kernel).__module__}.{type(kernel).__qualname__}"
    if by == target.name and said[0].kernel != name:
        raise NonconformanceError(f"{op}: explain", expected=name, got=said[0].kernel)
    with watched(target, op) as watch:
        explain(op, in_order(op, args), target.name)
        if watch.prepared:
            raise NonconformanceError(f"{op}: plans prepared by explain", expected=0, got=len(watch.prepared))
    compare(memory, before, call["args"], f"{op} explained")


def check_made_anew(target: Target, data: Mapping[str, Any]) -> None:
    """Check calls whose outputs are made by kvdock: what is returned holds what the reference writes into those of the case.

    Raises:
        NonconformanceError: something else comes back, or another byte has changed.
    """
    for call in data["calls"]:
        schema = schema_of(call["op"])
        made = [arg.name for arg in schema.args if arg.returned]
        memory, wanted = Arenas(data["arenas"], target.device), Arenas(data["arenas"], target.device)
        got = target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items() if name not in made})
        results = got if isinstance(got, tuple) else (got,)
        for name, result in zip(made, results, strict=True):
            given = memory.tensor(call["args"][name])
            if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (given.shape, given.dtype):
                expected = f"{given.dtype} {list(given.shape)}"
                raise NonconformanceError(f"{call['op']}: what is returned for {name}", expected=expected, got=repr(result)[:200])
            given.copy_(result)
        expected_memory = wanted.copy()
        refer(expected_memory, call)
        compare_call(memory, expected_memory, call, f"{call['op']} with outputs made anew")
