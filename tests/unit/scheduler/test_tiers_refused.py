"""Managers with tiers: what they refuse, in whole texts, and that nothing has changed then."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from kvdock.scheduler import CacheManager, NumberTier
from support_tiers import TierEngine

LIST = "Fix: pass a list, such as [kvdock.HostTier(8 << 30).bind(cache)]"
IDS = "Fix: pass ids as int32 or int64"


def whole(text: str) -> str:
    """Return what matches this text only, from its beginning to its end."""
    return f"^{re.escape(text)}$"


def filled() -> TierEngine:
    """Return an engine whose first prompt, 24 times 101, is in the tier and no longer in the pool."""
    one = TierEngine("full", 13, (100,))
    for number in (101, 102, 103):
        one.run([number] * 24)
    return one


class Sized(NumberTier):
    """Says that it has as many blocks as it is told, whatever that is."""

    def __init__(self, size: Any) -> None:
        super().__init__(1)
        self.size = size

    @property
    def num_blocks(self) -> Any:
        return self.size


@pytest.mark.parametrize(
    ("tiers", "error", "text"),
    [
        (None, ArgumentTypeError, f"CacheManager: tiers: expected Tiers, got None. {LIST}"),
        (NumberTier(3), ArgumentTypeError, f"CacheManager: tiers: expected Tiers, got NumberTier(num_blocks=3). {LIST}"),
        (b"ab", ArgumentTypeError, f"CacheManager: tiers: expected Tiers, got b'ab'. {LIST}"),
        ({1: NumberTier(3)}, ArgumentTypeError, f"CacheManager: tiers: expected Tiers, got {{1: NumberTier(num_blocks=3)}}. {LIST}"),
        ([NumberTier], ArgumentTypeError, f"CacheManager: tiers: expected Tiers, got {[NumberTier]}. {LIST}"),
        ([Sized(0)], ArgumentValueError, "CacheManager: tiers: num_blocks of Sized(num_blocks=1): expected at least 1, got 0"),
        (
            [Sized(True)],
            ArgumentTypeError,
            "CacheManager: tiers: num_blocks of Sized(num_blocks=1): expected an int of at least 1, got True",
        ),
        (
            [Sized(2**31 + 1)],
            ArgumentValueError,
            f"CacheManager: tiers: num_blocks of Sized(num_blocks=1): expected at most {2**31}, got {2**31 + 1}. "
            "Fix: make it smaller, or several tiers of it",
        ),
        ([Sized(2.0)], ArgumentTypeError, "CacheManager: tiers: num_blocks of Sized(num_blocks=1): expected an int of at least 1, got 2.0"),
    ],
)
def test_what_is_no_tier_is_refused_in_whole_words(tiers: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=whole(text)):
        CacheManager(4, 4, tiers=tiers)


def test_numbers_of_numpy_are_sizes_and_a_tuple_is_a_list_of_tiers() -> None:
    manager = CacheManager(4, 4, tiers=(NumberTier(np.int32(3)), Sized(np.int64(2))))  # type: ignore[arg-type]
    assert [usage.num_blocks for usage in manager.tier_usage] == [3, 2]


def test_a_tier_is_one_managers_as_long_as_that_is_there() -> None:
    tier = NumberTier(3)
    manager = CacheManager(4, 4, tiers=[tier])
    text = (
        "CacheManager: tiers: expected tiers that no other manager has, got NumberTier(num_blocks=3). "
        "Fix: make a tier for each manager, or let go of the other manager first"
    )
    with pytest.raises(ArgumentValueError, match=whole(text)):
        CacheManager(4, 4, tiers=[NumberTier(2), tier])
    manager.check_integrity()
    del manager
    assert CacheManager(4, 4, tiers=[tier]).tier_usage[0].num_blocks == 3


def test_a_manager_that_could_not_be_made_has_taken_no_tier() -> None:
    tier = NumberTier(3)
    with pytest.raises(ArgumentTypeError, match="clock"):
        CacheManager(4, 4, tiers=[tier], clock=5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="num_blocks"):
        CacheManager(0, 4, tiers=[tier])
    assert CacheManager(4, 4, tiers=[tier]).tier_usage[0].used == 0


PRIORITIES = [
    ("high", ArgumentTypeError, "expected an int, got 'high'"),
    (1.5, ArgumentTypeError, "expected an int, got 1.5"),
    (True, ArgumentTypeError, "expected an int, got True"),
    (2**63, ArgumentValueError, f"expected an int of at most 64 bits, got {2**63}"),
    (-(2**63) - 1, ArgumentValueError, f"expected an int of at most 64 bits, got {-(2**63) - 1}"),
]


@pytest.mark.parametrize("method", ["begin", "fetch"])
@pytest.mark.parametrize(("priority", "error", "text"), PRIORITIES)
def test_a_priority_is_looked_at_before_anything_comes_back(method: str, priority: Any, error: type[Exception], text: str) -> None:
    one = filled()
    before = one.manager.tier_usage, one.manager.prefix.stored_blocks().tolist()
    with pytest.raises(error, match=whole(f"CacheManager.{method}: priority: {text}")):
        getattr(one.manager, method)([101] * 24, priority=priority)
    one.check()
    assert (one.manager.tier_usage, one.manager.prefix.stored_blocks().tolist()) == before
    assert one.run([101] * 24) == 20


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (([],), ArgumentValueError, "at least one token, got none. Fix: refuse an empty request, or open_empty() a sequence whose ids"),
        (("ab",), ArgumentTypeError, f"CacheManager.fetch: tokens: expected integers of at most 64 bits, got <U2. {IDS}"),
        (([1.5],), ArgumentTypeError, f"CacheManager.fetch: tokens: expected integers of at most 64 bits, got float64. {IDS}"),
        (([101] * 24, 5), ArgumentTypeError, 'namespace: expected a tuple, got 5. Fix: name what it is: ("tenant", "a")'),
        (([101] * 24, "a"), ArgumentTypeError, 'namespace: expected a tuple, got \'a\'. Fix: name what it is: ("tenant", "a")'),
    ],
)
def test_what_cannot_be_fetched_is_said_and_changes_nothing(args: Any, error: type[Exception], text: str) -> None:
    one = filled()
    before = one.manager.tier_usage
    with pytest.raises(error, match=re.escape(text)):
        one.manager.fetch(*args)
    one.check()
    assert one.manager.tier_usage == before
    assert one.manager.fetch([101] * 24) == 20


def test_a_pin_of_more_than_tiers_have_is_refused_and_holds_nothing() -> None:
    one = filled()
    text = (
        "CacheManager.pin: tokens: expected at least a block of 4 tokens that are cached, got 48 tokens, of which 24 are cached. "
        "Fix: compute and commit the prefix first, and pin it before it is evicted"
    )
    with pytest.raises(ArgumentValueError, match=whole(text)):
        one.manager.pin([101] * 24 + [9] * 24)
    one.check()
    one.manager.reset()


def test_what_tiers_have_does_not_break_a_promise() -> None:
    one = filled()
    promised = one.begin([9] * 4, reserve=40)
    assert promised is not None
    with pytest.raises(OutOfBlocksError):
        one.manager.begin([101] * 24)
    assert one.manager.fetch([101] * 24) == 0
    one.check()
    assert one.manager.tier_usage[0].loaded == 0
    for _ in range(40):
        assert one.step(promised)
