"""What a run is told as. A new format is a new module, and a line in `FILES`.

`text` tells a failure as a bug report, `repro` as a script, `json_report` and `junit` tell the whole run to programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvdock_conformance.reports import failures, json_report, junit
from kvdock_conformance.run import Run

__all__ = ["FILES", "write"]

FILES: Mapping[str, Callable[[Run], str]] = MappingProxyType({"report.json": json_report.text, "junit.xml": junit.text})
"""What is written into the folder of a report, by file name."""


def write(run: Run, folder: Path) -> None:
    """Write a run's reports into a folder, which is made: `FILES`, and ``failures/<requirement>/``.

    Args:
        run: what came of the run.
        folder: where to. What an earlier run wrote there is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text(run), encoding="utf-8")
    failures.write(run, folder / "failures")
