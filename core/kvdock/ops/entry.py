"""One op, ready to be called: its quick path, its plans, and what happens when it gives up."""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

from kvdock.descriptors.lru import Entry, LRUDescriptorCache
from kvdock.errors import KVDockError, KVDockWarning
from kvdock.guarded import blame
from kvdock.interface import HOST, Request
from kvdock.ops.bound import BoundOp
from kvdock.ops.calls.variant import HOST_INT_RANK, Variant, pivot_of, variants_of
from kvdock.ops.calls.writer import compile_source
from kvdock.ops.catalog import CATALOG
from kvdock.ops.modes import MODE, Mode
from kvdock.ops.plan import Plan, outside_autograd
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Preparer
from kvdock.ops.shared import Shared
from kvdock.ops.signatures import EMPTY, Pools, Recent, Signature, new_outputs
from kvdock.ops.tracing import RECORDING, TracedForm, as_constant, form_of, is_intercepted, traced
from kvdock.ops.validate import validate

__all__ = ["OpEntry"]

MOST_SIGNATURES = 64
"""Signatures of an op that a thread keeps: the oldest leaves, and is validated again when it comes."""


class OpEntry(Shared):
    """One op, called with its arguments in the schema's order, None where absent. Threads and copies share it.

    Attributes:
        call: the op as a function of all arguments: the code in `kvdock.ops.calls`, and where a call begins.
        make_outputs: see `new_outputs`.
        dispatcher: whose op it is.
    """

    call: Callable[..., Any]
    is_compiling = staticmethod(torch.compiler.is_dynamo_compiling)  # half the price of `is_compiling`: a guard knows the rest
    is_intercepted = staticmethod(is_intercepted)
    recording = RECORDING
    get_mode = staticmethod(MODE.get)

    def __init__(self, schema: OpSchema, dispatcher: Preparer) -> None:
        self.schema = schema
        self.chooser = dispatcher.chooser
        self.recent = Recent()
        self.dispatcher = dispatcher
        # Its own destroyer, so that caches of two dispatchers are never taken for one another's.
        self.settings, self._local = dispatcher.descriptors.declare(schema.name, methodcaller("destroy"))
        self._epoch = dispatcher.chooser.epoch
        self._variants: dict[int | None, Variant] = {variant.pivot_rank: variant for variant in variants_of(schema)}
        self._pivot = pivot_of(schema)
        places = {name: place for place, name in enumerate(schema.arg_names)}
        self._pools = [places[arg.name] for arg in schema.static_args]
        self._written = [place for place, arg in enumerate(schema.static_args) if arg in schema.mutated]
        self._rest = {v.number: [places[name] for name in v.dims if places[name] not in self._pools] for v in self._variants.values()}
        self.make_outputs = functools.partial(new_outputs, schema)
        is_own = CATALOG.get(schema.name) == schema  # then its module is committed
        make = importlib.import_module(f"kvdock.ops.calls.{schema.name}").make if is_own else compile_source(schema)
        self.call, self._bound_call = make(self)

    def __call__(self, *values: Any) -> Any:
        """Run the op. See its public function in `kvdock.ops` for arguments and errors."""
        return self.call(*values)

    def enter(self, mode: Mode, values: tuple[Any, ...], own_name: str | None) -> str | None:
        """Do what `debug` asks for, and return the backend to use: that of a bound call, else what `use_backend` names."""
        named, check = own_name or mode.named, self.schema.check_values
        if not mode.debug or is_intercepted(values):  # then the values are looked at when the call comes to memory
            return named
        request = validate(self.schema, values)
        if check is not None and not self.dispatcher.select(request, named).choice.backend.is_capturing(request.device):
            args = self.schema.bind(values)
            indices = {
                name: value.cpu() for name, value in args.items() if isinstance(value, torch.Tensor) and not value.is_floating_point()
            }
            for finding in check(args | indices):
                warnings.warn(f"{self.schema.name}: {finding}", KVDockWarning, stacklevel=4)
        return named

    def blame(self, error: BaseException, values: tuple[Any, ...], own_name: str | None) -> None:
        """Note on an error that a call raised who served the call."""
        named = own_name or (MODE.get() or Mode()).named

        def find() -> tuple[str, object]:
            selection = self.dispatcher.select(validate(self.schema, values), named)
            return selection.served_by, selection.kernel

        blame(error, self.schema.name, find)

    def run_slowly(self, values: tuple[Any, ...], named: str | None, pools: Pools | None = None) -> None:
        """Say why the quick path gave up; run the op all the same when it had no reason to. Pools are given where they are known."""
        if is_intercepted(values):
            self._pass_on(values, named)
            return
        request = validate(self.schema, values)
        if self.schema.is_empty(values):
            fill = self.schema.when_empty
            if fill is not None:
                outside_autograd(lambda *args: fill(self.schema.bind(args)))(*values)
            return
        if pools is not None:
            pools.note_apart(self.schema.bind(values))
        _, plan = self._entry_for(request, values, named)
        plan.run(*values)

    def trace(self, values: tuple[Any, ...], named: str | None) -> Any:
        """Make a call one of `torch.ops.kvdock`, and return what the op returns: see `kvdock.ops.tracing`."""
        return traced(self.form_of, values, named)

    @as_constant
    def form_of(self, kinds: tuple[str, ...]) -> TracedForm:
        """Return what `torch.ops.kvdock` has for a call with such arguments."""
        return form_of(self.schema, self.dispatcher, kinds)

    def _pass_on(self, values: tuple[Any, ...], named: str | None) -> None:
        """Let torch show a call to who wants to see it."""
        try:
            self.trace(values, named)
        except KVDockError:
            raise
        except Exception:  # the class of a tensor refuses the op, or tensors with memory beside its own
            validate(self.schema, values)  # names the tensor
            raise

    def find(self, recent: Recent, key: tuple[Any, ...], values: tuple[Any, ...]) -> Signature | None:
        """Return the signature of a call: one that this thread has met, or a new one, once the call is found valid.

        None where the slow path is to serve it: it has nothing to do, or no guard could tell such calls.

        Args:
            recent: what is to try it first from now on.
            key: the backend asked for, whether a host int is in place of a tensor, static values, and which optional tensors are
                absent.
            values: all arguments.

        Raises:
            KVDockError: the call is not valid.
        """
        variant = self._variants.get(HOST_INT_RANK if key[1] else getattr(values[self._pivot], "ndim", None))
        if variant is None:
            return None
        try:
            signature = self._met(key, variant, values)
        except TypeError:  # what is no tensor
            signature = None
        signature = signature or self._new_signature(key, variant, values)
        if signature is not None:
            recent.use(key[1], signature)
        return signature

    def _met(self, key: tuple[Any, ...], variant: Variant, values: tuple[Any, ...]) -> Signature | None:
        """Look a signature up among those that this thread has met."""
        pools, tensors = self._met_pools(values), [values[place] for place in self._rest[variant.number]]
        for signature in self.recent.signatures if pools is not None else ():
            optional = signature.optional
            like = signature.pools is pools and signature.key == key and signature.guard(*tensors)
            if like and (optional is None or optional.accept(values)):
                return signature
        return None

    def _met_pools(self, values: tuple[Any, ...]) -> Pools | None:
        """Look the geometry of pools up."""
        tensors = [values[place] for place in self._pools]
        for pools in self.recent.pools:
            if pools.epoch == self.chooser.epoch and pools.generation == self.settings.generation and pools.guard(*tensors):
                return pools
        return None

    def _new_signature(self, key: tuple[Any, ...], variant: Variant, values: tuple[Any, ...]) -> Signature | None:
        """Validate a call, and remember its signature if a guard can tell such calls."""
        if is_intercepted(values):
            return None
        request, recent, args = validate(self.schema, values), self.recent, self.schema.bind(values)
        tensors = all(isinstance(args[name], torch.Tensor) and args[name].dim() == len(dims) for name, dims in variant.dims.items())
        # A second int in a tensor's place, and an optional output, are left to the slow path.
        if self.schema.is_empty(values) or not tensors or any(arg.optional and args[arg.name] is not None for arg in self.schema.mutated):
            return None
        cache = self._cache(request.device, key[0])
        pools = self._met_pools(values)
        if pools is None:
            pools = Pools(self.schema, args, self._epoch, self._local.generation)
            recent.pools = [pools, *recent.pools[: MOST_SIGNATURES - 1]]
        signature = Signature(self.schema, variant, key, values, pools, cache)
        recent.signatures = [signature, *recent.signatures[: MOST_SIGNATURES - 1]]
        return signature

    def _cache(self, device: torch.device, named: str | None) -> LRUDescriptorCache[Any]:
        """Return this thread's cache for a device; where what is registered has changed, no older plan is found any more."""
        self.dispatcher.choose(self.schema.name, device, named)
        if self._epoch != self.chooser.epoch:
            self._epoch = self.chooser.epoch
            self.settings.new_generation()
        return self._local.open(None if device == HOST else device)

    def prepare(
        self, signature: Signature, values: tuple[Any, ...], classes: tuple[int, ...] | None, named: str | None
    ) -> tuple[Entry, Plan]:
        """Return the plan for a signature whose tensors are aligned like ``classes``, or as well as can be, and its entry."""
        entry, plan = self._entry_for(validate(self.schema, values), values, named)
        if classes is None:
            signature.full = entry
        else:
            signature.entries[classes] = entry
        return entry, plan

    def _entry_for(self, request: Request, values: tuple[Any, ...], named: str | None) -> tuple[Entry, Plan]:
        """Look a plan up by its exact key in this thread's cache; prepare and keep it if it is not there."""
        cache = self._cache(request.device, named)  # before the clock starts: to find backends is no part of preparing
        # 1, 1.0 and True are equal, and need not mean the same. A clear during what follows is one of this plan too.
        key = (self._epoch, self._local.generation, named, *map(type, request.args.values()), *request.args.values())
        entry = cache.entries.get(key, EMPTY)
        plan = entry.value
        if plan is not None:
            entry.used = cache.clock = cache.clock + 1
        else:
            cache.misses += 1
            start = time.perf_counter()
            selection = self.dispatcher.select(request, named)
            plan = Plan(self.dispatcher.prepare(request, selection), selection, cache.owner)
            entry = cache.put(key, plan, prepare_s=time.perf_counter() - start)
        return entry, plan

    def bind(self, *pools: torch.Tensor, named: str | None = None) -> Callable[..., Any]:
        """Fix the pool arguments, so that calls no longer read them.

        Args:
            pools: the op's static tensor arguments, in the schema's order. The result holds them.
            named: backend to use for good, or None for the usual choice at each call.

        Returns:
            The op as a function of its other arguments, in the schema's order: a method of a `BoundOp`, which says what comes
            of copying it.
        """
        return BoundOp(self._bound_call, pools, named, self._written).bound_call

    @property
    def prepared(self) -> int:
        """How many plans the calling thread holds."""
        return sum(len(cache) for cache in self._local.caches.values())
