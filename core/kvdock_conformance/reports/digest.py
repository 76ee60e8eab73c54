"""A run on one page, in Markdown, to commit or to publish: versions, device, counts, and whatever did not pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvdock_conformance.reports.json_report import as_dict
from kvdock_conformance.run import ConformanceRun

__all__ = ["page", "text"]

_LONG = 120


def text(run: ConformanceRun) -> str:
    """Return the digest of a run."""
    return page(as_dict(run))


def page(report: Mapping[str, Any]) -> str:
    """Return the digest of a JSON report: one that was kept can be shortened later.

    Args:
        report: what ``report.json`` holds.
    """
    requirements, proofs = report["requirements"], report.get("proofs", ())
    areas = dict.fromkeys(item["area"] for item in requirements)
    lines = [f"# Conformance of {report['backend']}, level {report['level']}", "", *_table(("what", "this run"), _facts(report))]
    lines += ["", *_table(("area", "requirements", "cases"), [_area(area, requirements) for area in areas])]
    for column, rows in (("not passed", _grouped(requirements, "id", "passed")), ("fault not killed", _grouped(proofs, "fault", "killed"))):
        if rows:
            lines += ["", *_table((column, "verdict", "why"), rows)]
    return "\n".join(lines) + "\n"


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    about = report["about"]
    yield "result", _result(report)
    yield "requirements", _counts(item["verdict"] for item in report["requirements"])
    if "proofs" in report:
        yield "faults", _counts(proof["verdict"] for proof in report["proofs"])
    yield "hardware", about.get("hardware") or "not named"
    yield report["kind"], " on ".join(about[name] for name in ("class", "device") if about.get(name)) or "could not be opened"
    yield "versions", ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    yield "platform", about.get("platform", "")
    yield "started", f"{report['started']}, took {report['seconds']:.0f} s"


def _result(report: Mapping[str, Any]) -> str:
    """Say what the requirements show; faults that were seeded are about the kit, and do not count here."""
    verdicts, part = {item["verdict"] for item in report["requirements"]}, report["left_out"]
    if any(item["verdict"] == "failed" and any(case["verdict"] == "not run" for case in item["cases"]) for item in report["requirements"]):
        return "incomplete: the backend crashes or hangs, and cases were not run"
    if "failed" in verdicts:
        return "does not conform"
    if "not run" in verdicts or not verdicts:
        return "incomplete: nothing is certified"
    return f"passes what {report['op']} asks; the other areas were left out" if part else "conforms"


def _area(area: str, requirements: Iterable[Mapping[str, Any]]) -> tuple[str, str, str]:
    own = [item for item in requirements if item["area"] == area]
    return area, _counts(item["verdict"] for item in own), _counts(case["verdict"] for item in own for case in item["cases"])


def _counts(verdicts: Iterable[str]) -> str:
    return ", ".join(f"{count:,} {verdict}" for verdict, count in Counter(verdicts).most_common()) or "none"


def _grouped(items: Iterable[Mapping[str, Any]], name: str, good: str) -> list[tuple[str, str, str]]:
    """Return a row for each verdict and reason: a backend that could not be opened has one row, not hundreds."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        if item["verdict"] != good:
            groups.setdefault((item["verdict"], item["reason"] or item["sentence"]), []).append(item[name])
    return [(", ".join(names), verdict, _short(why)) for (verdict, why), names in groups.items()]


def _short(why: str) -> str:
    """Cut a reason to its first line, and that to a readable length: all of it is in the JSON report."""
    first = why.partition("\n")[0]
    return first if len(first) <= _LONG else f"{first[: _LONG - 4]} ..."


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
