"""Random operations on tables that share one allocator, against lists of tokens and a memory that is really written."""

from __future__ import annotations

import gc
import itertools
from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvdock.errors import OutOfBlocksError
from kvdock.scheduler import BlockAllocator, BlockTable


class Sequences:
    """A table, and what its rows must read back."""

    def __init__(self, table: BlockTable, rows: list[list[int]]) -> None:
        self.table = table
        self.rows = rows


class Tables(RuleBasedStateMachine):
    """Tables grow, fork, reorder, shrink and vanish; each row keeps its tokens, and no block is lost or held twice."""

    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 24), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.memory = np.full((num_blocks, block_size), -1)
        self.tokens = itertools.count()
        self.alive: list[Sequences] = []

    @rule(target=sequences, rows=st.integers(1, 3))
    def make(self, rows: int) -> Sequences:
        made = Sequences(BlockTable(self.allocator, self.block_size, rows), [[] for _ in range(rows)])
        self.alive.append(made)
        return made

    @rule(target=sequences, of=sequences)
    def fork(self, of: Sequences) -> Sequences:
        made = Sequences(of.table.fork(), [list(row) for row in of.rows])
        self.alive.append(made)
        return made

    @rule(of=sequences, n=st.integers(0, 9))
    def grow(self, of: Sequences, n: int) -> None:
        start, before = of.table.length, self.seen()
        try:
            pairs = of.table.grow(n)
        except OutOfBlocksError:
            assert self.seen() == before
            return
        self.memory[pairs[:, 1]] = self.memory[pairs[:, 0]]
        slots = of.table.slot_mapping(start, start + n)
        new = np.array([[next(self.tokens) for _ in range(n)] for _ in of.rows], dtype=np.int64).reshape(slots.shape)
        self.memory.ravel()[slots] = new
        for row, tokens in zip(of.rows, new.tolist(), strict=True):
            row.extend(tokens)

    @rule(of=sequences, data=st.data())
    def truncate(self, of: Sequences, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, of.table.length))
        of.table.truncate(length)
        of.rows = [row[:length] for row in of.rows]

    @rule(of=sequences, data=st.data())
    def select(self, of: Sequences, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(of.rows) - 1), min_size=1, max_size=4))
        of.table.select(rows)
        of.rows = [list(of.rows[row]) for row in rows]

    @rule(of=sequences, rows=st.integers(1, 3))
    def clear(self, of: Sequences, rows: int) -> None:
        of.table.clear(rows)
        of.rows = [[] for _ in range(rows)]

    @rule(of=consumes(sequences))
    def drop(self, of: Sequences) -> None:
        self.alive.remove(of)
        del of.table
        gc.collect(0)

    def seen(self) -> list[object]:
        return [self.allocator.ref_counts(range(self.allocator.num_blocks)).tolist(), [one.table.block_ids.tolist() for one in self.alive]]

    @invariant()
    def rows_read_back(self) -> None:
        for one in self.alive:
            length = one.table.length
            assert self.memory.ravel()[one.table.slot_mapping(0, length)].tolist() == one.rows
            assert one.table.block_ids.shape == (len(one.rows), -(-length // self.block_size))

    @invariant()
    def blocks_are_counted(self) -> None:
        holders = Counter(itertools.chain.from_iterable(one.table.block_ids.ravel().tolist() for one in self.alive))
        counts = self.allocator.ref_counts(range(self.allocator.num_blocks)).tolist()
        assert counts == [holders[block] for block in range(self.allocator.num_blocks)]
        assert self.allocator.num_used == len(holders)
        self.allocator.check_integrity()


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase
