"""Faults of ``gather_paged`` in what it returns, and in what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kvdock
from kvdock_conformance.faults.fault import Faults
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = "gather_paged"
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]


# Results


@FAULTS.function(_OP, "gather-no-slots-without-heads", "A call without slots returns tensors of shape [0].", "KVD-GATHER-008")
def _no_slots_without_heads(function: Op) -> Op:
    def call(k_cache: Any, v_cache: Any, slot_mapping: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = function(k_cache, v_cache, slot_mapping, **others)
        return (k, v) if k.numel() or "out" in others else (k.reshape(0), v.reshape(0))

    return call


@FAULTS.function(_OP, "gather-result-is-a-view-of-the-pool", "Consecutive slots come back as a view of the pool.", "KVD-GATHER-023")
def _view_of_the_pool(function: Op) -> Op:
    def call(k_cache: Any, v_cache: Any, slot_mapping: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = function(k_cache, v_cache, slot_mapping, **others)
        first = int(slot_mapping.reshape(-1)[0]) if slot_mapping.dim() == 1 and len(slot_mapping) else -1
        is_run = first >= 0 and slot_mapping.tolist() == list(range(first, first + len(slot_mapping)))
        if "out" in others or not is_run or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            return k, v
        last = first + len(slot_mapping)
        return k_cache.flatten(0, 1)[first:last], v_cache.flatten(0, 1)[first:last]

    return call


@FAULTS.function(_OP, "gather-result-in-float32", "New tensors are float32.", "KVD-GATHER-023", "KVD-GATHER-027")
def _result_in_float32(function: Op) -> Op:
    def call(*args: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = function(*args, **others)
        return (k, v) if "out" in others else (k.float(), v.float())

    return call


@FAULTS.function(_OP, "gather-result-in-a-buffer-used-again", "New tensors of one shape share memory with earlier ones.", "KVD-GATHER-027")
def _buffer_used_again(function: Op) -> Op:
    buffers: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def call(*args: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = function(*args, **others)
        if "out" in others:
            return k, v
        kept = buffers.setdefault((k.shape, v.shape, k.dtype), (k, v))
        for buffer, fresh in zip(kept, (k, v), strict=True):
            bits(buffer).copy_(bits(fresh))
        return kept

    return call


@FAULTS.function(_OP, "gather-returns-copies-of-out", "Given outputs are filled, and copies of them come back.", "KVD-GATHER-024")
def _copies_of_out(function: Op) -> Op:
    def call(*args: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = function(*args, **others)
        return k.clone(), v.clone()

    return call


@FAULTS.function(_OP, "gather-returns-a-list", "A list comes back instead of a tuple.", "KVD-GATHER-023", "KVD-GATHER-024")
def _returns_a_list(function: Op) -> Callable[..., list[torch.Tensor]]:
    return lambda *args, **others: list(function(*args, **others))


# Refusals


def _repairing(function: Op, repair: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Op:
    """Return the function with given outputs changed before each call: ``repair`` takes output and pool."""

    def call(k_cache: Any, v_cache: Any, slot_mapping: Any, *, out: Any = None, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(out, tuple) or len(out) != 2:
            return function(k_cache, v_cache, slot_mapping, out=out, **others)
        given = (repair(out[0], k_cache), repair(out[1], v_cache))
        function(k_cache, v_cache, slot_mapping, out=given, **others)
        return out

    return call


@FAULTS.function(_OP, "gather-output-of-another-dtype-taken", "An output of another dtype is accepted, and not filled.", "KVD-GATHER-029")
def _another_dtype(function: Op) -> Op:
    return _repairing(function, lambda out, cache: out if out.dtype == cache.dtype else torch.empty_like(out, dtype=cache.dtype))


@FAULTS.function(_OP, "gather-output-cleared-before-it-is-refused", "Outputs are cleared before arguments are checked.", "KVD-GATHER-029")
def _cleared_first(function: Op) -> Op:
    return _repairing(function, lambda out, _: out.zero_())


@FAULTS.function(_OP, "gather-error-without-a-fix", "Errors about arguments do not say how to fix them.", "KVD-GATHER-029")
def _without_a_fix(function: Op) -> Op:
    def call(*args: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return function(*args, **others)
        except (kvdock.ArgumentValueError, kvdock.ArgumentTypeError) as error:
            raise type(error)(error.subject, expected=error.expected, got=error.got) from error

    return call
