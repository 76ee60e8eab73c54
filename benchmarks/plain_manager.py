"""The baseline for a step of decoding: a block manager as engines write it, with Python lists.

A list of ids and of blocks per sequence, a count per block, and a hash table that finds whole blocks by what is in them and
before them. The tables for attention are made from the lists in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["PlainManager", "PlainSequence"]


class PlainSequence:
    """Ids, blocks, and the hash of the whole blocks so far."""

    def __init__(self, ids: list[int], blocks: list[int]) -> None:
        self.ids, self.blocks, self.hash = ids, blocks, 0


class PlainManager:
    """Free blocks, counts, and whole blocks by their hash."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.counts = [0] * num_blocks
        self.by_hash: dict[int, int] = {}

    def begin(self, ids: list[int]) -> PlainSequence:
        """Give a prompt its blocks; nothing is looked up, since prompts here have nothing in common."""
        seq = PlainSequence(list(ids), [self._take() for _ in range(-(-len(ids) // self.block_size))])
        for end in range(self.block_size, len(ids) + 1, self.block_size):
            self._publish(seq, end)
        return seq

    def extend(self, sequences: Sequence[PlainSequence]) -> list[int]:
        """Make room for one more token of each; return the slots."""
        slots = []
        for seq in sequences:
            block, offset = divmod(len(seq.ids), self.block_size)
            if not offset:
                seq.blocks.append(self._take())
            slots.append(seq.blocks[block] * self.block_size + offset)
        return slots

    def commit(self, sequences: Sequence[PlainSequence], ids: list[int]) -> None:
        """Append a token to each, whose keys and values are written; remember whole blocks."""
        for seq, token in zip(sequences, ids, strict=True):
            seq.ids.append(token)
            if len(seq.ids) % self.block_size == 0:
                self._publish(seq, len(seq.ids))

    def tables(self, sequences: Sequence[PlainSequence], slots: list[int]) -> tuple[Any, ...]:
        """Return what attention reads: block table, lengths, query lengths and their sums, positions, slots; int32."""
        width = max(len(seq.blocks) for seq in sequences)
        blocks = np.array([seq.blocks + [0] * (width - len(seq.blocks)) for seq in sequences], dtype=np.int32)
        lengths = np.array([len(seq.ids) + 1 for seq in sequences], dtype=np.int32)
        queries = np.ones(len(sequences), dtype=np.int32)
        sums = np.arange(len(sequences) + 1, dtype=np.int32)
        return blocks, lengths, queries, sums, lengths - 1, np.array(slots, dtype=np.int32)

    def _take(self) -> int:
        """Take a free block."""
        block = self.free.pop()
        self.counts[block] = 1
        return block

    def _publish(self, seq: PlainSequence, end: int) -> None:
        """Let the whole block before ``end`` be found."""
        seq.hash = hash((seq.hash, tuple(seq.ids[end - self.block_size : end])))
        self.by_hash.setdefault(seq.hash, seq.blocks[end // self.block_size - 1])
