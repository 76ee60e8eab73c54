"""What a fault is, and how it gets into a backend.

A fault is seeded into the backend under test itself, whatever device it runs on, and taken out again afterwards:

* `KernelSeed` puts a faulty kernel over the backend's own, through the registry's public door, so that calls take the very
  path that they usually take;
* `FunctionSeed` puts a faulty function over one of `kvdock.ops`, for what core does before any kernel is asked;
* `BackendSeed` replaces a method of the backend.

Most faults are one function of a call, made into a list entry by `Faults.call`::

    @FAULTS.call("paged_caching_", "last-token-dropped", "The last token is dropped.", "KVD-WRITE-001")
    def _last_token_dropped(run: Run, args: Args) -> None:
        run({**args, "k": args["k"][:-1], ...})
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from unittest import mock

import attrs

import kvdock
from kvdock import runtime
from kvdock.ops.catalog import CATALOG
from kvdock_conformance.checking.target import Target

__all__ = ["Args", "BackendSeed", "Fault", "Faults", "FaultyCall", "FunctionSeed", "KernelSeed", "Run", "Seed"]

Args = dict[str, Any]
"""Arguments of a call by name, in the schema's order, None where absent."""

Run = Callable[[Args], None]
"""Makes the call that the backend's own kernel would make, with these arguments."""

FaultyCall = Callable[[Run, Args], None]
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
class Fault:
    """One way to be wrong.

    Args:
        name: its name, in lower case with hyphens.
        sentence: what is wrong.
        area: the area whose requirements run on it: the op's name where it is about one op.
        killers: ids of the requirements that must fail, each of them.
        seed: how it gets into a backend.
        kind: kind of what it is a fault of: a name in `kvdock_conformance.kinds.KINDS`.
    """

    name: str
    sentence: str
    area: str
    killers: tuple[str, ...]
    seed: Seed
    kind: str = "backend"

    def why_not(self, target: Any) -> str:
        """Return why it cannot be seeded into a backend; empty when it can."""
        return self.seed.why_not(target)

    def seeded(self, target: Any) -> AbstractContextManager[None]:
        """Return a block in which the backend has the fault."""
        return self.seed.seeded(target)


@attrs.frozen
class KernelSeed:
    """A faulty kernel over the backend's own.

    Args:
        op: name of the op.
        change: given the backend's kernel, returns a faulty one.
    """

    op: str
    change: Callable[[kvdock.Kernel], kvdock.Kernel]

    def why_not(self, target: Target) -> str:
        """Return why not: the backend has no kernel for the op."""
        return "" if self.op in target.kernels else f"{target.name} has no kernel for {self.op}"

    @contextlib.contextmanager
    def seeded(self, target: Target) -> Iterator[None]:
        """Register the faulty kernel for a block."""
        own, registry = target.kernels[self.op], runtime.default().registry
        registry.register_kernel(target.name, self.op, self.change(own), override=True)
        try:
            yield
        finally:
            registry.register_kernel(target.name, self.op, own, override=True)


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
        method: name of a method of `kvdock.Backend` that is asked at each use, such as ``skipped_writes``.
        change: given the bound method, returns a faulty one.
    """

    method: str
    change: Callable[[Callable[..., Any]], Callable[..., Any]]

    def why_not(self, target: Target) -> str:
        """Return why not: there is always a way."""
        return ""

    def seeded(self, target: Target) -> AbstractContextManager[Any]:
        """Replace the method for a block."""
        return mock.patch.object(target.backend, self.method, self.change(getattr(target.backend, self.method)))


class _FaultyDescriptor(kvdock.Descriptor):
    """Another descriptor whose calls go through a function."""

    def __init__(self, inner: kvdock.Descriptor, op: str, call: FaultyCall) -> None:
        self._inner = inner
        self._names = CATALOG[op].arg_names
        self._call = call

    def _run(self, args: Args) -> None:
        """Make the call as the backend would."""
        self._inner(*(args[name] for name in self._names))

    def __call__(self, *args: Any) -> None:
        """Make the faulty call."""
        self._call(self._run, dict(zip(self._names, args, strict=True)))

    def destroy(self) -> None:
        """Destroy what is inside."""
        self._inner.destroy()


class _FaultyKernel(kvdock.Kernel):
    """Another kernel whose descriptors' calls go through a function."""

    def __init__(self, inner: kvdock.Kernel, make_call: Callable[[], FaultyCall]) -> None:
        self._inner = inner
        self._make_call = make_call

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        """Ask what is inside."""
        return self._inner.supports(request)

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        """Wrap what is prepared inside."""
        return _FaultyDescriptor(self._inner.prepare(request), request.op, self._make_call())


class Faults(list[Fault]):
    """A list of faults with decorators that add to it. All take the op or area, name, sentence, and the killers' ids.

    Args:
        area: area of the faults; None for the op's name.
    """

    def __init__(self, area: str | None = None) -> None:
        super().__init__()
        self._area = area

    def call(self, op: str, name: str, sentence: str, *killers: str) -> Callable[[FaultyCall], FaultyCall]:
        """Add a fault that is a function of a call, the same for all descriptors."""

        def add(call: FaultyCall) -> FaultyCall:
            self.append(Fault(name, sentence, self._area or op, killers, KernelSeed(op, lambda inner: _FaultyKernel(inner, lambda: call))))
            return call

        return add

    def plan(self, op: str, name: str, sentence: str, *killers: str) -> Callable[[Callable[[], FaultyCall]], Callable[[], FaultyCall]]:
        """Add a fault that keeps something from call to call: the function is asked for a `FaultyCall` per descriptor."""

        def add(make_call: Callable[[], FaultyCall]) -> Callable[[], FaultyCall]:
            self.append(Fault(name, sentence, self._area or op, killers, KernelSeed(op, lambda inner: _FaultyKernel(inner, make_call))))
            return make_call

        return add

    def kernel(self, op: str, name: str, sentence: str, *killers: str) -> Callable[[type[kvdock.Kernel]], type[kvdock.Kernel]]:
        """Add a fault that is a class of kernels, made of the backend's own kernel."""

        def add(change: Any) -> Any:
            self.append(Fault(name, sentence, self._area or op, killers, KernelSeed(op, change)))
            return change

        return add

    def function(self, op: str, name: str, sentence: str, *killers: str) -> Callable[[Any], Any]:
        """Add a fault of the public function: given the function, return a faulty one."""

        def add(change: Any) -> Any:
            self.append(Fault(name, sentence, self._area or op, killers, FunctionSeed(op, change)))
            return change

        return add

    def backend(self, area: str, method: str, name: str, sentence: str, *killers: str) -> Callable[[Any], Any]:
        """Add a fault of a method of the backend: given the bound method, return a faulty one."""

        def add(change: Any) -> Any:
            self.append(Fault(name, sentence, area, killers, BackendSeed(method, change)))
            return change

        return add
