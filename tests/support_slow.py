"""What `make test` does less of: variants of one kind, combinations of parameters, and examples that are drawn."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["FEW", "QUICK", "combination_of", "covering", "every", "examples", "first_of"]

QUICK = os.environ.get("KVDOCK_TESTS") == "quick"
"""Whether this is `make test`."""

FEW = 4
"""Up to so many combinations of a test's parameters are all run in `make test`, too."""


def first_of(values: Iterable[Any]) -> list[Any]:
    """Return parameters for a test: `make test` runs the first, and `make test-all` each of them."""
    first, *others = values
    return [first, *(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in others)]


def every(nth: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters for a test: `make test` runs the first of each so many, and `make test-all` each of them."""
    return [pytest.param(value, marks=pytest.mark.slow) if at % nth else value for at, value in enumerate(values)]


def examples(count: int) -> int:
    """Return how many examples of a property to draw: `make test` draws a quarter."""
    return max(count // 4, 1) if QUICK else count


def combination_of(item: pytest.Item) -> tuple[Hashable, ...]:
    """Return the values of a test's parameters: one for each decorator and each fixture, whose combinations pytest makes.

    What one decorator lists, of several parameters too, was chosen by hand.
    """
    spec = getattr(item, "callspec", None)
    if spec is None:
        return ()
    listed: dict[str, Any] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        listed |= dict.fromkeys(names, tuple(names))
    together: dict[Any, list[int]] = {}
    for name, value in sorted(spec.params.items()):
        together.setdefault(listed.get(name, name), []).append(id(value))  # few of them can be hashed
    return tuple((name, *values) for name, values in together.items())


def covering(combinations: Sequence[Sequence[Hashable]]) -> set[int]:
    """Return the places of a few combinations in which each value occurs that does in any."""
    left, found = {value for each in combinations for value in each}, set()
    for least in range(max(map(len, combinations), default=0), 0, -1):  # first those that have most to add
        for place, each in enumerate(combinations):
            if len(left.intersection(each)) >= least:
                found.add(place)
                left.difference_update(each)
    return found
