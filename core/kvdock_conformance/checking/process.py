"""Whether a backend leaves the process that it runs in as it was, and lets it end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock import runtime
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.fresh import facts_of, own_names, seeded_lines
from kvdock_conformance.checking.meaning import schema_of
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.settings import ProcessSettings, unchanged
from kvdock_conformance.checking.target import Target

__all__ = ["ENDING", "MARK", "SURROUNDINGS", "check_ending", "check_settings_of_calls", "check_settings_of_import", "check_surroundings"]

ENDING = """
import atexit, importlib, multiprocessing, os, subprocess, sys, threading, time, types
import torch
import kvdock
from kvdock import runtime

NAME, SETUP, DEVICE, MODULE = {name!r}, {setup!r}, {device!r}, None
{seeded}

if SETUP:
    module, _, function = SETUP.partition(":")
    getattr(importlib.import_module(module), function)()
elif NAME in {own!r}:
    importlib.import_module("kvdock_conformance.stand_ins").register(NAME)
device = torch.device(DEVICE)
pool, rows = torch.zeros(2, 4, 1, 8, device=device), torch.ones(1, 1, 8, device=device)
try:
    with kvdock.use_backend(NAME):
        kvdock.ops.paged_caching_(pool, pool.clone(), rows, rows, torch.tensor([5], device=device))
except Exception as error:
    print(error)  # what is wrong with the call is for others to say
print("the last line")
"""
"""A script that uses a backend once, and ends."""

MARK = "KVDOCK_CONFORMANCE_ENDING"
"""A variable of the environment that tells the script's processes, and those that it leaves behind, from all others."""

_LIMIT_S = 60.0
_GRACE_S = 5.0  # how long helpers may take to notice that their process has ended


def check_settings_of_import(target: Target, data: Mapping[str, Any]) -> None:
    """Check what importing the module and probing have changed in a fresh interpreter."""
    for what, was, came in facts_of(target)["changes"][:1]:
        raise NonconformanceError(f"{what} after import and probe()", expected=was, got=came)


def check_settings_of_calls(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case, those that are served, and check that they change nothing but memory.

    They are made until they leave no further thread behind: workers come one by one, and what goes on growing has too many.
    """
    memory = Arenas(data["arenas"], target.device)
    for _ in range(ProcessSettings.most_workers):
        before = set(ProcessSettings.running())
        with unchanged():
            for call in data["calls"]:
                with contextlib.suppress(kvdock.UnsupportedError):
                    target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
        if before.issuperset(ProcessSettings.running()):
            break


def check_surroundings(target: Target, data: Mapping[str, Any]) -> None:
    """Make each call of a case as a user has set the process and as it is, with plans that are made in either and used in the other.

    Raises:
        NonconformanceError: the memory differs afterwards, a warning that is an error was raised in the middle of a write, or what the
            user has set is otherwise.
    """
    inside, plain, again, within, untouched = (Arenas(data["arenas"], target.device) for _ in range(5))
    for call in data["calls"]:
        _arguments(untouched, call)
    warned = {inside: _warned(target, data, inside, data["surroundings"]), plain: _warned(target, data, plain)}
    runtime.default().dispatcher.descriptors.clear()
    warned |= {again: _warned(target, data, again), within: _warned(target, data, within, data["surroundings"])}
    expected, nothing = plain.copy(), untouched.copy()
    for memory, call in itertools.product((inside, again, within), data["calls"]):
        arenas = {spec["arena"] for spec in call["args"].values() if isinstance(spec, Mapping)}
        what = f"{call['op']} {'before' if memory is again else 'with'} {data['surroundings']}"
        compare(memory, nothing if call in warned[memory] else expected, call["args"], what, arenas)


def _arguments(memory: Arenas, call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: memory.tensor(spec) for name, spec in call["args"].items()}


def _warned(target: Target, data: Mapping[str, Any], memory: Arenas, surroundings: str = "") -> list[Mapping[str, Any]]:
    """Make the calls of a case that are served, as a user has set the process if so named, and return those that raised a warning."""
    made, warned = [(call, _arguments(memory, call)) for call in data["calls"]], []
    with SURROUNDINGS[surroundings](target.device) if surroundings else contextlib.nullcontext() as dress, unchanged():
        for call, args in made:
            written = [arg.name for arg in schema_of(call["op"]).mutated]
            for name, value in args.items() if dress is not None else ():
                args[name] = dress(value, name in written) if isinstance(value, torch.Tensor) else value
            try:
                target.call(call["op"], args)
            except Warning:
                warned.append(call)
            except kvdock.UnsupportedError:
                pass  # which is for others to ask
    return warned


Dress = Callable[[torch.Tensor, bool], torch.Tensor]
"""Makes another kind of tensor of one, in the same memory where it is written to."""


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


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a block of lower precision, on the host and on the device where it can be had there."""
    types = [name for name in {"cpu", device.type} if torch.amp.is_autocast_available(name)]
    return _all_of(*(torch.autocast(name, dtype=torch.bfloat16) for name in types))


@contextlib.contextmanager
def _timers() -> Iterator[None]:
    """Let those of the process's timers run that do not, long enough to end nothing."""
    ours = [number for number in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF) if not signal.getitimer(number)[0]]
    for number in ours:
        signal.setitimer(number, 10_000, 10_000)
    try:
        yield
    finally:
        for number in ours:
            signal.setitimer(number, 0)


