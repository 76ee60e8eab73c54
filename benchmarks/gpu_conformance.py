"""The conformance kit on a GPU, in many processes side by side, told as one run: a digest to commit.

    python benchmarks/gpu_conformance.py --backend cuda --level extended --out docs/benchmarks/conformance
    python benchmarks/gpu_conformance.py --backend cuda --prove --out docs/benchmarks/conformance

Most of a run's time is the host's: compiling kernels, and starting interpreters. Requirements that were not asked within ``--limit``
seconds are told as not run, faults that were not seeded by then as unclear, and nothing is written for the whole.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvdock_conformance import faults
from kvdock_conformance.prove import Proof, faults_of, prove
from kvdock_conformance.reports import digest
from kvdock_conformance.reports.json_report import as_dict
from kvdock_conformance.requirement import Level, Requirement, Requirements
from kvdock_conformance.requirements import load
from kvdock_conformance.run import run
from kvdock_conformance.session import ConformancePlan
from kvdock_conformance.verdict import Outcome

_MANY, _SHARE = 60, 6
"""A requirement of so many cases has a process of its own; of others, so many have one together."""

_CHUNK = 4
"""So many faults are seeded into one process in turn: enough to be worth its start, and few enough to share the rest out evenly."""


def proved(given: argparse.Namespace, areas: list[str]) -> list[dict[str, Any]]:
    """Seed the faults of areas, in processes side by side, each of which takes the next few until the limit."""
    plan, begun = ConformancePlan(given.backend, load()), time.monotonic()
    every = sorted((fault for fault in faults_of(plan, faults.load()) if fault.area in areas), key=lambda fault: areas.index(fault.area))
    chunks = [every[begin : begin + _CHUNK] for begin in range(0, len(every), _CHUNK)]

    def in_time(proof: Proof) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {proof.fault.name}: {proof.verdict}", flush=True)
        if time.monotonic() - begun > given.limit:
            raise KeyboardInterrupt  # as Ctrl-C: what was not seeded is unclear

    def seeded(chunk: list[faults.Fault]) -> list[Proof]:
        return prove(plan, {fault.name: fault for fault in chunk}, in_time)

    with ThreadPoolExecutor(given.workers) as pool:
        return [proof.as_dict() for some in pool.map(seeded, chunks) for proof in some]


def merged(reports: list[dict[str, Any]], proofs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Put reports of some requirements each together, as if one process had asked all."""
    whole = {**reports[0], "op": None, "left_out": [], "seconds": seconds, "started": min(report["started"] for report in reports)}
    found = {item["id"]: item for report in reports for item in report["requirements"]}
    whole["requirements"] = [found[item.id] for item in load() if item.id in found]
    return {**whole, **({"proofs": proofs} if proofs else {})}


def tell(area: str, report: dict[str, Any]) -> bool:
    """Print an area's counts, and what is not as it should be. Return whether all is."""
    told = [*report.get("requirements", ()), *report.get("proofs", ())]
    print(area, dict(Counter(item["verdict"] for item in told)))
    for item in told:
        if item["verdict"] not in ("passed", "unsupported", "killed"):
            print(f"  {item.get('id') or item['fault']}: {item['verdict']}: {(item['reason'] or item['sentence'])[:400]}")
        for case in item.get("cases", ()):
            if case["verdict"] == "failed":
                print(f"    {case['name']}: {case.get('failure', case.get('reason'))}"[:600])
    return {item["verdict"] for item in told} <= {"passed", "unsupported", "killed", "not seeded"}


def shared_out(every: Sequence[Requirement], level: Level) -> list[Requirements]:
    """Return requirements in shares, the longest first: those of many cases alone, since each compiles kernels of its own."""
    wanted = [(len(item.selected(level)), item) for item in every]
    alone = sorted((each for each in wanted if each[0] >= _MANY), key=lambda each: -each[0])
    areas = dict.fromkeys(item.area for _, item in wanted)
    few = [[item for count, item in wanted if item.area == area and count < _MANY] for area in areas]
    parts = [part[begin : begin + _SHARE] for part in few for begin in range(0, len(part), _SHARE)]
    return [*(Requirements([item]) for _, item in alone), *map(Requirements, parts)]


def asked(given: argparse.Namespace, areas: list[str]) -> list[dict[str, Any]]:
    """Run the kit in shares side by side, and return the reports. Of what has not ended within the limit the rest is not run."""
    level, begun = Level(given.level), time.monotonic()
    every = [item for item in load().of_kind("backend").select(level) if item.area in areas]

    def in_time(outcome: Outcome) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {outcome.requirement.id}: {outcome.verdict.value}, {outcome.seconds:.0f} s", flush=True)
        if time.monotonic() - begun > given.limit:
            raise KeyboardInterrupt  # as Ctrl-C

    def report(share: Requirements) -> dict[str, Any]:
        return as_dict(run(ConformancePlan(given.backend, share, level), in_time))

    with ThreadPoolExecutor(given.workers) as pool:
        return list(pool.map(report, shared_out(every, level)))


def main() -> int:
    """Run the areas, print what each found, and write the digest of all. Return 1 if something failed, 3 if not all was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--level", choices=["core", "extended"], default="extended")
    parser.add_argument("--prove", action="store_true", help="also seed the kit's faults, after the requirements of core level")
    parser.add_argument("--only-faults", action="store_true", help="with --prove: the requirements passed in a run before")
    parser.add_argument("--areas", nargs="*", help="only these, in this order")
    parser.add_argument("--limit", type=float, default=560, help="seconds for the requirements, and as many for the faults")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that seed faults")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.level = "core" if given.prove else given.level
    begun = time.monotonic()
    areas = given.areas or list(dict.fromkeys(item.area for item in load() if item.area != "prefix"))
    reports = [] if given.only_faults else asked(given, areas)
    proofs = proved(given, areas) if given.prove else []
    told = [item for report in reports for item in report["requirements"]]
    good = [tell(area, {"requirements": [item for item in told if item["area"] == area]}) for area in areas]
    good += [tell("faults", {"proofs": proofs})]  # each is told
    if given.areas or given.only_faults or any(item["verdict"] == "not run" for item in told):
        return 3 if all(good) else 1
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"{given.backend}-{given.level}{'-proved' if given.prove else ''}.md"
    (given.out / name).write_text(digest.page(merged(reports, proofs, time.monotonic() - begun)))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
