"""The benchmark of compiled steps: that its ways agree, and what it writes."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from support_docs import ROOT

SMALL = "--device cpu --dtype float32 --layers 2 --batch 3 --context 16 --heads 4 --kv-heads 2 --dim 8 --runs 4"


@pytest.mark.slow  # a C++ compiler runs
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler: g++")
def test_the_ways_agree_and_the_record_says_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = import_module("compiled")
    try:
        bench.main([*SMALL.split(), "--out", str(tmp_path)])
        (record,) = tmp_path.glob("*-compiled.json")
        found = json.loads(record.read_text())
        assert [*found["us"]] == ["by hand", "compiled"]
        assert (found["sizes"]["layers"], found["runs"], found["us"]["compiled"]["device"]) == ("2", 4, None)
        assert found["us"]["compiled"]["host"]["median"] > 0
        (page,) = tmp_path.glob("*-compiled.md")
        assert page.read_text() in capsys.readouterr().out
        cache = bench.Sizes(1, 2, 16, 2, 2, 8, torch.float32, torch.device("cpu")).cache()
        with pytest.raises(AssertionError, match="not close"):
            bench.check({"one": lambda: torch.zeros(2), "other": lambda: torch.ones(2)}, cache)
    finally:
        sys.modules.pop("compiled", None)
