"""Whatever happens in whatever order, every transfer ends, what came is right, and no block is lost: drawn histories of four ranks."""

from __future__ import annotations

import random

import pytest

from support_faults import Faults
from support_world import World


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_wrong_or_for_ever(seed: int) -> None:
    world = World(Faults(random.Random(seed)))  # noqa: S311 - what is drawn is a test case
    world.run(60)
    assert world.right + world.failed > 0


@pytest.mark.slow
def test_many_histories() -> None:
    right = failed = killed = 0
    for seed in range(100, 220):
        world = World(Faults(random.Random(seed)))  # noqa: S311 - as above
        world.run(80)
        right, failed, killed = right + world.right, failed + world.failed, killed + bool(world.dead)
    assert min(right, failed, killed) > 30, "all of it happens"
