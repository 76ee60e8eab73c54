"""Host tiers: what they refuse, in whole texts, and a pool that is not the one they are bound to."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, CapacityError, KVDockWarning
from kvdock.spec import KVSpec, LayerSpec
from kvdock.tiers import HostTier, NumberTier
from kvdock.tiers.host import bound_tiers

LIST = "Fix: pass a list, such as [kvdock.HostTier(8 << 30).bind(cache)]"


def whole(text: str) -> str:
    """Return what matches this text only, from its beginning to its end."""
    return f"^{re.escape(text)}$"


def cache_of(num_blocks: int) -> Any:
    spec = KVSpec(layers=(LayerSpec(2, 2, 8, 4),), max_positions=512, dtype=torch.float32)
    return kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=4), kvdock.RankInfo("cpu"))


@pytest.mark.parametrize("what", ["memory", "num_blocks"])
def test_what_has_no_cache_yet_has_no_memory(what: str) -> None:
    text = "HostTier: expected one that is bound to a cache, got HostTier(7). Fix: call bind(cache) with the cache of the manager's blocks"
    with pytest.raises(ArgumentValueError, match=whole(text)):
        getattr(HostTier(7), what)


def test_a_byte_less_than_a_block_is_too_small_and_binds_nothing() -> None:
    cache = cache_of(4)
    tier = HostTier(cache.nbytes // 4 - 1)
    with pytest.raises(CapacityError):
        tier.bind(cache)
    assert repr(tier) == f"HostTier({cache.nbytes // 4 - 1})", "it is as unbound as before"
    assert HostTier(cache.nbytes // 4).bind(cache).num_blocks == 1


@pytest.mark.parametrize(
    ("tiers", "error", "text"),
    [
        (5, ArgumentTypeError, f"made: tiers: expected Tiers, got 5. {LIST}"),
        ([HostTier(64), 5], ArgumentTypeError, f"made: tiers: expected Tiers, got [HostTier(64), 5]. {LIST}"),
        (
            [one := NumberTier(1)] * 2,
            ArgumentValueError,
            f"made: tiers: expected each tier once, got {[one] * 2}. Fix: make a tier for each place",
        ),
    ],
)
def test_what_cannot_all_be_bound_is_refused_before_any_is(tiers: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=whole(text)):
        bound_tiers("made", tiers, cache_of(4))


def test_a_tier_of_another_cache_is_refused_and_the_others_stay_unbound() -> None:
    cache, other = cache_of(4), cache_of(4)
    foreign, free = HostTier(other.nbytes).bind(other), HostTier(cache.nbytes)
    text = (
        f"made: tiers: expected host tiers of this cache, or of none, got HostTier({other.nbytes}, num_blocks=4). "
        "Fix: pass it unbound, or make a tier for each cache"
    )
    with pytest.raises(ArgumentValueError, match=whole(text)):
        bound_tiers("made", [free, foreign], cache)
    assert repr(free) == f"HostTier({cache.nbytes})"
    mine = HostTier(cache.nbytes).bind(cache)
    assert bound_tiers("made", (free, mine), cache) == (free, mine)
    assert free.num_blocks == 4


def test_a_tier_of_a_smaller_cache_loses_what_it_cannot_name_and_says_so() -> None:
    """A manager has numbers only: which cache they are of it cannot see."""
    small = cache_of(2)
    manager = kvdock.CacheManager(12, 4, tiers=[HostTier(small.nbytes).bind(small)])

    def run(name: int) -> int:
        seq = manager.begin([name] * 24)
        cached = seq.cached_len
        manager.commit(seq, [], computed=24)
        manager.finish(seq)
        manager.check_integrity()
        return cached

    with pytest.warns(KVDockWarning, match=r"^HostTier\(\d+, num_blocks=2\) raised IndexRangeError in store: ") as caught:
        assert [run(name) for name in (1, 2, 3, 4, 1)] == [0] * 5
    assert len(caught) == 1
    assert manager.tier_usage[0].lost > 0


def test_a_host_tier_of_one_block_brings_that_block_back() -> None:
    cache = cache_of(6)
    manager = kvdock.CacheManager(6, groups=cache.groups, tiers=[HostTier(cache.nbytes // 6).bind(cache)])
    seq, buffers = manager.begin([1] * 8), list(cache.buffers(0).values())
    for view in buffers:
        view[seq.block_table()[0]] = 7.0
    manager.commit(seq, [], computed=8)
    manager.finish(seq)
    big = manager.begin([2] * 24)
    for view in buffers:
        view[:] = -1.0
    manager.abort(big)
    back = manager.begin([1] * 8)
    assert back.cached_len == 4
    assert all((view[back.block_table()[0]] == 7.0).all() for view in buffers)
    manager.check_integrity()
