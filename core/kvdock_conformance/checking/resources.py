"""What a backend takes, and must give back: memory of calls, of plans, and of the process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import kvdock
from kvdock.ops.validate import validate
from kvdock.plugin import Request
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import ROUNDS, check_growth, set_apart, times_that_fit
from kvdock_conformance.checking.meaning import in_order, kernel_of, schema_of
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.repeated import BoundTarget
from kvdock_conformance.checking.target import HOST, Target

__all__ = [
    "check_given_back",
    "check_given_back_by_others",
    "check_keeps_nothing",
    "check_leaks",
    "check_leaks_of_counts",
    "made_calls",
    "requested_calls",
]

_LARGE = 1 << 16
_BLOCKS = "blocks of Python's memory"
_TURNS_KEPT = 6
"""A plan is prepared, found, repeated, and found again, called as it is and bound to its pools: by then what repeats it is made."""
_PER_COUNT = {
    "units of 16 bytes of malloc": 64,
    "open files": 1,
    "threads": 1,
    "bytes that torch holds of the device": 512,
}
"""What is left of each number of tokens; malloc itself keeps a little of each size that it has not seen."""


def made_calls(memory: Arenas, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each call of a case."""
    return [{name: memory.tensor(spec) for name, spec in call["args"].items()} for call in data["calls"]]


def _anew(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arguments as tensors of their own: one that is kept is seen."""
    return {name: value.view_as(value) if isinstance(value, torch.Tensor) else value for name, value in args.items()}


def _drawn_anew(args: Mapping[str, Any], choose: torch.Generator) -> dict[str, Any]:
    """Return the same arguments with other index values that are as good: what is kept of each is seen."""
    made = dict(args)
    if "slot_mapping" in args:
        capacity = math.prod(next(args[name] for name in ("k_cache", "kv_cache") if name in args).shape[:2])
        made["slot_mapping"] = args["slot_mapping"].copy_(torch.randint(-1, capacity, args["slot_mapping"].shape, generator=choose))
    elif "block_pairs" in args:
        count = len(args["block_pairs"])
        made["block_pairs"] = args["block_pairs"].copy_(torch.randperm(len(args["k_cache"]), generator=choose)[: 2 * count].view(count, 2))
    elif "block_table" in args:
        made["block_table"] = args["block_table"].copy_(args["block_table"][torch.randperm(len(args["block_table"]), generator=choose)])
    elif "cache_lengths" in args:
        lengths, room = args["cache_lengths"], args["k_cache"].shape[2] - args["k"].shape[2] + 1
        drawn = torch.randint(room, getattr(lengths, "shape", ()), generator=choose)
        made["cache_lengths"] = int(drawn) if isinstance(lengths, int) else lengths.copy_(drawn)
    return made


def _repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def check_keeps_nothing(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case several times over, each time on memory of its own, which nobody must have kept afterwards.

    Raises:
        NonconformanceError: the memory of a call is still there, as that of a view of it, or in a cycle that only the garbage collector
            frees; or a tensor of the call's own is in such a cycle.
    """
    op, kept = data["calls"][0]["op"], []
    names: dict[int, list[str]] = {number: [] for number in range(len(data["arenas"]))}
    for at, call in enumerate(data["calls"]):
        for name, spec in call["args"].items():
            if isinstance(spec, Mapping):
                names[spec["arena"]].append(f"{name} of call {at}")
    set_apart()
    with _uncollected() as in_cycles:
        for turn in range(_TURNS_KEPT):
            memory = Arenas(data["arenas"], target.device)
            way = BoundTarget(target.name, target.setup, str(target.device)) if turn > 1 else target
            for args in made_calls(memory, data):
                with contextlib.suppress(kvdock.KVDockError):  # it may be a call that raises
                    way.call(op, args)
            for number, content in enumerate(memory.bytes):
                kept.append((f"{' and '.join(names[number])} of turn {turn}", StorageWeakRef(content.untyped_storage())))  # type: ignore[no-untyped-call]  # torch's
            del memory, args, content, way
            if turn == 0:
                gc.collect()  # what a compiler leaves behind
        alive = [name for name, reference in kept if not reference.expired()]  # type: ignore[no-untyped-call]  # torch's
        alive += [f"a tensor {list(tensor.shape)} that is part of a cycle" for tensor in in_cycles()]
    if alive:
        raise NonconformanceError(f"{op}: memory that is kept behind the calls", expected="none", got=", ".join(alive))


@contextlib.contextmanager
def _uncollected() -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Keep the garbage collector from running by itself in a block, and give a function that returns what tensors it would free."""

    def in_cycles() -> list[torch.Tensor]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(debug)
        found = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
        gc.garbage.clear()
        return found

    was_enabled, debug = gc.isenabled(), gc.get_debug()
    gc.disable()
    try:
        yield in_cycles
    finally:
        if was_enabled:
            gc.enable()


def check_leaks(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case in turn, again and again, every other time with index values of their own if ``data["values"]`` says so.

    Raises:
        NonconformanceError: they leave memory, tensors, open files or threads behind.
    """
    op, every = data["calls"][0]["op"], made_calls(Arenas(data["arenas"], target.device), data)
    turns = [(args, is_new) for is_new in (False, *[True][: data.get("values", 0)]) for args in every]
    calls, choose = itertools.cycle(turns), torch.Generator().manual_seed(0)

    def call() -> None:
        args, is_new = next(calls)
        with contextlib.suppress(kvdock.KVDockError):  # it may be one that raises
            target.call(op, _anew(_drawn_anew(args, choose) if is_new else args))

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
    attempts = 2 if len(new) > 4 * ROUNDS else 1  # each number comes once
    least = {**_PER_COUNT, _BLOCKS: 1 if attempts > 1 else 16}  # some of Python's own stay
    times = len(new) // (attempts * ROUNDS + 1)

    def work(number: int) -> None:
        for args in new[number * times : (number + 1) * times]:
            target.call(op, _anew(args))

    check_growth(f"{op}: calls of new numbers of tokens", target.device, times, work, least, attempts)


def _round_of_plans(target: Target, calls: Sequence[tuple[Request, tuple[Any, ...]]]) -> None:
    """Prepare, call and destroy a plan for each call."""
    with target.backend.device_guard(target.device):
        for request, values in calls:
            plan = kernel_of(target, request.op).prepare(request)
            plan(*values)
            plan.destroy()


def requested_calls(target: Target, data: Mapping[str, Any]) -> list[tuple[Request, tuple[Any, ...]]]:
    """Return the requests and the arguments in order of the calls of a case that the backend serves, or of all where it has no kernel."""
    op = data["calls"][0]["op"]
    every = [in_order(op, args) for args in made_calls(Arenas(data["arenas"], target.device), data)]
    return [
        (validate(schema_of(op), values), values) for values in every if op not in target.kernels or not target.reasons_against(op, values)
    ]


def check_given_back(target: Target, data: Mapping[str, Any]) -> None:
    """Prepare, call and destroy plans of the signatures of a case, again and again.

    Raises:
        NonconformanceError: each plan leaves something behind.
    """
    calls = requested_calls(target, data)
    if not calls:
        return

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
        {**on_host, "bytes that torch holds of the device": 1},
        attempts=1,
    )
