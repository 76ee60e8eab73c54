"""Faults that any op of a plugin can have, whoever serves it: written once, for what its schema says that it reads and writes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs
import torch

import kvdock
from kvdock import runtime
from kvdock.ops.catalog import CATALOG
from kvdock.ops.dispatcher import ACTIVE_OPS
from kvdock.ops.schema import Arg, Role
from kvdock_conformance.checking.meaning import schema_of
from kvdock_conformance.faults import descriptors
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, HostSeed, KernelSeed, Seed
from kvdock_conformance.faults.seeds import FaultyKernel
from kvdock_conformance.faults.tensors import at_or_before, bits, flip_byte
from kvdock_conformance.requirement import Case, Level, Requirement, cases_at

__all__ = ["FAULTS", "CallSeed", "OpFault", "lock_kept", "mistakes_ignored", "never_nothing"]

FaultyOpCall = Callable[[str, BackendCall, Args], None]
"""Stands in for a call of an op of that name."""


@attrs.frozen
class OpFault:
    """One way to be wrong for every op that a plugin brings.

    Args:
        name: its name, in lower case with hyphens.
        sentence: what is wrong.
        killers: ids of the requirements that must fail, without the op.
        seed: given the op's name, how it gets into a backend.
        shows: whether a case could show it; None where every case could.
        in_errors: whether it shows in errors for indices out of range alone.
    """

    name: str
    sentence: str
    killers: tuple[str, ...]
    seed: Callable[[str], Seed]
    shows: Callable[[Case], bool] | None = None
    in_errors: bool = False

    def of(self, op: str, asked: Mapping[str, Requirement] | None = None) -> Fault:
        """Return it as a fault of one op, noticed by its killers, or by those of them that are asked and have cases that show it."""
        killers = [f"{killer}@{op}" for killer in self.killers]
        if asked is not None:
            killers = [name for name in killers if name in asked and self._is_shown(asked[name])]
        args = CATALOG[op].args if op in CATALOG else ()  # indices of others may be anything: no case makes them wrong
        is_read = any(arg.host and arg.scale_of is None for arg in args if arg.role is Role.TENSOR)  # then the host knows, on any device
        host_only = tuple(killers) if self.in_errors and not is_read else ()
        return Fault(f"{self.name}@{op}", self.sentence, op, tuple(killers), self.seed(op), host_only=host_only)

    def _is_shown(self, requirement: Requirement) -> bool:
        return self.shows is None or any(map(self.shows, cases_at(Level.EXTENDED, requirement.cases())))


FAULTS: dict[str, OpFault] = {}


def _add(name: str, sentence: str, killers: str, seed: Callable[[str], Seed]) -> None:
    FAULTS[name] = OpFault(name, sentence, tuple(f"KVD-OP-{number}" for number in killers.split()), seed)


def _call(name: str, sentence: str, killers: str, *, by_address: bool = False) -> Callable[[FaultyOpCall], FaultyOpCall]:
    """Add a fault of a call; ``by_address`` where it shows in host memory alone, by where that lies."""

    def add(change: FaultyOpCall) -> FaultyOpCall:
        def seed(op: str) -> Seed:
            made = KernelSeed(op, lambda inner: FaultyKernel(inner, lambda: _bound(change, op)))
            return HostSeed(made) if by_address else made

        _add(name, sentence, killers, seed)
        return change

    return add


def _bound(change: FaultyOpCall, op: str) -> Callable[[BackendCall, Args], None]:
    return lambda run, args: change(op, run, args)


def _plan(name: str, sentence: str, killers: str) -> Callable[[Callable[[str], Callable[[BackendCall, Args], None]]], Any]:
    """Add a fault that keeps something from call to call of a plan."""

    def add(make: Callable[[str], Callable[[BackendCall, Args], None]]) -> Any:
        _add(name, sentence, killers, lambda op: KernelSeed(op, lambda inner: FaultyKernel(inner, lambda: make(op))))
        return make

    return add


def _tensors(op: str, args: Args, *roles: Role) -> Iterator[tuple[Arg, torch.Tensor]]:
    """Yield the tensors of a call that have a role."""
    for arg in schema_of(op).args:
        if arg.role in roles and isinstance(args[arg.name], torch.Tensor):
            yield arg, args[arg.name]


def _changed(op: str, run: BackendCall, args: Args) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Make a call, and yield the bits of each tensor that it changes, those from before, and the places that changed."""
    before = [(bits(tensor), bits(tensor).clone()) for _, tensor in _tensors(op, args, Role.MUTATED)]
    run(args)
    for now, then in before:
        places = (now != then).nonzero()
        if len(places) and now.dim():
            yield now, then, places


