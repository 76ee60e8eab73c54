"""Which dispatcher the public functions use: that of the process's runtime, resolved at the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.tracing import process_form_of, traced
from kvdock.process import process_runtime

__all__ = ["ACTIVE_OPS", "active_dispatcher", "call_op"]


def active_dispatcher() -> OpDispatcher:
    """Return the dispatcher of the process's runtime."""
    return process_runtime().dispatcher


class _ActiveOps(dict[str, Callable[..., Any]]):
    """The ops of the process's runtime, resolved once each: a look-up costs less than a function call."""

    def __missing__(self, name: str) -> Callable[..., None]:
        if torch.compiler.is_dynamo_compiling():  # plugins cannot be looked for in what is traced, but beside it
            return lambda *values: traced(lambda kinds: process_form_of(name, kinds), values, None)
        call = self[name] = active_dispatcher().op(name).call
        return call


ACTIVE_OPS = _ActiveOps()
"""``ACTIVE_OPS[name]`` is an op of the process's runtime, as a function of its arguments in the schema's order. Cleared by
`kvdock.runtime.set_default`, they are resolved anew."""


def call_op(name: str, *values: Any) -> Any:
    """Call an op of the process's runtime by name, as ops that plugins bring are: kvdock has no function for them.

    Args:
        name: name of the op.
        values: its arguments in the schema's order, None where absent.

    Returns:
        The outputs that its schema says are returned; else None.

    Raises:
        ArgumentValueError: there is no such op; or as the op does.
    """
    return ACTIVE_OPS[name](*values)
