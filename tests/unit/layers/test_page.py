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
    assert import_module("layer_groups").page() == written, "run: python benchmarks/layer_groups.py --out docs/benchmarks"
