"""Managers with tiers: random calls, with memories that are really written, tiers that are full and tiers that fail.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/scheduler/test_tiers_model.py`` runs it for an hour.
"""

from __future__ import annotations

import os
import random
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import KVDockWarning
from kvdock_conformance.checking.group_calls import drive_engine
from opskit import PROPERTY
from support_slow import examples
from support_tiers import MODELS, TierEngine


def drive(name: str, seed: int, steps: int, *, fails: bool = False) -> TierEngine:
    """Make random calls, and look at everything after each."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    sizes = rng.choice([[5], [40], [300], [7, 20], [20, 300], [1, 1, 50]])
    how = {"null_block": rng.random() < 0.7} if name != "full" else {}
    engine = TierEngine(name, rng.choice([24, 40, 90]), sizes, fails=(lambda *_: rng.random() < 0.2) if fails else None, **how)
    engine.priorities, engine.fetches = (0, 0, 1, 2), 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if fails else "error", KVDockWarning)
        for _ in range(steps // 4):  # prompts that come again, beside a few sequences that hold some of the pool
            engine.request(rng)
        drive_engine(engine, seed, steps)
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_right(name: str) -> None:
    drive(name, 2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(PROPERTY, max_examples=examples(12))
@given(seed=st.integers(0, 2**32), fails=st.booleans())
def test_whatever_is_called_what_is_read_is_right(name: str, seed: int, fails: bool) -> None:
    drive(name, seed, 60, fails=fails)


@pytest.mark.parametrize("name", ["full", "full and a window"])
def test_managers_that_are_called_alike_decide_alike(name: str) -> None:
    one, other = (drive(name, 5, 40) for _ in range(2))
    assert one.told == other.told
    assert [tier.calls for tier in one.tiers] == [tier.calls for tier in other.tiers]
    assert one.tiers[0].calls


@pytest.mark.slow
def test_whatever_is_called_for_long() -> None:
    minutes, seed = float(os.environ.get("KVDOCK_STATEFUL_MINUTES", "1")), 0
    loaded = lost = 0
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        engine = drive(list(MODELS)[seed % len(MODELS)], seed, 300, fails=seed % 3 == 0)
        loaded += sum(each.loaded for each in engine.manager.tier_usage)
        lost, seed = lost + sum(each.lost for each in engine.manager.tier_usage), seed + 1
    print(f"{seed} runs, {loaded} blocks came back, {lost} were lost")
    assert loaded
    assert lost
