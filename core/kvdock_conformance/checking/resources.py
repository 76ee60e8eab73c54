"""What a backend takes, and must give back: memory of calls, of plans, and of the process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import resource
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock.plugin import Request
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import ROUNDS, check_growth, only_new, times_that_fit
from kvdock_conformance.checking.meaning import in_order
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.target import HOST, Target

__all__ = [
    "check_given_back",
    "check_given_back_by_others",
    "check_keeps_nothing",
    "check_leaks",
    "check_leaks_of_counts",
    "check_scratch",
    "check_scratch_within",
    "made_calls",
    "requested_calls",
]

_LARGE = 1 << 16
_PER_COUNT = {
    "blocks of Python's memory": 1,
    "units of 16 bytes of malloc": 64,
    "open files": 1,
    "threads": 1,
}
"""What is left of each number of tokens; malloc itself keeps a little of each size that it has not seen."""


def made_calls(memory: Arenas, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each call of a case."""
    return [{name: memory.tensor(spec) for name, spec in call["args"].items()} for call in data["calls"]]


def _anew(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arguments as tensors of their own: one that is kept is seen."""
    return {name: value.view_as(value) if isinstance(value, torch.Tensor) else value for name, value in args.items()}


def _repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def check_keeps_nothing(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case several times over, each time on memory of its own, which nobody must have kept afterwards.

    Raises:
        NonconformanceError: the memory of a call is still there, as that of a view of it.
    """
    op, kept = data["calls"][0]["op"], []
    with only_new():
        for turn in range(4):  # the plan is prepared, found, repeated, and found again
            memory = Arenas(data["arenas"], target.device)
            for args in made_calls(memory, data):
                target.call(op, args)
            for number, content in enumerate(memory.bytes):
                names = [name for name, spec in data["calls"][0]["args"].items() if isinstance(spec, Mapping) and spec["arena"] == number]
                kept.append((f"{' and '.join(names)} of call {turn}", StorageWeakRef(content.untyped_storage())))  # type: ignore[no-untyped-call]  # torch's
            del memory, args, content
        gc.collect()
    alive = [name for name, reference in kept if not reference.expired()]  # type: ignore[no-untyped-call]  # torch's
    if alive:
        raise NonconformanceError(f"{op}: memory that is kept behind the calls", expected="none", got=", ".join(alive))


def check_leaks(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case in turn, again and again.

    Raises:
        NonconformanceError: they leave memory, tensors, open files or threads behind.
    """
    op, every = data["calls"][0]["op"], made_calls(Arenas(data["arenas"], target.device), data)
    calls = itertools.cycle(every)

    def call() -> None:
        target.call(op, _anew(next(calls)))

    _repeat(call, 4 * len(every))
    times = times_that_fit(call)
    check_growth(f"{op}: calls", target.device, times, lambda number: _repeat(call, times))


def check_leaks_of_counts(target: Target, data: Mapping[str, Any]) -> None:
    """Make calls behind the first ``data["warm"]``, each of a number of tokens that none had before.

    Raises:
        NonconformanceError: they leave something behind.
    """
    op, every = data["calls"][0]["op"], made_calls(Arenas(data["arenas"], target.device), data)
    seen = itertools.cycle(every[: data["warm"]])

    def call() -> None:
        target.call(op, _anew(next(seen)))

    _repeat(call, (1 + times_that_fit(call, fewest=1)) * data["warm"])  # Python and torch keep a little of the first calls too
    new = every[data["warm"] :]
    times = len(new) // (2 * ROUNDS + 1)

    def work(number: int) -> None:
        for args in new[number * times : (number + 1) * times]:
            target.call(op, _anew(args))

    check_growth(f"{op}: calls of new numbers of tokens", target.device, times, work, _PER_COUNT, attempts=2)


def _peak(device: torch.device, call: Callable[[], object]) -> int:
    """Return by how many bytes the memory in use grows in a call; 0 where that cannot be told. Large blocks alone tell on a host."""
    own = getattr(torch, device.type)
    if hasattr(own, "reset_peak_memory_stats"):
        own.reset_peak_memory_stats(device)
        before = own.memory_allocated(device)
        call()
        return int(own.max_memory_allocated(device) - before)
    with contextlib.suppress(OSError):  # another system, or not allowed
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    return 0


def _resident(name: str) -> int:
    """Return a line of the process's status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(lines[name].split()[0]) * 1024


def check_scratch(target: Target, data: Mapping[str, Any]) -> None:
    """Compare the scratch memory of the calls of a case with that of the first, whose memory is dense.

    Raises:
        NonconformanceError: another call takes more, by ``data["spare"]`` bytes.
    """
    op, taken = data["calls"][0]["op"], []
    for args in made_calls(Arenas(data["arenas"], target.device), data):
        target.call(op, args)
        taken.append(_peak(target.device, lambda: target.call(op, args)))  # noqa: B023 - called at once
        if taken[-1] > taken[0] + data["spare"]:
            raise NonconformanceError(
                f"{op}: scratch memory of a call on memory that is not dense",
                expected=f"about what it takes on dense memory, {taken[0]} bytes",
                got=f"{taken[-1]} bytes",
            )


def _error_within(count: int, call: Callable[[], object]) -> BaseException | None:
    """Make a call while this process may get so many bytes more, from whomever; return the error where that is not enough."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (taken + count, before[1]))
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever the backend makes of it
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return None


def check_scratch_within(target: Target, data: Mapping[str, Any]) -> None:
    """Make the last call of a case, behind others like it, with little memory left: ``data["limits"]`` in turn, in bytes.

    The next limit is tried where torch's own allocator asked for more than one. Of a device that allocator alone can be asked.

    Raises:
        NonconformanceError: it needs more, or gets it elsewhere.
    """
    op, (few, many), limits = data["calls"][0]["op"], made_calls(Arenas(data["arenas"], target.device), data), data["limits"]
    for _ in range(3):
        target.call(op, few)
    what, expected = f"{op}: scratch memory of a call", f"at most {limits[-1]} bytes, all of torch's allocator"
    if target.device != HOST:
        peak = _peak(target.device, lambda: target.call(op, many))
        if peak > limits[-1]:
            raise NonconformanceError(what, expected=expected, got=f"{peak} bytes")
        return
    for limit in limits:
        error = _error_within(limit, lambda: target.call(op, many))
        if error is None:
            return
        told = "".join(traceback.format_exception(error))
        if "DefaultCPUAllocator" not in told or limit == limits[-1]:
            raise NonconformanceError(what, expected=expected, got=f"with {limit} bytes: {type(error).__name__}: {error}") from error


def _round_of_plans(target: Target, calls: Sequence[tuple[Request, tuple[Any, ...]]]) -> None:
    """Prepare, call and destroy a plan for each call."""
    with target.backend.device_guard(target.device):
        for request, values in calls:
            plan = target.kernels[request.op].prepare(request)
            plan(*values)
            plan.destroy()


def requested_calls(target: Target, data: Mapping[str, Any]) -> list[tuple[Request, tuple[Any, ...]]]:
    """Return the requests and the arguments in order of the calls of a case that the backend serves."""
    op = data["calls"][0]["op"]
    every = [in_order(op, args) for args in made_calls(Arenas(data["arenas"], target.device), data)]
    return [(validate(CATALOG[op], values), values) for values in every if not target.reasons_against(op, values)]


def check_given_back(target: Target, data: Mapping[str, Any]) -> None:
    """Prepare, call and destroy plans of the signatures of a case, again and again.

    Raises:
        NonconformanceError: each plan leaves something behind.
    """
    calls = requested_calls(target, data)

    def call() -> None:
        _round_of_plans(target, calls)

    _repeat(call, 3)
    times = max(2, times_that_fit(call) // len(calls))
    what = f"{data['calls'][0]['op']}: plans that were prepared, called and destroyed"
    check_growth(what, target.device, times * len(calls), lambda number: _repeat(call, times))


def check_given_back_by_others(target: Target, data: Mapping[str, Any]) -> None:
    """Prepare, call and destroy plans, each of a signature of its own.

    Raises:
        NonconformanceError: each plan leaves much behind: 64 KiB of the host's memory, or anything of its device's.
    """
    calls = requested_calls(target, data)
    times = len(calls) // (ROUNDS + 1)
    # What was compiled for a signature stays with the process, and takes memory of the host: it is nobody's plan.
    on_host = {"units of 16 bytes of malloc": _LARGE // 16, "pages of address space": _LARGE // 4096} if target.device == HOST else {}
    check_growth(
        f"{data['calls'][0]['op']}: plans of unlike signatures that were prepared, called and destroyed",
        target.device,
        times,
        lambda number: _round_of_plans(target, calls[number * times : (number + 1) * times]),
        {**on_host, f"bytes that torch holds of {target.device}": 1},
        attempts=1,
    )
