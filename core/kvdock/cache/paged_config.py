"""What the user chooses about a cache in blocks. Which class that is follows from its layers."""

from __future__ import annotations

import attrs

from kvdock.cache.grouping import only_use, rank_parts
from kvdock.cache.interface import OpSource
from kvdock.cache.mixed import MixedKVCache
from kvdock.cache.mla import MLAKVCache
from kvdock.cache.paged import PagedKVCache
from kvdock.cache.paged_options import Given, PagedConfig
from kvdock.cache.uses import KeysAndValues, Latents, Use
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

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
        layout: which of layer and block is outermost. None is LAYER_FIRST where all layers keep keys and values, or all latents, by one
            rule of retention; others lie in one memory block by block, as do all in an engine's one buffer.
        head_layout: which of token and head is outermost in a block.
        alignment: bytes that the address of each memory is a multiple of, and so what lies together of each block: a power of two. Where
            the allocator gives less, so many bytes are taken beyond the budget.
        keep_all: whether layers with windows or chunks keep all tokens too, as full attention does. Where all layers keep something of
            each token, they are one group then, with one block table; states are groups of their own either way.
        pinned_for: of a cache in host memory, the device whose kernels are to read and write it themselves. Its memory is of exact
            size then, and page-locked in the background: see `kvdock.cache.swapping.host_cache`.
    """

    def build(self, spec: KVSpec, rank: RankInfo, ops: OpSource) -> PagedKVCache:
        """Make a `PagedKVCache`: an `MLAKVCache` of latents alone, a `MixedKVCache` of several kinds or rules."""
        return self.build_on(None, spec, rank, ops)

    def build_on(self, tensors: Given | None, spec: KVSpec, rank: RankInfo, ops: OpSource) -> PagedKVCache:
        """Make the same, in given tensors."""
        use = only_use(rank_parts(spec, self, rank))
        return _CLASSES[use](spec, self, rank, ops, tensors)


_CLASSES: dict[type[Use] | None, type[PagedKVCache]] = {KeysAndValues: PagedKVCache, Latents: MLAKVCache, None: MixedKVCache}
