"""From a call to a kernel: by the tensors' own device, through a descriptor that is prepared once per signature."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from kvdock.descriptors.table import DescriptorTable
from kvdock.errors import ArgumentValueError, BackendError, KVDockWarning, UnsupportedError
from kvdock.interface import Descriptor, Kernel, Request, TensorMeta
from kvdock.ops.catalog import CATALOG
from kvdock.ops.geometry import extent
from kvdock.ops.modes import MODE, Mode
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Choice, Chooser
from kvdock.ops.signature import compile_binder, compile_call
from kvdock.ops.validate import validate

__all__ = ["PORTABLE", "Explanation", "OpDispatcher", "OpEntry"]

PORTABLE = "portable"
"""What serves an op that a backend lacks: vectorised torch on the tensors' own device. `use_backend` takes it as a name."""


class Plan:
    """A descriptor with what the quick checks need: ``run`` is its call, ``extents`` the bytes each pool spans."""

    __slots__ = ("descriptor", "extents", "run", "selection")

    def __init__(self, descriptor: Descriptor, extents: tuple[int, ...], selection: Selection) -> None:
        self.run = _runner(descriptor)
        self.descriptor = descriptor
        self.extents = extents
        self.selection = selection


@attrs.frozen
class Selection:
    """Which kernel serves a request, and why each other candidate does not."""

    kernel: Kernel
    served_by: str
    choice: Choice
    device: torch.device
    rejected: tuple[tuple[str, tuple[str, ...]], ...]


@attrs.frozen
class Explanation:
    """Which kernel would run for a call, for people. See `OpDispatcher.explain`.

    Args:
        op: name of the op.
        device: device of its tensors.
        backend: name of the backend that was chosen for the device.
        backend_reason: why it was.
        served_by: the backend's name, or ``"portable"``.
        kernel: class of the kernel.
        rejected: each other candidate with its reasons.
    """

    op: str
    device: str
    backend: str
    backend_reason: str
    served_by: str
    kernel: str
    rejected: list[tuple[str, list[str]]]


class OpEntry:
    """One op, called with its arguments in the schema's order, None where absent. Threads may share it."""

    def __init__(self, schema: OpSchema, dispatcher: OpDispatcher) -> None:
        self.schema = schema
        self._dispatcher = dispatcher
        self._table = DescriptorTable(_destroy)
        scope = {
            "slow": self.run_slowly,
            "prepare": self._prepare,
            "enter": self.enter,
            "get_mode": MODE.get,
            "local": self._table,
            "chooser": dispatcher.chooser,
        }
        self.call = compile_call(schema, scope)
        self._bind = compile_binder(schema, scope)

    def __call__(self, *values: Any) -> None:
        """Run the op. See its public function in `kvdock.ops` for arguments and errors."""
        self.call(*values)

    def enter(self, mode: Mode, values: tuple[Any, ...]) -> str | None:
        """Do what `debug` asks for, and return the backend that `use_backend` names."""
        if mode.debug:
            self._check_values(values, mode.named)
        return mode.named

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
            raise UnsupportedError(
                f"{self.schema.name} under torch.compile",
                got="a call that is being traced",
                fix="call it outside the compiled function; support comes later",
            )
        request = validate(self.schema, values)
        if _is_noop(self.schema, values):
            return
        selection = self._dispatcher.select(request, named)
        _runner(self._dispatcher.prepare(request, selection))(*values)

    def _prepare(self, values: tuple[Any, ...], key: Any, named: str | None) -> Plan:
        """Validate a new signature and prepare its plan."""
        request = validate(self.schema, values)
        selection = self._dispatcher.select(request, named)
        args = self.schema.bind(values)
        extents = tuple(extent(args[arg.name]) for arg in self.schema.static_args)
        plan = Plan(self._dispatcher.prepare(request, selection), extents, selection)
        self._table.put(key, plan, epoch=self._dispatcher.chooser.epoch)
        return plan

    def bind(self, *pools: torch.Tensor, named: str | None = None) -> Callable[..., None]:
        """Fix the pool arguments, so that calls no longer read them.

        Args:
            pools: the op's static tensor arguments, in the schema's order. The result holds them.
            named: backend to use for good, or None for the usual choice at each call.

        Returns:
            The op as a function of its other arguments, in the schema's order.
        """
        return self._bind(*pools, named)

    @property
    def prepared(self) -> int:
        """How many plans the calling thread holds."""
        return len(self._table.plans)


