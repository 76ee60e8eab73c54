"""The records of the first token, computed and from wherever its blocks are, and the pages that are written from them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "benchmarks"
RECORDS = sorted(FOLDER.glob("*first-token.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_the_page_is_as_written(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "benchmarks"))
    bench, found = import_module("first_token"), json.loads(record.read_text())
    assert bench.page(found) == record.with_suffix(".md").read_text(), "run: python benchmarks/first_token.py --out docs/benchmarks"


def test_there_is_one_of_a_cpu_and_one_of_a_gpu() -> None:
    """On the CPU, where computing takes longest, all else is quicker; on an H200 a file is not."""
    seconds = {}
    for record in RECORDS:
        found = json.loads(record.read_text())
        assert {each["computed"]["computed"] for each in found["rounds"]} == {found["tokens"]} == {4096}
        assert {each[way]["computed"] for each in found["rounds"] for way in ("pool", "host", "file")} == {found["block_size"]}
        assert len({way["token"] for each in found["rounds"] for way in each.values()}) == 1
        seconds[record.stem] = {way: min(each[way]["seconds"] for each in found["rounds"]) for way in found["rounds"][0]}
    on_cpu, on_gpu = seconds["first-token"], seconds["h200-first-token"]
    assert max(on_cpu["pool"], on_cpu["host"], on_cpu["file"]) < on_cpu["computed"]
    assert max(on_gpu["pool"], on_gpu["host"]) < on_gpu["computed"] < on_gpu["file"]
