"""``kvdock conformance --backend NAME``, or ``--prefix NAME``: checks it against every requirement, and says what came of each.

Exits with 0 when the backend conforms, 1 when something failed, 3 when something was not run, 2 for a wrong option, such as a
folder for reports that cannot be written to. Ctrl-C ends a run early: what came of it until then is told.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines, show_table
from kvdock.cli.progress import progress
from kvdock.errors import ArgumentValueError
from kvdock_conformance import expected, reports, requirements
from kvdock_conformance.child import Child
from kvdock_conformance.reports.json_report import as_dict
from kvdock_conformance.reports.text import bug_report, summary
from kvdock_conformance.requirement import Level
from kvdock_conformance.run import ConformanceRun, not_begun, run
from kvdock_conformance.session import ConformancePlan
from kvdock_conformance.verdict import Outcome

__all__ = ["LevelName", "certify", "command"]

_SHOWN = 10  # ids of what was left out; the JSON report has them all


class LevelName(enum.StrEnum):
    """What ``--level`` takes."""

    CORE = "core"
    EXTENDED = "extended"


_WORKERS = {("backend", LevelName.CORE): min(2, os.cpu_count() or 1)}
"""Areas at once where nobody says how many. The extended level has cases of many GiB, and what is asked of a prefix cache is quick."""


def certify(plan: ConformancePlan, *, with_faults: bool, children: Sequence[Child] = ()) -> ConformanceRun:
    """Run a plan, and after it the seeded faults if they are asked for and the backend could be opened.

    Raises:
        ArgumentValueError: no plugin has the backend, it has no such device, or there is no such area.
    """
    with progress("requirements", len(plan.known())) as show:
        found = run(plan, lambda outcome: show(f"{outcome.requirement.id} {outcome.verdict.value}"), children)
    if not with_faults or not found.about:
        return found
    from kvdock_conformance import faults
    from kvdock_conformance.prove import faults_of, prove

    every = {**faults.load(), **faults.of_ops(found.plan.requirements)}
    with progress("faults", len(faults_of(plan, every))) as show:
        proofs = prove(found.plan, every, lambda proof: show(f"{proof.fault.name} {proof.verdict}"))
    return attrs.evolve(found, proofs=[proof.as_dict() for proof in proofs])


def command(
    backend: Annotated[str | None, typer.Option(help="Name of the backend, as `kvdock backends` lists it.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Name of a prefix cache, in place of a backend.")] = None,
    level: Annotated[LevelName, typer.Option(help="How much to check.")] = LevelName.CORE,
    op: Annotated[str | None, typer.Option(help="Check only this op, a plugin's too, or area. The report lists what was left out.")] = None,
    device: Annotated[str | None, typer.Option(help="One of the backend's devices, such as acme:1. Default: the first.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for report.json, junit.xml, digest.md (one page), and a repro.py for each failure.")
    ] = None,
    expected_file: Annotated[Path | None, typer.Option("--expected", help="TOML file of expected failures.")] = None,
    prove_it: Annotated[bool, typer.Option("--prove", help="Also seed faults into the backend. The kit must notice each.")] = False,
    fuzz_minutes: Annotated[
        float | None,
        typer.Option("--fuzz", metavar="MINUTES", help="After the extended level, draw random calls for so long. Needs Hypothesis."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random calls of --fuzz.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="So many areas at once, on host memory; the report is the same. Default: 2 where there are processors."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Check a backend or a prefix cache. Exits with 0 if it conforms, 1 if something failed, 3 if something was not run."""
    with errors_shown("conformance", json_output), ExitStack() as stack:
        kind, name = _wanted(backend=backend, prefix=prefix)
        at_once = _WORKERS.get((kind, level), 1) if workers is None else workers
        children = [stack.enter_context(Child()) for _ in range(at_once)]  # they load torch while this process does
        every = requirements.load_alone()
        known = expected.read(expected_file, every) if expected_file is not None else {}
        plan = ConformancePlan(name, every, Level(level.value), op, known, kind=kind, device=device, workers=at_once)
        plan.known()  # raises where there is no such area
        if fuzz_minutes is not None:
            from kvdock_conformance.fuzz import check_fuzz

            plan = attrs.evolve(plan, level=Level.EXTENDED)
            check_fuzz(plan, fuzz_minutes)
        with _terminated_as_interrupted():
            try:
                if report is not None:
                    reports.prepare(report)  # before the run: it may be long
                found = certify(plan, with_faults=prove_it, children=children)
            except KeyboardInterrupt:  # in the moment before the run, which takes those that come in it
                found = not_begun(plan)
            if fuzz_minutes is not None and found.about:
                found = _fuzzed(found, fuzz_minutes, seed)
    if not json_output:
        _show(found)
    if report is not None:
        with errors_shown("conformance", json_output):
            reports.write(found, report)
    if json_output:
        show_json("conformance", as_dict(found))
    else:
        _show_end(found, report)
    raise typer.Exit(found.exit_code)


