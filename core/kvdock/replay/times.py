"""How long operations take, each call of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from time import perf_counter_ns
from typing import ParamSpec, TypeVar

import attrs
import numpy as np

__all__ = ["OperationTimes", "Times"]

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen
class Times:
    """What the calls of one operation took, in seconds.

    Args:
        calls: how many.
        total_s: all of them together.
        mean_s: their mean; 0 without any, as all that follow.
        p50_s: half of them took no longer.
        p99_s: 99 of 100 took no longer.
        max_s: none took longer.
    """

    calls: int
    total_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class OperationTimes:
    """Calls operations, and keeps what each call took: 8 bytes per call.

    Args:
        names: the operations, in the order of the report.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._taken = {name: array("q") for name in names}

    def call(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function as one call of the operation ``name``. A call that raises does not count."""
        start = perf_counter_ns()
        result = function(*args, **kwargs)
        self._taken[name].append(perf_counter_ns() - start)
        return result

    def total_s(self) -> float:
        """Return the seconds that all calls of all operations took."""
        return sum(sum(taken) for taken in self._taken.values()) / 1e9

    def summary(self) -> dict[str, Times]:
        """Return what each operation's calls took, by its name."""
        return {name: _times(taken) for name, taken in self._taken.items()}


def _times(taken: array[int]) -> Times:
    """Summarise nanoseconds."""
    if not taken:
        return Times(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    seconds = np.frombuffer(taken, dtype=np.int64) / 1e9
    p50, p99 = np.quantile(seconds, [0.5, 0.99], method="inverted_cdf")
    return Times(len(taken), float(seconds.sum()), float(seconds.mean()), float(p50), float(p99), float(seconds.max()))