@_call("op-last-element-left", "The last element that a call writes is left.", "001 004")
def _last_left(op: str, run: BackendCall, args: Args) -> None:
    for now, then, places in _changed(op, run, args):
        last = tuple(places[-1].tolist())
        now[last] = then[last]


@_call("op-row-behind", "The first row that is written goes to the one behind it.", "001 004")
def _row_behind(op: str, run: BackendCall, args: Args) -> None:
    for now, then, places in _changed(op, run, args):
        row = int(places[0, 0])
        now[(row + 1) % len(now)] = now[row].clone()
        if len(now) > 1:
            now[row] = then[row]


@_call("op-byte-past-the-end", "The byte behind the last element of what is written is changed.", "001 004")
def _past_the_end(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in _tensors(op, args, Role.MUTATED):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        flip_byte(tensor, int(tensor.storage_offset()) + sum((size - 1) * step for size, step in steps) + 1)


@_call("op-input-changed", "The first element of what is only read is changed.", "001 002")
def _input_changed(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in _tensors(op, args, Role.TENSOR):
        flip_byte(tensor, int(tensor.storage_offset()))


@_call("op-padding-written", "A negative number among indices is taken for 0.", "001 004")
def _padding_written(op: str, run: BackendCall, args: Args) -> None:
    whole = {arg.name: t for arg, t in _tensors(op, args, Role.TENSOR) if not (t.is_floating_point() or t.dtype == torch.bool)}
    run({**args, **{name: tensor.clamp(min=0) for name, tensor in whole.items()}})


def _has_negative(case: Case) -> bool:
    """Whether a case brings a negative index; a made-up one of the matrix is taken for such."""
    specs = [spec for call in case.data.get("calls", ()) for spec in call["args"].values() if isinstance(spec, Mapping)]
    indices = [spec["values"] for spec in specs if spec["dtype"].startswith("int") and spec.get("values")]
    return not specs or any(min(values) < 0 for values in indices)


FAULTS["op-padding-written"] = attrs.evolve(FAULTS["op-padding-written"], shows=_has_negative)


@_call("op-steps-ignored", "What is read is taken to be dense.", "001")
def _steps_ignored(op: str, run: BackendCall, args: Args) -> None:
    def dense(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())

    run({**args, **{arg.name: dense(tensor) for arg, tensor in _tensors(op, args, Role.TENSOR)}})


@_call("op-address-rounded-to-16", "What is read begins at the multiple of 16 bytes at or before it.", "001")
def _rounded_address(op: str, run: BackendCall, args: Args) -> None:
    run({**args, **{arg.name: at_or_before(tensor) for arg, tensor in _tensors(op, args, Role.TENSOR)}})


@_call(
    "op-storages-taken-for-even",
    "What lies at a multiple of 16 bytes of its storage is taken to be at such an address.",
    "001",
    by_address=True,
)
def _even_storages(op: str, run: BackendCall, args: Args) -> None:
    run({**args, **{arg.name: at_or_before(tensor, by_place=True) for arg, tensor in _tensors(op, args, Role.TENSOR)}})


@_call("op-many-dropped", "A call of more than 64 rows does nothing.", "001 005")
def _many_dropped(op: str, run: BackendCall, args: Args) -> None:
    if max((len(tensor) for _, tensor in _tensors(op, args, Role.TENSOR) if tensor.dim()), default=0) <= 64:
        run(args)


@_plan("op-first-values-kept", "A plan goes by what its first call of each shape has read.", "004")
def _first_values_kept(op: str) -> Callable[[BackendCall, Args], None]:
    kept: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        inputs = {arg.name: tensor for arg, tensor in _tensors(op, args, Role.TENSOR)}
        first = {name: kept.setdefault((name, tensor.shape), tensor.detach().clone()) for name, tensor in inputs.items()}
        run({**args, **first})

    return call


@_plan("op-first-sizes-kept", "A plan goes by the run-time sizes of its first call: what is behind them is left.", "004")
def _first_sizes_kept(op: str) -> Callable[[BackendCall, Args], None]:
    first: dict[tuple[str, int], int] = {}

    def call(run: BackendCall, args: Args) -> None:
        cut = dict(args)
        for arg, tensor in _tensors(op, args, Role.TENSOR, Role.MUTATED):
            for at, dim in enumerate(arg.dims_of_rank(tensor.dim()) or ()):
                if dim.runtime:
                    size = first.setdefault((arg.name, at), tensor.shape[at])
                    cut[arg.name] = cut[arg.name].narrow(at, 0, min(size, tensor.shape[at]))
        run(cut)

    return call


@_plan("op-plan-per-count", "Plans are forgotten when a plan meets a new shape.", "005")
def _plan_per_count(op: str) -> Callable[[BackendCall, Args], None]:
    met: set[Any] = set()

    def call(run: BackendCall, args: Args) -> None:
        shapes = tuple(tensor.shape for _, tensor in _tensors(op, args, Role.TENSOR))
        if met and shapes not in met:
            runtime.default().dispatcher.descriptors.clear(op)
        met.add(shapes)
        run(args)

    return call


@_call("op-result-has-gradients-of-one", "What is written is part of a graph where one tensor alone requires gradients.", "010")
def _has_gradients_of_one(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    learnt = [read.requires_grad for _, read in _tensors(op, args, Role.TENSOR) if read.is_floating_point()]
    for _, tensor in _tensors(op, args, Role.MUTATED):
        if tensor.is_floating_point() and sum(learnt) == 1:
            tensor.requires_grad_(True)


@_call("op-result-has-gradients", "What is written is part of a graph.", "010")
def _has_gradients(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in _tensors(op, args, Role.MUTATED):
        if tensor.is_floating_point() and any(read.requires_grad for _, read in _tensors(op, args, Role.TENSOR)):
            tensor.requires_grad_(True)


@_call("op-misses-under-autocast", "A call does nothing where autocast is on.", "019")
def _misses_under_autocast(op: str, run: BackendCall, args: Args) -> None:
    if not torch.is_autocast_enabled("cpu"):
        run(args)


@_call("op-reads-behind", "The byte behind the last element of what is read is read.", "020", by_address=True)
def _reads_behind(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in _tensors(op, args, Role.TENSOR):
        if tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            ctypes.string_at(tensor.data_ptr() + (last + 1) * tensor.itemsize, 1)


@_call("op-done-again-later", "A call is done again when it has returned.", "021")
def _done_again(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    later = threading.Timer(0.005, run, (args,))
    later.daemon = True
    later.start()


@_call("op-reads-through-one-buffer", "What calls of a process read goes through a buffer of each shape.", "024")
def _through_one_buffer(op: str, run: BackendCall, args: Args) -> None:
    shared = {
        arg.name: _BUFFERS.setdefault((op, arg.name, tensor.shape, tensor.dtype, tensor.device), torch.empty_like(tensor))
        for arg, tensor in _tensors(op, args, Role.TENSOR)
    }
    run({**args, **{name: buffer.copy_(args[name]) for name, buffer in shared.items()}})


_BUFFERS: dict[Any, torch.Tensor] = {}


@_call("op-tensors-in-a-cycle", "What a call has read is in a cycle behind it.", "023")
def _in_a_cycle(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    cycle: list[Any] = [tensor for _, tensor in _tensors(op, args, Role.TENSOR)]
    cycle.append(cycle)


@_call("op-lock-kept-by-an-error", "A lock that a call has taken is kept when it raises.", "025")
def lock_kept(op: str, run: BackendCall, args: Args) -> None:
    """Make a call by whoever has the lock."""
    if not _LOCK.acquire(timeout=1):
        raise RuntimeError("the engine is busy")
    run(args)
    _LOCK.release()


_LOCK = threading.RLock()


@_plan("op-error-kept", "A plan keeps its last error for a report, and with it what was on the stack.", "023")
def _error_kept(op: str) -> Callable[[BackendCall, Args], None]:
    last: list[Exception] = []

    def call(run: BackendCall, args: Args) -> None:
        try:
            run(args)
        except Exception as error:
            last[:] = [error]
            raise

    return call


FAULTS["op-error-kept"] = attrs.evolve(
    FAULTS["op-error-kept"], shows=lambda case: case.name == "out of range" or not case.data, in_errors=True
)
FAULTS["op-lock-kept-by-an-error"] = attrs.evolve(FAULTS["op-lock-kept-by-an-error"], in_errors=True)


@_plan("op-calls-remembered", "A plan remembers that it was called, each time.", "022")
def _remembered(op: str) -> Callable[[BackendCall, Args], None]:
    calls: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        calls.append(object())
        run(args)

    return call


@_plan("op-kept-for-each-count", "A plan keeps steps for each shape of what it reads.", "026")
def _kept_for_each(op: str) -> Callable[[BackendCall, Args], None]:
    steps: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        key = tuple(tensor.shape for _, tensor in _tensors(op, args, Role.TENSOR))
        steps.setdefault(key, torch.arange(5, device="cpu"))
        run(args)

    return call


@_plan("op-calls-counted-in-a-byte", "A plan counts its calls in a byte, and the 256th does nothing.", "028")
def _counted_in_a_byte(op: str) -> Callable[[BackendCall, Args], None]:
    count = [0]

    def call(run: BackendCall, args: Args) -> None:
        count[0] = (count[0] + 1) % 256
        if count[0]:
            run(args)

    return call


@_call("op-refuses-rows-if-deterministic", "Indices in rows raise where a user asks for deterministic algorithms.", "019")
def _not_deterministic(op: str, run: BackendCall, args: Args) -> None:
    indices = [tensor for _, tensor in _tensors(op, args, Role.TENSOR) if not tensor.is_floating_point()]
    if torch.get_deterministic_debug_mode() == 2 and any(tensor.dim() == 2 for tensor in indices):
        raise RuntimeError("put_ does not have a deterministic implementation")
    run(args)


@_call("op-places-for-64-threads", "Of the threads that are there at once, 64 get a place, which ends with the thread.", "029")
def _places_for_64(op: str, run: BackendCall, args: Args) -> None:
    _PLACES[:] = [thread for thread in _PLACES if thread.is_alive()]
    if threading.current_thread() not in _PLACES:
        if len(_PLACES) == 64:
            raise RuntimeError("no place is left")
        _PLACES.append(threading.current_thread())
    run(args)


_PLACES: list[threading.Thread] = []


class _PlansKept(descriptors.OwnKernel):
    """Keeps what each plan took when it is destroyed."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        _TAKEN.append(torch.empty(64, dtype=torch.uint8, device=request.device))
        return plan


_TAKEN: list[torch.Tensor] = []
_add("op-destroy-gives-nothing-back", "destroy() leaves a plan's scratch memory.", "027", lambda op: KernelSeed(op, _PlansKept))


class _Moody(descriptors.OwnKernel):
    """Refuses every other time."""

    asked = 0

    def supports(self, request: kvdock.plugin.Request) -> Any:
        """Refuse every other time."""
        self.asked += 1
        return ["not now"] if self.asked % 2 else super().supports(request)


_add("op-refuses-now-and-then", "A kernel refuses every other time that it is asked.", "016 017", lambda op: KernelSeed(op, _Moody))

_OF_PLANS: Mapping[str, str] = {
    "one-plan-at-a-time": "006",
    "destroyed-again-when-collected": "007",
    "destroy-raises": "007",
    "never-called-raises": "007",
    "arguments-shared-by-threads": "008",
    "tensors-kept": "009",
    "memory-kept": "009",
    "supports-tries-memory": "017",
}
"""Faults of plans that know nothing of an op, and what notices them in any."""


def _of_plan(fault: Fault) -> Callable[[str], Seed]:
    """Return how a fault of one op's kernel gets into that of another op."""
    return lambda op: attrs.evolve(fault.seed, op=op)  # type: ignore[misc] # a KernelSeed


for _fault in descriptors.FAULTS:
    _name = _fault.name.removeprefix("desc-")
    if _name in _OF_PLANS:
        _add(f"op-{_name}", _fault.sentence, _OF_PLANS[_name], _of_plan(_fault))


@attrs.frozen
class CallSeed:
    """A faulty function over an op as users call it.

    Args:
        op: name of the op.
        change: given the function, returns a faulty one.
    """

    op: str
    change: Callable[[Callable[..., Any]], Callable[..., Any]]

    def why_not(self, target: Any) -> str:
        """Return why not: there is always a way."""
        return ""

    def seeded(self, target: Any) -> AbstractContextManager[Any]:
        """Replace the function for a block."""
        return mock.patch.dict(ACTIVE_OPS, {self.op: self.change(ACTIVE_OPS[self.op])})


def mistakes_ignored(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does nothing where another would say what is wrong."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (kvdock.ArgumentTypeError, kvdock.ArgumentValueError):
            return None

    return call


def never_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that changes a byte where there is nothing to do."""

    def call(*args: Any) -> Any:
        found = function(*args)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if not all(tensor.numel() for tensor in tensors):
            flip_byte(next(tensor for tensor in tensors if tensor.numel()), 0)
        return found

    return call


def _outputs_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        found = function(*args)
        return torch.zeros_like(found) if isinstance(found, torch.Tensor) else found and tuple(map(torch.zeros_like, found))

    return call


_add("op-mistakes-ignored", "A call that is wrong does nothing.", "011 012 013 014 015", lambda op: CallSeed(op, mistakes_ignored))
_add("op-outputs-empty", "Outputs that are made anew hold zeros.", "018", lambda op: CallSeed(op, _outputs_empty))
_add("op-works-without-tokens", "A call without anything to do changes a byte.", "003", lambda op: CallSeed(op, never_nothing))
