"""The adapters, driven by stand-ins of the engines that they are for; every text is compared with one without any cache."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

import kvdock
from support_docs import ROOT
from support_engines import (
    LAYERS,
    MiniScheduler,
    NanoScheduler,
    NanoSequence,
    Req,
    mini_sglang,
    modules,
    nano_vllm,
    without_cache,
)


def adapter(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "examples" / "adapters"))
    try:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture
def nano() -> Iterator[ModuleType]:
    with modules(**nano_vllm()):
        made = adapter("kvdock_nano_vllm")
        made.install()
        yield made


@pytest.fixture
def mini() -> Iterator[ModuleType]:
    with modules(**mini_sglang()):
        made = adapter("kvdock_mini_sglang")
        made.install()
        yield made


class Nano:
    """A nano-vllm of so many blocks."""

    def __init__(self, num_blocks: int, block_size: int = 4, budget: int = 64) -> None:
        self.scheduler = NanoScheduler(num_blocks, block_size, budget)
        self.runner = sys.modules["nanovllm.engine.model_runner"].ModelRunner(num_blocks, block_size)  # type: ignore[attr-defined]
        self.manager: kvdock.CacheManager = self.scheduler.block_manager.manager

    def serve(self, *requests: tuple[list[int], int]) -> list[NanoSequence]:
        """Serve prompts with so many new tokens; compare each text, and prove after each step that no block is lost."""
        seqs = [NanoSequence(prompt, new) for prompt, new in requests]
        self.scheduler.waiting.extend(seqs)
        while self.scheduler.waiting or self.scheduler.running:
            batch = self.scheduler.schedule()
            assert batch, "somebody always gets on"
            self.scheduler.postprocess(batch, self.runner.run(batch))
            self.manager.check_integrity()
            for seq in seqs:
                if seq.block_table:
                    held = self.scheduler.block_manager.sequences[seq.seq_id]
                    assert seq.block_table == held.block_table.tolist()
                    assert held.computed <= seq.num_cached_tokens, "nothing is found before it is computed"
        assert [seq.token_ids for seq in seqs] == [without_cache(*request) for request in requests]
        assert self.manager.num_sequences == 0
        assert not self.scheduler.block_manager.sequences
        return seqs


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


def any_request(draw: np.random.Generator, roots: list[list[int]]) -> tuple[list[int], int]:
    """Draw a prompt that may begin like others, and how many new tokens."""
    root, ending = roots[int(draw.integers(len(roots)))], text(int(draw.integers(1, 9)), int(draw.integers(4)))
    return root + ending, int(draw.integers(1, 21))


def test_nano_vllm_hits_what_was_computed_whole_blocks_only(nano: ModuleType) -> None:
    engine = Nano(20)
    engine.serve((text(10), 3))
    assert engine.scheduler.hits == 0
    engine.serve((text(10), 3))
    assert engine.scheduler.hits == 8
    engine.serve((without_cache(text(10), 3), 2))
    assert engine.scheduler.hits == 8 + 12, "what was generated is found too"
    engine.serve((text(8), 2))
    assert engine.scheduler.hits == 20 + 4, "a token is left to compute"


def test_nano_vllm_equal_prompts_of_one_batch_end_in_the_same_blocks(nano: ModuleType) -> None:
    engine = Nano(12)
    engine.serve(*[(text(9), 3)] * 3)
    assert engine.manager.prefix.size_info.total_size == 8, "nothing is stored twice"
    assert engine.manager.allocator.num_used == 2


def test_nano_vllm_preempts_when_blocks_run_out_and_goes_on_with_what_is_cached(nano: ModuleType) -> None:
    engine = Nano(10)
    seqs = engine.serve(*((text(9, seed), 14) for seed in range(3)))
    assert sum(seq.preempted for seq in seqs) >= 2
    assert engine.scheduler.hits > 0, "not all was lost"


def test_nano_vllm_computes_a_long_prompt_in_chunks(nano: ModuleType) -> None:
    engine = Nano(20, budget=7)
    engine.serve((text(30), 4), (text(9, 1), 3), (text(30), 2))
    assert engine.scheduler.hits == 28


def test_nano_vllm_says_when_there_is_no_room(nano: ModuleType) -> None:
    blocks = nano.BlockManager(4, 4)
    first, second = NanoSequence(text(8), 1), NanoSequence(text(9, 1), 1)
    assert blocks.can_allocate(first) == 0
    blocks.allocate(first, 0)
    assert blocks.can_allocate(second) == -1
    assert blocks.can_allocate(NanoSequence(text(17), 1)) == -1, "more than the pool"
    first.num_cached_tokens = 8
    blocks.deallocate(first)
    assert (first.block_table, first.num_cached_tokens) == ([], 0)
    assert blocks.can_allocate(second) == 0


def test_nano_vllm_has_kvdocks_pool(nano: ModuleType) -> None:
    runner = Nano(6).runner
    assert isinstance(runner.kv_cache, kvdock.PagedKVCache)
    for number, layer in enumerate(runner.model):
        assert layer.k_cache.data_ptr() == runner.kv_cache.k_cache(number).data_ptr()
        assert not layer.k_cache.any(), "zero, where theirs is memory as it came"


@pytest.mark.parametrize("seed", range(12))
def test_nano_vllm_any_requests(nano: ModuleType, seed: int) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.choice([1, 2, 4, 16]))
    engine = Nano(-(-64 // size), size, int(draw.choice([5, 17, 200])))
    roots = [text(int(draw.integers(1, 21)), number) for number in range(3)]
    for _ in range(3):
        requests = [any_request(draw, roots) for _ in range(6)]
        engine.serve(*requests)


def serve(engine: MiniScheduler, *requests: tuple[list[int], int]) -> list[Req]:
    """Serve prompts with so many new tokens; compare each text, and prove after each step that no page is lost."""
    reqs = [Req(list(prompt), len(prompt) + new) for prompt, new in requests]
    engine.waiting.extend(reqs)
    left = len(engine.done) + len(reqs)
    for _ in range(1000):
        engine.step()
        engine.check()
        if len(engine.done) == left:
            break
    assert [req.tokens for req in reqs] == [without_cache(*request) for request in requests]
    assert engine.prefix.size_info.protected_size == 0
    return reqs


@pytest.mark.parametrize("page_size", [1, 4])
def test_mini_sglang_hits_whole_pages(mini: ModuleType, page_size: int) -> None:
    engine = MiniScheduler(64 // page_size, page_size, chunk=100)
    (first,) = serve(engine, (text(10), 3))
    again, longer = serve(engine, (text(10), 3), (without_cache(text(10), 3), 2))
    assert first.hits == 0
    assert again.hits == 9 // page_size * page_size
    assert longer.hits == 12, "what was generated is found too"


def test_mini_sglang_frees_duplicates_and_goes_on_with_the_stored_ones(mini: ModuleType) -> None:
    engine = MiniScheduler(16, 4, chunk=100)
    serve(engine, *[(text(9), 3)] * 3)
    assert sum(engine.prefix.size_info) == 8
    assert len(engine.free) == 14


def test_mini_sglang_waits_evicts_and_computes_in_chunks(mini: ModuleType) -> None:
    engine = MiniScheduler(10, 4, chunk=5)
    for seed in range(4):
        serve(engine, (text(20, seed), 4), (text(20, seed), 8), (text(13, seed + 10), 3))
    assert engine.evictions > 0


def test_mini_sglang_raises_what_its_interface_says(mini: ModuleType) -> None:
    cache = mini.PrefixCache(torch.device("cpu"), 4)
    assert cache.evict(0).tolist() == []
    with pytest.raises(RuntimeError, match="at most the 0 blocks"):
        cache.evict(1)
    cache.insert_prefix(torch.tensor(text(8), dtype=torch.int32), torch.arange(8, dtype=torch.int32))
    assert cache.size_info == (8, 0)
    assert cache.evict(1).tolist() == [4, 5, 6, 7], "whole pages"
    cache.reset()
    assert cache.size_info == (0, 0)


def test_mini_sglang_has_kvdocks_pool(mini: ModuleType) -> None:
    pool = MiniScheduler(6, 4, chunk=8).pool
    assert isinstance(pool.cache, kvdock.PagedKVCache)
    assert (pool.num_layers, pool.dtype, pool.device) == (LAYERS, torch.float64, torch.device("cpu"))
    assert pool.k_cache(0).shape[:2] == (6, 4)


@pytest.mark.parametrize("seed", range(12))
def test_mini_sglang_any_requests(mini: ModuleType, seed: int) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.choice([1, 2, 4, 16]))
    engine = MiniScheduler(-(-64 // size), size, int(draw.choice([3, 17, 200])))
    roots = [text(int(draw.integers(1, 21)), number) for number in range(3)]
    for _ in range(3):
        requests = [any_request(draw, roots) for _ in range(6)]
        serve(engine, *requests)
