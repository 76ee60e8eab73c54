"""Variants of one kind whose tests start processes, each of which imports torch for a second and more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["first_of"]


def first_of(values: Iterable[Any]) -> list[Any]:
    """Return parameters for a test: `make test` runs the first, and `make test-all` each of them."""
    first, *others = values
    return [first, *(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in others)]
