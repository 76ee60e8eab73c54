"""What a fault is, and how it gets into a backend.

A fault is seeded into the backend under test itself, whatever device it runs on, and taken out again afterwards:

* `KernelSeed` puts a faulty kernel over the backend's own, through the registry's public door, so that calls take the very
  path that they usually take;
* `FunctionSeed` puts a faulty function over one of `kvdock.ops`, for what core does before any kernel is asked;
* `BackendSeed` replaces a method of the backend.

Most faults are one function of a call, made into a list entry by `Faults.call`::

    @FAULTS.call("paged_caching_", "last-token-dropped", "The last token is dropped.", "KVD-WRITE-001")
    def _last_token_dropped(run: BackendCall, args: Args) -> None:
        run({**args, "k": args["k"][:-1], ...})
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs

import kvdock
from kvdock_conformance.faults.seeds import (
    Args,
    BackendCall,
    BackendSeed,
    FaultyCall,
    FaultyKernel,
    FunctionSeed,
    HostSeed,
    KernelSeed,
    PlanKernel,
    Seed,
)

__all__ = ["Args", "BackendCall", "BackendSeed", "Fault", "Faults", "FaultyCall", "FunctionSeed", "HostSeed", "KernelSeed", "Seed"]


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
        host_only: those of the killers that notice it only where an index out of range must raise: in host memory, for the backend
            whose own that is. Elsewhere it is skipped, and nothing can be wrong with the error.
    """

    name: str
    sentence: str
    area: str
    killers: tuple[str, ...]
    seed: Seed
    kind: str = "backend"
    host_only: tuple[str, ...] = ()

    def why_not(self, target: Any) -> str:
        """Return why it cannot be seeded into a backend; empty when it can."""
        if self.host_only and not target.must_raise and not self.killers_where(must_raise=False):
            return f"it shows in errors for indices out of range, which {target.name} may skip instead"
        return self.seed.why_not(target)

    def seeded(self, target: Any) -> AbstractContextManager[None]:
        """Return a block in which the backend has the fault."""
        return self.seed.seeded(target)

    def killers_where(self, *, must_raise: bool) -> tuple[str, ...]:
        """Return the killers that can notice it where an index out of range must raise, or where it need not."""
        return self.killers if must_raise else tuple(name for name in self.killers if name not in self.host_only)


class Faults(list[Fault]):
    """A list of faults with decorators that add to it. All take the op or area, name, sentence, and the killers' ids.

    Those of calls, kernels and functions take ``host_only`` too: see `Fault`.

    Args:
        area: area of the faults; None for the op's name.
    """

    def __init__(self, area: str | None = None) -> None:
        super().__init__()
        self._area = area

    def call(
        self, op: str, name: str, sentence: str, *killers: str, host_only: tuple[str, ...] = (), by_address: bool = False
    ) -> Callable[[FaultyCall], FaultyCall]:
        """Add a fault that is a function of a call, the same for all descriptors; ``by_address`` where host memory's shows it alone."""

        def add(call: FaultyCall) -> FaultyCall:
            change: Any = lambda inner: FaultyKernel(inner, lambda: call)  # noqa: E731 - the type is the reason
            self.kernel(op, name, sentence, *killers, host_only=host_only, by_address=by_address)(change)
            return call

        return add

    def plan(
        self, op: str, name: str, sentence: str, *killers: str, host_only: tuple[str, ...] = ()
    ) -> Callable[[Callable[[], FaultyCall]], Callable[[], FaultyCall]]:
        """Add a fault that keeps something from call to call: the function is asked for a `FaultyCall` per descriptor."""

        def add(make_call: Callable[[], FaultyCall]) -> Callable[[], FaultyCall]:
            seed = KernelSeed(op, lambda inner: FaultyKernel(inner, make_call))
            self.append(Fault(name, sentence, self._area or op, killers, seed, host_only=host_only))
            return make_call

        return add

    def kernel(
        self, op: str, name: str, sentence: str, *killers: str, host_only: tuple[str, ...] = (), by_address: bool = False
    ) -> Callable[[type[kvdock.plugin.Kernel]], type[kvdock.plugin.Kernel]]:
        """Add a fault that is a class of kernels, made of the backend's own kernel; ``by_address`` where it reaches memory so."""

        def add(change: Any) -> Any:
            seed = KernelSeed(op, change)
            self.append(Fault(name, sentence, self._area or op, killers, HostSeed(seed) if by_address else seed, host_only=host_only))
            return change

        return add

    def planned(self, op: str, name: str, sentence: str, *killers: str, by_address: bool = False) -> Callable[[Any], Any]:
        """Add a fault of plans: a class of them, made of the backend's own plan; ``by_address`` as above."""

        def add(plan: Any) -> Any:
            change: Any = lambda inner: PlanKernel(inner, plan)  # noqa: E731 - the type is the reason
            self.kernel(op, name, sentence, *killers, by_address=by_address)(change)
            return plan

        return add

    def function(self, op: str, name: str, sentence: str, *killers: str, host_only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
        """Add a fault of the public function: given the function, return a faulty one."""

        def add(change: Any) -> Any:
            self.append(Fault(name, sentence, self._area or op, killers, FunctionSeed(op, change), host_only=host_only))
            return change

        return add

    def backend(self, area: str, method: str, name: str, sentence: str, *killers: str) -> Callable[[Any], Any]:
        """Add a fault of a method of the backend: given the bound method, return a faulty one."""

        def add(change: Any) -> Any:
            self.append(Fault(name, sentence, area, killers, BackendSeed(method, change)))
            return change

        return add
