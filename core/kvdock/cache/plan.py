"""How large a pool would be, without taking memory."""

from __future__ import annotations

import attrs

from kvdock.cache.grouping import grouping
from kvdock.cache.paged_config import PagedKVCacheConfig
from kvdock.errors import ArgumentTypeError
from kvdock.layers.groups import GroupPlan, LayerGroup
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = ["BlockPlan", "plan_blocks"]


@attrs.frozen
class BlockPlan:
    """What a pool for a model would be.

    Args:
        bytes_per_block: bytes of a block, in all layers of its group; blocks of all groups are of one size.
        num_blocks: blocks that the configuration asks for, or that fit into its budget.
        groups: layers that share a block table, and how many tokens a block has there.
    """

    bytes_per_block: int
    num_blocks: int
    groups: tuple[LayerGroup, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that one sequence of so many tokens needs: windows and chunks need their last ones only."""
        return GroupPlan(self.groups, self.bytes_per_block).nbytes(num_tokens)

    def waste(self, num_tokens: int) -> float:
        """Return which part of those bytes holds nothing that it needs, from 0 to 1."""
        return GroupPlan(self.groups, self.bytes_per_block).waste(num_tokens)


def plan_blocks(spec: KVSpec, config: PagedKVCacheConfig, rank: RankInfo, *, in_one_memory: bool = False) -> BlockPlan:
    """Plan a pool for any kinds of layers.

    Layers with one rule of retention form groups that share one pool; see `kvdock.layers.plan_groups` for how they are chosen. It is
    what `create_cache` makes of the same arguments.

    Args:
        spec: what the layers keep.
        config: how large the pool may be, and the least tokens in a block.
        rank: which share of the heads; its device is not touched.
        in_one_memory: whether all is to lie in one buffer, as `PagedKVCache.from_tensors` takes it. Only layers of one kind and one rule
            lie otherwise; places in a block are then rounded up to 16 bytes.

    Raises:
        ArgumentTypeError: an argument of the wrong type.
        ArgumentValueError: heads and ranks do not divide, no layer keeps anything, bytes of groups cannot agree, a layout that these
            layers do not have, or more bytes than an address space has.
        CapacityError: the budget is too small.
    """
    for name, value, kind in (("spec", spec, KVSpec), ("config", config, PagedKVCacheConfig), ("rank", rank, RankInfo)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(f"plan_blocks: {name}", expected=f"a {kind.__name__}", got=repr(value)[:80])
    plan = grouping(spec, config, rank, is_one_memory=in_one_memory).plan
    return BlockPlan(plan.block_bytes, config.blocks_for(plan.block_bytes, len(spec.layers), plan.groups), plan.groups)
