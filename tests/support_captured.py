"""A decode step with two layers of attention over a paged cache, and a run of it without any graph to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import kvdock
from kvdock.scheduler import BatchTables, CacheSequence, TableViews

HEADS, KV_HEADS, DIM, VOCABULARY, BLOCK, LAYERS = 4, 2, 32, 50, 4, 2


class Decoder:
    """A small decoder, its cache and its manager. Counts how often its step is called."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, num_blocks: int = 64) -> None:
        random = torch.Generator().manual_seed(3)
        width = HEADS * DIM
        self.embedding = torch.randn(VOCABULARY, width, generator=random).to(device, dtype)
        qkv = torch.randn(LAYERS, width, (HEADS + 2 * KV_HEADS) * DIM, generator=random) / width**0.5
        self.qkv = qkv.to(device, dtype)
        spec = kvdock.KVSpec.uniform(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, max_positions=256, dtype=dtype)
        config = kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=BLOCK)
        self.cache = kvdock.create_cache(spec, config, kvdock.RankInfo(device))
        self.manager = kvdock.CacheManager(num_blocks, BLOCK, null_block=True)
        self.calls: list[int] = []

    def tables(self, rows: int) -> BatchTables:
        return BatchTables(self.manager, rows, 16, device=self.cache.device)

    def step(self, tables: TableViews, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits ``[b, VOCABULARY]``."""
        self.calls.append(len(tokens))
        hidden = self.embedding[tokens]
        for layer, weights in enumerate(self.qkv):
            q, k, v = (hidden @ weights).unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            pools = self.cache.update(layer, k, v, tables.slot_mapping)
            hidden = hidden + kvdock.ops.paged_attention(q, *pools, tables.block_table, tables.seq_lens).flatten(1)
        return hidden @ self.embedding.T

    def begin(self, lengths: Sequence[int]) -> list[CacheSequence]:
        """Begin sequences, and fill their blocks: each token's keys and values follow from its place in the pool."""
        sequences = [self.manager.begin(np.arange(length) + 100 * number) for number, length in enumerate(lengths)]
        for seq in sequences:
            slots = torch.from_numpy(seq.slot_mapping(0, seq.num_tokens)).to(self.cache.device)
            rows = torch.sin(slots[:, None, None] + torch.arange(KV_HEADS * DIM, device=slots.device).view(KV_HEADS, DIM))
            for layer in range(LAYERS):
                self.cache.update(layer, rows.to(self.cache.dtype), rows.to(self.cache.dtype), slots)
            self.manager.commit(seq, [], computed=seq.num_tokens)
        return sequences

    def grow(self, sequences: Sequence[CacheSequence]) -> list[int]:
        """Make room for a token of each, and say which."""
        self.manager.extend(sequences, 1)
        return [seq.num_tokens % VOCABULARY for seq in sequences]

    def plain(self, sequences: Sequence[CacheSequence], tokens: Sequence[int]) -> torch.Tensor:
        """Return what the step gives on tables of exactly these rows, and leave the pool as it was."""
        pools = [pool for layer in range(LAYERS) for pool in (self.cache.k_cache(layer), self.cache.v_cache(layer))]
        before, calls = [pool.clone() for pool in pools], len(self.calls)
        tables = self.tables(len(sequences))
        tables.update(sequences)
        logits = self.step(tables.first(len(sequences), len(sequences)), torch.tensor(tokens, device=self.cache.device))
        for pool, held in zip(pools, before, strict=True):
            pool.copy_(held)
        del self.calls[calls:]
        return logits
