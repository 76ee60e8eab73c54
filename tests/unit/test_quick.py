"""Which combinations of parameters `make test` runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from support_slow import FEW, combination_of, covering
from support_sources import ROOT


@pytest.mark.parametrize("sizes", [(), (1,), (7,), (1, 5), (3, 5), (4, 4), (2, 3, 5), (2, 2, 2, 6)], ids=str)
def test_each_value_occurs_and_no_more_are_run_than_the_longest_list_has(sizes: tuple[int, ...]) -> None:
    combinations = [[*enumerate(values)] for values in itertools.product(*map(range, sizes))]
    found = [combinations[place] for place in covering(combinations)]
    assert {value for each in found for value in each} == {(axis, value) for axis, size in enumerate(sizes) for value in range(size)}
    assert len(found) == max(sizes, default=0)


def test_what_only_one_combination_has_is_run() -> None:
    assert covering(["ax", "by", "bx", "ay", "cz", "dx"]) == {0, 1, 4, 5}


@pytest.mark.parametrize(("one", "two"), [("a", 1), ("a", 2)])
@pytest.mark.parametrize("other", [None])
def test_what_one_decorator_lists_stays_together(request: pytest.FixtureRequest, one: str, two: int, other: None) -> None:
    assert set(combination_of(request.node)) == {(("one", "two"), id(one), id(two)), (("other",), id(other))}


class Item(SimpleNamespace):
    """As much of a test as is looked at."""

    def __init__(self, name: str, values: dict[str, Any], *, slow: bool = False) -> None:
        super().__init__(parent=None, name=f"{name}[{values}]", callspec=SimpleNamespace(params=values), slow=slow)

    def iter_markers(self, name: str) -> list[Any]:
        return []

    def get_closest_marker(self, name: str) -> object:
        return self.slow or None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "slow"
        self.slow = True


@pytest.mark.parametrize("quick", [True, False])
def test_make_test_leaves_the_rest_to_make_test_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert conftest is not None
    monkeypatch.setattr(conftest, "QUICK", quick)
    many = [Item("many", {"a": a, "b": b}) for a in range(5) for b in range(3)]
    few = [Item("few", {"a": a, "b": 0}) for a in range(FEW)]
    slow = [Item("half", {"a": a, "b": b}, slow=b > 0) for a in range(5) for b in range(3)]
    conftest.pytest_collection_modifyitems([*many, *few, *slow])
    assert sum(not item.slow for item in many) == (5 if quick else 15)
    assert not any(item.slow for item in few)
    assert [item.callspec.params["b"] for item in slow if not item.slow] == [0] * 5, "what is left of them has each value of its own"
