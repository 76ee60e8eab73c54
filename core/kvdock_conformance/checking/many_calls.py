"""Calls that one plan has seen very often: whatever it counts them in must not run over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvdock.ops.validate import validate
from kvdock_conformance.checking.meaning import compare_call, in_order, kernel_of, refer, schema_of
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.target import Target

__all__ = ["check_many_calls"]

_WARM = 2
_LOOKS = {4: 10, 16: 1}  # at the clock, behind so many calls: by how much more than there is time for they may take
_NEAR = 6  # calls on either side of a power of two that are looked at: a plan may have been called before it counts


def check_many_calls(target: Target, data: Mapping[str, Any]) -> None:
    """Make the call of a case ``data["times"]`` times, as users do and by a plan of its own, and look at those around powers of two.

    What it writes is spoilt before each of these. Where so many would take longer than ``data["most_s"]``, a few must do: an interpreter
    takes as long for one as others for a thousand.

    Raises:
        NonconformanceError: a byte differs.
    """
    call, memory = data["calls"][0], Arenas(data["arenas"], target.device)
    op, args = call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()}
    start, expected = memory.copy(), memory.copy()
    refer(expected, call)
    written = [call["args"][arg.name]["arena"] for arg in schema_of(op).mutated if arg.name in call["args"]]

    def again(way: Callable[[], object], times: int) -> None:
        begun_s = 0.0
        for number in range(1, times + 1):
            if number == _WARM:  # the first calls may compile
                begun_s = time.monotonic()
            if number in _LOOKS and (time.monotonic() - begun_s) / (number - _WARM) * times > data["most_s"] * _LOOKS[number]:
                return
            if not _is_near_a_power(number):
                way()
                continue
            for at in written:
                memory.bytes[at].copy_(start.bytes[at])
            way()
            compare_call(memory, expected, call, f"{op}, call {number} of one plan")

    again(lambda: target.call(op, args), data["times"])
    values = in_order(op, args)
    if op in target.kernels and target.reasons_against(op, values):
        return  # another's kernel serves it, and its plans are not this backend's
    with target.backend.device_guard(target.device):
        plan = kernel_of(target, op).prepare(validate(schema_of(op), values))
        again(lambda: plan(*values), data["times"])
        plan.destroy()


def _is_near_a_power(number: int) -> bool:
    """Whether a power of two is close."""
    nearest = 1 << (number + number // 2).bit_length() - 1
    return abs(number - nearest) <= _NEAR
