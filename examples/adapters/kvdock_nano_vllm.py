"""kvdock under nano-vllm: its block manager, its cache, and what writes and reads the cache. See README.md beside this file."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

import kvdock
from kvdock.scheduler import CacheSequence


class BlockManager:
    """What nano-vllm's scheduler asks, answered by a `CacheManager`. Its sequences keep their block tables, as lists.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block, at most 512.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = kvdock.CacheManager(num_blocks, block_size)
        self.block_size = block_size
        self.sequences: dict[int, CacheSequence] = {}

    def can_allocate(self, seq: Any) -> int:
        """Return how many blocks of a sequence are cached; -1 if there is no room for the others."""
        fit = self.manager.plan(seq.token_ids)
        return fit.cached_len // self.block_size if fit.fits else -1

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        """Give a sequence blocks for all its tokens; what is cached needs not be computed."""
        held = self.sequences[seq.seq_id] = self.manager.begin(seq.token_ids)
        seq.num_cached_tokens, seq.block_table = held.cached_len, held.block_table().tolist()

    def deallocate(self, seq: Any) -> None:
        """Take the blocks back, from one that is done or has to wait. Whole blocks that are computed stay cached."""
        self.manager.finish(self.sequences.pop(seq.seq_id))
        seq.num_cached_tokens, seq.block_table = 0, []

    def can_append(self, seq: Any) -> bool:
        """Say whether there is room for the last token."""
        return len(seq) <= len(seq.block_table) * self.block_size or self.manager.available_size > 0

    def may_append(self, seq: Any) -> None:
        """Make room for the last token, and for those that fit into the same block: one call for a whole block."""
        held = self.sequences[seq.seq_id]
        if len(seq) > held.num_tokens:
            self.manager.extend(held, self.block_size - held.num_tokens % self.block_size)
            seq.block_table = held.block_table().tolist()

    def hash_blocks(self, seq: Any) -> None:
        """Let others find what a step has computed, once it fills a block."""
        held = self.sequences[seq.seq_id]
        whole = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size * self.block_size
        if whole > held.computed:
            version = held.table_version
            self.manager.commit(held, seq.token_ids[held.num_known : whole], computed=whole)
            if held.table_version != version:  # another has computed the same meanwhile: go on with its blocks
                seq.block_table = held.block_table().tolist()


def store_kvcache(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values ``[tokens, heads, dim]`` into a layer's cache; the kernel follows from the device."""
    kvdock.ops.paged_caching_(k_cache, v_cache, key, value, slot_mapping)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from prompts, or parts of prompts, ``[tokens, heads, dim]``, by the name under which nano-vllm calls it.

    Keys lie in the blocks of a layer's cache; without a table they are in hand, one sequence behind the other, and nothing is cached
    of them yet: such rows are blocks of one token each.
    """
    if block_table is None:
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        block_table = cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
    return kvdock.ops.paged_attention(
        q,
        k,
        v,
        block_table,
        cu_seqlens_k.diff(),
        cu_query_lens=cu_seqlens_q,
        max_query_len=max_seqlen_q,
        scale=softmax_scale,
        causal=causal,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Attend from one token of each sequence, ``[sequences, 1, heads, dim]``, to a layer's cache; rows of length 0 are padding."""
    seen = kvdock.ops.paged_attention(q.squeeze(1), k_cache, v_cache, block_table, cache_seqlens, scale=softmax_scale, causal=causal)
    return seen.unsqueeze(1)


def adopt_kv_cache(runner: Any) -> None:
    """Put a `PagedKVCache` of the same size in the place of the cache that a model runner has measured and made."""
    layers = [module for module in runner.model.modules() if hasattr(module, "k_cache") and hasattr(module, "v_cache")]
    num_blocks, block_size, heads, dim = layers[0].k_cache.shape
    dtype, device = layers[0].k_cache.dtype, layers[0].k_cache.device
    runner.kv_cache = None
    for layer in layers:
        layer.k_cache = layer.v_cache = None  # so that their memory is free again
    spec = kvdock.KVSpec.uniform(
        num_layers=len(layers), num_kv_heads=heads, head_dim=dim, max_positions=num_blocks * block_size, dtype=dtype
    )
    runner.kv_cache = kvdock.create_cache(
        spec, kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size), kvdock.RankInfo(device)
    )
    for number, layer in enumerate(layers):
        layer.k_cache, layer.v_cache = runner.kv_cache.k_cache(number), runner.kv_cache.v_cache(number)


def install() -> None:
    """Let nano-vllm use all that, in this process; call it before an ``LLM`` is made. The package flash-attn need not be there."""
    lacking = importlib.util.find_spec("flash_attn") is None
    if lacking:  # what it imports from there has the same names here
        sys.modules["flash_attn"] = sys.modules[__name__]
    from nanovllm.engine import model_runner, scheduler
    from nanovllm.layers import attention

    if lacking:
        del sys.modules["flash_attn"]
    measure = model_runner.ModelRunner.allocate_kv_cache

    def allocate_kv_cache(runner: Any) -> None:
        measure(runner)
        adopt_kv_cache(runner)

    model_runner.ModelRunner.allocate_kv_cache = allocate_kv_cache
    scheduler.BlockManager, attention.store_kvcache = BlockManager, store_kvcache
    attention.flash_attn_varlen_func, attention.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
