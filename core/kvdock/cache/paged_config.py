"""What the user chooses about a cache in blocks. Which class that is follows from its layers."""

from __future__ import annotations

import attrs

from kvdock.cache.interface import OpSource
from kvdock.cache.mla import MLAKVCache
from kvdock.cache.paged import PagedConfig, PagedKVCache
from kvdock.layers.shared import SharedLayerSpec
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec, MLALayerSpec

__all__ = ["PagedKVCacheConfig"]


@attrs.frozen
class PagedKVCacheConfig(PagedConfig):
    """What the user chooses about a paged cache. Give a budget, a number of blocks, or both.

    Args:
        max_kv_memory_bytes: bound on the bytes of the whole pool: all layers, keys and values. Without ``num_blocks`` the
            pool has as many blocks as fit.
        block_size: tokens in a block.
        num_blocks: blocks of the pool. With a budget too, they must fit into it.
        cache_dtype: dtype of the elements; default is that of the KVSpec.
        layout: which of layer and block is outermost.
        head_layout: which of token and head is outermost in a block.
    """

    def build(self, spec: KVSpec, rank: RankInfo, ops: OpSource) -> PagedKVCache:
        """Make a `PagedKVCache`; where all layers are of latents an `MLAKVCache`, which is one."""
        kind = MLAKVCache if all(isinstance(layer, MLALayerSpec | SharedLayerSpec) for layer in spec.layers) else PagedKVCache
        return kind(spec, self, rank, ops)
