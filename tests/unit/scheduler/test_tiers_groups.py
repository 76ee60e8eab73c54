"""Tiers of managers of several layer groups: each group gives and gets what it has, and a prompt goes on where all of them can."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest

from kvdock.errors import IntegrityError, KVDockWarning
from support_tiers import TierEngine
from support_tiers import unit_of as unit_of_group

NOTHING = np.empty(0, dtype=np.int32)
"""What the pool has of a prompt."""

WINDOWS = ["a window", "full and a window", "full and a window with sinks", "full and chunks", "windows and full of unlike blocks"]
STATES = ["full and a state", "full, a window and two states"]


def engine(name: str, num_blocks: int = 40, *sizes: int, **how: Any) -> TierEngine:
    return TierEngine(name, num_blocks, sizes or (2000,), **how)


def unit_of(name: str) -> int:
    """Return how many tokens a unit has."""
    return 4 if name == "full" else unit_of_group(name)


def prompt(name: str, number: int) -> list[int]:
    """Return a prompt of three units, which no other begins like."""
    return [number + 100] * (3 * unit_of(name))


def asked(name: str, number: int) -> list[int]:
    """Return a prompt that goes on behind that."""
    return [*prompt(name, number), 1]


def push_out(one: TierEngine, name: str) -> None:
    """Compute other prompts until nothing is left of those before in the pool."""
    for number in range(50, 90):
        one.run(prompt(name, number))


@pytest.mark.parametrize("name", WINDOWS)
def test_what_windows_and_chunks_need_comes_back(name: str) -> None:
    one = engine(name, 60)
    one.run(prompt(name, 1))
    push_out(one, name)
    assert one.manager.plan(asked(name, 1)).cached_len == 3 * unit_of(name)
    assert one.run(asked(name, 1)) == 3 * unit_of(name), "and the engine has looked at all that it reads"
    assert one.manager.tier_usage[0].loaded > 0


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_comes_back(name: str) -> None:
    one = engine(name, 60)
    one.run(asked(name, 1), at_most=3 * unit_of(name))
    for number in range(50, 90):
        one.run(asked(name, number), at_most=3 * unit_of(name))
    assert one.run(asked(name, 1)) == 3 * unit_of(name)
    assert one.manager.tier_usage[0].loaded > 0


def test_a_checkpoint_comes_back_to_a_unit_that_has_it_alone() -> None:
    one = engine("full and a state", 40)
    first = asked("full and a state", 1)
    one.run(first, at_most=12)
    for number in range(50, 66):
        one.run(asked("full and a state", number), at_most=12)
    assert one.run(first, at_most=12) == 12
    assert one.manager.tier_usage[0].loaded >= 4, "three blocks of tokens, and a state"
    assert one.run(first) == 12, "it is in the pool now, with its state"


def test_without_a_checkpoint_tokens_alone_are_of_no_use() -> None:
    one = engine("full and a state", 40)
    ids = asked("full and a state", 1)
    one.run(ids, at_most=12)
    units = one.manager._pool.tiers
    assert units is not None
    for number in range(50, 66):
        one.run(asked("full and a state", number), at_most=12)
    (level,) = units.levels
    found = units.find(np.array(ids[:12]), (), NOTHING)
    assert found is not None
    level.blocks.release(level.table[found.units[-1], 1:])
    level.table[found.units[-1], 1] = -1
    level.counts[found.units[-1]] -= 1
    one.check()
    assert one.manager.plan(ids).cached_len == 0
    assert one.run(ids) == 0
    assert level.loaded == 0


def test_what_a_window_has_let_go_is_not_in_the_tier() -> None:
    """Of a prompt of many units the window keeps the last ones: the tier has those blocks, and all of the group that keeps all."""
    one = engine("full and a window", 60)
    ids = [7] * 37
    one.run(ids[:36])
    push_out(one, "full and a window")
    tiers = one.manager._pool.tiers
    assert tiers is not None
    found = tiers.find(np.array(ids[:36]), (), NOTHING)
    assert found is not None
    assert found.there[:, 0].all()
    assert found.there[-2:, 1:].all(), "6 tokens of a window are in the last two units"
    assert not found.there[0, 1:].any()
    assert one.run(ids) == 36


def test_a_prompt_that_parts_where_a_window_let_go_goes_on_where_it_can() -> None:
    one = engine("full and a window", 60)
    one.run([7] * 36)
    push_out(one, "full and a window")
    assert one.run([7] * 20 + [8] * 5) == 0, "behind 20 tokens the window is gone, and nothing is loaded in vain"
    one.check()


@pytest.mark.parametrize("name", ["full and a window", "full, a window and two states"])
def test_a_load_that_fails_gives_all_blocks_back(name: str) -> None:
    failing = [False]
    one = engine(name, 60, 400, fails=lambda tier, what: failing[0] and what == "load")
    how = {"at_most": 3 * unit_of(name)}
    one.run(asked(name, 1), **how)
    for number in range(50, 70):
        one.run(asked(name, number), **how)
    failing[0] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)
        assert one.run(asked(name, 1), **how) == 0
    assert one.manager.tier_usage[0].lost > 0
    failing[0] = False
    assert one.run(asked(name, 1), **how) == 3 * unit_of(name), "it was computed again"


@pytest.mark.parametrize("name", ["full", "full and a window", "full and a state"])
def test_a_load_that_is_interrupted_gives_all_blocks_back(name: str) -> None:
    one = engine(name, 40)
    how = {"at_most": 3 * unit_of(name)}
    for number in range(1, 20):
        one.run(asked(name, number), **how)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    load, one.tiers[0].load = one.tiers[0].load, interrupted  # type: ignore[method-assign]
    assert one.manager.plan(asked(name, 1)).cached_len == 3 * unit_of(name)
    with pytest.raises(KeyboardInterrupt):
        one.manager.begin(asked(name, 1))
    one.check()
    one.tiers[0].load = load  # type: ignore[method-assign]
    assert one.run(asked(name, 1), **how) == 3 * unit_of(name), "nothing was lost"


@pytest.mark.parametrize("name", ["full", "full and a window"])
def test_forks_cuts_and_drafts_beside_tiers(name: str) -> None:
    one = engine(name, 60)
    for number in range(1, 12):
        one.run(prompt(name, number))
    request = one.begin(prompt(name, 1))
    assert request is not None
    for _ in range(3):
        assert one.step(request)
    one.fork(request, request.seq.num_tokens)
    one.draft(request, is_undone=True)
    one.truncate(request, request.seq.shortest)
    one.check()
    push_out(one, name)
    for each in one.all[:]:
        one.end(each, "keep")
    one.check()


def test_a_prompt_in_chunks_comes_back_and_goes_on() -> None:
    one = engine("full", 20)
    ids = [5] * 41
    one.run(ids)
    for number in (1, 2, 3, 4, 5):
        one.run([number] * 30)
    request = one.begin([*ids, *[6] * 9], at_most=4)
    assert request is not None
    assert request.seq.cached_len == 40
    while request.seq.computed < 50:
        assert one.step(request, 4)
    one.end(request, "keep")
    one.check()


def test_what_tiers_must_not_be_is_said() -> None:
    one = engine("full", 13)
    for number in (1, 2, 3):
        one.run([number] * 24)
    tiers = one.manager._pool.tiers
    assert tiers is not None
    tiers._held[3] = True
    with pytest.raises(IntegrityError, match=r"Tiers: expected nothing that is held, got \[3\]"):
        one.manager.check_integrity()
    tiers._held[3] = False
    tiers.index._number[int(one.manager.prefix.stored_blocks()[0])] = -1
    with pytest.raises(IntegrityError, match="TierIndex: expected the units that are cached"):
        one.manager.check_integrity()


def test_what_is_held_makes_no_room() -> None:
    """What a prompt is about to get back stays in a tier that is full of other things, too, while the pool makes room for it."""
    one = engine("full", 13, 12)
    for number in (1, 2, 3):
        one.run([number] * 24)
    before = one.manager.tier_usage[0]
    assert one.run([1] * 24) == 20
    after = one.manager.tier_usage[0]
    assert (before.num_blocks, after.loaded - before.loaded) == (12, 5)
    assert one.run([1] * 24) == 20


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (3, 2, 1)])
def test_tiers_that_are_far_too_small_do_no_harm(sizes: tuple[int, ...]) -> None:
    one = engine("full", 13, *sizes)
    for number in (1, 2, 3, 1, 2, 3, 4, 1):
        one.run([number] * 24)
    assert all(usage.used <= usage.num_blocks for usage in one.manager.tier_usage)
    assert one.manager.tier_usage[0].stored > 0


def test_promises_are_kept_beside_tiers() -> None:
    one = engine("full", 13)
    for number in (1, 2, 3):
        one.run([number] * 24)
    promised = one.begin([9] * 4, reserve=20)
    assert promised is not None
    fit = one.manager.plan([1] * 24)
    assert (fit.cached_len, fit.fits) == (20, True), "six blocks are left"
    assert one.run([1] * 24) == 20
    for _ in range(20):
        assert one.step(promised)
    one.check()


def test_the_end_of_a_prompt_that_a_tier_lost_is_computed_again() -> None:
    one = engine("full", 13, 7)
    one.run([1] * 44)
    for number in (2, 3):
        one.run([number] * 24)
    cached = one.run([1] * 44)
    assert cached in range(0, 44, 4)
    assert one.run([1] * 44) == 40


@pytest.mark.filterwarnings("ignore::kvdock.errors.KVDockWarning")
@pytest.mark.parametrize(
    ("name", "num_blocks", "seed"),
    [("full and a window", 24, 20), ("full and a window", 24, 18), ("full and a window shorter than a unit", 40, 11)],
)
def test_a_prompt_goes_on_with_what_the_pool_has_where_a_tier_fails_to_load(name: str, num_blocks: int, seed: int) -> None:
    """Room for what does not come is not made of what is gone on with instead; and a prompt that was said to fit does."""
    one = engine(name, num_blocks, 300, fails=lambda _, what: what == "load")
    rng = random.Random(seed)  # noqa: S311 - one of those with which it went wrong
    for _ in range(20):
        ids = [rng.randrange(6)] * rng.randint(8, 26) + [rng.randrange(3) for _ in range(rng.randrange(4))]
        begun = one.begin(ids, **({"at_most": rng.randint(1, 12)} if rng.random() < 0.3 else {}))
        while begun is not None and begun.seq.computed < len(ids) + rng.randrange(3) and one.step(begun):
            pass
        while len(one.all) > rng.randrange(3):
            one.end(rng.choice(one.all), "keep")
    one.check()
    assert one.manager.tier_usage[0].lost > 0
