"""A folder for each requirement that failed: ``report.txt``, for people, and ``repro.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvdock_conformance.reports.repro import script
from kvdock_conformance.reports.text import bug_report
from kvdock_conformance.run import Run

__all__ = ["write"]


def write(run: Run, folder: Path) -> None:
    """Write the first failed case of each requirement with one, also where the failure was expected.

    Args:
        run: what came of the run.
        folder: where to; replaced if it is there, left out if nothing failed.
    """
    if folder.exists():
        shutil.rmtree(folder)
    for outcome in run.outcomes:
        if not outcome.failed:
            continue
        place, case = folder / outcome.requirement.id, outcome.failed[0]
        place.mkdir(parents=True)
        (place / "report.txt").write_text(bug_report(run, outcome, case), encoding="utf-8")
        text = script(outcome.requirement, case, name=run.plan.backend, setup=run.plan.setup, limit_s=run.plan.limit_s)
        (place / "repro.py").write_text(text, encoding="utf-8")
