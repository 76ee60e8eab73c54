"""What an op is and means, whoever brings it: kvdock's own have their references in the kit, those of plugins bring one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast
from unittest import mock

import attrs
import torch

import kvdock
from kvdock import runtime
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.schema import OpSchema
from kvdock_conformance.checking.calls import Reference
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.target import Target
from kvdock_conformance.reference import (
    copy_blocks_,
    gather_paged,
    mla_caching_,
    mla_gather,
    paged_attention,
    paged_caching_,
    static_update_,
    swap_blocks_,
)

__all__ = [
    "BOUNDS",
    "REFERENCES",
    "compare_call",
    "forgive",
    "in_order",
    "kernel_of",
    "kernels_over",
    "refer",
    "refer_to",
    "schema_of",
    "tolerance_of",
]

REFERENCES: Mapping[str, Reference] = {
    "paged_caching_": paged_caching_,
    "static_update_": static_update_,
    "gather_paged": gather_paged,
    "copy_blocks_": copy_blocks_,
    "swap_blocks_": swap_blocks_,
    "paged_attention": paged_attention,
    "mla_caching_": mla_caching_,
    "mla_gather": mla_gather,
}
"""What each of kvdock's own ops means: a function of its arguments but scales, in the schema's order."""

BOUNDS: Mapping[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""How far a number that attention computes may be from float64's, absolutely and relative to it, for inputs of a standard normal
distribution and scores whose standard deviation is at most 2. Of numbers that are as exact as their dtype, with weights and result
rounded once each, about a fifth is used."""

_BOUNDS_OF: Mapping[str, Mapping[torch.dtype, float]] = {"paged_attention": BOUNDS}
"""By op of kvdock's own that computes."""


def schema_of(op: str) -> OpSchema:
    """Return the schema of an op."""
    return runtime.default().dispatcher.op(op).schema


def in_order(op: str, args: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return arguments by name in the schema's order, None where absent."""
    return tuple(args.get(name) for name in schema_of(op).arg_names)


def refer(memory: Arenas, call: Mapping[str, Any]) -> None:
    """Do in memory what a call means. Every index of it is in range."""
    refer_to(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})


def refer_to(op: str, args: Mapping[str, Any]) -> None:
    """Do what a call of an op means with its arguments, in host memory. Every index of it is in range."""
    if op in REFERENCES:
        REFERENCES[op](*(args.get(arg.name) for arg in schema_of(op).args if arg.scale_of is None))
    else:
        runtime.default().registry.brought_ops()[op].reference(*in_order(op, args))


def compare_call(memory: Arenas, expected: Arenas, call: Mapping[str, Any], what: str) -> None:
    """Compare every byte with what it should be behind a call, but for what computed numbers may be off.

    Raises:
        NonconformanceError: names the first place that differs.
    """
    forgive(memory, expected, call)
    compare(memory, expected, call["args"], what)


def forgive(memory: Arenas, expected: Arenas, call: Mapping[str, Any]) -> None:
    """Expect of what a call computes what it holds where that is near enough."""
    for arg in schema_of(call["op"]).mutated:
        spec = call["args"].get(arg.name)
        tolerance = tolerance_of(call["op"], getattr(torch, spec["dtype"])) if spec is not None else 0.0
        if tolerance:
            _forgive(memory, expected, {**spec, "values": None}, tolerance)


def tolerance_of(op: str, dtype: torch.dtype) -> float:
    """Return how far what an op writes in a dtype may be off."""
    brought = runtime.default().registry.brought_ops().get(op)
    return brought.tolerance if brought is not None else _BOUNDS_OF.get(op, {}).get(dtype, 0.0)


def _forgive(memory: Arenas, expected: Arenas, spec: Mapping[str, Any], tolerance: float) -> None:
    """Expect of a tensor what it holds where that is near enough."""
    got, wanted = memory.tensor(spec).cpu(), expected.tensor(spec)
    near = torch.isclose(got.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    wanted.copy_(torch.where(near, got, wanted))


def kernel_of(target: Target, op: str) -> kvdock.plugin.Kernel:
    """Return the backend's own kernel for an op, or the portable one: kvdock's, or that of the plugin that brought the op."""
    brought = runtime.default().registry.brought_ops().get(op)
    own = target.kernels.get(op)
    return own if own is not None else PORTABLE_KERNELS[op] if brought is None else brought.portable


@contextlib.contextmanager
def kernels_over(target: Target, op: str, change: Callable[[kvdock.plugin.Kernel], kvdock.plugin.Kernel]) -> Iterator[None]:
    """Put kernels over those that serve an op in a block: over the backend's own, and over the portable one of a plugin's op."""
    registry = runtime.default().registry
    own, brought = target.kernels.get(op), registry.brought_ops().get(op)
    over = {} if brought is None else {op: attrs.evolve(brought, portable=change(brought.portable))}
    try:
        with mock.patch.dict(cast("dict[str, Any]", registry.brought_ops()), over):
            _register(target, op, None if own is None else change(own))
            yield
    finally:
        _register(target, op, own)


def _register(target: Target, op: str, kernel: kvdock.plugin.Kernel | None) -> None:
    """Make a kernel the backend's own, if it has one; either way no older plan is found any more."""
    if kernel is None:
        runtime.default().registry.choose_anew()
    else:
        runtime.default().registry.register_kernel(target.name, op, kernel, override=True)
