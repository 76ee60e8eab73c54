"""What a backend claims about a call: that it serves it. What it does not serve is tested the other way round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvdock
from kvdock import runtime
from kvdock_conformance.checking.calls import check_refused
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.target import Target
from kvdock_conformance.requirement import Capability, Check

__all__ = ["SERVED", "check_not_served", "first_call", "reasons_against"]


def first_call(target: Target, data: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a case's first call in the schema's order, on zeros: nobody asked looks at what tensors hold."""
    call, arenas = data["calls"][0], data["arenas"]
    used = {spec["arena"] for spec in call["args"].values() if isinstance(spec, Mapping)}
    sizes = [arena["bytes"] if number in used else 0 for number, arena in enumerate(arenas)]
    memory = Arenas([{**arena, "fill": "zeros", "bytes": size} for arena, size in zip(arenas, sizes, strict=True)], target.device)
    unset = {name: {**spec, "values": None} if isinstance(spec, Mapping) else spec for name, spec in call["args"].items()}
    return tuple(memory.tensor(unset.get(name)) for name in runtime.default().dispatcher.op(call["op"]).schema.arg_names)


def reasons_against(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return why the backend does not serve a case's first call itself; empty when it does."""
    return target.reasons_against(data["calls"][0]["op"], first_call(target, data))


def check_not_served(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check a call that the backend says no to: served by portable kernels it must be right, else raise and change nothing.

    Args:
        target: the backend.
        data: the case.
        reasons: what the backend says against it.
        check: what the call must fulfil if portable kernels serve it.

    Raises:
        NonconformanceError: a reason is empty, or the call does neither.
    """
    for reason in reasons:
        if not isinstance(reason, str) or not reason.strip():
            raise NonconformanceError(
                f"{target.name}: reason against {data['calls'][0]['op']}", expected="a text that says why", got=repr(reason)
            )
    if _is_served(target, data):
        check(target, data)
    else:
        check_refused(target, data, kvdock.UnsupportedError, [target.name, *reasons])


def _is_served(target: Target, data: Mapping[str, Any]) -> bool:
    call = data["calls"][0]
    try:
        kvdock.runtime.default().dispatcher.explain(call["op"], first_call(target, data), target.name)
    except kvdock.UnsupportedError:
        return False
    return True


SERVED = Capability("serves the call", reasons_against, check_not_served)
"""The capability of serving a case's first call: by op, cache dtype, and whatever `Kernel.supports` looks at."""
