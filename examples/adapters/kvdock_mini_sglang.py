"""kvdock under mini-sglang: its prefix cache, its pool of keys and values, and its attention. See README.md beside this file.

Its unit is the slot of a token ("index"), and sizes are tokens; kvdock's is the block, which is a page there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from minisgl.attention.base import BaseAttnBackend, BaseAttnMetadata
from minisgl.core import get_global_ctx
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


@dataclass
class AttnMetadata(BaseAttnMetadata):
    """What attention needs to know of a batch, once for all layers."""

    block_table: torch.Tensor  # [requests, pages], int32
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    max_query_len: int = 1

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Return which rows are the last of each request."""
        return self.cu_query_lens[1 : bs + 1] - 1


class AttnBackend(BaseAttnBackend):
    """Attention that reads the pool's pages where they lie: prompts, parts of prompts, and decoding.

    Args:
        config: the model's; nothing of it is needed.
    """

    def __init__(self, config: Any) -> None:
        context = get_global_ctx()
        self.pool, self.page_table, self.page_size = context.kv_cache, context.page_table, context.page_size

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Any,
        *,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
    ) -> torch.Tensor:
        """Store a layer's new keys and values, and attend to all that their requests have; ``window_size``: as flash-attn counts it."""
        told = batch.attn_metadata
        self.pool.store_kv(k, v, batch.out_loc, layer_id)
        return self.pool.cache.attend(
            layer_id,
            q,
            told.block_table,
            told.seq_lens,
            cu_query_lens=told.cu_query_lens,
            max_query_len=told.max_query_len,
            scale=softmax_scale,
            window=window_size[0] + 1 or None,
        )

    def prepare_metadata(self, batch: Any) -> None:
        """Read pages and lengths of a batch's requests, padding included: one copy to the device."""
        reqs, device = batch.padded_reqs, self.pool.device
        counts, lens = [req.extend_len for req in reqs], [req.device_len for req in reqs]
        host = torch.tensor(
            [[req.table_idx for req in reqs] + [0], [*lens, 0], np.cumsum([0, *counts]).tolist()],
            dtype=torch.int32,
            pin_memory=device.type != "cpu",
        )
        rows, seq_lens, cu_query_lens = host.to(device, non_blocking=True)
        slots = self.page_table[:, : max(lens) : self.page_size]  # of the first token of each page
        batch.attn_metadata = AttnMetadata(slots[rows[:-1]] // self.page_size, seq_lens[:-1], cu_query_lens, max(counts))

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        """Make what captured graphs will read, for the largest of them."""
        most, where = max(bs_list), {"dtype": torch.int32, "device": self.pool.device}
        table = torch.zeros(most, -(-max_seq_len // self.page_size), **where)
        self.captured = AttnMetadata(table, torch.zeros(most, **where), torch.arange(most + 1, **where))

    def prepare_for_capture(self, batch: Any) -> None:
        """Let a batch be one that a graph is captured of."""
        batch.attn_metadata = self._captured(batch.size)

    def prepare_for_replay(self, batch: Any) -> None:
        """Put a prepared batch where the graph of its padded size reads it."""
        told, captured = batch.attn_metadata, self._captured(batch.padded_size)
        captured.block_table[:, : told.block_table.shape[1]] = told.block_table
        captured.seq_lens.copy_(told.seq_lens)

    def _captured(self, rows: int) -> AttnMetadata:
        whole = self.captured
        return AttnMetadata(whole.block_table[:rows], whole.seq_lens[:rows], whole.cu_query_lens[: rows + 1])


def create_kvcache_pool(model_config: Any, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVCachePool:
    """Make the pool of one rank."""
    from minisgl.distributed import get_tp_info

    heads, dim, positions = model_config.num_kv_heads, model_config.head_dim, num_pages * page_size
    spec = kvdock.KVSpec.uniform(num_layers=model_config.num_layers, num_kv_heads=heads, head_dim=dim, max_positions=positions, dtype=dtype)
    rank = kvdock.RankInfo(device, get_tp_info().size, get_tp_info().rank)
    return KVCachePool(kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=num_pages, block_size=page_size), rank))


def install() -> None:
    """Let mini-sglang know it, in this process: as cache type "kvdock", as attention "kvdock", and as the pool of every engine."""
    from minisgl import attention, kvcache
    from minisgl.engine import engine

    kvcache.SUPPORTED_CACHE_MANAGER.register("kvdock")(lambda device: PrefixCache(device, get_global_ctx().page_size))
    attention.SUPPORTED_ATTENTION_BACKENDS.register("kvdock")(AttnBackend)
    engine.create_kvcache_pool = create_kvcache_pool
