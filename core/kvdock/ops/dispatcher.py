"""From a call to a kernel: by the tensors' own device, through a descriptor that is prepared once per signature."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.errors import ArgumentValueError, BackendError, UnsupportedError
from kvdock.guarded import are_reasons, ask, ask_guard
from kvdock.interface import Descriptor, Kernel, Request, TensorMeta
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Choice, Chooser, Rejected, Selection
from kvdock.ops.shared import Shared
from kvdock.ops.validate import validate

__all__ = ["PORTABLE", "Explanation", "OpDispatcher", "own_reasons"]

PORTABLE = "portable"
"""What serves an op that a backend lacks: vectorised torch on the tensors' own device. `use_backend` takes it as a name."""


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


class OpDispatcher(Shared):
    """The ops of one runtime. `dispatcher.op(name)` is callable; threads may share all of it, and copies of what keeps it do.

    Args:
        chooser: knows the backends.
        schemas: the ops.
        descriptors: where prepared descriptors are kept; by default caches of the usual capacity.
    """

    def __init__(
        self, chooser: Chooser, schemas: Mapping[str, OpSchema] = CATALOG, descriptors: DescriptorCacheManager | None = None
    ) -> None:
        self.chooser = chooser
        self.descriptors = descriptors if descriptors is not None else DescriptorCacheManager()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        """How many plans were prepared on portable kernels, by op and by the backend that could not serve them."""
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
            self._ops.setdefault(name, OpEntry(brought[name].schema, self))  # the first thread's
        return self._ops[name]

    def _portable(self, op: str) -> Kernel | None:
        """Return the kernel that serves an op on any device: kvdock's own, or that of the plugin that brought the op."""
        own = PORTABLE_KERNELS.get(op)
        brought = None if own is not None else self.chooser.brought_ops().get(op)
        return own if brought is None else brought.portable

    def choose(self, op: str, device: torch.device, named: str | None) -> Choice:
        """Return the backend for an op on a device. `PORTABLE` names kernels rather than a backend."""
        return self.chooser.choose(op, device, None if named == PORTABLE else named)

    def select(self, request: Request, named: str | None = None) -> Selection:
        """Choose the kernel that serves a request: that of the chosen backend, else of another that claims the device, else a portable one.

        A backend that is named is left for portable kernels only.

        Raises:
            UnsupportedError: none serves it; lists every reason.
            BackendError: no backend can be chosen, or two that nothing prefers serve what the chosen one does not.
        """
        choice, schema = self.choose(request.op, request.device, named), self._ops[request.op].schema
        against = ("use_backend asked for portable kernels",) if named == PORTABLE else own_reasons(request, choice, schema)
        rejected: Rejected = ((choice.backend.name, against),) if against else ()
        serving = None if against else choice
        if serving is None and named is None:
            reasons = functools.partial(own_reasons, request, schema=schema)
            serving, rejected = self.chooser.instead(request.op, request.device, rejected, reasons)
        if serving is not None:
            known = schema.known_to(serving.api)
            places = None if len(known) == len(schema.args) else known
            return Selection(serving.kernels[request.op], serving.backend.name, serving, request.device, rejected, places)
        portable = self._portable(request.op)
        against = _kernel_reasons(request, portable, PORTABLE)
        if portable is not None and not against:
            return Selection(portable, PORTABLE, choice, request.device, rejected)
        got = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in (*rejected, (PORTABLE, against)))
        fix = "change what the reasons name, or install a backend that serves it; bytes of any dtype can be moved, by .view(torch.uint8)"
        raise UnsupportedError(f"{request.op} on {request.device}", expected="a request that some kernel serves", got=got, fix=fix)

    def prepare(self, request: Request, selection: Selection) -> Descriptor:
        """Make the descriptor for a request, on its device.

        Raises:
            BackendError: a graph is being captured: preparing may compile or allocate, which cannot be recorded.
            PluginError: the backend raised something that is not in the contract, or made no descriptor.
        """
        backend, device = selection.choice.backend, request.device
        if ask(backend.name, f"is_capturing({device})", lambda: backend.is_capturing(device), "a bool", _is_bool):
            raise BackendError(
                f"{request.op} on {device}",
                got="a new signature while a graph is captured",
                fix="warm up first: call it once with tensors like these",
            )
        if selection.served_by == PORTABLE:
            self.fallbacks[request.op, backend.name] += 1
        question, given = f"prepare() of its kernel for {request.op}", _as_known(request, selection.known)
        with ask_guard(backend, device):
            made: Descriptor = ask(selection.served_by, question, lambda: selection.kernel.prepare(given), "a Descriptor", _is_descriptor)
        return made

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


def own_reasons(request: Request, choice: Choice, schema: OpSchema | None = None) -> tuple[str, ...]:
    """Return why a backend does not serve a request itself, in the words of `UnsupportedError`; empty when it does.

    The schema is that of the op, if it is not the catalog's.
    """
    schema = schema or CATALOG[request.op]
    known = schema.known_to(choice.api)
    newer = [arg for place, arg in enumerate(schema.args) if place not in known and request.args[arg.name] is not None]
    if newer:
        made_for = ".".join(map(str, choice.api))
        came = (f"{arg.name} came with version {'.'.join(map(str, arg.since))} of the contract" for arg in newer)
        return tuple(f"{text}, and {choice.backend.name} is made for {made_for}" for text in came)
    dtypes = choice.capabilities.dtypes
    cache = next((meta for meta in request.args.values() if isinstance(meta, TensorMeta) and meta.strides is not None), None)
    if dtypes is not None and cache is not None and cache.dtype not in dtypes:
        return (f"{choice.backend.name} stores {', '.join(map(str, dtypes))}, not {cache.dtype}",)
    return _kernel_reasons(_as_known(request, known), choice.kernels.get(request.op), choice.backend.name)


def _is_bool(answer: Any) -> bool:
    return isinstance(answer, bool)


def _is_descriptor(answer: Any) -> bool:
    return isinstance(answer, Descriptor)


def _as_known(request: Request, known: tuple[int, ...] | None) -> Request:
    """Return a request as an older version of the contract had it: without the arguments that came later."""
    if known is None or len(known) == len(request.args):
        return request
    names = list(request.args)
    return attrs.evolve(request, args={names[place]: request.args[names[place]] for place in known})


def _kernel_reasons(request: Request, kernel: Kernel | None, name: str) -> tuple[str, ...]:
    if kernel is None:
        return ("it has no kernel for this op",)
    question = f"supports() of its kernel for {request.op}"
    return tuple(ask(name, question, lambda: kernel.supports(request), "a list of reasons (str), empty for yes", are_reasons))
