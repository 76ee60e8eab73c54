"""What is evicted goes to tiers, and is found there."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockWarning, UnsupportedError
from kvdock.prefix import RadixPrefixCache
from kvdock.scheduler import CacheManager, NumberTier, TierUsage
from support_tiers import FailingTier, MemoryTier, TierEngine

ROOM = 12
"""Blocks of 4 tokens in most pools here, beside the null block."""


def engine(*sizes: int, **how: Any) -> TierEngine:
    """Return an engine with a small pool, and tiers of so many blocks."""
    return TierEngine("full", ROOM + 1, sizes, **how)


def prompt(name: int, length: int = 24) -> list[int]:
    """Return a prompt that no other begins like."""
    return [name + 100] * length


def test_what_was_evicted_is_found_in_a_tier() -> None:
    one = engine(100)
    assert [one.run(prompt(name)) for name in (1, 2, 3, 1)] == [0, 0, 0, 20]
    (usage,) = one.manager.tier_usage
    assert usage == TierUsage(num_blocks=100, used=usage.stored, stored=usage.stored, loaded=5, lost=0)
    assert one.manager.prefix.stats.hit_tokens == 20, "what came back counts as found"


def test_a_plan_says_what_begin_finds_and_tells_the_tier() -> None:
    one = engine(100)
    for name in (1, 2, 3):
        one.run(prompt(name))
    before = one.facts(), one.manager.prefix.stored_blocks().tolist(), one.manager.tier_usage
    assert one.manager.plan(prompt(1)) == (20, 6, True)
    assert (one.facts(), one.manager.prefix.stored_blocks().tolist(), one.manager.tier_usage) == before, "nothing has changed"
    assert [len(blocks) for blocks in one.tiers[0].ahead] == [5]
    seq = one.manager.begin(prompt(1))
    assert (seq.cached_len, seq.block_table().size) == (20, 6)


def test_what_a_plan_found_is_looked_up_again_where_the_tier_has_changed() -> None:
    """Between `plan` and `begin`: more of the prompt is evicted, the tier forgets it, somebody else has brought it back."""
    one = engine(12)
    for name in (1, 2, 3):
        one.run(prompt(name))
    assert one.manager.plan(prompt(1)).cached_len == 20
    one.run(prompt(4)), one.run(prompt(5)), one.run(prompt(6))
    assert one.manager.begin(prompt(1)).cached_len == 0, "it is neither in the pool nor in the tier"
    two = engine(100)
    two.run(prompt(1))
    assert two.manager.plan(prompt(1)).cached_len == 20, "all of it is in the pool"
    two.run(prompt(2)), two.run(prompt(3))
    assert two.manager.begin(prompt(1)).cached_len == 20
    three = engine(100)
    for name in (1, 2, 3):
        three.run(prompt(name))
    assert three.manager.plan(prompt(1)).cached_len == three.manager.fetch(prompt(1)) == 20
    assert three.manager.begin(prompt(1)).cached_len == 20
    assert three.manager.tier_usage[0].loaded == 5, "once"
    for each in (one, two, three):
        each.manager.check_integrity()


def test_one_prompt_is_planned_and_another_begins() -> None:
    one, ids = engine(100), np.array(prompt(1))
    for name in (1, 2, 3, 4):
        one.run(prompt(name))
    assert [one.manager.plan(each).cached_len for each in (ids, prompt(2), prompt(9), ids)] == [20, 20, 0, 20]
    ids[10:] = 7  # the same array, with another prompt in it
    seq = one.manager.begin(ids)
    assert seq.cached_len == 8
    one.manager.abort(seq)
    assert one.manager.plan(prompt(9)).cached_len == 0
    assert one.manager.begin(prompt(2, 13)).cached_len == 12
    one.manager.check_integrity()


def test_what_does_not_fit_with_the_rest_does_not_come_back() -> None:
    one = engine(100)
    for name in (1, 2, 3):
        one.run(prompt(name))
    held = one.manager.begin(prompt(9, 4 * (ROOM - 2)))
    assert one.manager.plan(prompt(1)).fits is False
    chunk = one.manager.begin(prompt(1), at_most=4)
    assert chunk.cached_len == 0
    assert one.manager.tier_usage[0].loaded == 0
    one.manager.abort(held)
    one.manager.check_integrity()


def test_a_limit_to_what_is_cached_is_one_to_what_comes_back() -> None:
    one = engine(100)
    for name in (1, 2, 3):
        one.run(prompt(name))
    assert one.manager.begin(prompt(1), max_cached_len=10).cached_len == 10
    assert one.manager.tier_usage[0].loaded == 3
    one.manager.check_integrity()


def test_with_room_for_all_nothing_is_ever_forgotten() -> None:
    rng, one = random.Random(3), engine(2000)  # noqa: S311 - the same in every run
    known: set[tuple[int, ...]] = {()}
    for _ in range(60):
        ids = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(5, 40))]
        whole = [tuple(ids[:stop]) for stop in range(0, len(ids) + 1, 4)]
        assert one.run(ids) == max(len(each) for each in whole if each in known and len(each) < len(ids))
        known |= set(whole)
    assert one.manager.tier_usage[0].loaded > 30


@pytest.mark.parametrize("sizes", [(12, 12), (12, 12, 400)])
def test_what_falls_out_of_a_tier_goes_to_the_next(sizes: tuple[int, ...]) -> None:
    one = engine(*sizes)
    for name in range(5):
        one.run(prompt(name))
    assert [usage.used > 0 for usage in one.manager.tier_usage[:2]] == [True, True]
    assert one.run(prompt(0)) == 20, "from the second"
    assert one.manager.tier_usage[1].loaded == 5
    for name in range(10, 30):
        one.run(prompt(name))
    assert one.run(prompt(0)) == (20 if len(sizes) == 3 else 0)


def test_what_came_back_stays_where_it_was_and_is_not_copied_again() -> None:
    one = engine(100)
    for name in (1, 2, 3, 1):
        one.run(prompt(name))
    stored = one.manager.tier_usage[0].stored
    one.run(prompt(4)), one.run(prompt(5))
    again = [pairs for what, pairs in one.tiers[0].calls if what == "store"][-1]
    assert one.manager.tier_usage[0].stored - stored <= 2 * 6 + 6
    assert len({block for _, block in again}) == len(again)
    assert one.run(prompt(1)) == 20


def test_the_lowest_priority_goes_first_and_never_for_a_lower_one() -> None:
    one = engine(12)
    for name, priority in ((1, 5), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)):
        one.priorities = (priority,)
        one.run(prompt(name))
    assert one.run(prompt(1)) == 20
    assert one.run(prompt(2)) == 0
    assert one.manager._pool.tiers is not None
    assert one.manager._pool.tiers.index._priority.max() == 5, "it has its priority back"


def test_a_pin_brings_back_and_holds() -> None:
    one = engine(100)
    for name in (1, 2, 3):
        one.run(prompt(name))
    with one.manager.pin(prompt(1, 20)) as pin:
        assert pin.num_tokens == 20
        for name in (4, 5, 6):
            one.run(prompt(name))
        loaded = one.manager.tier_usage[0].loaded
        assert one.run(prompt(1)) == 20
        assert one.manager.tier_usage[0].loaded == loaded, "it was in the pool all the time"
    one.check()


def test_fetch_brings_back_ahead() -> None:
    one = engine(100)
    for name in (1, 2, 3):
        one.run(prompt(name))
    assert not one.manager.can_go_on(prompt(1))[1:].any()
    assert one.manager.fetch(prompt(1)) == 20
    assert one.manager.can_go_on(prompt(1))[20]
    assert CacheManager(4, 4).fetch(prompt(1)) == 0, "without tiers there is nothing to bring"


def test_a_store_that_fails_costs_hits_and_is_told_once() -> None:
    one = engine(100, fails=lambda *_: True)
    with pytest.warns(KVDockWarning, match=r"FailingTier\(100\) raised OSError in store: the disk is gone. .*Fix: ") as told:
        assert [one.run(prompt(name)) for name in (1, 2, 3, 1)] == [0, 0, 0, 0]
    assert len(told) == 1
    (usage,) = one.manager.tier_usage
    assert (usage.used, usage.stored) == (0, 0)
    assert usage.lost > 0


def test_a_load_that_fails_leaves_no_half_block() -> None:
    failing = [False]
    one = engine(100, fails=lambda tier, what: failing[0] and what == "load")
    for name in (1, 2, 3):
        one.run(prompt(name))
    failing[0] = True
    with pytest.warns(KVDockWarning, match="raised OSError in load"):
        assert one.run(prompt(1)) == 0
    failing[0] = False
    assert one.run(prompt(1)) == 20, "it was computed again, and is found"
    assert one.manager.tier_usage[0].lost


def test_what_another_tier_has_is_found_where_one_fails() -> None:
    one = engine(6, 100, fails=lambda tier, what: len(tier.memory) == 6 and what == "load")
    for name in range(5):
        one.run(prompt(name))
    with pytest.warns(KVDockWarning, match=r"FailingTier\(6\) raised OSError in load"):
        assert one.run(prompt(2)) == 0, "it was in the first"
    assert one.run(prompt(0)) == 20, "and this one in the second"
    first, second = one.manager.tier_usage
    assert first.lost > 0 == first.loaded == second.lost


def test_a_tier_that_calls_the_manager_has_failed() -> None:
    class Calls(NumberTier):
        def store(self, pairs: Any, source: Any) -> None:
            managers[0].plan([1])

    managers = [CacheManager(4, 4, tiers=[Calls(10)])]
    seq = managers[0].begin(prompt(1, 16))
    managers[0].commit(seq, [], computed=16)
    managers[0].finish(seq)
    with pytest.warns(KVDockWarning, match=f"raised {UnsupportedError.__name__} in store: CacheManager: expected calls one after"):
        managers[0].begin(prompt(2, 16))
    managers[0].check_integrity()


def test_what_is_taken_back_or_forgotten_is_in_no_tier() -> None:
    one = engine(100)
    one.run(prompt(1), keep=False)
    one.run(prompt(2)), one.run(prompt(3)), one.run(prompt(4))
    assert one.run(prompt(1), keep=False) == 0
    assert one.run(prompt(2)) == 20
    one.manager.reset()
    one.check()
    assert [usage.used for usage in one.manager.tier_usage] == [0]
    assert one.run(prompt(3)) == 0


def test_namespaces_and_unlike_tokens_of_equal_ends_are_apart() -> None:
    one = engine(100)
    one.run([1] * 24, ("a",))
    for name in (2, 3, 4):
        one.run(prompt(name))
    assert one.run([1] * 24, ("b",)) == 0
    assert one.run([9] * 4 + [1] * 20, ("a",)) == 0
    assert one.run([1] * 24, ("a",)) == 20


def test_ranks_that_are_called_alike_have_one_digest_whatever_moves_their_bytes() -> None:
    digests = set()
    for tier in (NumberTier(20), MemoryTier(20, np.zeros((ROOM, 4), dtype=np.int64)), NumberTier(18)):
        manager = CacheManager(ROOM, 4, tiers=[tier])
        manager.keep_digest()
        for name in (1, 2, 3, 4, 1, 2, 3):
            seq = manager.begin(prompt(name))
            manager.commit(seq, [], computed=24)
            manager.finish(seq)
        assert manager.tier_usage[0].stored
        digests.add((tier.num_blocks, manager.digest()))
    assert len(digests) == 2, "tiers of other sizes decide otherwise"
    assert len({digest for _, digest in digests}) == 2


class TurnedRound(RadixPrefixCache):
    """Returns what it evicts in an order of its own, as a plugin's may."""

    def evict(self, num_blocks: int) -> Any:
        return np.roll(super().evict(num_blocks)[::-1], 3)