def _own_settings(device: torch.device) -> AbstractContextManager[None]:
    """Return a block in which much is not as it is at first, for whoever resets it in place of leaving it."""
    options = torch._tensor_str.PRINT_OPTS
    return _all_of(
        np.errstate(all="raise"),
        np.printoptions(precision=3),
        _set(torch.set_flush_denormal, True, False),
        _set(lambda value: torch.set_printoptions(precision=value), 3, options.precision),
        torch.no_grad(),
        torch.autograd.set_detect_anomaly(True),
        _set(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
        _set(sys.setswitchinterval, 0.004, sys.getswitchinterval()),
        _set(os.umask, 0o077, os.umask(0o077)),
        _timers(),
    )


@contextlib.contextmanager
def _parameters(device: torch.device) -> Iterator[Dress]:
    """What a module holds: pools that move with it."""
    yield lambda tensor, _: torch.nn.Parameter(tensor, requires_grad=False)


@contextlib.contextmanager
def _of_inference(device: torch.device) -> Iterator[Dress]:
    """What a model computed in inference mode, and is read behind it."""

    def dress(tensor: torch.Tensor, is_written: bool) -> torch.Tensor:
        with torch.inference_mode():
            return (
                tensor
                if is_written
                else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)
            )

    yield dress


SURROUNDINGS: Mapping[str, Callable[[torch.device], AbstractContextManager[Dress | None]]] = {
    "another default dtype": lambda _: _set(torch.set_default_dtype, torch.bfloat16, torch.get_default_dtype()),
    "another default device": lambda _: _all_of(torch.device("meta")),
    # The other door to the same setting loads a compiler.
    "deterministic algorithms": lambda _: _set(torch.set_deterministic_debug_mode, "error", torch.get_deterministic_debug_mode()),
    "warnings as errors": lambda _: _warnings_are_errors(),
    "autocast": _autocast,
    "inference mode": lambda _: _all_of(torch.inference_mode()),
    "settings of a user's own": _own_settings,
    "parameters for all tensors": _parameters,
    "rows made in inference mode": _of_inference,
}
"""What a user may have set, or passes, by name."""


def check_ending(target: Target, data: Mapping[str, Any]) -> None:
    """Let a fresh interpreter use the backend, and see how it ends and what it leaves behind.

    Raises:
        NonconformanceError: it ended with an error, not by itself, or left a process behind.
    """
    text = ENDING.format(name=target.name, setup=target.setup, device=str(target.device), seeded=seeded_lines(), own=own_names(target))
    mark = uuid.uuid4().hex
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: mark}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        path = Path(folder) / "ending.py"
        path.write_text(text, encoding="utf-8")
        process = subprocess.Popen([sys.executable, "-P", str(path)], env=environ, stdout=output, stderr=output)  # noqa: S603 - our own script
        try:
            code = process.wait(_LIMIT_S)
            left = _left_behind(mark)
        except subprocess.TimeoutExpired:
            code, left = None, []
        finally:
            _end(_marked(mark))
            process.wait()
        output.seek(0)
        said = output.read()[-2000:].strip()
    ending = "a process that has used the backend"
    if code is None:
        raise NonconformanceError(ending, expected=f"an end within {_LIMIT_S:g} s", got=f"none, behind {said!r}")
    if code != 0:
        raise NonconformanceError(ending, expected="exit code 0", got=f"exit code {code}: {said}")
    if left:
        raise NonconformanceError(f"processes that it leaves behind, {_GRACE_S:g} s after its end", expected="none", got="; ".join(left))


def _left_behind(mark: str) -> list[str]:
    """Return the command lines of the marked processes that do not end by themselves."""
    deadline = time.monotonic() + _GRACE_S
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return list(_marked(mark).values())


def _marked(mark: str) -> dict[int, str]:
    """Return the command lines of the processes with a mark by process id; none where the system does not tell."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _end(processes: Mapping[int, str]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
