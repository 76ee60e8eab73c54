"""Sequences that decode over a cache of several groups, with a table for each group, windows that let go, and blocks that change groups."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.layers import Buffer, ChunkedLayerSpec, LayerKind, StateLayerSpec
from support_caches import CPU

F32 = torch.float32
WINDOW, CHUNK, SCALE = 6, 8, 0.25
LAYERS: tuple[LayerKind, ...] = (
    kvdock.LayerSpec(2, 2, 8, 8, window=WINDOW),
    kvdock.LayerSpec(2, 2, 8, 8),
    StateLayerSpec([Buffer("sums", (2, 8, 8), F32), Buffer("last", (2, 8), torch.float64)]),
    kvdock.MLALayerSpec(24, 8),
    ChunkedLayerSpec(2, 2, 8, 8, CHUNK),
    kvdock.LayerSpec(2, 2, 8, 8, window=WINDOW),
)
BEYOND = 1 << 30


@attrs.define(eq=False)
class Tables:
    """The simplest manager that there is: a free list for all groups, and for each sequence and group its blocks by place."""

    cache: kvdock.PagedKVCache
    free: list[int]
    blocks: dict[tuple[int, int], dict[int, int]] = attrs.field(factory=lambda: defaultdict(dict))
    users: dict[int, set[int]] = attrs.field(factory=lambda: defaultdict(set))

    def grow(self, sequence: int, position: int) -> None:
        """Make room for a token in every group."""
        for number, group in enumerate(self.cache.groups):
            place = 0 if group.retention.is_state else position // group.block_size
            held = self.blocks[sequence, number]
            if place not in held:
                held[place] = block = self.free.pop(0)
                self.users[block].add(number)
                if group.retention.is_state:
                    for layer, _ in group.members:
                        for view in self.cache.state(layer).values():
                            view[block].zero_()

    def let_go(self, sequence: int, num_tokens: int) -> None:
        """Free what no later token reads, and leave NaN in it: whoever reads it all the same will tell."""
        memory = self.cache._store.pools[0].memory
        for number, group in enumerate(self.cache.groups):
            held = self.blocks[sequence, number]
            needed = {place for span in group.retention.blocks(num_tokens, group.block_size) for place in span}
            for place in [each for each in held if each not in needed]:
                block = held.pop(place)
                memory[block].fill_(255)
                self.free.append(block)

    def slot(self, sequence: int, layer: int, position: int) -> torch.Tensor:
        number = self.cache.group_of(layer)
        size = self.cache.groups[number].block_size
        return torch.tensor([self.blocks[sequence, number][position // size] * size + position % size])

    def table(self, sequence: int, layer: int, num_tokens: int) -> torch.Tensor:
        """Return the block table, with ids beyond the pool where nothing is held."""
        number = self.cache.group_of(layer)
        width = -(-num_tokens // self.cache.groups[number].block_size)
        held = self.blocks[sequence, number]
        return torch.tensor([[held.get(place, BEYOND) for place in range(width)]], dtype=torch.int32)


def seen_from(layer: LayerKind, position: int) -> int:
    """Return the first position that a token at ``position`` sees."""
    if isinstance(layer, ChunkedLayerSpec):
        return position - position % layer.chunk
    window = getattr(layer, "window", None)
    return 0 if window is None else max(0, position - window + 1)


def meant(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Return attention of one query, ``[1, heads, dim]``, to lists of ``[heads, dim]``, in float64."""
    k, v = torch.stack(keys).double(), torch.stack(values).double()
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    weights = torch.einsum("hd,thd->ht", q[0].double(), k).mul(SCALE).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)[None]


