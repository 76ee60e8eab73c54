"""A run as JUnit XML: a test case for each requirement. What is not run is an error, so that no CI takes it for green."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kvdock_conformance.reports.text import bug_report
from kvdock_conformance.run import ConformanceRun
from kvdock_conformance.verdict import Outcome, Verdict

__all__ = ["text"]

_TAGS = {Verdict.FAILED: "failure", Verdict.NOT_RUN: "error", Verdict.UNSUPPORTED: "skipped", Verdict.EXPECTED_FAILURE: "skipped"}
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")  # what XML cannot hold


def text(run: ConformanceRun) -> str:
    """Return a run as JUnit XML."""
    verdicts = [outcome.verdict for outcome in run.outcomes]
    suite = ElementTree.Element(
        "testsuite",
        name=f"kvdock conformance of {run.plan.backend}, {run.plan.level.value}",
        tests=str(len(verdicts)),
        failures=str(verdicts.count(Verdict.FAILED)),
        errors=str(verdicts.count(Verdict.NOT_RUN)),
        skipped=str(verdicts.count(Verdict.UNSUPPORTED) + verdicts.count(Verdict.EXPECTED_FAILURE)),
        time=f"{run.seconds:.3f}",
        timestamp=run.started.isoformat(timespec="seconds"),
    )
    suite.append(_properties(run))
    for outcome in run.outcomes:
        suite.append(_case(run, outcome))
    tree = ElementTree.Element("testsuites")
    tree.append(suite)
    ElementTree.indent(tree)
    return ElementTree.tostring(tree, encoding="unicode", xml_declaration=True) + "\n"


def _properties(run: ConformanceRun) -> ElementTree.Element:
    """Return what the backend says of itself, as far as it is text."""
    properties = ElementTree.Element("properties")
    told = {**run.about, **run.about.get("versions", {})}
    for name, value in told.items():
        if isinstance(value, str):
            ElementTree.SubElement(properties, "property", name=_printable(name), value=_printable(value))
    return properties


def _case(run: ConformanceRun, outcome: Outcome) -> ElementTree.Element:
    requirement = outcome.requirement
    case = ElementTree.Element("testcase", classname=requirement.area, name=requirement.id, time=f"{outcome.seconds:.3f}")
    if outcome.verdict in _TAGS:
        message = outcome.reason or requirement.sentence
        found = ElementTree.SubElement(case, _TAGS[outcome.verdict], message=_printable(f"{outcome.verdict.value}: {message}"))
        found.text = _printable("\n".join(bug_report(run, outcome, failed) for failed in outcome.failed[:1]))
    return case


def _printable(content: str) -> str:
    """Return a text without the characters that XML cannot hold."""
    return _UNPRINTABLE.sub("?", content)
