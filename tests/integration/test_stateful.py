"""Random operations on a paged cache and its copies, against Transformers' own caches fed with the same tensors.

The model keeps every token, and cuts it to the window that Transformers' own layer with a window announces; that layer
itself cannot take back what it dropped.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from integration import zoo
from kvdock import PagedKVCacheConfig
from kvdock.errors import IndexRangeError, OutOfBlocksError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.scheduler.grouped_blocks import GroupedBlocks
from support_slow import examples

WINDOWS = {"llama-gqa": None, "mistral-window": 8}


class Pair:
    """A paged cache and the dynamic one that must hold the same."""

    def __init__(self, paged: PagedCacheForTransformers, dynamic: DynamicCache, rows: int) -> None:
        self.paged = paged
        self.dynamic = dynamic
        self.rows = rows


class Caches(RuleBasedStateMachine):
    """Steps with layers in any order, copies, changes of the batch, cuts, resets and drops, in a pool that runs full."""

    pairs = Bundle("pairs")

    @initialize(target=pairs, name=st.sampled_from(sorted(WINDOWS)), num_blocks=st.integers(4, 40), block_size=st.integers(1, 5))
    def start(self, name: str, num_blocks: int, block_size: int) -> Any:
        self.name = name
        made = zoo.model(name)
        paged = PagedCacheForTransformers.for_model(made, PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size))
        self.manager = paged.state.manager
        self.allocator = self.manager.allocator
        self.generator = torch.Generator().manual_seed(1)
        self.alive = [Pair(paged, DynamicCache(), 0)]
        return multiple(self.alive[0])

    @rule(of=pairs, rows=st.integers(1, 3), tokens=st.integers(1, 9), order=st.permutations([0, 1]))
    def step(self, of: Pair, rows: int, tokens: int, order: list[int]) -> None:
        rows = of.rows if of.paged.get_seq_length() else rows
        before = self.seen()
        new = {layer: [torch.randn(rows, 2, tokens, 8, generator=self.generator) for _ in range(2)] for layer in order}
        try:
            got = {layer: of.paged.update(*new[layer], layer) for layer in order}
        except OutOfBlocksError:
            assert self.seen() == before
            return
        length, offset = self.visible(of, tokens)
        for layer in sorted(order):
            everything = of.dynamic.update(*new[layer], layer)
            expected = [states[:, :, offset : offset + length] for states in everything]
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(got[layer], expected, strict=True))
        of.rows = rows

    @rule(target=pairs, of=pairs)
    def copy(self, of: Pair) -> Pair:
        made = Pair(copy.deepcopy(of.paged), copy.deepcopy(of.dynamic), of.rows)
        self.alive.append(made)
        return made

    @rule(of=pairs, data=st.data())
    def reorder(self, of: Pair, data: st.DataObject) -> None:
        if not of.paged.get_seq_length():
            return
        rows = torch.tensor(data.draw(st.permutations(range(of.rows)) | st.lists(st.integers(0, of.rows - 1), min_size=1, max_size=4)))
        for cache in (of.paged, of.dynamic):
            cache.reorder_cache(rows)
        of.rows = len(rows)

    @rule(of=pairs, data=st.data())
    def crop(self, of: Pair, data: st.DataObject) -> None:
        length = of.paged.get_seq_length()
        remove = data.draw(st.integers(0, max(length - 1, 0)))
        before = self.seen()
        if length:
            try:
                of.paged.crop(-remove)
            except IndexRangeError:  # somebody else has the room of what a window has left behind
                assert WINDOWS[self.name] is not None
                assert self.seen() == before
                return
            of.dynamic.crop(-remove)

    @rule(of=pairs)
    def reset(self, of: Pair) -> None:
        of.paged.reset()
        of.dynamic = DynamicCache()

    @rule(target=pairs, of=consumes(pairs))
    def drop(self, of: Pair) -> Any:
        if len(self.alive) == 1:
            return of
        self.alive.remove(of)
        del of.paged
        gc.collect(0)
        return multiple()

    def visible(self, of: Pair, tokens: int) -> tuple[int, int]:
        """Return what Transformers' own layer announces for so many new tokens: how many are visible, and the first."""
        window, length = WINDOWS[self.name], of.dynamic.get_seq_length()
        if window is None:
            return length + tokens, 0
        layer = DynamicSlidingWindowLayer(window)
        layer.cumulative_length = length
        sizes: tuple[int, int] = layer.get_mask_sizes(tokens)
        return sizes

    def seen(self) -> list[Any]:
        tables = [(one.paged.batch_size, zoo.table(one.paged).ravel().tolist(), list(one.paged.state.lengths.of)) for one in self.alive]
        return [self.allocator.ref_counts(np.arange(self.allocator.num_blocks)).tolist(), tables]

    @invariant()
    def same_lengths_and_sizes(self) -> None:
        for one in self.alive:
            assert one.paged.get_seq_length() == one.dynamic.get_seq_length()
            for layer in range(2):
                assert one.paged.get_mask_sizes(3, layer) == self.visible(one, 3)

    @invariant()
    def blocks_are_held_by_caches_that_live(self) -> None:
        self.manager.check_integrity()  # which also takes back what was dropped
        pool, batches = self.manager._pool, [one.paged.state.batch for one in self.alive]
        rows = [seq._row for batch in batches if batch for seq in batch.sequences]
        held = {block for row in rows for table in pool.tables for block in table.held(row).tolist()}
        let_go = pool.units.num_idle if isinstance(pool, GroupedBlocks) else 0  # there yet, until somebody wants the room
        assert pool.used - let_go <= len(held) <= pool.used
        self.manager.hand_over()


Caches.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestCaches = Caches.TestCase
