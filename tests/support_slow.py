"""What `make test` does less of: variants of one kind whose tests start processes, and examples that are drawn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["QUICK", "examples", "first_of"]

QUICK = os.environ.get("KVDOCK_TESTS") == "quick"
"""Whether this is `make test`."""


def first_of(values: Iterable[Any]) -> list[Any]:
    """Return parameters for a test: `make test` runs the first, and `make test-all` each of them."""
    first, *others = values
    return [first, *(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in others)]


def examples(count: int) -> int:
    """Return how many examples of a property to draw: `make test` draws two fifths."""
    return 2 * count // 5 if QUICK else count
