"""Tiers that raise, now and then or for ever: hits are lost and nothing else, and the cause is told once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from kvdock.errors import KVDockWarning
from kvdock.scheduler import CacheManager, NumberTier
from support_tiers import TierEngine

AGAIN = "What it should have kept is computed again; this is said once. Fix: see to the cause, or make the manager without this tier"
NAMES = (1, 2, 3, 1, 4, 2, 5, 1, 3, 2)


def run_all(one: TierEngine, times: int = 1) -> list[int]:
    """Run prompts that come again, each of which is checked after each call; return how much was found of each."""
    return [one.run([name] * 24) for name in NAMES * times]


def told(caught: list[Any]) -> list[str]:
    return [str(each.message) for each in caught]


FAILS: dict[str, Callable[[], Callable[[Any, str], bool]]] = {
    "store": lambda: lambda _, what: what == "store",
    "load": lambda: lambda _, what: what == "load",
    "both": lambda: lambda *_: True,
    "in turn": lambda: lambda tier, _: len(tier.calls) % 2 == 1,
}


@pytest.mark.parametrize("how", FAILS)
def test_a_tier_that_raises_costs_hits_and_is_told_once(how: str) -> None:
    sound = TierEngine("full", 13, (100,))
    one = TierEngine("full", 13, (100,), fails=FAILS[how]())
    with pytest.warns(KVDockWarning) as caught:
        found = run_all(one)
    first = "load" if how == "load" else "store"
    assert told(caught) == [f"FailingTier(100) raised OSError in {first}: the disk is gone. {AGAIN}"]
    assert all(mine <= best for mine, best in zip(found, run_all(sound), strict=True))
    (usage,) = one.manager.tier_usage
    assert usage.lost > 0
    assert (usage.stored > 0) == (how in ("load", "in turn"))
    if how != "in turn":
        assert usage.loaded == 0


@pytest.mark.parametrize("what", ["store", "load"])
def test_what_a_tier_lost_is_counted_in_blocks(what: str) -> None:
    one = TierEngine("full", 13, (100,), fails=lambda _, called: called == what)
    with pytest.warns(KVDockWarning):
        run_all(one)
    failed = sum(len(pairs) for called, pairs in one.tiers[0].calls if called == what)
    passed = sum(len(pairs) for called, pairs in one.tiers[0].calls if called != what)
    (usage,) = one.manager.tier_usage
    assert (usage.lost, usage.stored + usage.loaded) == (failed, passed)


def test_a_tier_that_is_well_again_is_used_again() -> None:
    ill = [True]
    one = TierEngine("full", 13, (100,), fails=lambda *_: ill[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KVDockWarning)
        run_all(one)
        ill[0] = False
        assert [one.run([name] * 24) for name in (31, 32, 33, 31)] == [0, 0, 0, 20]
        ill[0] = True
        assert one.run([32] * 24) == 0
        one.manager.reset()
        run_all(one)
    assert len(caught) == 1, "once in the life of a manager, whatever comes between"


def test_each_of_two_tiers_is_told_of_once() -> None:
    one = TierEngine("full", 13, (6, 100), fails=lambda tier, what: what == ("load" if len(tier.memory) == 6 else "store"))
    with pytest.warns(KVDockWarning) as caught:
        run_all(one, 2)
    assert sorted(told(caught)) == [
        f"FailingTier(100) raised OSError in store: the disk is gone. {AGAIN}",
        f"FailingTier(6) raised OSError in load: the disk is gone. {AGAIN}",
    ]
    first, second = one.manager.tier_usage
    assert (first.loaded, second.used, second.stored) == (0, 0, 0)


def test_where_the_first_takes_nothing_the_second_gets_nothing() -> None:
    """What comes to the second comes from the first: it is no second chance for what the first refuses."""
    one = TierEngine("full", 13, (6, 100), fails=lambda tier, _: len(tier.memory) == 6)
    with pytest.warns(KVDockWarning):
        assert run_all(one)[3] == 0
    assert one.tiers[1].calls == []


class Ahead(NumberTier):
    """Raises when it is told what will be loaded."""

    def prefetch(self, blocks: Any) -> None:
        raise RuntimeError(f"{len(blocks)} blocks are too many")


def use(manager: CacheManager, name: int, namespace: tuple[Any, ...] = ()) -> int:
    """Run a prompt of six blocks of 4; return how much of it was found."""
    manager.plan([name] * 24, namespace)
    seq = manager.begin([name] * 24, namespace)
    cached = seq.cached_len
    manager.commit(seq, [], computed=24)
    manager.finish(seq)
    manager.check_integrity()
    return cached


def test_a_hint_that_raises_loses_nothing() -> None:
    manager = CacheManager(12, 4, tiers=[Ahead(100)])
    with pytest.warns(KVDockWarning) as caught:
        assert [use(manager, name) for name in (1, 2, 3, 1, 2)] == [0, 0, 0, 20, 20]
    assert told(caught) == [f"Ahead(num_blocks=100) raised RuntimeError in prefetch: 5 blocks are too many. {AGAIN}"]
    assert manager.tier_usage[0].lost == 0


def test_where_warnings_are_errors_it_is_logged_and_no_call_fails(caplog: pytest.LogCaptureFixture) -> None:
    one = TierEngine("full", 13, (100,), fails=lambda *_: True)
    with warnings.catch_warnings(), caplog.at_level(logging.ERROR, "kvdock"):
        warnings.simplefilter("error", KVDockWarning)
        assert run_all(one)[3] == 0
    assert [record.getMessage() for record in caplog.records] == [f"FailingTier(100) raised OSError in store: the disk is gone. {AGAIN}"]


class Interrupted(BaseException):
    """What a user's key, or a signal, raises anywhere."""


@pytest.mark.parametrize("name", ["full", "full and a window"])
@pytest.mark.parametrize("sizes", [(100,), (6, 100), (100, 6)])
def test_an_interrupted_store_leaves_a_manager_that_goes_on(name: str, sizes: tuple[int, ...]) -> None:
    """Whichever copy it is that is interrupted: from the pool, or from a tier that is full to the next."""
    is_on = [False]

    def fails(tier: Any, what: str) -> bool:
        if is_on[0] and what == "store" and tier is one.tiers[-1 if sizes[0] == 6 else 0]:
            raise Interrupted
        return False

    one = TierEngine(name, 13 if name == "full" else 24, sizes, fails=fails)
    for number in range(8):
        one.run([number] * 24)
    is_on[0] = True
    with pytest.raises(Interrupted):
        [one.run([number] * 24) for number in range(30, 40)]
    is_on[0] = False
    for each in one.all[:]:
        one.end(each, "abort")
    one.check()
    for number in (50, 51, 52, 53):
        one.run([number] * 24)
    assert one.run([53] * 24) == 20
