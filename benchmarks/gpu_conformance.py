"""The conformance kit on a GPU, in many processes side by side, told as one run: a digest to commit.

    python benchmarks/gpu_conformance.py --backend cuda --level extended --out docs/benchmarks/conformance
    python benchmarks/gpu_conformance.py --backend cuda --prove --out docs/benchmarks/conformance

Most of a run's time is the host's: compiling kernels, and starting interpreters. An area that does not end within ``--limit``
seconds is told as missing, faults that were not seeded by then as unclear, and nothing is written for the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvdock_conformance import faults
from kvdock_conformance.prove import Proof, faults_of, prove
from kvdock_conformance.reports import digest
from kvdock_conformance.requirements import load
from kvdock_conformance.session import ConformancePlan

_CHUNK = 4
"""So many faults are seeded into one process in turn: enough to be worth its start, and few enough to share the rest out evenly."""


def started(area: str, given: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    """Start the kit for one area."""
    words = ["--backend", given.backend, "--level", given.level, "--op", area]
    command = [sys.executable, "-m", "kvdock", "conformance", *words, "--report", str(folder / area)]
    with (folder / f"{area}.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)


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
    """Put reports of one area each together, as if one process had asked all."""
    whole = {**reports[0], "op": None, "left_out": [], "seconds": seconds, "started": min(report["started"] for report in reports)}
    whole["requirements"] = [item for report in reports for item in report["requirements"]]
    return {**whole, **({"proofs": proofs} if proofs else {})}


def wait(running: dict[str, subprocess.Popen[str]], limit: float) -> None:
    """Wait until all have ended, and end the others at the limit."""
    begun = time.monotonic()
    while running and time.monotonic() - begun < limit:
        time.sleep(0.5)
        for area in [area for area, process in running.items() if process.poll() is not None]:
            print(f"{time.monotonic() - begun:5.0f} s  {area}: exit {running.pop(area).returncode}", flush=True)
    for process in running.values():
        process.kill()


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


def asked(given: argparse.Namespace, areas: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run the kit for each area, and return the reports of those that ended in time."""
    wait({area: started(area, given, folder) for area in areas}, given.limit)
    files = {area: folder / area / "report.json" for area in areas}
    for area, file in files.items():
        if not file.exists():
            print(f"{area}: no report\n{(folder / f'{area}.txt').read_text()[-1500:]}")
    return [json.loads(file.read_text()) for file in files.values() if file.exists()]


def main() -> int:
    """Run the areas, print what each found, and write the digest of all. Return 1 if something failed, 3 if not all was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--level", choices=["core", "extended"], default="extended")
    parser.add_argument("--prove", action="store_true", help="also seed the kit's faults, after the requirements of core level")
    parser.add_argument("--areas", nargs="*", help="only these, in this order")
    parser.add_argument("--limit", type=float, default=560, help="seconds for the requirements, and as many for the faults")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that seed faults")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.level = "core" if given.prove else given.level
    begun = time.monotonic()
    areas = given.areas or list(dict.fromkeys(item.area for item in load() if item.area != "prefix"))
    reports = asked(given, areas, Path(tempfile.mkdtemp()))
    proofs = proved(given, areas) if given.prove else []
    good = [tell(report["op"], report) for report in reports] + [tell("faults", {"proofs": proofs})]  # each is told
    if given.areas or len(reports) < len(areas):
        return 3 if all(good) else 1
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"{given.backend}-{given.level}{'-proved' if given.prove else ''}.md"
    (given.out / name).write_text(digest.page(merged(reports, proofs, time.monotonic() - begun)))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
