"""The ops of a runtime, each ready to be called; the public functions use those of the process's runtime, resolved at the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.errors import ArgumentValueError
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Chooser, Preparer
from kvdock.ops.tracing import process_form_of, traced
from kvdock.ops.validate import validate
from kvdock.process import process_runtime

__all__ = ["ACTIVE_OPS", "Explanation", "OpDispatcher", "active_dispatcher", "call_op"]


@attrs.frozen
class Explanation:
    """Which kernel would run for a call, for people. See `OpDispatcher.explain`.

    ``backend`` was chosen for the device. ``served_by`` is its name, that of another that claims the device, or
    ``"portable"``. ``kernel`` is a class, and ``rejected`` names each candidate that was asked before, with its reasons.
    """

    op: str
    device: str
    backend: str
    backend_reason: str
    served_by: str
    kernel: str
    rejected: list[tuple[str, list[str]]]


class OpDispatcher(Preparer):
    """The ops of one runtime. `dispatcher.op(name)` is callable; threads may share all of it, and copies of what keeps it do.

    Args:
        chooser: knows the backends.
        schemas: the ops.
        descriptors: where prepared descriptors are kept; by default caches of the usual capacity.
    """

    def __init__(
        self, chooser: Chooser, schemas: Mapping[str, OpSchema] = CATALOG, descriptors: DescriptorCacheManager | None = None
    ) -> None:
        super().__init__(chooser, schemas, DescriptorCacheManager() if descriptors is None else descriptors)
        self._ops = {name: OpEntry(schema, self) for name, schema in schemas.items()}

    def op(self, name: str) -> OpEntry:
        """Return an op by name.

        Raises:
            ArgumentValueError: there is no such op; lists those there are.
        """
        if name not in self._ops:
            brought = self.chooser.brought_ops()
            if name not in brought:
                raise ArgumentValueError("op", expected=f"one of {', '.join(sorted({*self._ops, *brought}))}", got=repr(name))
            schema = self._schemas.setdefault(name, brought[name].schema)  # the first thread's
            self._ops.setdefault(name, OpEntry(schema, self))
        return self._ops[name]

    def explain(self, op: str, args: tuple[Any, ...], named: str | None = None) -> Explanation:
        """Say which kernel would run for a call, and why each other did not. Prepares and runs nothing.

        The arguments are in the schema's order, None where absent; ``named`` is the backend to ask for, as `use_backend` does.
        """
        selection = self.select(validate(self.op(op).schema, args), named)
        choice = self.choose(op, selection.device, named)
        return Explanation(
            op,
            str(selection.device),
            choice.backend.name,
            choice.reason,
            selection.served_by,
            f"{type(selection.kernel).__module__}.{type(selection.kernel).__qualname__}",
            [(name, list(reasons)) for name, reasons in selection.rejected],
        )


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
