"""The adapters, driven by stand-ins of the engines that they are for; every text is compared with one without any cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from support_adapters import Nano, installed, mini_engine, serve
from support_engines import model_of, module_of, modules
from support_nano_vllm import NanoSequence
from support_slow import examples


@pytest.fixture
def nano() -> Iterator[ModuleType]:
    with installed("kvdock_nano_vllm") as made:
        yield made


@pytest.fixture
def mini() -> Iterator[ModuleType]:
    with installed("kvdock_mini_sglang") as made:
        yield made


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


def any_request(draw: np.random.Generator, roots: list[list[int]]) -> tuple[list[int], int]:
    """Draw a prompt that may begin like others, and how many new tokens."""
    root, ending = roots[int(draw.integers(len(roots)))], text(int(draw.integers(1, 9)), int(draw.integers(4)))
    return root + ending, int(draw.integers(1, 21))


def test_nano_vllm_hits_what_was_computed_whole_blocks_only(nano: ModuleType) -> None:
    engine = Nano(20)
    (first,) = engine.serve((text(10), 3))
    assert engine.scheduler.hits == 0
    engine.serve((text(10), 3))
    assert engine.scheduler.hits == 8
    engine.serve((first.token_ids, 2))
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
    for number, layer in enumerate(runner.layers):
        assert layer.k_cache.data_ptr() == runner.kv_cache.k_cache(number).data_ptr()
        assert not layer.k_cache.any(), "zero, where theirs is memory as it came"


def test_nano_vllm_needs_no_flash_attn_and_nobody_takes_kvdock_for_it(nano: ModuleType) -> None:
    attention: Any = sys.modules["nanovllm.layers.attention"]
    assert attention.flash_attn is nano, "what it has imported"
    assert "flash_attn" not in sys.modules


def test_nano_vllm_takes_over_from_a_flash_attn_that_is_there() -> None:
    real = module_of("flash_attn")
    real.__spec__ = ModuleSpec("flash_attn", None)
    with modules(flash_attn=real), installed("kvdock_nano_vllm") as made:
        attention: Any = sys.modules["nanovllm.layers.attention"]
        assert attention.flash_attn is real is sys.modules["flash_attn"]
        assert attention.flash_attn_varlen_func is made.flash_attn_varlen_func
        Nano(20).serve((text(10), 3), (text(10), 3))


@pytest.mark.parametrize("seed", range(examples(12)))
def test_nano_vllm_any_requests(nano: ModuleType, seed: int) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.choice([1, 2, 4, 16]))
    engine = Nano(-(-64 // size), size, int(draw.choice([5, 17, 200])))
    roots = [text(int(draw.integers(1, 21)), number) for number in range(3)]
    for _ in range(3):
        requests = [any_request(draw, roots) for _ in range(6)]
        engine.serve(*requests)


@pytest.mark.parametrize("page_size", [1, 4])
def test_mini_sglang_hits_whole_pages(mini: ModuleType, page_size: int) -> None:
    engine = mini_engine(64 // page_size, page_size, chunk=100)
    (first,) = serve(engine, (text(10), 3))
    again, longer = serve(engine, (text(10), 3), (first.tokens, 2))
    assert first.hits == 0
    assert again.hits == 9 // page_size * page_size
    assert longer.hits == 12, "what was generated is found too"


def test_mini_sglang_frees_duplicates_and_goes_on_with_the_stored_ones(mini: ModuleType) -> None:
    engine = mini_engine(16, 4, chunk=100)
    serve(engine, *[(text(9), 3)] * 3)
    assert sum(engine.prefix.size_info) == 8
    assert len(engine.free) == 14


def test_mini_sglang_waits_evicts_and_computes_in_chunks(mini: ModuleType) -> None:
    engine = mini_engine(10, 4, chunk=5)
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
    pool = mini_engine(6, 4, chunk=8).pool
    assert isinstance(pool.cache, kvdock.PagedKVCache)
    assert (pool.num_layers, pool.dtype, pool.device) == (2, torch.float64, torch.device("cpu"))
    assert pool.k_cache(0).shape[:2] == (7, 4)


@pytest.mark.parametrize("model", ["llama", "mistral-window"])
@pytest.mark.parametrize("seed", range(examples(6)))
def test_mini_sglang_any_requests(mini: ModuleType, seed: int, model: str) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.choice([1, 2, 4, 16]))
    engine = mini_engine(-(-64 // size), size, int(draw.choice([3, 17, 200])), model_of(model))
    roots = [text(int(draw.integers(1, 21)), number) for number in range(3)]
    for _ in range(3):
        requests = [any_request(draw, roots) for _ in range(6)]
        serve(engine, *requests)
