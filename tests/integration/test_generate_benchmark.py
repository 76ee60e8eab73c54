"""The benchmark of whole `generate()` calls: that its ways give the same tokens, and what it writes."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from support_docs import ROOT

SMALL = "--device cpu --layers 2 --batches 1 2 --prompts 40 --new-tokens 5 --rounds 3"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_the_ways_agree_and_the_record_says_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = import_module("generate")
    try:
        monkeypatch.setattr(bench, "SHAPE", SHAPE)
        bench.main([*SMALL.split(), "--out", str(tmp_path)])
        (record,) = tmp_path.glob("*-generate.json")
        cells = json.loads(record.read_text())["cells"]
        assert [(one["batch"], one["prompt"]) for one in cells] == [(1, 40), (2, 40)]
        for one in cells:
            assert [*one["ways"]] == list(bench.WAYS)
            assert {*one["same"].values()} == {1.0}
            assert all(0 < found["step_ms"][0] <= found["step_ms"][2] for found in one["ways"].values())
        (page,) = tmp_path.glob("*-generate.md")
        assert page.read_text().replace(f"![decode steps]({record.stem}.svg)\n\n", "") in capsys.readouterr().out
        written = page.read_bytes(), record.with_suffix(".svg").stat().st_size
        assert b"<svg" in record.with_suffix(".svg").read_bytes()
        page.unlink()
        bench.main(["--draw", str(record)])
        assert (page.read_bytes(), record.with_suffix(".svg").stat().st_size) == written
    finally:
        sys.modules.pop("generate", None)


@pytest.mark.slow
def test_latents_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = import_module("generate")
    try:
        monkeypatch.setattr(bench, "LATENTS", {**bench.LATENTS, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2})
        bench.main([*SMALL.split(), "--model", "latents", "--ways", "DynamicCache", "kvdock", "--out", str(tmp_path)])
        (record,) = tmp_path.glob("*-latents.json")
        assert {share for one in json.loads(record.read_text())["cells"] for share in one["same"].values()} == {1.0}
    finally:
        sys.modules.pop("generate", None)
