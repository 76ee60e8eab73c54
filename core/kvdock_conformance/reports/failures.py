"""A folder for each requirement that failed: ``report.txt``, for people, and ``repro.py``."""

from __future__ import annotations

from pathlib import Path

from kvdock_conformance.reports.text import bug_report
from kvdock_conformance.run import ConformanceRun
from kvdock_conformance.verdict import CaseOutcome, Outcome

__all__ = ["clear", "write"]

_REPORT, _REPRO = "report.txt", "repro.py"


def clear(folder: Path) -> None:
    """Take out what an earlier run has written, and the folders that are empty then. What else lies there is somebody's."""
    for place in sorted(folder.glob("KVD-*-[0-9][0-9][0-9]")):
        for name in (_REPORT, _REPRO):
            (place / name).unlink(missing_ok=True)
        if not any(place.iterdir()):
            place.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


def write(run: ConformanceRun, folder: Path) -> None:
    """Write the first failed case of each requirement with one, also where the failure was expected.

    Args:
        run: what came of the run.
        folder: where to; left out if nothing failed.
    """
    for outcome in run.outcomes:
        if not outcome.failed:
            continue
        place, case = folder / outcome.requirement.id, outcome.failed[0]
        place.mkdir(parents=True, exist_ok=True)
        for name, text in ((_REPORT, bug_report(run, outcome, case)), (_REPRO, _script(run, outcome, case))):
            (place / name).write_text(text, encoding="utf-8")


def _script(run: ConformanceRun, outcome: Outcome, case: CaseOutcome) -> str:
    from kvdock_conformance.reports.repro import script  # which needs torch, and is needed where something failed

    plan = run.plan
    return script(outcome.requirement, case, name=plan.backend, setup=plan.setup, limit_s=plan.limit_s, device=plan.device)
