"""Calls whose like was made before: what they bring counts, they load nothing, and autograd records none."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvdock import runtime
from kvdock.ops.schema import Role
from kvdock_conformance.checking.calls import check_calls
from kvdock_conformance.checking.copies import pair_name
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.gathers import gathered_slot
from kvdock_conformance.checking.meaning import REFERENCES, compare_call, refer, schema_of
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.target import Target

__all__ = [
    "NOISES",
    "PLACES",
    "BoundTarget",
    "Listener",
    "check_autograd",
    "check_called",
    "check_computed",
    "check_quiet",
    "check_repeated",
    "length_place",
    "listener",
    "memory_of",
]


class BoundTarget(Target):
    """The backend by way of ops that are bound to their pools, as caches bind them: such calls are remembered for any backend."""

    def __init__(self, name: str, setup: str | None = None, device: str | None = None) -> None:
        super().__init__(name, setup, device)
        self._bound: dict[Any, Callable[..., None]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundTarget:
        """Begin with nothing bound: what is kept by addresses is not that of copied pools."""
        return BoundTarget(self.name, self.setup, str(self.device))

    def call(self, op: str, args: dict[str, Any]) -> None:
        """Call an op with arguments by name, bound to its pools at the first call with them."""
        schema = schema_of(op)
        names = [arg.name for arg in schema.static_args]
        pools = tuple(args[name] for name in names)
        key = (op, *((pool.data_ptr(), pool.shape, pool.stride(), pool.dtype) for pool in pools))
        if key not in self._bound:
            self._bound[key] = runtime.default().dispatcher.op(op).bind(*pools, named=self.name)
        self._bound[key](*(args.get(name) for name in schema.arg_names if name not in names))


def length_place(place: Sequence[int]) -> str:
    """Return how an error names the length of a row."""
    return f"cache_lengths[{place[0]}]"


PLACES: Mapping[str, Callable[[Sequence[int]], str]] = {
    "paged_caching_": gathered_slot,
    "static_update_": length_place,
    "gather_paged": gathered_slot,
    "copy_blocks_": pair_name,
    "swap_blocks_": pair_name,
    "mla_caching_": gathered_slot,
    "mla_gather": gathered_slot,
}
"""How an error of each op names an index."""


def check_called(target: Target, data: Mapping[str, Any], *also: Target) -> None:
    """Check the calls of a case as a user makes them.

    Raises:
        NonconformanceError: a byte differs, or an index out of range neither raised as it must nor was skipped and counted.
    """
    op = data["calls"][0]["op"]
    check_calls(target, data, REFERENCES[op], PLACES[op], counted="gather" not in op, also=also, has_one_for_all=_has_one_length)


def check_repeated(target: Target, data: Mapping[str, Any]) -> None:
    """Check the calls of a case as a user makes them, and bound to their pools.

    Raises:
        NonconformanceError: a byte differs, or an index out of range neither raised as it must nor was skipped and counted.
    """
    check_called(target, data, BoundTarget(target.name, target.setup, str(target.device)))


def memory_of(target: Target, data: Mapping[str, Any]) -> Arenas:
    """Return the memory of a case, with what its places hold."""
    memory = Arenas(data["arenas"], target.device)
    for place in data.get("places", ()):
        memory.tensor(place)
    return memory


def check_computed(target: Target, data: Mapping[str, Any]) -> None:
    """Check the calls of a case as a user makes them, and bound to their pools; every index is in range, and outputs are given.

    Raises:
        NonconformanceError: a number is further off than it may be, or another byte has changed.
    """
    told = None  # what the only call means; behind others, memory holds what is near enough
    for way in (target, BoundTarget(target.name, target.setup, str(target.device))):
        memory = memory_of(target, data)
        expected = memory.copy() if told is None else told
        for number, call in enumerate(data["calls"]):
            args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
            if told is None:
                refer(expected, call)
            told = expected.copy() if told is None and len(data["calls"]) == 1 else None
            way.call(call["op"], args)
            compare_call(memory, expected, call, f"{call['op']}, call {number}")


def _has_one_length(call: Mapping[str, Any]) -> bool:
    """Whether a call has one length for all rows."""
    lengths = call["args"].get("cache_lengths", {"shape": None})
    return isinstance(lengths, int) or lengths["shape"] in ([], [1])


NOISES = ("compile", "exec", "import", "open", "ctypes.dlopen", "os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen")
"""Python's audit events of what belongs into `Kernel.prepare`."""


class Listener:
    """Hears what Python is asked for in one thread. There is no way to take an audit hook out: `listener` makes one for good."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._thread == threading.get_ident() and event in NOISES:
            self._heard.append(f"{event} {args[:1]!r:.80}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[str]]:
        """Hear what this thread does in a block."""
        self._heard, self._thread = [], threading.get_ident()
        try:
            yield self._heard
        finally:
            self._thread = None


@functools.cache
def listener() -> Listener:
    """Return this process's listener."""
    return Listener()


def check_quiet(target: Target, data: Mapping[str, Any]) -> None:
    """Check that calls behind the first ``data["warm"]`` are right, and neither compile nor load anything.

    Raises:
        NonconformanceError: a byte differs, or Python was asked for one of `NOISES`.
    """
    memory = Arenas(data["arenas"], target.device)
    expected = memory.copy()  # what was compared is alike, so that it serves the next call too
    for number, call in enumerate(data["calls"]):
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        refer(expected, call)
        with listener().listening() as heard:
            target.call(call["op"], args)
        compare_call(memory, expected, call, f"{call['op']}, call {number}")
        if heard and number >= data["warm"]:
            raise NonconformanceError(f"{call['op']}: what call {number} asked Python for", expected="nothing", got="; ".join(heard[:3]))


def check_autograd(target: Target, data: Mapping[str, Any]) -> None:
    """Check calls of which all that is read requires gradients, or one tensor does, and calls in inference mode.

    Raises:
        NonconformanceError: a byte differs, or what was written is part of a graph.
    """
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        op = call["op"]
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        read = [arg.name for arg in schema_of(op).args if arg.role is Role.TENSOR and arg.name in args]
        learnt = [name for name in read if args[name].is_floating_point()]
        alone = learnt if len(learnt) > 1 and call is data["calls"][0] else []
        for names, mode in ((learnt, torch.enable_grad), (learnt, torch.inference_mode), *(([name], torch.enable_grad) for name in alone)):
            for name in learnt:
                args[name].requires_grad_(name in names)
            expected = memory.copy()
            refer(expected, call)
            with mode():
                target.call(op, args)
            compare_call(memory, expected, call, f"{op} in {mode.__name__}")
            for arg in schema_of(op).mutated:
                if arg.name in args and args[arg.name].requires_grad:
                    got = f"requires_grad, by {args[arg.name].grad_fn}, of {' and '.join(names)}"
                    raise NonconformanceError(f"{op}: {arg.name} after a call in {mode.__name__}", expected="no gradients", got=got)
