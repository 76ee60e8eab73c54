"""A cache of several groups under a `CacheManager` of the same groups: what attention and states give is what the tokens alone say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.layers import Buffer, LayerKind, StateLayerSpec
from kvdock.scheduler import BatchTables, CacheSequence
from support_caches import CPU

F32, SCALE = torch.float32, 0.25
FULL, WINDOWED = kvdock.LayerSpec(1, 1, 8, 8), kvdock.LayerSpec(1, 1, 8, 8, window=5)
STATE = StateLayerSpec([Buffer("sums", (32,), F32), Buffer("count", (4,), torch.float64)])
MODELS: dict[str, tuple[LayerKind, ...]] = {
    "full and windows": (WINDOWED, FULL, WINDOWED, WINDOWED),
    "full and states": (STATE, FULL, STATE),
    "windows, latents and a state": (WINDOWED, kvdock.MLALayerSpec(8, 8), STATE),
}


def rows(layer: int, kind: LayerKind, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a layer keeps of the last of some tokens: it follows from all of them, as in a model."""
    draw = torch.Generator().manual_seed(hash((layer, tuple(ids))) % 2**31)
    shape = (8,) if isinstance(kind, kvdock.MLALayerSpec) else (1, 8)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


class Model:
    """Computes tokens of sequences by a cache, and compares each layer's result with one that needs no cache."""

    def __init__(self, layers: Sequence[LayerKind], num_blocks: int, ops: kvdock.OpDispatcher) -> None:
        self.layers = layers
        config = kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=2)
        self.cache = kvdock.create_cache(kvdock.KVSpec(layers, 4096, F32), config, CPU, ops=ops)
        self.manager = kvdock.CacheManager(num_blocks, groups=self.cache.groups, null_block=True, state_interval=4)
        self.reused = 0

    def copy(self, pairs: Any) -> None:
        if len(pairs):
            self.cache.copy_blocks(pairs)

    def begin(self, ids: list[int]) -> CacheSequence:
        """Compute a prompt in chunks, as an engine does: behind each the states may be kept for others."""
        chunk = self.manager.block_size
        seq = self.manager.begin(ids, at_most=chunk)
        self.reused += seq.cached_len
        self.copy(seq.block_pairs)
        while True:
            for position in range(seq.computed, seq.num_tokens):
                self.compute([seq], [ids[: position + 1]])
            self.manager.commit(seq, [], computed=seq.num_tokens)
            if seq.num_tokens == len(ids):
                return seq
            self.copy(self.manager.extend(seq, min(chunk, len(ids) - seq.num_tokens))[1])

    def decode(self, seqs: list[CacheSequence], texts: list[list[int]]) -> None:
        self.copy(self.manager.extend(seqs, 1))
        for text in texts:
            text.append(sum(text) % 3)
        self.compute(seqs, texts)
        self.manager.commit(seqs, [text[-1] for text in texts], computed=[len(text) for text in texts])

    def compute(self, seqs: list[CacheSequence], texts: list[list[int]]) -> None:
        """Compute the last token of each text."""
        lens = torch.tensor([len(text) for text in texts])
        for number, kind in enumerate(self.layers):
            group = self.cache.group_of(number)
            if isinstance(kind, StateLayerSpec):
                for seq, text in zip(seqs, texts, strict=True):
                    self.advance(number, int(seq.block_table(group)[0]), text)
                continue
            new = [torch.stack(part) for part in zip(*(rows(number, kind, text) for text in texts), strict=True)]
            slots = [int(seq.slot_mapping(len(text) - 1, len(text), group=group)[0]) for seq, text in zip(seqs, texts, strict=True)]
            assert min(slots) >= self.cache.groups[group].block_size, "block 0 is nobody's"
            self.cache.update(number, new[0], new[1], torch.tensor(slots))
            width = max(len(seq.block_table(group)) for seq in seqs)
            table = torch.zeros(len(seqs), width, dtype=torch.int32)
            for row, seq in enumerate(seqs):
                table[row, : len(seq.block_table(group))] = torch.from_numpy(seq.block_table(group).copy())
            q = torch.ones(len(seqs), 2, 16 if isinstance(kind, kvdock.MLALayerSpec) else 8)
            got = self.cache.attend(number, q, table, lens, scale=SCALE, window=getattr(kind, "window", None))
            expected = torch.stack([self.meant(number, kind, text, row) for text, row in zip(texts, q, strict=True)])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def advance(self, number: int, block: int, text: list[int]) -> None:
        """Look at the state that is there, and at the one behind the last token."""
        state = self.cache.state(number)
        assert (state["count"][block] == len(text) - 1).all(), "the state is that behind the token before"
        for end in (len(text) - 1, len(text)):
            expected = sum((torch.full((32,), float(each)) for each in text[:end]), torch.zeros(32))
            if end == len(text):
                state["sums"][block] += text[-1]
                state["count"][block] += 1
            assert torch.equal(state["sums"][block], expected)

    def meant(self, number: int, kind: LayerKind, text: list[int], q: torch.Tensor) -> torch.Tensor:
        window = getattr(kind, "window", None)
        first = 0 if window is None else max(0, len(text) - window)
        kept = [rows(number, kind, text[: end + 1]) for end in range(first, len(text))]
        if isinstance(kind, kvdock.MLALayerSpec):
            kept = [(torch.cat([kv_c, k_pe])[None], kv_c[None]) for kv_c, k_pe in kept]
        k, v = (torch.cat(part) for part in zip(*kept, strict=True))
        return (q @ k.T * SCALE).softmax(-1) @ v


@pytest.mark.parametrize("name", MODELS)
def test_sequences_that_share_prefixes_and_let_go_compute_what_they_mean(name: str, ops: kvdock.OpDispatcher) -> None:
    model = Model(MODELS[name], 200, ops)
    choose = random.Random(5)  # noqa: S311 - a seeded choice
    unit = model.manager.block_size
    shared = [choose.randrange(3) for _ in range(3 * unit)]
    running: list[tuple[CacheSequence, list[int]]] = []
    for turn in range(8):
        prompt = shared[: choose.randrange(2 * unit, 3 * unit)] + [choose.randrange(3) for _ in range(choose.randrange(1, 6))]
        running.append((model.begin(prompt), prompt))
        for _ in range(5):
            model.decode([seq for seq, _ in running], [text for _, text in running])
        if turn % 2:
            model.manager.finish(running.pop(0)[0])
        model.manager.check_integrity()
    assert model.reused > 2 * unit, "prefixes of all groups were found again, and what they hold was right"


def test_the_tables_of_a_batch_are_what_a_cache_takes(ops: kvdock.OpDispatcher) -> None:
    model = Model(MODELS["full and windows"], 60, ops)
    texts = [[0, 1, 2, 1, 0, 2, 1], [2, 2, 1]]
    seqs = [model.begin(text) for text in texts]
    model.copy(model.manager.extend(seqs, 1))
    tables = BatchTables(model.manager, 2, 8)
    tables.update(seqs)
    for text in texts:
        text.append(1)
    for number, kind in enumerate(model.layers):
        group = model.cache.group_of(number)
        new = [torch.stack(part) for part in zip(*(rows(number, kind, text) for text in texts), strict=True)]
        model.cache.update(number, new[0], new[1], tables.slot_mappings[group])
        q = torch.ones(2, 2, 8)
        window = getattr(kind, "window", None)
        got = model.cache.attend(number, q, tables.block_tables[group], tables.seq_lens, scale=SCALE, window=window)
        expected = torch.stack([model.meant(number, kind, text, row) for text, row in zip(texts, q, strict=True)])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
