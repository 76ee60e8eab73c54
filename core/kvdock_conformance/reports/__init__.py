"""What a run is told as. A new format is a new module, and a line in `FILES`.

`text` tells a failure as a bug report, `repro` as a script. `json_report` and `junit` tell the whole run to programs, `digest` tells
it to people on one page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvdock.errors import ArgumentValueError
from kvdock_conformance.reports import digest, failures, json_report, junit
from kvdock_conformance.run import ConformanceRun

__all__ = ["FILES", "prepare", "write"]

FILES: Mapping[str, Callable[[ConformanceRun], str]] = MappingProxyType(
    {"report.json": json_report.text, "junit.xml": junit.text, "digest.md": digest.text}
)
"""What is written into the folder of a report, by file name."""

_FAILURES = "failures"


def prepare(folder: Path) -> None:
    """Make the folder of a report, and take out of it what an earlier run has written: nobody may take that for this run's.

    Args:
        folder: the folder. What no run has written stays.

    Raises:
        ArgumentValueError: it cannot be made, or nothing can be written there.
    """
    try:
        (folder / _FAILURES).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        failures.clear(folder / _FAILURES)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentValueError(
            f"report: {folder}", expected="a folder that can be written to", got=str(error), fix="name another one, such as a new one"
        ) from error


def write(run: ConformanceRun, folder: Path) -> None:
    """Write a run's reports into a folder: `FILES`, and ``failures/<requirement>/``.

    Args:
        run: what came of the run.
        folder: where to, see `prepare`.

    Raises:
        ArgumentValueError: it cannot be written.
    """
    prepare(folder)
    try:
        for name, text in FILES.items():
            (folder / name).write_text(text(run), encoding="utf-8")
        failures.write(run, folder / _FAILURES)
    except OSError as error:
        raise ArgumentValueError(f"report: {folder}", expected="room for the reports", got=str(error)) from error
