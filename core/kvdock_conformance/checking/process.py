"""Whether calls leave the process that they are made in as it was, and how another one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvdock
from kvdock import runtime
from kvdock_conformance.checking.left_alone import folder_left_empty, nothing_frozen
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.settings import ProcessSettings, unchanged
from kvdock_conformance.checking.target import Target

__all__ = ["GRACE_S", "LIMIT_S", "MARK", "check_settings_of_calls", "ended"]

MARK = "KVDOCK_CONFORMANCE_ENDING"
"""A variable of the environment that tells a process, and those that it leaves behind, from all others."""

LIMIT_S = 150.0
GRACE_S = 5.0  # how long helpers may take to notice that their process has ended


def check_settings_of_calls(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case, those that are served, and check that they change nothing but memory.

    They are made until they leave no further thread behind: workers come one by one, and what goes on growing has too many.
    """
    memory = Arenas(data["arenas"], target.device)
    runtime.default().dispatcher.descriptors.clear()  # so that plans are prepared too
    with nothing_frozen():
        for _ in range(ProcessSettings.most_workers):
            before = set(ProcessSettings.running())
            with folder_left_empty(), unchanged():
                for call in data["calls"]:
                    with contextlib.suppress(kvdock.UnsupportedError, kvdock.IndexRangeError):
                        target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
            if before.issuperset(ProcessSettings.running()):
                break


def ended(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, list[str], str]:
    """Run a process to its end.

    Returns:
        Its exit code, None where it had to be ended; the command lines of the processes that it left behind, which are ended too; and
        what all of them wrote.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, env={**environ, MARK: mark}, stdout=output, stderr=output)  # noqa: S603 - our own script
        try:
            code, left = process.wait(LIMIT_S), _left_behind(mark)
        except subprocess.TimeoutExpired:
            code, left = None, []
        finally:
            _end(_marked(mark))
            process.wait()
        output.seek(0)
        return code, left, output.read()


def _left_behind(mark: str) -> list[str]:
    """Return the command lines of the marked processes that do not end by themselves."""
    deadline = time.monotonic() + GRACE_S
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
