"""From a call to a kernel: by the tensors' own device, through a descriptor that is prepared once per signature.

Here is the seam between ops and whoever knows the backends: `ops` asks a `Chooser`, and never sees a plugin.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch

from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.errors import BackendError, UnsupportedError
from kvdock.guarded import are_reasons, ask, ask_guard
from kvdock.interface import KVDOCK_API, Backend, Capabilities, Descriptor, Kernel, Request, TensorMeta
from kvdock.ops.catalog import Op
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.schema import OpSchema
from kvdock.ops.shared import Shared

__all__ = ["PORTABLE", "Choice", "Chooser", "Preparer", "Rejected", "Selection", "own_reasons"]

PORTABLE = "portable"
"""What serves an op that a backend lacks: vectorised torch on the tensors' own device. `use_backend` takes it as a name."""

Rejected = tuple[tuple[str, tuple[str, ...]], ...]
"""Who was asked to serve a request and does not, each with its reasons."""


@attrs.frozen
class Choice:
    """The backend chosen for one op on one device.

    Args:
        backend: the backend, which is ready.
        kernels: its kernels by op name, with what was registered over them.
        capabilities: what it said it can do.
        reason: why it was chosen, for people: ``"only ready backend that claims cpu"``.
        api: version of the contract that its plugin was made for.
    """

    backend: Backend
    kernels: Mapping[str, Kernel]
    capabilities: Capabilities
    reason: str
    api: tuple[int, int] = KVDOCK_API


class Chooser(Protocol):
    """Chooses the backend for an op on a device. `kvdock.plugins.registry.Registry` is one."""

    def brought_ops(self) -> Mapping[str, Op]:
        """Return the ops that plugins bring, by name."""
        ...

    epoch: int
    """Counts changes to what is registered. It is part of every key, so that no plan outlives what it was chosen from."""

    def choose(self, op: str, device: torch.device, named: str | None = None) -> Choice:
        """Return the backend for an op on a device, with its index: the one ``named`` before any other that is configured.

        Raises:
            NoBackendError: no ready backend claims the device.
            BackendUnavailableError: the named or configured backend does not exist, is not ready, or does not run there.
            AmbiguousBackendError: several are ready and none is preferred.
        """
        ...

    def instead(
        self, op: str, device: torch.device, rejected: Rejected, against: Callable[[Choice], tuple[str, ...]]
    ) -> tuple[Choice | None, Rejected]:
        """Return who else of those that claim the device serves a request, if any does, and all who were asked and do not.

        Asks by priority, the highest first, for reasons ``against`` each; ``rejected`` has the chosen backend's.

        Raises:
            AmbiguousBackendError: several of one priority serve it.
        """
        ...


@attrs.frozen
class Selection:
    """Which kernel serves a request, and why each candidate before it does not.

    ``choice`` is the backend that serves it; of a portable kernel, that which was chosen. ``known`` are the places of the
    arguments that the kernel's version of the contract has; None where it has all.
    """

    kernel: Kernel
    served_by: str
    choice: Choice
    device: torch.device
    rejected: Rejected
    known: tuple[int, ...] | None = None


class Preparer(Shared):
    """Chooses kernels and prepares descriptors for ops: what an `OpDispatcher` does for its own.

    Args:
        chooser: knows the backends.
        schemas: the ops.
        descriptors: where prepared descriptors are kept.
    """

    def __init__(self, chooser: Chooser, schemas: Mapping[str, OpSchema], descriptors: DescriptorCacheManager) -> None:
        self.chooser, self.descriptors, self._schemas = chooser, descriptors, dict(schemas)
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        """How many plans were prepared on portable kernels, by op and by the backend that could not serve them."""

    @abstractmethod
    def op(self, name: str) -> Callable[..., Any]:
        """Return an op by name."""

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
        choice, schema = self.choose(request.op, request.device, named), self._schemas[request.op]
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
        if ask(backend.name, f"is_capturing({device})", lambda: backend.is_capturing(device), "a bool", lambda it: isinstance(it, bool)):
            raise BackendError(
                f"{request.op} on {device}",
                got="a new signature while a graph is captured",
                fix="warm up first: call it once with tensors like these",
            )
        if selection.served_by == PORTABLE:
            self.fallbacks[request.op, backend.name] += 1
        question, given = f"prepare() of its kernel for {request.op}", _as_known(request, selection.known)
        with ask_guard(backend, device):
            make = functools.partial(selection.kernel.prepare, given)
            made: Descriptor = ask(selection.served_by, question, make, "a Descriptor", lambda it: isinstance(it, Descriptor))
        return made


def own_reasons(request: Request, choice: Choice, schema: OpSchema) -> tuple[str, ...]:
    """Return why a backend does not serve a request of an op itself, in the words of `UnsupportedError`; empty when it does."""
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
