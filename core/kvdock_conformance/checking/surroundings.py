"""What a user may have set around calls, or passes to them: calls do the same, and leave it alone."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import itertools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

import kvdock
from kvdock import runtime
from kvdock_conformance.checking import dressing
from kvdock_conformance.checking.left_alone import folder_left_empty
from kvdock_conformance.checking.meaning import forgive, schema_of
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.settings import unchanged
from kvdock_conformance.checking.target import Target

__all__ = ["SURROUNDINGS", "check_surroundings"]


def check_surroundings(target: Target, data: Mapping[str, Any]) -> None:
    """Make each call of a case as a user has set the process and as it is, with plans that are made in either and used in the other.

    Raises:
        NonconformanceError: the memory differs afterwards, a warning that is an error was raised in the middle of a write, or what the
            user has set is otherwise.
    """
    inside, plain, again, within = (Arenas(data["arenas"], target.device) for _ in range(4))
    runtime.default().dispatcher.descriptors.clear()
    warned = {inside: _warned(target, data, inside, data["surroundings"]), plain: _warned(target, data, plain)}
    runtime.default().dispatcher.descriptors.clear()
    warned |= {again: _warned(target, data, again), within: _warned(target, data, within, data["surroundings"])}
    expected, nothing = plain.copy(), _untouched(target, data) if any(warned.values()) else plain
    for memory, call in itertools.product((inside, again, within), data["calls"]):
        arenas = {spec["arena"] for spec in call["args"].values() if isinstance(spec, Mapping)}
        what = f"{call['op']} {'before' if memory is again else 'with'} {data['surroundings']}"
        right = nothing if call in warned[memory] else expected
        forgive(memory, right, call)
        compare(memory, right, call["args"], what, arenas)


def _untouched(target: Target, data: Mapping[str, Any]) -> Arenas:
    """Return a copy of the memory of a case whose calls could not be made."""
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        _arguments(memory, call)
    return memory.copy()


def _arguments(memory: Arenas, call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: memory.tensor(spec) for name, spec in call["args"].items()}


def _dressed(op: str, args: Mapping[str, Any], dress: dressing.Dress) -> dict[str, Any]:
    """Return arguments whose tensors are of another kind."""
    written = [arg.name for arg in schema_of(op).mutated]
    return {name: dress(value, name in written) if isinstance(value, torch.Tensor) else value for name, value in args.items()}


def _warned(target: Target, data: Mapping[str, Any], memory: Arenas, surroundings: str = "") -> list[Mapping[str, Any]]:
    """Make the calls of a case that are served, as a user has set the process if so named, and return those that could not be."""
    made, warned = [(call, _arguments(memory, call)) for call in data["calls"]], []
    context = (contextvars.Context if surroundings.endswith("in another context") else contextvars.copy_context)()  # a task's own
    around = SURROUNDINGS[surroundings](target.device) if surroundings else contextlib.nullcontext()
    with folder_left_empty(), around as dress, unchanged():
        for call, args in made:
            if not _torch_works(target.device):
                warned.append(call)  # nobody can write there so
                continue
            if dress is not None:
                args = _dressed(call["op"], args, dress)
            try:
                context.run(target.call, call["op"], args)
            except Warning:
                warned.append(call)
            except (kvdock.UnsupportedError, kvdock.IndexRangeError):
                pass  # which is for others to ask: here, what is left behind an error too
    return warned


def _torch_works(device: torch.device) -> bool:
    """Whether torch's own ops work here: with deterministic algorithms they raise on a device whose ops fall back to the host."""
    try:
        torch.arange(1, device=device)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def _set(write: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


@contextlib.contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _has_autocast(name: str) -> bool:
    """Whether a type of device has lower precision, and its module all that torch needs for that."""
    try:
        torch.autocast(name, dtype=torch.bfloat16)
    except (AssertionError, RuntimeError):
        return False
    return True


def _autocast(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[None]:
    """Return a block of lower precision, on the host and on the device where it can be had there."""
    types = [name for name in {"cpu", device.type} if _has_autocast(name)]
    return _all_of(*(torch.autocast(name, dtype=dtype) for name in types))


@contextlib.contextmanager
def _timers() -> Iterator[None]:
    """Let those of the process's timers run that do not, long enough to end nothing."""
    ours = [number for number in range(3) if not signal.getitimer(number)[0]]
    for number in ours:
        signal.setitimer(number, 10_000, 10_000)
    try:
        yield
    finally:
        for number in ours:
            signal.setitimer(number, 0)


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _own_settings(device: torch.device) -> AbstractContextManager[None]:
    """Return a block in which much is not as it is at first, for whoever resets it in place of leaving it."""
    loop = asyncio.new_event_loop()
    return _all_of(
        np.errstate(all="raise"),
        np.printoptions(precision=3),
        _set(torch.set_flush_denormal, True, False),
        mock.patch.object(torch._tensor_str.PRINT_OPTS, "precision", 3),
        torch.no_grad(),
        _autocast(device, torch.float16),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        _set(torch.set_deterministic_debug_mode, "warn", torch.get_deterministic_debug_mode()),
        _set(torch.set_num_threads, 5 if torch.get_num_threads() == 3 else 3, torch.get_num_threads()),  # who shares work, does so unevenly
        _blocked(signal.SIGWINCH),
        _set(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
        _set(sys.setswitchinterval, 0.004, sys.getswitchinterval()),
        _set(sys.setrecursionlimit, sys.getrecursionlimit() + 9, sys.getrecursionlimit()),
        _set(lambda on: (gc.enable if on else gc.disable)(), not gc.isenabled(), gc.isenabled()),
        _set(lambda counts: gc.set_threshold(*counts), (600, 9, 9), gc.get_threshold()),
        _set(logging.disable, logging.DEBUG, logging.root.manager.disable),
        _set(os.umask, 0o077, os.umask(0o077)),
        _set(sys.setprofile, _looked_at, sys.getprofile()),
        _set(sys.settrace, _looked_at, sys.gettrace()),
        _timers(),
        contextlib.closing(loop),
        _set(asyncio._set_running_loop, loop, None),  # as in a task of an engine
        *(
            _set(functools.partial(signal.signal, number), _interrupted, signal.getsignal(number))
            for number in (signal.SIGINT, signal.SIGUSR1)
        ),
    )


def _looked_at(frame: object, event: str, argument: object) -> None:
    """Do what a profiler or a debugger does that looks at nothing."""


def _interrupted(number: int, frame: object) -> None:
    """Do what a program of a user's own does at a signal."""
    raise KeyboardInterrupt


SURROUNDINGS: Mapping[str, Callable[[torch.device], AbstractContextManager[dressing.Dress | None]]] = {
    "another default dtype": lambda _: _set(torch.set_default_dtype, torch.bfloat16, torch.get_default_dtype()),
    "another default device": lambda _: _all_of(torch.device("meta")),
    # The other door to the same setting loads a compiler.
    "deterministic algorithms": lambda _: _set(torch.set_deterministic_debug_mode, "error", torch.get_deterministic_debug_mode()),
    "warnings as errors": lambda _: _warnings_are_errors(),
    "autocast": _autocast,
    "inference mode in another context": lambda _: _all_of(torch.inference_mode()),
    "settings of a user's own": _own_settings,
    "parameters for all tensors": dressing.parameters,
    "rows made in inference mode": dressing.of_inference,
    "all made in inference mode": dressing.all_of_inference,
}
"""What a user may have set, or passes, by name."""
