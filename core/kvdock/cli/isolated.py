"""Loads and probes one plugin in a child process with a time limit: a hang or a crash becomes a verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import attrs

from kvdock.plugins.entry_points import FoundEntryPoint
from kvdock.plugins.records import PluginRecord, PluginState
from kvdock.plugins.settings import ALLOW, DENY, DISABLE, Selector, normalise

__all__ = ["Examination", "examine"]

_PHASES = {
    "start": "starting Python and importing kvdock",
    "import": "importing {subject}",
    "hooks": "calling the hooks of plugin {subject!r}",
    "probe": "probe() of backend {subject!r}",
    "kernels": "kernels() of backend {subject!r}",
    "notes": "notes() of backend {subject!r}",
}
_PROBING = ("probe", "kernels", "notes")
_START_S = 120.0  # how long Python and torch may take to start, which is not the plugin's fault
_POLL_S = 0.05
_TRACEBACK_S = 1.0  # how long a child that hangs gets to write where it hangs
_LONGEST = 20_000  # characters of its stderr to keep


@attrs.frozen
class Examination:
    """What came out of examining one plugin.

    Args:
        record: its record.
        notes: what the user should be told beside it.
        seconds: how long the plugin took to load and probe; None if it did not come to an end.
        problems: what is wrong with it though it is ready.
    """

    record: PluginRecord
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    problems: tuple[str, ...] = ()


def examine(found: FoundEntryPoint, timeout_s: float) -> Examination:
    """Load and probe one plugin in a child process.

    Args:
        found: the entry point. Nothing else is loaded in the child.
        timeout_s: how long the plugin may take in seconds, from when the child is ready to load it.
    """
    with tempfile.TemporaryDirectory(prefix="kvdock-doctor-") as name:
        folder = Path(name)
        # Files and not pipes: a process that the plugin left behind could hold a pipe open for ever.
        with (folder / "output").open("w+b") as output:
            end = _run(found, folder / "result", output, timeout_s)
            output.seek(0)
            text = output.read().decode(errors="replace")
        return _verdict(found, _lines(folder / "result"), end, text)


def _run(found: FoundEntryPoint, result: Path, output: IO[bytes], timeout_s: float) -> str:
    """Run the child to its end, its time limit or its crash; return how it ended, empty when by itself."""
    environ = {key: value for key, value in os.environ.items() if key not in (ALLOW, DENY, DISABLE)}
    environ[ALLOW] = quote(str(Selector(found.name, normalise(found.distribution))), safe="@%")  # whatever the locale can encode
    command = [sys.executable, "-P", "-m", "kvdock.cli.isolated_child", str(result)]
    child = subprocess.Popen(  # noqa: S603 - our own module
        command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        code = _wait(child, result, timeout_s)
        if code is None:
            child.send_signal(signal.SIGUSR1)  # the child answers with the traceback of every thread
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TRACEBACK_S)
            return f"did not end within {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with whatever it started
        child.wait()
    if code < 0:
        return f"crashed the process with {signal.Signals(-code).name}"
    return f"ended the process with exit code {code}"


def _wait(child: subprocess.Popen[bytes], result: Path, timeout_s: float) -> int | None:
    """Wait for the child's exit code; None when it takes too long to start, or after its first line."""
    deadline, started = time.monotonic() + _START_S, False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL_S)
        # The limit counts from the first line: until then the time is that of Python and torch, not of the plugin.
        if not started and result.exists() and result.stat().st_size > 0:
            deadline, started = time.monotonic() + timeout_s, True
        if time.monotonic() > deadline:
            return None


def _lines(result: Path) -> list[dict[str, Any]]:
    """Read what the child wrote, up to a line that it did not finish."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in result.read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(line))
    return lines


def _verdict(found: FoundEntryPoint, lines: list[dict[str, Any]], end: str, output: str) -> Examination:
    """Take the child's own record, or make one of where and how it ended."""
    last: dict[str, Any] = lines[-1] if lines else {"step": "start", "subject": ""}
    if "record" in last:
        return Examination(PluginRecord.from_dict(last["record"]), tuple(last["notes"]), last["seconds"], tuple(last["problems"]))
    state = PluginState.UNUSABLE if last["step"] in _PROBING else PluginState.LOAD_FAILED
    reason = f"{_PHASES[last['step']].format(subject=last['subject'])} {end}"
    return Examination(found.record(state, reason, output[-_LONGEST:].strip()))
