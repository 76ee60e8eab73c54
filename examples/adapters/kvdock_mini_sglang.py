"""kvdock under mini-sglang: its prefix cache and its pool of keys and values. See README.md beside this file.

Its unit is the slot of a token ("index"), and sizes are tokens; kvdock's is the block, which is a page there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from minisgl.kvcache.base import BaseCacheHandle, BaseKVCachePool, BasePrefixCache, InsertResult, MatchResult, SizeInfo

import kvdock


@dataclass(frozen=True, eq=False)
class Handle(BaseCacheHandle):
    """The end of a stored prefix, and the slots of its tokens."""

    found: Any
    device: torch.device

    def get_matched_indices(self) -> torch.Tensor:
        """Return the slots, int32 ``[cached_len]``; good while the handle is locked."""
        return torch.from_numpy(self.found.indices).to(self.device)


class PrefixCache(BasePrefixCache):
    """A prefix cache of kvdock's.

    Args:
        device: where slots are wanted.
        page_size: tokens in a page.
        name: "radix", or a plugin's.
    """

    def __init__(self, device: torch.device, page_size: int, name: str = "radix") -> None:
        self.device, self.page_size = device, page_size
        self.prefix = kvdock.create_prefix_cache(name, block_size=page_size)

    def lock_handle(self, handle: Handle, unlock: bool = False) -> None:
        """Protect a prefix from eviction, or give one protection back."""
        self.prefix.lock_handle(handle.found.handle, unlock=unlock)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        """Find the longest stored prefix, in whole pages."""
        return MatchResult(self._handle(self.prefix.match_prefix(input_ids)))

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        """Store whole pages. Slots from what was locked to ``cached_len`` are duplicates: free them, and use the handle's."""
        whole = len(input_ids) // self.page_size * self.page_size
        result = self.prefix.insert_prefix(input_ids[:whole], indices[: whole : self.page_size].cpu() // self.page_size)
        return InsertResult(result.cached_len, self._handle(result))

    def evict(self, size: int) -> torch.Tensor:
        """Forget ``size`` tokens, rounded up to pages; return their slots."""
        try:
            blocks = self.prefix.evict(-(-size // self.page_size))
        except kvdock.OutOfBlocksError as error:
            raise RuntimeError(str(error)) from error
        slots = blocks[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)
        return torch.from_numpy(slots.ravel()).to(self.device)

    def reset(self) -> None:
        """Forget everything."""
        self.prefix.reset()

    @property
    def size_info(self) -> SizeInfo:
        """How many tokens are stored."""
        return SizeInfo(self.prefix.size_info.evictable_size, self.prefix.size_info.protected_size)

    def check_integrity(self) -> None:
        """Raise if the bookkeeping is broken."""
        self.prefix.check_integrity()

    def _handle(self, found: Any) -> Handle:
        """Make a handle of what a match or an insertion gave."""
        return Handle(found.handle.cached_len, found, self.device)


class KVCachePool(BaseKVCachePool):
    """A `PagedKVCache`: one tensor of keys and one of values for each layer, ``[pages, page size, heads, dim]``."""

    def __init__(self, cache: kvdock.PagedKVCache) -> None:
        self.cache = cache

    def k_cache(self, index: int) -> torch.Tensor:
        """Return a layer's keys."""
        return self.cache.k_cache(index)

    def v_cache(self, index: int) -> torch.Tensor:
        """Return a layer's values."""
        return self.cache.v_cache(index)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        """Write keys and values of tokens, heads side by side or ``[tokens, heads, dim]``, into their slots."""
        rows, shape = len(out_loc), self.cache.k_cache(layer_id).shape[2:]
        self.cache.update(layer_id, k.view(rows, *shape), v.view(rows, *shape), out_loc)

    device = property(lambda self: self.cache.device)
    dtype = property(lambda self: self.cache.dtype)
    num_layers = property(lambda self: self.cache.num_layers)


def create_kvcache_pool(model_config: Any, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVCachePool:
    """Make the pool of one rank."""
    from minisgl.distributed import get_tp_info

    heads, dim, positions = model_config.num_kv_heads, model_config.head_dim, num_pages * page_size
    spec = kvdock.KVSpec.uniform(num_layers=model_config.num_layers, num_kv_heads=heads, head_dim=dim, max_positions=positions, dtype=dtype)
    rank = kvdock.RankInfo(device, get_tp_info().size, get_tp_info().rank)
    return KVCachePool(kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=num_pages, block_size=page_size), rank))


def install() -> None:
    """Let mini-sglang know it, in this process: as the cache type "kvdock", and as the pool of every engine."""
    from minisgl import kvcache
    from minisgl.core import get_global_ctx
    from minisgl.engine import engine

    kvcache.SUPPORTED_CACHE_MANAGER.register("kvdock")(lambda device: PrefixCache(device, get_global_ctx().page_size))
    engine.create_kvcache_pool = create_kvcache_pool