def step(tables: Tables, sequence: int, position: int, log: dict[Any, list[Any]], draw: torch.Generator) -> None:
    """Compute a token in every layer, and compare each result with that over everything that was ever written."""
    cache = tables.cache
    tables.grow(sequence, position)
    for number, layer in enumerate(LAYERS):
        if isinstance(layer, StateLayerSpec):
            block = tables.blocks[sequence, cache.group_of(number)][0]
            state, new = cache.state(number), torch.randn(2, 8, generator=draw)
            state["sums"][block] = 0.5 * state["sums"][block] + torch.einsum("hi,hj->hij", new, new)
            log[sequence, number].append(new)
            expected = torch.zeros(2, 8, 8)
            for each in log[sequence, number]:
                expected = 0.5 * expected + torch.einsum("hi,hj->hij", each, each)
            assert torch.equal(state["sums"][block], expected)
            last = log[sequence, number][-2].double() if position else torch.zeros(2, 8, dtype=torch.float64)
            assert torch.equal(state["last"][block], last)
            state["last"][block] = new
            continue
        shapes = ((24,), (8,)) if isinstance(layer, kvdock.MLALayerSpec) else ((2, 8), (2, 8))
        new_k, new_v = (torch.randn(1, *shape, generator=draw) for shape in shapes)
        cache.update(number, new_k, new_v, tables.slot(sequence, number, position))
        rows = (torch.cat([new_k, new_v], -1), new_k) if isinstance(layer, kvdock.MLALayerSpec) else (new_k[0], new_v[0])
        log[sequence, number].append(rows)
        q = torch.randn(1, 4, rows[0].shape[-1], generator=draw)
        first = seen_from(layer, position)
        window = position - first + 1 if first else None
        table, lens = tables.table(sequence, number, position + 1), torch.tensor([position + 1])
        got = cache.attend(number, q, table, lens, scale=SCALE, window=window)
        past = log[sequence, number][first:]
        torch.testing.assert_close(got.double(), meant(q, [k for k, _ in past], [v for _, v in past]), rtol=1e-4, atol=1e-5)
    tables.let_go(sequence, position + 1)


@pytest.mark.parametrize("heads", kvdock.HeadLayout)
@pytest.mark.parametrize("keep_all", [False, True])
def test_sequences_over_tables_of_their_own_compute_what_a_model_without_a_cache_does(
    keep_all: bool, heads: kvdock.HeadLayout, ops: kvdock.OpDispatcher
) -> None:
    config = kvdock.PagedKVCacheConfig(num_blocks=100 if keep_all else 64, block_size=2, head_layout=heads, keep_all=keep_all)
    cache = kvdock.create_cache(kvdock.KVSpec(LAYERS, 4096, F32), config, CPU, ops=ops)
    tables = Tables(cache, list(range(cache.num_blocks)))
    log: dict[Any, list[Any]] = defaultdict(list)
    draw = torch.Generator().manual_seed(3)
    for position in range(30):
        for sequence in range(3):
            if position >= 7 * sequence:
                step(tables, sequence, position - 7 * sequence, log, draw)
    held = sum(len(found) for found in tables.blocks.values())
    lens = [30, 23, 16]
    assert held == sum(group.num_blocks(length) for group in cache.groups for length in lens)
    assert held + len(tables.free) == cache.num_blocks
    if not keep_all:
        assert any(len(groups) > 1 for groups in tables.users.values()), "blocks that one group let go were another's later"


def test_a_fork_is_a_copy_of_the_last_blocks_of_every_group(ops: kvdock.OpDispatcher) -> None:
    config = kvdock.PagedKVCacheConfig(num_blocks=60, block_size=2)
    cache = kvdock.create_cache(kvdock.KVSpec(LAYERS, 4096, F32), config, CPU, ops=ops)
    tables = Tables(cache, list(range(cache.num_blocks)))
    log: dict[Any, list[Any]] = defaultdict(list)
    draw = torch.Generator().manual_seed(4)
    for position in range(11):
        step(tables, 0, position, log, draw)
    pairs = []
    for number in range(len(cache.groups)):
        for place, block in tables.blocks[0, number].items():
            tables.blocks[1, number][place] = twin = tables.free.pop(0)
            pairs.append((block, twin))
    cache.copy_blocks(pairs)
    for number in range(len(LAYERS)):
        log[1, number] = list(log[0, number])
    for position in range(11, 17):
        for sequence in (1, 0):
            step(tables, sequence, position, log, draw)
