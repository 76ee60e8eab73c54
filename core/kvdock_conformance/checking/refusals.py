"""Calls that must be refused: which error, what it says, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvdock
from kvdock_conformance.checking.calls import expect_refusal
from kvdock_conformance.checking.memory import Memory
from kvdock_conformance.checking.target import Target

__all__ = ["check_refusal"]


def check_refusal(target: Target, data: Mapping[str, Any]) -> None:
    """Make a bad call before and after a good one has left a plan: each time it must raise and change nothing.

    Args:
        target: the backend.
        data: the case: ``calls`` are the good call and the bad one, ``error`` is the name of the error's class in `kvdock`,
            ``texts`` what its text must contain.

    Raises:
        NonconformanceError: it does not raise, says something else, or a byte has changed.
    """
    memory = Memory(data["arenas"], target.device)
    (good, good_args), (bad, bad_args) = (
        (call, {name: memory.tensor(spec) for name, spec in call["args"].items()}) for call in data["calls"]
    )
    for _ in range(2):
        expect_refusal(target, memory, bad, bad_args, getattr(kvdock, data["error"]), data["texts"])
        target.call(good["op"], good_args)
