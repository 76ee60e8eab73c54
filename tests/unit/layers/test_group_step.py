"""The benchmark of a step with two layer groups decodes with both, and its page says what was measured."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvdock.layers import KeepAll, KeepWindow
from support_docs import ROOT


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("group_step")
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.modules.pop("group_step", None)


def test_both_decode_alike(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SEQUENCES", 5)
    one, two = bench.measure(2)
    assert len(one) == len(two) == 2
    assert min(*one, *two) > 0
    assert [group.retention for group in bench.groups_of((None, 128))] == [KeepAll(), KeepWindow(128)]
    assert [len(group.members) for group in bench.groups_of((None, None))] == [2]


def test_the_page_says_what_was_measured(bench: ModuleType) -> None:
    text = bench.page([100e-6, 110e-6, 120e-6], [150e-6, 154e-6, 240e-6])
    assert "| one group, us | 110 | 100 to 120 |" in text
    assert "| two groups, us | 154 | 150 to 240 |" in text
    assert "| ratio | 1.50 | 1.40 to 2.00 |" in text
