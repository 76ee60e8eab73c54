"""Layers with states in files: a prompt goes on behind each checkpoint that was cached, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from kvdock.files import Loaded, load_pool, load_prefix, save_pool, save_prefix
from support_files import cached, compute, pool

KINDS = ("states", "states and windows", "only states")


def turns(manager: kvdock.CacheManager) -> list[list[int]]:
    """Return a prompt and two that go on behind it, in different ways, in whole units."""
    unit = manager.block_size
    first = list(range(2 * unit))
    return [first, [*first, *range(1000, 1000 + 3 * unit)], [*first, *range(2000, 2000 + unit)]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_checkpoint_of_a_pool_comes_back(tmp_path: Path, kind: str) -> None:
    cache, manager = pool(kind, num_blocks=400)
    prompts = turns(manager)
    for ids in prompts:
        compute(cache, manager, ids)
    saved = save_pool(tmp_path / "p", manager, cache)
    assert saved.num_prefixes == 3, "each ends with a checkpoint"
    other, others = pool(kind, num_blocks=400)
    assert load_pool(tmp_path / "p", others, other) == Loaded(3, 3, 6 * others.block_size, 6 * others.block_size)
    for ids in prompts:
        assert cached(other, others, [*ids, 7]) == len(ids)
    assert cached(other, others, [*prompts[0], *range(1000, 1000 + others.block_size)]) == len(prompts[0]), "within, there is no state"
    compute(other, others, [*prompts[0], 5, 6, 7])  # compares what it begins with
    others.check_integrity()
    assert (others.num_sequences, others.prefix.num_locks) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_saved_as_far_as_its_last_checkpoint(tmp_path: Path, kind: str) -> None:
    cache, manager = pool(kind, num_blocks=400)
    first, longer, _ = turns(manager)
    compute(cache, manager, first)
    compute(cache, manager, longer)
    assert save_prefix(tmp_path / "p", manager, cache, longer[:-1]).num_tokens == len(first)
    other, others = pool(kind, num_blocks=400)
    assert load_prefix(tmp_path / "p", others, other).num_loaded == len(first)
    assert cached(other, others, longer) == len(first)
    save_prefix(tmp_path / "p", manager, cache, longer)
    assert load_prefix(tmp_path / "p", others, other).num_loaded == len(longer) - len(first), "it goes on behind the checkpoint"
    assert cached(other, others, longer) == len(longer)
    assert load_prefix(tmp_path / "p", others, other).num_loaded == 0


def test_without_a_checkpoint_there_is_nothing_to_save(tmp_path: Path) -> None:
    cache, manager = pool("states")
    seq = manager.begin(ids := list(range(3 * manager.block_size)))  # not in chunks
    manager.commit(seq, (), computed=len(ids))
    manager.finish(seq)
    assert manager.prefix.size_info.total_size == len(ids)
    with pytest.raises(ArgumentValueError, match=r"save_prefix: tokens: expected at least a block of .* tokens that are cached"):
        save_prefix(tmp_path / "p", manager, cache, ids)
    with pytest.raises(ArgumentValueError, match=r"save_pool: manager: expected one that has cached something.*Fix: .*at_most"):
        save_pool(tmp_path / "p", manager, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_there_without_their_state_get_it(tmp_path: Path, kind: str) -> None:
    cache, manager = pool(kind, num_blocks=400)
    _, ids, _ = turns(manager)
    compute(cache, manager, ids)
    save_prefix(tmp_path / "p", manager, cache, ids)
    other, others = pool(kind, num_blocks=400)
    compute(other, others, ids)
    used = others.blocks_used
    units = others._pool.units  # type: ignore[attr-defined] # of several groups
    units.drop(2, ends=False)  # as for others that need room: what was let go longest ago
    units.drop(2, ends=True)
    assert others.blocks_used < used
    assert cached(other, others, ids) == 0
    assert load_prefix(tmp_path / "p", others, other).num_loaded == len(ids)
    assert cached(other, others, ids) == len(ids)
    assert others.blocks_used <= used, "of windows only what the end needs"
    others.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", range(0, 40, 3))
def test_a_pool_with_little_room_evicts_nothing(tmp_path: Path, kind: str, room: int) -> None:
    cache, manager = pool(kind, num_blocks=400)
    prompts = turns(manager)
    for ids in prompts:
        compute(cache, manager, ids)
    save_pool(tmp_path / "p", manager, cache)
    other, others = pool(kind, num_blocks=60)
    mine = list(range(5000, 5000 + 2 * others.block_size))
    compute(other, others, mine)
    begun = []
    while others._pool.num_blocks - others.blocks_used > room:
        try:
            begun.append(others.begin(range(9000, 9000 + others.block_size)))
        except OutOfBlocksError:
            break
    free, there, gone = others._pool.num_blocks - others.blocks_used, cached(other, others, mine), others.prefix.stats.evictions
    found = load_pool(tmp_path / "p", others, other)
    assert sum(cached(other, others, ids) == len(ids) for ids in prompts) == found.num_prefixes
    assert (cached(other, others, mine), others.prefix.stats.evictions) == (there, gone)
    assert others._pool.num_blocks - others.blocks_used <= free
    for seq in begun:
        others.abort(seq)
    others.check_integrity()
    if room > 36:
        assert found.num_prefixes == 3


def test_what_a_tier_has_is_not_read_again(tmp_path: Path) -> None:
    cache, manager = pool("states", num_blocks=400)
    first, longer, _ = turns(manager)
    compute(cache, manager, first)
    compute(cache, manager, longer)
    save_prefix(tmp_path / "p", manager, cache, longer)
    other, _ = pool("states", num_blocks=400)
    others = kvdock.CacheManager(400, groups=other.groups, tiers=[kvdock.HostTier(2**20).bind(other)])
    compute(other, others, first)
    others.prefix.size_info.total_size and others._pool.evict(len(first) // others.block_size)
    assert cached(other, others, first) == 0
    assert load_prefix(tmp_path / "p", others, other).num_loaded == len(longer) - len(first)
    assert cached(other, others, longer) == len(longer)
    others.check_integrity()


def test_a_manager_of_other_tables_is_refused(tmp_path: Path) -> None:
    cache, _ = pool("only states")
    spec = kvdock.KVSpec([kvdock.LayerSpec(1, 1, 8, 8)], max_positions=64, dtype=cache.dtype)
    tokens: Any = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=64, block_size=1), kvdock.RankInfo("cpu"))
    manager = kvdock.CacheManager(64, groups=tokens.groups)
    with pytest.raises(ArgumentValueError, match=r"save_pool: manager: expected the manager of this cache.*Fix: make it with CacheManager"):
        save_pool(tmp_path / "p", manager, cache)


def test_what_keeps_no_states_is_refused(tmp_path: Path) -> None:
    cache, manager = pool("states")
    with pytest.raises(
        ArgumentTypeError, match=r"save_pool: beside: expected a kvdock.files.Beside, or None, got 'x'.*Fix: pass who keeps"
    ):
        save_pool(tmp_path / "p", manager, cache, beside="x")  # type: ignore[arg-type] # on purpose
