"""The record of the first token from a file, and the page that is written from it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "docs" / "benchmarks" / "files.json"


def test_the_page_is_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench, found = import_module("files"), json.loads(RECORD.read_text())
    assert bench.page(found) == RECORD.with_suffix(".md").read_text(), "run: python benchmarks/files.py --out docs/benchmarks"


def test_only_the_last_block_was_computed_and_the_token_is_the_same() -> None:
    found = json.loads(RECORD.read_text())
    assert found["computed"]["computed"] == found["tokens"] == 4096
    assert found["file"]["computed"] == found["block_size"]
    assert found["computed"]["token"] == found["file"]["token"]
    assert found["file"]["first_token_s"] < found["computed"]["first_token_s"]