class OpDispatcher:
    """The ops of one runtime. `dispatcher.op(name)` is callable; threads may share all of it.

    Args:
        chooser: knows the backends.
        schemas: the ops.
    """

    def __init__(self, chooser: Chooser, schemas: Mapping[str, OpSchema] = CATALOG) -> None:
        self.chooser = chooser
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        """How many plans were prepared on portable kernels, by op and by the backend that could not serve them."""
        self._ops = {name: OpEntry(schema, self) for name, schema in schemas.items()}

    def op(self, name: str) -> OpEntry:
        """Return an op by name.

        Raises:
            ArgumentValueError: there is no such op; lists those there are.
        """
        try:
            return self._ops[name]
        except KeyError:
            raise ArgumentValueError("op", expected=f"one of {', '.join(sorted(self._ops))}", got=repr(name)) from None

    def choose(self, op: str, device: torch.device, named: str | None) -> Choice:
        """Return the backend for an op on a device. `PORTABLE` names kernels rather than a backend."""
        return self.chooser.choose(op, device, None if named == PORTABLE else named)

    def select(self, request: Request, named: str | None = None) -> Selection:
        """Choose the kernel that serves a request: the backend's own, else a portable one.

        Raises:
            UnsupportedError: neither serves it; lists every reason.
            BackendError: no backend can be chosen.
        """
        choice = self.choose(request.op, request.device, named)
        rejected: list[tuple[str, tuple[str, ...]]] = []
        for served_by, kernel, asked in self._candidates(request, choice, named):
            reasons = asked or tuple(kernel.supports(request) if kernel is not None else ["it has no kernel for this op"])
            if kernel is not None and not reasons:
                return Selection(kernel, served_by, choice, request.device, tuple(rejected))
            rejected.append((served_by, reasons))
        raise UnsupportedError(
            f"{request.op} on {request.device}",
            expected="a request that some kernel serves",
            got="; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in rejected),
        )

    def _candidates(self, request: Request, choice: Choice, named: str | None) -> list[tuple[str, Kernel | None, tuple[str, ...]]]:
        """List the kernels to ask, in order, with what speaks against each before it is asked."""
        own = choice.kernels.get(request.op)
        against = ("use_backend asked for portable kernels",) if named == PORTABLE else _dtype_reasons(request, choice)
        return [(choice.backend.name, own, against), (PORTABLE, PORTABLE_KERNELS.get(request.op), ())]

    def prepare(self, request: Request, selection: Selection) -> Descriptor:
        """Make the descriptor for a request, on its device.

        Raises:
            BackendError: a graph is being captured: preparing may compile or allocate, which cannot be recorded.
        """
        backend = selection.choice.backend
        if backend.is_capturing(request.device):
            raise BackendError(
                f"{request.op} on {request.device}",
                got="a new signature while a graph is captured",
                fix="warm up first: call it once with tensors like these",
            )
        if selection.served_by == PORTABLE:
            self.fallbacks[request.op, backend.name] += 1
        with backend.device_guard(request.device):
            return selection.kernel.prepare(request)

    def explain(self, op: str, args: tuple[Any, ...], named: str | None = None) -> Explanation:
        """Say which kernel would run for a call, and why each other did not. Prepares and runs nothing.

        Args:
            op: name of the op.
            args: its arguments in the schema's order, None where absent.
            named: backend to ask for, as `use_backend` does.
        """
        selection = self.select(validate(self.op(op).schema, args), named)
        return Explanation(
            op,
            str(selection.device),
            selection.choice.backend.name,
            selection.choice.reason,
            selection.served_by,
            f"{type(selection.kernel).__module__}.{type(selection.kernel).__qualname__}",
            [(name, list(reasons)) for name, reasons in selection.rejected],
        )


def _dtype_reasons(request: Request, choice: Choice) -> tuple[str, ...]:
    """Say which cache dtype is outside what the backend declares."""
    dtypes = choice.capabilities.dtypes
    cache = next(meta for meta in request.args.values() if isinstance(meta, TensorMeta))
    if dtypes is None or cache.dtype in dtypes:
        return ()
    return (f"{choice.backend.name} stores {', '.join(map(str, dtypes))}, not {cache.dtype}",)


def _destroy(plan: Plan) -> None:
    """Let a plan's descriptor go, under its device."""
    with plan.selection.choice.backend.device_guard(plan.selection.device):
        plan.descriptor.destroy()


def _runner(descriptor: Descriptor) -> Callable[..., None]:
    """Return what to call at each call of a plan. A cache records no gradients, and must not be drawn into a graph."""
    run = descriptor.__call__  # a bound method is called quicker than an instance
    if not descriptor.uses_autograd:
        return run

    def run_outside_autograd(*values: Any) -> None:
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            with torch.no_grad():
                return run(*values)
        return run(*values)

    return run_outside_autograd


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
