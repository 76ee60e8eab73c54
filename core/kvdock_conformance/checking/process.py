"""Whether a backend leaves the process that it runs in as it was, and lets it end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.fresh import facts_of, own_names, seeded_lines
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.settings import ProcessSettings, unchanged
from kvdock_conformance.checking.target import Target

__all__ = ["ENDING", "MARK", "check_ending", "check_settings_of_calls", "check_settings_of_import"]

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
                with contextlib.suppress(kvdock.UnsupportedError, kvdock.IndexRangeError):
                    target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
        if before.issuperset(ProcessSettings.running()):
            break


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
