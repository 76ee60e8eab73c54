"""One op, ready to be called: its quick path, its plans, and what happens when it gives up."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from operator import methodcaller
from typing import Any, Protocol

import torch

from kvdock.descriptors.lifetimes import Owner
from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.errors import KVDockWarning, UnsupportedError
from kvdock.interface import HOST, Descriptor, Request
from kvdock.ops.bound import BoundOp
from kvdock.ops.geometry import extent
from kvdock.ops.modes import MODE, Mode
from kvdock.ops.plan import Plan
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Choice, Chooser, Selection
from kvdock.ops.shared import Shared
from kvdock.ops.signature import compile_binder, compile_call
from kvdock.ops.validate import validate

__all__ = ["OpEntry", "Preparer", "compiling_error"]


class Preparer(Protocol):
    """Chooses kernels and prepares descriptors for entries. `kvdock.ops.dispatcher.OpDispatcher` is one."""

    chooser: Chooser
    descriptors: DescriptorCacheManager

    def choose(self, op: str, device: torch.device, named: str | None) -> Choice:
        """Return the backend for an op on a device."""
        ...

    def select(self, request: Request, named: str | None = None) -> Selection:
        """Return the kernel that serves a request."""
        ...

    def prepare(self, request: Request, selection: Selection) -> Descriptor:
        """Return a descriptor made by that kernel."""
        ...


class OpEntry(Shared):
    """One op, called with its arguments in the schema's order, None where absent. Threads and copies share it."""

    def __init__(self, schema: OpSchema, dispatcher: Preparer) -> None:
        self.schema = schema
        self._dispatcher = dispatcher
        # Its own, so that caches of two dispatchers are never taken for one another's.
        self._settings, self._local = dispatcher.descriptors.declare(schema.name, methodcaller("destroy"))
        self._epoch = dispatcher.chooser.epoch
        scope = {
            "slow": self.run_slowly,
            "prepare": self._prepare,
            "enter": self.enter,
            "get_mode": MODE.get,
            "local": self._local,
            "settings": self._settings,
            "chooser": dispatcher.chooser,
        }
        self.call = compile_call(schema, scope)
        self._binder = compile_binder(schema, scope)

    def __call__(self, *values: Any) -> None:
        """Run the op. See its public function in `kvdock.ops` for arguments and errors."""
        self.call(*values)

    def enter(self, mode: Mode, values: tuple[Any, ...], own_name: str | None) -> str | None:
        """Do what `debug` asks for, and return the backend to use: that of a bound call, else what `use_backend` names."""
        named = own_name or mode.named
        if mode.debug:
            self._check_values(values, named)
        return named

    def _check_values(self, values: tuple[Any, ...], named: str | None) -> None:
        """Read index values back and check them, unless a graph is being captured."""
        request = validate(self.schema, values)
        choice = self._dispatcher.choose(self.schema.name, request.device, named)
        if self.schema.check_values is None or choice.backend.is_capturing(request.device):
            return
        for finding in self.schema.check_values(_index_values_on_host(self.schema, values)):
            warnings.warn(f"{self.schema.name}: {finding}", KVDockWarning, stacklevel=5)

    def run_slowly(self, values: tuple[Any, ...], named: str | None) -> None:
        """Say why the quick path gave up; run the op all the same when it had no reason to."""
        if torch.compiler.is_compiling():
            raise compiling_error(self.schema.name)
        request = validate(self.schema, values)
        if _is_noop(self.schema, values):
            return
        cache = self._local.open(None if request.device == HOST else request.device)
        plan = self._make_plan(request, values, named, cache.owner)  # held by its name while it runs
        plan.run(*values)

    def _make_plan(self, request: Request, values: tuple[Any, ...], named: str | None, owner: Owner) -> Plan:
        """Prepare a plan for a request."""
        selection = self._dispatcher.select(request, named)
        args = self.schema.bind(values)
        extents = tuple(extent(args[arg.name]) for arg in self.schema.static_args)
        return Plan(self._dispatcher.prepare(request, selection), extents, selection, owner)

    def _prepare(self, values: tuple[Any, ...], key: Any, named: str | None, device: torch.device | None) -> Plan:
        """Validate a new signature, prepare its plan, and keep it in this thread's cache."""
        request = validate(self.schema, values)
        self._dispatcher.choose(self.schema.name, request.device, named)  # finds backends, the first time: no part of preparing
        epoch = self._dispatcher.chooser.epoch
        if self._epoch != epoch:  # what is registered has changed: no older plan will be found
            self._epoch = epoch
            self._settings.new_generation()
        cache = self._local.open(device)
        cache.count_miss()
        generation = self._local.generation  # a clear during what follows is one of this plan too
        start = time.perf_counter()
        plan = self._make_plan(request, values, named, cache.owner)
        cache.put((epoch, generation, *key[2:]), plan, prepare_s=time.perf_counter() - start)
        return plan

    def bind(self, *pools: torch.Tensor, named: str | None = None) -> Callable[..., None]:
        """Fix the pool arguments, so that calls no longer read them.

        Args:
            pools: the op's static tensor arguments, in the schema's order. The result holds them.
            named: backend to use for good, or None for the usual choice at each call.

        Returns:
            The op as a function of its other arguments, in the schema's order: a method of a `BoundOp`, which says what comes
            of copying it.
        """
        return BoundOp(*self._binder, pools, named).call

    @property
    def prepared(self) -> int:
        """How many plans the calling thread holds."""
        return sum(len(cache) for cache in self._local.caches.values())


def compiling_error(op: str) -> UnsupportedError:
    """Return the error of a call that torch.compile traces: it would read addresses of tensors that do not exist."""
    advice = "call it outside the compiled function; support comes later"
    torch._dynamo.graph_break(msg=f"kvdock: {op} cannot be traced. Fix: {advice}")  # what fullgraph=True shows
    return UnsupportedError(f"{op} under torch.compile", got="a call that is being traced", fix=advice)


def _is_noop(schema: OpSchema, values: tuple[Any, ...]) -> bool:
    """Whether a valid call has nothing to do: a run-time size is 0."""
    pools = {arg.name for arg in schema.static_args}
    args = schema.bind(values)
    return any(isinstance(value, torch.Tensor) and name not in pools and value.numel() == 0 for name, value in args.items())


def _index_values_on_host(schema: OpSchema, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments with index tensors copied to the host."""
    args = schema.bind(values)
    for name, value in args.items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            args[name] = value.cpu()
    return args
