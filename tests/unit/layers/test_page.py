"""The page of groups says what the code does."""

from __future__ import annotations

from importlib import import_module

import pytest
import transformers

from support_docs import ROOT


def test_the_page_of_layer_groups_is_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = (ROOT / "docs" / "benchmarks" / "layer-groups.md").read_text()
    if f"Transformers {transformers.__version__}," not in written:
        pytest.skip("made with another version of Transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = import_module("layer_groups")
    page, section = written.split("\n## What a sequence holds in Transformers\n")
    assert bench.page() == page, "run: python benchmarks/layer_groups.py --out docs/benchmarks"
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ") and "`DynamicCache`" not in line]
    assert [row[0].strip("| ") for row in rows] == list(bench.HELD)
    for _, theirs, ours, ratio, *_ in rows:
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), abs=0.002)
        assert float(ratio) <= 1.1


def test_a_short_sequence_holds_what_the_page_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = import_module("layer_groups")
    tokens = 2 * bench.CHUNK
    theirs, ours, most, whole = bench.held("gpt-oss, 36 layers", tokens)
    row = 2 * 8 * 4  # a key and a value of eight elements, in float32
    assert theirs == 18 * row * (tokens + 127), "18 layers keep all, and 18 their window"
    assert theirs <= ours <= 1.1 * theirs
    assert whole == 36 * row * tokens
    assert ours < most <= whole
