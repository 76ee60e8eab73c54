"""A run as one JSON object; ``report.schema.json`` beside this says what is in it, as a JSON schema, draft 2020-12."""

from __future__ import annotations

import json
from typing import Any

from kvdock_conformance.run import ConformanceRun
from kvdock_conformance.verdict import CaseOutcome, Outcome, Verdict

__all__ = ["VERSION", "as_dict", "text"]

VERSION = 1
"""Version of the schema: counted up when a field changes its meaning or goes; new fields do not count."""


def as_dict(run: ConformanceRun) -> dict[str, Any]:
    """Return a run as what JSON can hold."""
    return {
        "schema": VERSION,
        "backend": run.plan.backend,
        "kind": run.plan.kind,
        "level": run.plan.level.value,
        "op": run.plan.area,
        "left_out": run.plan.left_out(),
        "about": dict(run.about),
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": round(run.seconds, 3),
        "exit_code": run.exit_code,
        "complete": not run.missing and not run.given_up and not run.plan.left_out(),
        "counts": {verdict.value: run.counts().get(verdict.value, 0) for verdict in Verdict},
        "requirements": [_requirement(outcome) for outcome in run.outcomes],
        **({"proofs": [dict(proof) for proof in run.proofs]} if run.proofs else {}),
    }


def _requirement(outcome: Outcome) -> dict[str, Any]:
    """Return one requirement; cases that failed have their data."""
    return {
        "id": outcome.requirement.id,
        "sentence": outcome.requirement.sentence,
        "area": outcome.requirement.area,
        "level": outcome.requirement.level.value,
        "hardware": outcome.requirement.hardware,
        "verdict": outcome.verdict.value,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 4),
        "cases": [_case(case) for case in outcome.cases],
    }


def _case(case: CaseOutcome) -> dict[str, Any]:
    told: dict[str, Any] = {"name": case.name, "verdict": case.verdict.value, "seconds": round(case.seconds, 4)}
    if case.reason:
        told["reason"] = case.reason
    if case.failure is not None:
        told |= {"failure": dict(case.failure), "data": dict(case.data)}
    return told


def text(run: ConformanceRun) -> str:
    """Return a run as JSON."""
    return json.dumps(as_dict(run), indent=2) + "\n"
