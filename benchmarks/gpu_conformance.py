"""The conformance kit on a GPU, area by area in processes side by side, told as one run: a digest to commit.

    python benchmarks/gpu_conformance.py --backend cuda --level extended --prove --out docs/benchmarks/conformance

Most of a run's time is the host's: compiling kernels, and starting interpreters. An area that does not end within ``--limit``
seconds is told as missing, and nothing is written for the whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvdock_conformance.reports import digest
from kvdock_conformance.requirements import load


def started(area: str, given: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    """Start the kit for one area."""
    words = ["--backend", given.backend, "--level", given.level, "--op", area, *(["--prove"] if given.prove else [])]
    command = [sys.executable, "-m", "kvdock", "conformance", *words, "--report", str(folder / area)]
    with (folder / f"{area}.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)


def merged(reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Put reports of one area each together, as if one process had asked all."""
    whole = {**reports[0], "op": None, "left_out": [], "seconds": seconds, "started": min(report["started"] for report in reports)}
    whole["requirements"] = [item for report in reports for item in report["requirements"]]
    proofs = [proof for report in reports for proof in report.get("proofs", ())]
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
    told = [*report["requirements"], *report.get("proofs", ())]
    print(area, dict(Counter(item["verdict"] for item in told)))
    for item in told:
        if item["verdict"] not in ("passed", "unsupported", "killed"):
            print(f"  {item.get('id') or item['fault']}: {item['verdict']}: {(item['reason'] or item['sentence'])[:400]}")
        for case in item.get("cases", ()):
            if case["verdict"] == "failed":
                print(f"    {case['name']}: {case.get('failure', case.get('reason'))}"[:600])
    return {item["verdict"] for item in told} <= {"passed", "unsupported", "killed", "not seeded"}


def main() -> int:
    """Run the areas, print what each found, and write the digest of all. Return 1 if something failed, 3 if not all was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--level", choices=["core", "extended"], default="extended")
    parser.add_argument("--prove", action="store_true", help="also seed the kit's faults")
    parser.add_argument("--areas", nargs="*", help="only these")
    parser.add_argument("--limit", type=float, default=560)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder, begun = Path(tempfile.mkdtemp()), time.monotonic()
    areas = given.areas or list(dict.fromkeys(item.area for item in load() if item.area != "prefix"))
    wait({area: started(area, given, folder) for area in areas}, given.limit)
    files = {area: folder / area / "report.json" for area in areas}
    reports = {area: json.loads(file.read_text()) for area, file in files.items() if file.exists()}
    for area in areas:
        if area not in reports:
            print(f"{area}: no report\n{(folder / f'{area}.txt').read_text()[-1500:]}")
    good = [tell(area, report) for area, report in reports.items()]  # each is told, whatever the first is
    is_good = all(good)
    if given.areas or len(reports) < len(areas):
        return 3 if is_good else 1
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"{given.backend}-{given.level}{'-proved' if given.prove else ''}.md"
    (given.out / name).write_text(digest.page(merged(list(reports.values()), time.monotonic() - begun)))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
