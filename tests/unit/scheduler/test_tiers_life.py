"""Tiers of a block, full ones, and what sequences, pins and namespaces do around a prompt that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError
from kvdock.scheduler import CacheManager, NumberTier, TierUsage
from support_tiers import MemoryTier, TierEngine


def engine(*sizes: int) -> TierEngine:
    """Return an engine whose pool has 12 blocks of 4, which is two prompts of 24."""
    return TierEngine("full", 13, sizes)


def push_out(one: TierEngine, *names: int) -> None:
    """Run as many prompts as push all others out of the pool."""
    for name in names or (91, 92):
        one.run([name] * 24)


def test_a_tier_of_one_block_keeps_the_beginning_of_a_prompt() -> None:
    one = engine(1)
    one.run([1] * 24)
    push_out(one, 2)
    held = one.begin([3] * 48)  # all of the pool: what was cached goes at once, and of each prompt one block would fit
    assert held is not None
    one.end(held, "abort")
    one.check()
    (usage,) = one.manager.tier_usage
    assert (usage.num_blocks, usage.used) == (1, 1)
    assert sorted([one.manager.fetch([name] * 24) for name in (1, 2)]) == [0, 4]
    one.check()


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 23, 25])
def test_of_tokens_that_fill_no_block_only_whole_blocks_come_back(length: int) -> None:
    one = engine(100)
    one.run([1] * length)
    push_out(one)
    assert one.manager.fetch([1] * length) == (length - 1) // 4 * 4, "one token is always computed"
    assert one.run([1] * length) == (length - 1) // 4 * 4
    push_out(one)
    assert one.run([1] * (length + 9)) == length // 4 * 4


def test_a_prompt_that_parts_inside_a_block_comes_back_up_to_there() -> None:
    one = engine(100)
    one.run([1] * 24)
    push_out(one)
    assert one.run([1] * 10 + [2] * 14) == 8
    assert one.manager.tier_usage[0].loaded == 2, "and no more than that"


def test_of_two_tiers_the_full_second_forgets_and_the_first_does_not() -> None:
    one = engine(100, 1)
    for name in range(1, 10):
        one.run([name] * 24)
    assert one.manager.tier_usage[1] == TierUsage(num_blocks=1, used=0, stored=0, loaded=0, lost=0), "the first has room for all"
    two = engine(6, 6)
    for name in range(1, 10):
        two.run([name] * 24)
    first, second = two.manager.tier_usage
    assert second.used <= 6
    assert second.stored > 6, "it was full, and made room"
    assert (first.lost, second.lost) == (0, 0), "what is forgotten in turn is not lost"
    assert two.run([1] * 24) == 0


def test_what_has_a_priority_stays_in_a_full_second_tier() -> None:
    one = engine(6, 6)
    for name, priority in ((1, 7), (2, 0), (3, 0), (4, 7), (5, 0), (6, 0), (7, 0)):
        one.priorities = (priority,)
        one.run([name] * 24)
    one.priorities = (0,)
    assert [one.run([name] * 24) for name in (1, 2)] == [20, 0]


def test_a_pin_of_what_is_in_a_tier_outlives_all_that_is_pushed_out() -> None:
    one = engine(100)
    one.run([1] * 24)
    push_out(one)
    pin = one.manager.pin([1] * 23)
    assert (pin.num_tokens, pin.is_held) == (20, True)
    push_out(one, 3, 4)
    with pytest.raises(ArgumentValueError, match="expected no open sequences and no pins, got 0 open, 1 pins"):
        one.manager.reset()
    loaded = one.manager.tier_usage[0].loaded
    assert one.run([1] * 24) == 20
    assert one.manager.tier_usage[0].loaded == loaded == 5
    pin.release()
    push_out(one, 3, 4)
    assert one.run([1] * 24) == 20, "from the tier, as before"
    assert one.manager.tier_usage[0].loaded > loaded


def test_one_prompt_in_two_namespaces_is_two_in_a_tier() -> None:
    one = engine(100)
    spaces: Sequence[tuple[Any, ...]] = [(), ("a",), ("a", 1), (1,)]
    for space in spaces[:3]:
        one.run([1] * 24, space)
    push_out(one)
    assert [one.manager.plan([1] * 24, space).cached_len for space in spaces] == [20, 20, 20, 0]
    assert [one.manager.fetch([1] * 24, space) for space in spaces[1::2]] == [20, 0]
    one.manager.reset()
    assert [one.run([1] * 24, space) for space in spaces] == [0] * 4


@pytest.mark.parametrize("keep", [0, 3, 4, 18, 20, 22])
def test_a_sequence_that_came_back_forks_and_is_cut(keep: int) -> None:
    one = engine(100)
    one.run([1] * 24)
    push_out(one)
    request = one.begin([1] * 24)
    assert request is not None
    assert request.seq.cached_len == 20
    while request.seq.computed < 24:
        assert one.step(request)
    one.fork(request, keep)
    one.check()
    one.truncate(request, keep)
    one.check()
    assert request.seq.num_tokens == keep
    for each in one.all[:]:
        one.end(each, "abort")
        one.check()
    push_out(one)
    assert one.run([1] * 24) == 20


def test_a_reset_beside_an_open_sequence_leaves_it_what_came_back() -> None:
    one = engine(100)
    one.run([1] * 24)
    push_out(one)
    request = one.begin([1] * 24)
    assert request is not None
    blocks = request.seq.block_table().tolist()
    one.manager.reset(keep_open=True)
    one.check()
    assert request.seq.block_table().tolist() == blocks
    assert one.manager.tier_usage[0].used == 0
    one.end(request, "keep")
    push_out(one)
    assert one.run([1] * 24) == 0, "it published nothing more"


@pytest.mark.parametrize("sizes", [(1,), (6, 3), (40,)])
def test_managers_that_are_fed_alike_decide_alike(sizes: tuple[int, ...]) -> None:
    """Blocks, hits and usage follow from the calls alone, with memory and without."""
    memory = np.zeros((12, 4), dtype=np.int64)
    managers = [CacheManager(12, 4, tiers=[made(n) for n in sizes]) for made in (NumberTier, lambda n: MemoryTier(n, memory))]
    for manager in managers:
        manager.keep_digest()
    for step in range(24):
        name, seen = step * step % 7, []
        for manager in managers:
            fetched = manager.fetch([name] * 22, (step % 2,), priority=step % 3)
            seq = manager.begin([name] * 22, (step % 2,), priority=step % 3)
            manager.commit(seq, [], computed=22)
            other = manager.fork(seq, 9)
            blocks = seq.block_table().tolist(), other.block_table().tolist()
            manager.truncate(seq, 17)
            manager.finish(other), manager.finish(seq, keep=step % 5 > 0)
            manager.check_integrity()
            seen.append((fetched, blocks, manager.tier_usage, manager.digest()))
        assert seen[0] == seen[1], f"step {step}"
    assert managers[0].tier_usage[0].stored > 0
