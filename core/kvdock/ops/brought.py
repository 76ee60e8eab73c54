"""An op that a plugin brings: its schema, a kernel for every device, and what it means."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import attrs

from kvdock.errors import ArgumentTypeError
from kvdock.interface import Kernel
from kvdock.ops.calls.writer import source_of
from kvdock.ops.catalog import CATALOG
from kvdock.ops.schema import OpSchema
from kvdock.spec import check_op_words

__all__ = ["Op"]


@attrs.frozen
class Op:
    """An op of a plugin's own, which the hook ``kvdock_ops`` returns. It is called, cached, bound and explained as kvdock's own are.

    Args:
        schema: what it takes and writes. Its name begins with that of its plugin, so that no two plugins mean different things by one.
        portable: a kernel of torch operations for any device, which serves what a backend lacks. It asks for no values on a device.
        reference: the meaning, in plain loops: a function of the arguments in the schema's order that writes what the op writes. For
            tests only; the conformance kit compares kernels with it.
        draw: returns good values of what the schema cannot say, given sizes and a generator: see the reference for authors of plugins.
        tolerance: how far a written number may be from the reference's, absolutely and relative to it; 0 means bit for bit.

    Raises:
        ArgumentTypeError: a part of the wrong type.
        ArgumentValueError: a name that kvdock's own ops have, or that the code of a call cannot have; a tensor without sizes or dtypes.
    """

    schema: OpSchema
    portable: Kernel
    reference: Callable[..., object]
    draw: Callable[[Mapping[str, int], random.Random], Mapping[str, object]] | None = None
    tolerance: float = 0.0

    def __attrs_post_init__(self) -> None:
        for part, kind in (("schema", OpSchema), ("portable", Kernel)):
            if not isinstance(getattr(self, part), kind):
                raise ArgumentTypeError(f"Op: {part}", expected=f"a {kind.__name__}", got=repr(getattr(self, part))[:80])
        for part in ("reference", "draw"):
            if not callable(getattr(self, part)) and (part, self.draw) != ("draw", None):
                raise ArgumentTypeError(f"Op: {part}", expected="a function", got=repr(getattr(self, part))[:80])
        check_op_words(self.schema.name, CATALOG, {arg.name: (arg.dims, arg.dtypes) for arg in self.schema.args if arg.is_tensor})
        source_of(self.schema)