@pytest.mark.parametrize("made", [RadixPrefixCache, TurnedRound])
def test_any_prefix_cache_will_do(made: Any) -> None:
    one = engine(500, prefix=made(4))
    for name in (1, 2, 3, 4):
        one.run(prompt(name, 20 + 5 * name))
    assert [one.run(prompt(name, 20 + 5 * name)) for name in (1, 2, 3, 4)] == [24, 28, 32, 36]


def test_nothing_goes_to_a_tier_where_nothing_is_cached() -> None:
    one = engine(100, prefix="naive")
    assert [one.run(prompt(name)) for name in (1, 2, 1)] == [0, 0, 0]
    assert one.tiers[0].calls == []


def test_a_sequence_that_is_decoded_goes_with_all_its_tokens() -> None:
    one = engine(100)
    request = one.begin(prompt(1, 5))
    assert request is not None
    while request.seq.num_tokens < 30:
        one.step(request)
    ids = [*request.ids, 7]
    one.end(request, "keep")
    for name in (2, 3, 4):
        one.run(prompt(name))
    assert one.run(ids) == 28


def test_it_goes_to_another_thread_with_its_manager() -> None:
    one = engine(100)
    for name in (1, 2, 3):
        one.run(prompt(name))
    one.manager.hand_over()
    found: list[Any] = []

    def other() -> None:
        found.append(one.run(prompt(1)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [20]


@pytest.mark.parametrize(
    ("tiers", "error", "text"),
    [
        (5, ArgumentTypeError, "CacheManager: tiers: expected Tiers, got 5"),
        ("ab", ArgumentTypeError, "expected Tiers"),
        ([NumberTier(3), None], ArgumentTypeError, r"HostTier\(8 << 30\).bind\(cache\)"),
        ([one := NumberTier(3), one], ArgumentValueError, "expected each tier once"),
    ],
)
def test_what_is_no_tier_is_refused(tiers: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CacheManager(4, 4, tiers=tiers)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3"])
def test_a_number_of_blocks_is_an_int_above_0(size: Any) -> None:
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match="NumberTier: num_blocks"):
        NumberTier(size)
    assert repr(NumberTier(3)) == "NumberTier(num_blocks=3)"


def test_half_of_what_is_stored_is_seen_by_the_model() -> None:
    """The failing tier of these tests does leave half a copy behind, and junk."""
    pool = np.arange(8).reshape(4, 2)
    tier = FailingTier(4, pool, lambda *_: True)
    with pytest.raises(OSError, match="disk"):
        tier.store(np.array([[0, 0], [1, 1]]), None)
    assert tier.memory[:2].tolist() == [[0, 1], [-12345, -12345]]
    assert isinstance(tier, MemoryTier)
