"""Managers of several layer groups: random calls, with a memory that is really written.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/scheduler/test_groups_model.py`` runs it for an hour.
"""

from __future__ import annotations

import os
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock_conformance.checking.group_calls import drive_engine
from kvdock_conformance.checking.group_engine import GROUPED
from opskit import PROPERTY
from support_group_model import Engine
from support_slow import examples


def drive(name: str, seed: int, steps: int) -> Engine:
    """Make random calls, and look at everything after each."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    engine = Engine(name, rng.choice([24, 40, 90]), prefix=rng.choice(["radix", "radix", "naive"]), null_block=rng.random() < 0.7)
    drive_engine(engine, seed, steps)
    return engine


@pytest.mark.parametrize("name", GROUPED)
@settings(PROPERTY, max_examples=examples(12))
@given(seed=st.integers(0, 2**32))
def test_whatever_is_called_what_is_read_is_right(name: str, seed: int) -> None:
    drive(name, seed, 60)


@pytest.mark.slow
def test_whatever_is_called_for_long() -> None:
    minutes, seed = float(os.environ.get("KVDOCK_STATEFUL_MINUTES", "1")), 0
    refused = computed = 0
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        engine = drive(list(GROUPED)[seed % len(GROUPED)], seed, 300)
        refused, computed, seed = refused + engine.refused, computed + engine.computed, seed + 1
    print(f"{seed} runs, {computed} tokens computed, {refused} calls refused")
    assert seed
    assert refused
