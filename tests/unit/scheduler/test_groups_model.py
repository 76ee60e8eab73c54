"""Managers of several layer groups: random calls, with a memory that is really written.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/scheduler/test_groups_model.py`` runs it for an hour.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import ArgumentValueError, OutOfBlocksError
from opskit import PROPERTY
from support_group_model import MODELS, Engine

ACTIONS = ("begin", "begin", "step", "step", "step", "batch", "batch", "fork", "truncate", "draft", "end", "pin", "unpin", "reset")


def drive(name: str, rng: random.Random, steps: int) -> Engine:
    """Make random calls, and look at everything after each."""
    engine = Engine(name, rng.choice([24, 40, 90]), prefix=rng.choice(["radix"] * 4 + ["naive"]), null_block=rng.random() < 0.7)
    pins: list[Any] = []
    for _ in range(steps):
        action, one = rng.choice(ACTIONS), rng.choice(engine.all) if engine.all else None
        if action == "begin" or one is None:
            ids = [int(rng.random() < 0.04) for _ in range(rng.randint(1, 30))]
            how: dict[str, Any] = {"reserve": rng.choice([0, 0, 5])}
            if rng.random() < 0.5:
                how["at_most"] = rng.randint(1, 12)
            elif rng.random() < 0.2:
                how["max_cached_len"] = rng.randint(0, 20)
            engine.begin(ids, rng.choice([(), (), ("other",)]), partial=rng.random() < 0.3, **how)
        elif action == "step":
            engine.step(one, rng.choice([1, 1, 3, 9]))
        elif action == "batch":
            engine.batch(rng.sample(engine.all, rng.randint(1, len(engine.all))))
        elif action == "fork":
            engine.fork(one, rng.randint(0, one.seq.num_tokens))
        elif action == "truncate":
            engine.truncate(one, rng.randint(0, min(one.seq.num_tokens, len(one.ids))))
        elif action == "draft" and one.seq.computed == one.seq.num_tokens == len(one.ids):
            made = engine.tried(lambda one=one: engine.manager.extend(one.seq, 4))
            if made is not None:
                engine.copy(made[1])
                engine.truncate(one, one.seq.computed)
        elif action == "end":
            engine.end(one, rng.choice(["keep", "keep", "drop", "abort"]))
        elif action == "pin":
            with contextlib.suppress(ArgumentValueError, OutOfBlocksError):  # less than a block is cached, or promises need it
                pins.append(engine.manager.pin(one.ids[: one.seq.computed], one.namespace))
        elif action == "unpin" and pins:
            pins.pop(rng.randrange(len(pins))).release()
        elif action == "reset" and not pins and rng.random() < 0.3:
            engine.manager.reset(keep_open=True)
        engine.check()
    for pin in pins:
        pin.release()
    while engine.all:
        engine.end(engine.all[-1], "keep")
        engine.check()
    engine.manager.reset()
    engine.check()
    blocks = engine.manager._pool.units.blocks
    assert blocks.num_used == (engine.manager.null_block is not None)
    return engine


@pytest.mark.parametrize("name", MODELS)
@settings(PROPERTY, max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_called_what_is_read_is_right(name: str, seed: int) -> None:
    drive(name, random.Random(seed), 60)  # noqa: S311 - nothing secret


@pytest.mark.slow
def test_whatever_is_called_for_long() -> None:
    minutes, seed = float(os.environ.get("KVDOCK_STATEFUL_MINUTES", "1")), 0
    refused = computed = 0
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        engine = drive(list(MODELS)[seed % len(MODELS)], random.Random(seed), 300)  # noqa: S311 - nothing secret
        refused, computed, seed = refused + engine.refused, computed + engine.computed, seed + 1
    print(f"{seed} runs, {computed} tokens computed, {refused} calls refused")
    assert seed
    assert refused
