"""The ops of a runtime, each ready to be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.errors import ArgumentValueError
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Chooser, Preparer
from kvdock.ops.validate import validate

__all__ = ["Explanation", "OpDispatcher"]


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
            self._schemas[name] = brought[name].schema
            self._ops.setdefault(name, OpEntry(brought[name].schema, self))  # the first thread's
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
