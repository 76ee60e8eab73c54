"""How a fault gets into a backend, and out again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from unittest import mock

import attrs

import kvdock
from kvdock import runtime
from kvdock_conformance.checking.meaning import kernels_over, schema_of
from kvdock_conformance.checking.target import HOST, Target

__all__ = [
    "Args",
    "BackendCall",
    "BackendSeed",
    "FaultyCall",
    "FaultyKernel",
    "FunctionSeed",
    "HostSeed",
    "KernelSeed",
    "PlanKernel",
    "Seed",
    "TwistedKernel",
]

Args = dict[str, Any]
"""Arguments of a call by name, in the schema's order, None where absent."""

BackendCall = Callable[[Args], None]
"""Makes the call that the backend's own kernel would make, with these arguments."""

FaultyCall = Callable[[BackendCall, Args], None]
"""Stands in for a call: may change its arguments, make it or not, and spoil something before or after."""


class Seed(Protocol):
    """A way into a backend, or into what else is tested: ``target`` is what its kind's checks take."""

    def why_not(self, target: Any) -> str:
        """Return why the fault cannot be seeded into a backend; empty when it can."""
        ...

    def seeded(self, target: Any) -> AbstractContextManager[None]:
        """Return a block in which the backend has the fault."""
        ...


@attrs.frozen
class KernelSeed:
    """A faulty kernel over the backend's own.

    Args:
        op: name of the op.
        change: given the backend's kernel, returns a faulty one. An attribute ``about`` of it names the cache dtypes that the
            fault shows with, if it does not show with others.
    """

    op: str
    change: Callable[[kvdock.plugin.Kernel], kvdock.plugin.Kernel]

    def why_not(self, target: Target) -> str:
        """Return why not: the backend has no kernel for the op, or its kernel is never asked about what the fault is about."""
        if self.op in runtime.default().registry.brought_ops():
            return ""
        if self.op not in target.kernels:
            return f"{target.name} has no kernel for {self.op}"
        about, declared = getattr(self.change, "about", None), runtime.default().registry.loaded()[target.name].capabilities.dtypes
        if about is None or declared is None or set(about).intersection(declared):
            return ""
        return f"{target.name} declares which dtypes it stores: its kernel is not asked about {', '.join(map(str, about))}"

    @contextlib.contextmanager
    def seeded(self, target: Target) -> Iterator[None]:
        """Put the faulty kernel in place for a block."""
        try:
            with kernels_over(target, self.op, self.change):
                yield
        finally:
            runtime.default().dispatcher.descriptors.clear()  # nothing of the faulty kernel's is left to be destroyed later


@attrs.frozen
class HostSeed:
    """A seed that makes sense only on host memory, as where it is reached by its address.

    Args:
        seed: the seed.
    """

    seed: Seed

    def why_not(self, target: Target) -> str:
        """Return why not: the memory is a device's."""
        return self.seed.why_not(target) if target.device == HOST else f"the memory of {target.device} is not the host's"

    def seeded(self, target: Target) -> AbstractContextManager[None]:
        """Put it in place for a block."""
        return self.seed.seeded(target)


@attrs.frozen
class FunctionSeed:
    """A faulty function over one of `kvdock.ops`.

    Args:
        op: name of the op.
        change: given the function, returns a faulty one.
    """

    op: str
    change: Callable[[Callable[..., Any]], Callable[..., Any]]

    def why_not(self, target: Target) -> str:
        """Return why not: there is always a way."""
        return ""

    def seeded(self, target: Target) -> AbstractContextManager[Any]:
        """Replace the function for a block."""
        return mock.patch.object(kvdock.ops, self.op, self.change(getattr(kvdock.ops, self.op)))


@attrs.frozen
class BackendSeed:
    """A faulty method of the backend.

    Args:
        method: name of a method of `kvdock.plugin.Backend` that is asked at each use, such as ``skipped_writes``.
        change: given the bound method, returns a faulty one.
    """

    method: str
    change: Callable[[Callable[..., Any]], Callable[..., Any]]

    def why_not(self, target: Target) -> str:
        """Return why not: there is always a way."""
        return ""

    @contextlib.contextmanager
    def seeded(self, target: Target) -> Iterator[None]:
        """Replace the method for a block; what was chosen by its answers is chosen anew, in the block and behind it."""
        try:
            with mock.patch.object(target.backend, self.method, self.change(getattr(target.backend, self.method))):
                runtime.default().registry.choose_anew()
                yield
        finally:
            runtime.default().registry.choose_anew()


class _FaultyDescriptor(kvdock.plugin.Descriptor):
    """Another descriptor whose calls go through a function."""

    def __init__(self, inner: kvdock.plugin.Descriptor, op: str, call: FaultyCall) -> None:
        self._inner = inner
        self._names = schema_of(op).arg_names
        self._call = call

    def _run(self, args: Args) -> None:
        """Make the call as the backend would."""
        self._inner(*(args[name] for name in self._names))
        self.workspace_bytes = self._inner.workspace_bytes

    def __call__(self, *args: Any) -> None:
        self._call(self._run, dict(zip(self._names, args, strict=True)))

    def destroy(self) -> None:
        self._inner.destroy()


class PlanKernel(kvdock.plugin.Kernel):
    """Another kernel, each of whose plans is wrapped: ``wrap`` returns a faulty plan, given a good one."""

    def __init__(self, inner: kvdock.plugin.Kernel, wrap: Callable[[kvdock.plugin.Descriptor], kvdock.plugin.Descriptor]) -> None:
        self._inner, self._wrap = inner, wrap

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        """Ask what is inside."""
        return self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Wrap what is prepared inside."""
        return self._wrap(self._inner.prepare(request))


class FaultyKernel(PlanKernel):
    """Another kernel whose plans' calls go through a function."""

    def __init__(self, inner: kvdock.plugin.Kernel, make_call: Callable[[], FaultyCall]) -> None:
        super().__init__(inner, lambda plan: plan)
        self._make_call = make_call

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Wrap what is prepared inside."""
        return _FaultyDescriptor(super().prepare(request), request.op, self._make_call())


class TwistedKernel(kvdock.plugin.Kernel):
    """A kernel that sees other arguments than those of the request and the call: what is static, or absent, is in the plan."""

    def __init__(self, inner: kvdock.plugin.Kernel, twist: Callable[[Args], Args]) -> None:
        self._inner, self._twist = inner, twist

    def supports(self, request: kvdock.plugin.Request) -> Any:
        """Ask what is inside."""
        return self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Prepare what is inside for other arguments."""
        return _TwistedPlan(self._inner.prepare(attrs.evolve(request, args=self._twist(dict(request.args)))), self._twist, [*request.args])


class _TwistedPlan(kvdock.plugin.Descriptor):
    def __init__(self, inner: kvdock.plugin.Descriptor, twist: Callable[[Args], Args], names: list[str]) -> None:
        self._inner, self._twist, self._names = inner, twist, names

    def __call__(self, *args: Any) -> None:
        self._inner(*self._twist(dict(zip(self._names, args, strict=True))).values())

    def destroy(self) -> None:
        self._inner.destroy()
