"""Which blocks a manager has: those of one layer group that keeps all tokens, or units of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvdock.errors import ArgumentValueError
from kvdock.layers.groups import LayerGroup
from kvdock.prefix.factory import prefix_cache_of_pool
from kvdock.prefix.inputs import check_block_size, count_of
from kvdock.prefix.interface import PrefixCache
from kvdock.scheduler.block_allocator import BlockAllocator, checked_num_blocks
from kvdock.scheduler.grouped_blocks import GroupedBlocks
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Rows
from kvdock.scheduler.tier import Tier, checked_tiers
from kvdock.scheduler.tiers import Tiers
from kvdock.scheduler.units import UnitBlocks, checked_groups

__all__ = ["pool_of"]

_SUBJECT, _BLOCK_SIZE = "CacheManager", 16


def pool_of(
    num_blocks: int,
    block_size: int | None,
    prefix: str | PrefixCache,
    groups: Sequence[LayerGroup] | None,
    state_interval: int,
    *,
    null_block: bool,
    tiers: Sequence[Tier],
    options: Mapping[str, Any],
) -> tuple[PoolBlocks, Rows]:
    """Return the blocks of a manager, and the rows of its sequences. The arguments are those of `kvdock.CacheManager`."""
    places = checked_tiers(_SUBJECT, tiers)
    interval = count_of(f"{_SUBJECT}: state_interval", state_interval, 1)
    found = () if groups is None else checked_groups(_SUBJECT, groups)
    count_of(f"{_SUBJECT}: num_blocks", num_blocks, 1)
    if len(found) > 1 or not all(group.retention.keeps_all for group in found):
        size = _BLOCK_SIZE if block_size is None else check_block_size(_SUBJECT, block_size)
        units = UnitBlocks(found, num_blocks, size, null_block=null_block)
        _check_given(block_size, units.num_tokens)
        made = prefix_cache_of_pool(
            _SUBJECT, prefix, num_blocks=units.ids.num_blocks, block_size=check_block_size(_SUBJECT, units.num_tokens), options=options
        )
        rows = Rows(units.num_tokens)
        return _with_tiers(GroupedBlocks(units, made, rows, interval), places, units.num_lasting, units.table.shape[1]), rows
    size = check_block_size(_SUBJECT, found[0].block_size if found else _BLOCK_SIZE if block_size is None else block_size)
    _check_given(block_size, size)
    checked_num_blocks(_SUBJECT, num_blocks, size)
    made = prefix_cache_of_pool(_SUBJECT, prefix, num_blocks=num_blocks, block_size=size, options=options)
    rows = Rows(size)
    return _with_tiers(PoolBlocks(BlockAllocator(num_blocks), made, rows, null_block=null_block), places, 1, 1), rows


def _with_tiers(pool: PoolBlocks, tiers: Sequence[Tier], per_unit: int, columns: int) -> PoolBlocks:
    if tiers:
        size = pool.prefix.block_size
        pool.tiers = Tiers(tiers, pool.allocator.num_blocks, per_unit=per_unit, columns=columns, block_size=size)
        pool.allocators += tuple(level.blocks for level in pool.tiers.levels)  # where blocks go in tiers is decided, too
    return pool


def _check_given(block_size: int | None, follows: int) -> None:
    if block_size is not None and block_size != follows:
        expected = f"{follows} tokens, in which blocks of all groups end together"
        raise ArgumentValueError(
            f"{_SUBJECT}: block_size", expected=expected, got=block_size, fix="leave it out: it follows from the groups"
        )
