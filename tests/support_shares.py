"""Sequences of a manager whose tokens several ranks share, in one process: a pool for each rank, and one that has all tokens."""

from __future__ import annotations

from typing import Any

import torch

import kvdock
from kvdock.distributed import ContextShare

HEADS, DIM = 2, 8


class Shared:
    """Pools of ``size`` ranks beside one with everything, filled alike.

    Args:
        size: ranks.
        block: block size of the ranks' pools.
        seed: of keys, values and queries.
        dtype: of the pools.
    """

    def __init__(self, size: int, block: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.shares = [ContextShare(size, index) for index in range(size)]
        self.block, self.dtype = block, dtype
        self.manager = kvdock.CacheManager(64, size * block)
        self.random = torch.Generator().manual_seed(seed)
        self.whole = self.pool(size * block)
        self.parts = [self.pool(block) for _ in self.shares]

    def pool(self, block: int) -> Any:
        """Keys and values, full of what nobody may read."""
        return torch.full((2, 64, block, HEADS, DIM), torch.nan, dtype=self.dtype)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random, dtype=torch.float64).to(self.dtype)

    def write(self, slots: torch.Tensor) -> None:
        """Write new keys and values into every pool."""
        k, v = self.draw(2, slots.numel(), HEADS, DIM)
        kvdock.ops.paged_caching_(self.whole[0], self.whole[1], k, v, slots)
        for share, pool in zip(self.shares, self.parts, strict=True):
            kvdock.ops.paged_caching_(pool[0], pool[1], k, v, share.slots(slots, self.block))

    def begin(self, *lengths: int) -> list[Any]:
        """Sequences of so many tokens, which are written."""
        found = []
        for length in lengths:
            seq = self.manager.begin(torch.randint(0, 10**6, (length,), generator=self.random))
            self.write(torch.from_numpy(seq.slot_mapping(seq.cached_len, length)))
            found.append(seq)
        return found

    def tables(self, sequences: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Block table and lengths."""
        table = torch.zeros(len(sequences), 12, dtype=torch.int32)
        for row, seq in zip(table, sequences, strict=True):
            blocks = torch.from_numpy(seq.block_table())
            row[: blocks.numel()] = blocks
        return table, torch.tensor([seq.num_tokens for seq in sequences])

    def compare(self, q: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, **options: Any) -> None:
        """Assert that what the ranks find together is what one process finds."""
        expected = kvdock.ops.paged_attention(q, self.whole[0], self.whole[1], table, lens, return_lse=True, **options)
        parts = [share.attend(q, *pool, table, lens, **options) for share, pool in zip(self.shares, self.parts, strict=True)]
        for got, want in zip(kvdock.ops.merge_attention(parts), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
