"""Faults that any op of a plugin can have, whoever serves it: written once, for what its schema says that it reads and writes."""

from __future__ import annotations

import contextvars
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs
import torch

import kvdock
from kvdock import runtime
from kvdock.ops.dispatcher import ACTIVE_OPS
from kvdock.ops.schema import Role
from kvdock_conformance.faults import descriptors
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, KernelSeed, Seed
from kvdock_conformance.faults.of_any_op import FAULTS, add, called, changed_by, planned, tensors_of
from kvdock_conformance.faults.tensors import at_or_before, flip_byte
from kvdock_conformance.requirement import Case

__all__ = ["FAULTS", "CallSeed", "lock_kept", "mistakes_ignored", "never_nothing"]


@called("op-last-element-left", "The last element that a call writes is left.", "001 004")
def _last_left(op: str, run: BackendCall, args: Args) -> None:
    for now, then, places in changed_by(op, run, args):
        last = tuple(places[-1].tolist())
        now[last] = then[last]


@called("op-row-behind", "The first row that is written goes to the one behind it.", "001 004")
def _row_behind(op: str, run: BackendCall, args: Args) -> None:
    for now, then, places in changed_by(op, run, args):
        row = int(places[0, 0])
        now[(row + 1) % len(now)] = now[row].clone()
        if len(now) > 1:
            now[row] = then[row]


