"""A failure as a bug report for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvdock_conformance.run import ConformanceRun
from kvdock_conformance.verdict import CaseOutcome, Outcome

__all__ = ["bug_report", "summary"]

_LONG = 100
_MANY = 12
_GIVEN_UP = "; it crashes or hangs, and cases were not run"


def bug_report(run: ConformanceRun, outcome: Outcome, case: CaseOutcome) -> str:
    """Return the report of one failed case: requirement, backend, calls with shapes and strides, what was expected, what came."""
    about, failure = run.about, case.failure or {}
    on = f" on {about['device']}" if "device" in about else ""
    on += f", {about['hardware']}" if about.get("hardware") else ""
    lines = [
        f"{outcome.requirement.id}: {outcome.requirement.sentence}",
        f"{run.plan.kind:9} {run.plan.backend} ({about.get('class', 'not opened')}){on}",
        f"case      {case.name}",
        *_call_lines(case.data),
        f"wrong     {failure.get('what', '')}",
        f"expected  {failure.get('expected', '')}",
        f"got       {failure.get('got', '')}",
    ]
    if failure.get("details"):
        lines += ["", failure["details"].rstrip()]
    if outcome.given_up:
        lines += ["", outcome.reason]
    others = [other.name for other in outcome.failed if other is not case]
    if others:
        lines += ["", f"{len(others)} of its {len(outcome.cases)} cases fail too: {', '.join(others)}"]
    return "\n".join(lines) + "\n"


def _call_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a case does: its calls with their arguments, or its data where it has none."""
    if "calls" not in data:
        yield f"data      {_short(json.dumps(data))}"
        return
    for call in data["calls"]:
        yield f"call      {call['op']}"
        for name, spec in call["args"].items():
            yield f"  {name:14} {_argument(spec, data['arenas'])}"


def _argument(spec: Any, arenas: Any) -> str:
    if not isinstance(spec, Mapping):
        return str(spec)
    arena = arenas[spec["arena"]]
    content = (
        f"values {_values(spec['values'])}" if spec.get("values") is not None else f"{arena.get('fill', 'random')}, seed {arena['seed']}"
    )
    offset = arena.get("shift", 0) + spec["offset"]
    return f"{spec['dtype']} {spec['shape']} strides {spec['strides']}, {offset} bytes past a 64-byte boundary, {content}"


def _values(values: Any) -> str:
    """Write what a tensor holds; long lists are cut."""
    if isinstance(values, Mapping) or len(values) <= _MANY:
        return str(values)
    return f"[{', '.join(map(str, values[:_MANY]))}, ... {len(values) - _MANY} more]"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 4] + " ..."


def summary(run: ConformanceRun) -> str:
    """Return one line about a run: how many requirements have each verdict, and whether they were all that the level has."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in run.counts().items())
    left = run.plan.left_out()
    scope = f" of {run.plan.area}" if left else ""
    rest = f"; nothing is certified without the {len(left)} requirements of other areas" if left else ""
    state = {0: "passes" if left else "conforms", 1: "fails" if left else "does not conform", 3: "incomplete: nothing is certified"}
    found = state[attrs.evolve(run, proofs=()).exit_code] + (_GIVEN_UP if run.given_up else "")  # what seeded faults show is about the kit
    verdicts = Counter(proof["verdict"] for proof in run.proofs)
    faults = f"; faults: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}" if verdicts else ""
    return f"{run.plan.backend} at level {run.plan.level.value}{scope}: {found} ({counts}) in {run.seconds:.1f} s{rest}{faults}"