def _fuzzed(found: ConformanceRun, minutes: float, seed: int) -> ConformanceRun:
    """Draw on behind a run."""
    from kvdock_conformance.fuzz import fuzz, with_fuzz

    return attrs.evolve(found, outcomes=with_fuzz(found.outcomes, fuzz(found.plan, minutes, seed)))


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Take SIGTERM in a block for Ctrl-C: a run that a CI system ends is told too, and leaves no process behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wanted(**names: str | None) -> tuple[str, str]:
    """Return the kind and the name of what is to be checked.

    Raises:
        ArgumentValueError: none is named, or several are.
    """
    given = [(kind, name) for kind, name in names.items() if name is not None]
    if len(given) != 1:
        got = " and ".join(f"--{kind} {name}" for kind, name in given) or "none"
        raise ArgumentValueError("conformance", expected=f"one of {', '.join(f'--{kind} NAME' for kind in names)}", got=got)
    return given[0]


def _show(found: ConformanceRun) -> None:
    show_table(("requirement", "verdict", "cases", "seconds", "sentence"), [_row(outcome) for outcome in found.outcomes])
    if found.proofs:
        show_table(("fault", "verdict", "noticed by", "sentence"), [_proof_row(proof) for proof in found.proofs])
    reasons = dict.fromkeys(outcome.reason for outcome in found.missing if "\n" in outcome.reason)
    show_lines(*(f"\nnot run: {reason}\n" for reason in reasons))
    for outcome in found.failed:
        show_lines("", *(bug_report(found, outcome, case) for case in outcome.failed[:1]))


def _show_end(found: ConformanceRun, report: Path | None) -> None:
    if report is not None:
        any_failed = any(outcome.failed for outcome in found.outcomes)
        show_lines(f"reports are in {report}" + ("; failures/ has a repro.py for each failure" if any_failed else ""))
    left = found.plan.left_out()
    if left:
        show_lines(f"left out: {', '.join(left[:_SHOWN])}" + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""))
    if found.about.get("by_name"):
        show_lines(found.about["by_name"])
    show_lines(summary(found))


def _row(outcome: Outcome) -> tuple[object, ...]:
    """Return the row of one requirement; of a long reason, its first line."""
    first, *more = outcome.reason.splitlines() or [""]
    sentence = outcome.requirement.sentence + (f"\n({first}{' ...' if more else ''})" if first else "")
    return outcome.requirement.id, outcome.verdict.value, len(outcome.cases), f"{outcome.seconds:.2f}", sentence


def _proof_row(proof: Any) -> tuple[object, ...]:
    noticed = ", ".join(proof["killed_by"]) or proof["reason"] or "nothing"
    missed = f"; not by {', '.join(proof['missed'])}" if proof["missed"] else ""
    always = f"; these fail without the fault too: {', '.join(proof['always'])}" if proof["always"] else ""
    refused = "; the backend refuses some of their cases" if proof["verdict"] == "out of reach" else ""
    return proof["fault"], proof["verdict"], noticed + missed + refused + always, proof["sentence"]