@called("op-byte-past-the-end", "The byte behind the last element of what is written is changed.", "001 004")
def _past_the_end(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in tensors_of(op, args, Role.MUTATED):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        flip_byte(tensor, int(tensor.storage_offset()) + sum((size - 1) * step for size, step in steps) + 1)


@called("op-input-changed", "The first element of what is only read is changed.", "001 002")
def _input_changed(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in tensors_of(op, args, Role.TENSOR):
        flip_byte(tensor, int(tensor.storage_offset()))


@called("op-padding-written", "A negative number among indices is taken for 0.", "001 004")
def _padding_written(op: str, run: BackendCall, args: Args) -> None:
    whole = {arg.name: t for arg, t in tensors_of(op, args, Role.TENSOR) if not (t.is_floating_point() or t.dtype == torch.bool)}
    run({**args, **{name: tensor.clamp(min=0) for name, tensor in whole.items()}})


def _has_negative(case: Case) -> bool:
    """Whether a case brings a negative index; a made-up one of the matrix is taken for such."""
    specs = [spec for call in case.data.get("calls", ()) for spec in call["args"].values() if isinstance(spec, Mapping)]
    indices = [spec["values"] for spec in specs if spec["dtype"].startswith("int") and spec.get("values")]
    return not specs or any(min(values) < 0 for values in indices)


FAULTS["op-padding-written"] = attrs.evolve(FAULTS["op-padding-written"], shows=_has_negative)


@called("op-steps-ignored", "What is read is taken to be dense.", "001")
def _steps_ignored(op: str, run: BackendCall, args: Args) -> None:
    def dense(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())

    run({**args, **{arg.name: dense(tensor) for arg, tensor in tensors_of(op, args, Role.TENSOR)}})


@called("op-address-rounded-to-16", "What is read begins at the multiple of 16 bytes at or before it.", "001")
def _rounded_address(op: str, run: BackendCall, args: Args) -> None:
    run({**args, **{arg.name: at_or_before(tensor) for arg, tensor in tensors_of(op, args, Role.TENSOR)}})


@called(
    "op-storages-taken-for-even",
    "What lies at a multiple of 16 bytes of its storage is taken to be at such an address.",
    "001",
    by_address=True,
)
def _even_storages(op: str, run: BackendCall, args: Args) -> None:
    run({**args, **{arg.name: at_or_before(tensor, by_place=True) for arg, tensor in tensors_of(op, args, Role.TENSOR)}})


@called("op-many-dropped", "A call of more than 64 rows does nothing.", "001 005")
def _many_dropped(op: str, run: BackendCall, args: Args) -> None:
    if max((len(tensor) for _, tensor in tensors_of(op, args, Role.TENSOR) if tensor.dim()), default=0) <= 64:
        run(args)


@planned("op-first-values-kept", "A plan goes by what its first call of each shape has read.", "004")
def _first_values_kept(op: str) -> Callable[[BackendCall, Args], None]:
    kept: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        inputs = {arg.name: tensor for arg, tensor in tensors_of(op, args, Role.TENSOR)}
        first = {name: kept.setdefault((name, tensor.shape), tensor.detach().clone()) for name, tensor in inputs.items()}
        run({**args, **first})

    return call


@planned("op-first-sizes-kept", "A plan goes by the run-time sizes of its first call: what is behind them is left.", "004")
def _first_sizes_kept(op: str) -> Callable[[BackendCall, Args], None]:
    first: dict[tuple[str, int], int] = {}

    def call(run: BackendCall, args: Args) -> None:
        cut = dict(args)
        for arg, tensor in tensors_of(op, args, Role.TENSOR, Role.MUTATED):
            for at, dim in enumerate(arg.dims_of_rank(tensor.dim()) or ()):
                if dim.runtime:
                    size = first.setdefault((arg.name, at), tensor.shape[at])
                    cut[arg.name] = cut[arg.name].narrow(at, 0, min(size, tensor.shape[at]))
        run(cut)

    return call


@planned("op-plan-per-count", "Plans are forgotten when a plan meets a new shape.", "005")
def _plan_per_count(op: str) -> Callable[[BackendCall, Args], None]:
    met: set[Any] = set()

    def call(run: BackendCall, args: Args) -> None:
        shapes = tuple(tensor.shape for _, tensor in tensors_of(op, args, Role.TENSOR))
        if met and shapes not in met:
            runtime.default().dispatcher.descriptors.clear(op)
        met.add(shapes)
        run(args)

    return call


@called("op-result-has-gradients-of-one", "What is written is part of a graph where one tensor alone requires gradients.", "010")
def _has_gradients_of_one(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    learnt = [read.requires_grad for _, read in tensors_of(op, args, Role.TENSOR) if read.is_floating_point()]
    for _, tensor in tensors_of(op, args, Role.MUTATED):
        if tensor.is_floating_point() and sum(learnt) == 1:
            tensor.requires_grad_(True)


@called("op-result-has-gradients", "What is written is part of a graph.", "010")
def _has_gradients(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in tensors_of(op, args, Role.MUTATED):
        if tensor.is_floating_point() and any(read.requires_grad for _, read in tensors_of(op, args, Role.TENSOR)):
            tensor.requires_grad_(True)


@called("op-misses-under-autocast", "A call does nothing where autocast is on.", "019")
def _misses_under_autocast(op: str, run: BackendCall, args: Args) -> None:
    if not torch.is_autocast_enabled("cpu"):
        run(args)


@called("op-reads-behind", "The byte behind the last element of what is read is read.", "020", by_address=True)
def _reads_behind(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    for _, tensor in tensors_of(op, args, Role.TENSOR):
        if tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            ctypes.string_at(tensor.data_ptr() + (last + 1) * tensor.itemsize, 1)


@called("op-done-again-later", "A call is done again when it has returned.", "021")
def _done_again(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    later = threading.Timer(0.005, run, (args,))
    later.daemon = True
    later.start()


@called("op-reads-through-one-buffer", "What calls of a process read goes through a buffer of each shape.", "024")
def _through_one_buffer(op: str, run: BackendCall, args: Args) -> None:
    shared = {
        arg.name: _BUFFERS.setdefault((op, arg.name, tensor.shape, tensor.dtype, tensor.device), torch.empty_like(tensor))
        for arg, tensor in tensors_of(op, args, Role.TENSOR)
    }
    run({**args, **{name: buffer.copy_(args[name]) for name, buffer in shared.items()}})


_BUFFERS: dict[Any, torch.Tensor] = {}


@called("op-tensors-in-a-cycle", "What a call has read is in a cycle behind it.", "023")
def _in_a_cycle(op: str, run: BackendCall, args: Args) -> None:
    run(args)
    cycle: list[Any] = [tensor for _, tensor in tensors_of(op, args, Role.TENSOR)]
    cycle.append(cycle)


@called("op-lock-kept-by-an-error", "A lock that a call has taken is kept when it raises.", "025")
def lock_kept(op: str, run: BackendCall, args: Args) -> None:
    """Make a call by whoever has the lock."""
    if not _LOCK.acquire(timeout=1):
        raise RuntimeError("the engine is busy")
    run(args)
    _LOCK.release()


_LOCK = threading.RLock()


@planned("op-error-kept", "A plan keeps its last error for a report, and with it what was on the stack.", "023")
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


@planned("op-calls-remembered", "A plan remembers that it was called, each time.", "022")
def _remembered(op: str) -> Callable[[BackendCall, Args], None]:
    calls: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        calls.append(object())
        run(args)

    return call


@planned("op-kept-for-each-count", "A plan keeps steps for each shape of what it reads.", "026")
def _kept_for_each(op: str) -> Callable[[BackendCall, Args], None]:
    steps: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        key = tuple(tensor.shape for _, tensor in tensors_of(op, args, Role.TENSOR))
        steps.setdefault(key, torch.arange(5, device="cpu"))
        run(args)

    return call


@planned("op-calls-counted-in-a-byte", "A plan counts its calls in a byte, and the 256th does nothing.", "028")
def _counted_in_a_byte(op: str) -> Callable[[BackendCall, Args], None]:
    count = [0]

    def call(run: BackendCall, args: Args) -> None:
        count[0] = (count[0] + 1) % 256
        if count[0]:
            run(args)

    return call


@called("op-refuses-rows-if-deterministic", "Indices in rows raise where a user asks for deterministic algorithms.", "019")
def _not_deterministic(op: str, run: BackendCall, args: Args) -> None:
    indices = [tensor for _, tensor in tensors_of(op, args, Role.TENSOR) if not tensor.is_floating_point()]
    if torch.get_deterministic_debug_mode() == 2 and any(tensor.dim() == 2 for tensor in indices):
        raise RuntimeError("put_ does not have a deterministic implementation")
    run(args)


@called("op-places-for-64-threads", "Of the threads that are there at once, 64 get a place, which ends with the thread.", "029")
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
add("op-destroy-gives-nothing-back", "destroy() leaves a plan's scratch memory.", "027", lambda op: KernelSeed(op, _PlansKept))


class _Moody(descriptors.OwnKernel):
    """Refuses every other time."""

    asked = 0

    def supports(self, request: kvdock.plugin.Request) -> Any:
        """Refuse every other time."""
        self.asked += 1
        return ["not now"] if self.asked % 2 else super().supports(request)


add("op-refuses-now-and-then", "A kernel refuses every other time that it is asked.", "016 017", lambda op: KernelSeed(op, _Moody))

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
        add(f"op-{_name}", _fault.sentence, _OF_PLANS[_name], _of_plan(_fault))


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


add("op-mistakes-ignored", "A call that is wrong does nothing.", "011 012 013 014 015", lambda op: CallSeed(op, mistakes_ignored))
add("op-outputs-empty", "Outputs that are made anew hold zeros.", "018", lambda op: CallSeed(op, _outputs_empty))
add("op-works-without-tokens", "A call without anything to do changes a byte.", "003", lambda op: CallSeed(op, never_nothing))


@called(
    "op-context-of-the-parent",
    "What the first call has opened belongs to its process: a call behind a fork raises.",
    "030",
    by_address=True,
)
def _of_the_parent(op: str, run: BackendCall, args: Args) -> None:
    if _OPENED.setdefault(op, os.getpid()) != os.getpid():
        raise RuntimeError("the context is another process's")
    run(args)


_OPENED: dict[str, int] = {}


@called(
    "op-negatives-cleared-for-the-call",
    "Negative integers of 64 bits are cleared in the caller's tensor, and put back.",
    "020",
    by_address=True,
)
def _cleared_for_the_call(op: str, run: BackendCall, args: Args) -> None:
    for _, tensor in tensors_of(op, args, Role.TENSOR):
        if tensor.dtype == torch.int64 and tensor.numel() and bool((tensor < 0).any()):
            before = tensor.clone()
            tensor.clamp_(min=0)
            tensor.copy_(before)
    run(args)


FAULTS["op-negatives-cleared-for-the-call"] = attrs.evolve(FAULTS["op-negatives-cleared-for-the-call"], shows=_has_negative)


class _Contextual(descriptors.OwnKernel):
    """Keeps the stream of its plans in a context variable."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        _STREAM.set(request.device)
        return _FindsStream(plan)


class _FindsStream(descriptors.OwnPlan):
    """Finds its stream in the context that it is called in."""

    def __call__(self, *args: Any) -> None:
        _STREAM.get()
        self.inner(*args)


_STREAM: contextvars.ContextVar[torch.device] = contextvars.ContextVar("stream")
add(
    "op-stream-in-a-context",
    "A plan finds its stream in the context that prepared it alone.",
    "019",
    lambda op: KernelSeed(op, _Contextual),
)
