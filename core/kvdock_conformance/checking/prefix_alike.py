"""Two prefix caches that are fed alike."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_model import SlowPrefixCache
from kvdock_conformance.checking.prefix_play import Player, play
from kvdock_conformance.checking.prefix_target import PrefixTarget

__all__ = ["another_world", "check_alike"]


@contextlib.contextmanager
def another_world(seed: int, step: int) -> Iterator[None]:
    """Let chance, and clocks that go on by ``step`` at each look, be others for a block."""
    state, ticks = random.getstate(), itertools.count(1 << 30, step)
    with contextlib.ExitStack() as stack:
        for clock in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"):
            stack.enter_context(mock.patch(f"time.{clock}", ticks.__next__))
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def check_alike(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Feed two caches alike, while the time runs backwards and chance is another for the second.

    Raises:
        NonconformanceError: an answer differs.
    """
    answers, kept = [], []
    for seed, step in ((1, 1), (2, -1)):
        with another_world(seed, step):
            cache = target.make(data["block_size"])
            kept.append((cache, [object() for _ in range(1000)]))  # the second cache's memory lies elsewhere
            answers.append(play(Player(cache, SlowPrefixCache(data["block_size"], "lru"), data, target.make, ()), data["steps"]))
    for (what, first), (_, second) in zip(*answers, strict=True):
        if first != second:
            raise NonconformanceError(f"{what}, of two caches that are fed alike", expected=first, got=second)
