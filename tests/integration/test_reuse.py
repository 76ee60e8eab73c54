"""One cache for several calls: continued, forked, cut back, emptied; and the blocks that it holds meanwhile."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from integration import zoo
from kvdock import PagedKVCacheConfig
from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.compat import CROPS_TO_LENGTH

FAMILIES = ("llama-gqa", "gemma3", "deepseek-v3", "gemma3n-shared")


def longer(sequences: torch.Tensor, *tokens: int) -> dict[str, torch.Tensor]:
    """Append tokens to each row."""
    ids = torch.cat([sequences, torch.tensor([tokens]).expand(len(sequences), -1)], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def greedy(made: Any, inputs: dict[str, torch.Tensor], cache: Any = None) -> torch.Tensor:
    result: torch.Tensor = made.generate(**inputs, **{zoo.CACHE_KEYWORD: cache}, **zoo.GREEDY)
    return result


def forward(made: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = made(input_ids=ids, **{zoo.CACHE_KEYWORD: cache}).logits
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_call_goes_on_where_the_first_ended(name: str) -> None:
    made = zoo.model(name)
    cache = zoo.paged(made)
    first = greedy(made, zoo.prompt(6), cache)
    held = cache.get_seq_length()
    assert held == first.shape[1] - 1, "the last token has not been computed"
    inputs = longer(first, 5, 9, 12)
    assert torch.equal(greedy(made, inputs, cache), greedy(made, inputs))
    assert cache.get_seq_length() > held


def test_a_second_call_with_only_the_new_tokens() -> None:
    """The mask covers everything then, the ids only what is new."""
    made = zoo.model("llama-gqa")
    expected, got = [], []
    for cache, results in ((zoo.dynamic(made), expected), (zoo.paged(made), got)):
        first = greedy(made, zoo.prompt(6), cache)
        inputs = longer(first, 5, 9)
        inputs["input_ids"] = inputs["input_ids"][:, -3:]
        results.append(greedy(made, inputs, cache))
    assert torch.equal(expected[0], got[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_share_a_prefix_and_go_their_own_ways(name: str) -> None:
    made = zoo.model(name)
    prefix = zoo.paged(made)
    ids = zoo.prompt(10)["input_ids"]
    forward(made, ids, prefix)
    used = prefix.usage.pool_blocks_used
    copies = [copy.deepcopy(prefix) for _ in range(3)]
    assert prefix.usage.pool_blocks_used == used, "a copy takes no blocks"
    endings = [(4, 5), (33,), (4, 5, 6, 7, 8)]
    for cache, ending in zip(copies, endings, strict=True):
        inputs = longer(ids, *ending)
        assert torch.equal(greedy(made, inputs, cache), greedy(made, inputs))
    inputs = longer(ids, 21)
    assert torch.equal(greedy(made, inputs, prefix), greedy(made, inputs)), "the prefix is as it was"


def test_a_cache_does_not_read_on_in_a_block_that_it_left_to_its_copy() -> None:
    """The cache copies the shared block when it writes; the copy then takes its own tokens back and writes others there."""
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    ids = zoo.prompt(6)["input_ids"]
    forward(made, ids, cache)
    copied = copy.deepcopy(cache)
    forward(made, torch.tensor([[20]]), cache)
    copied.truncate(4)
    forward(made, torch.tensor([[30, 31]]), copied)
    expected = zoo.dynamic(made)
    forward(made, ids, expected)
    forward(made, torch.tensor([[20]]), expected)
    assert zoo.close(cache.layers[1].keys, expected.layers[1].keys)
    assert zoo.close(forward(made, torch.tensor([[21]]), cache), forward(made, torch.tensor([[21]]), expected))


def test_the_blocks_of_a_copy_come_back_when_it_is_dropped() -> None:
    made = zoo.model("llama-gqa")
    prefix = zoo.paged(made, num_blocks=16)
    ids = zoo.prompt(10)["input_ids"]
    forward(made, ids, prefix)
    for ending in range(2, 6):  # four copies of 5 blocks each would not fit
        copied = copy.deepcopy(prefix)
        greedy(made, longer(ids, ending), copied)
        del copied
        gc.collect()
        assert prefix.usage.pool_blocks_used == prefix.usage.blocks == 3
    prefix.state.manager.allocator.check_integrity()
    manager = prefix.state.manager
    del prefix
    gc.collect()
    manager.check_integrity()
    assert manager.allocator.num_used == 0


def test_a_copy_of_a_copy_and_a_copy_of_nothing() -> None:
    made = zoo.model("llama-gqa")
    cache = copy.deepcopy(copy.deepcopy(zoo.paged(made)))
    assert torch.equal(greedy(made, zoo.prompt(4, 7), cache), greedy(made, zoo.prompt(4, 7)))


def test_a_copy_inside_something_larger_is_one_copy() -> None:
    cache = zoo.paged(zoo.model("llama-gqa"))
    copied = copy.deepcopy({"a": cache, "b": cache})
    assert copied["a"] is copied["b"] is not cache


@pytest.mark.parametrize("keep", [1, 4, 7, 8, 9])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_back_cache_goes_on_from_there(name: str, keep: int) -> None:
    made = zoo.model(name)
    cache = zoo.paged(made)
    ids = zoo.prompt(9)["input_ids"]
    forward(made, ids, cache)
    cache.crop(keep - 9)
    assert cache.get_seq_length() == keep
    assert cache.usage.blocks == sum(group.num_blocks(keep) for group in cache.state.pool.groups)
    inputs = longer(ids[:, :keep], 40, 41)
    assert torch.equal(greedy(made, inputs, cache), greedy(made, inputs))


def test_crop_means_what_the_installed_version_means() -> None:
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    forward(made, zoo.prompt(9)["input_ids"], cache)
    cache.crop(0)
    assert cache.get_seq_length() == 9
    if CROPS_TO_LENGTH:
        cache.crop(20)
        assert cache.get_seq_length() == 9
        cache.crop(5)
    else:
        with pytest.raises(ArgumentValueError, match=r"got 5. Fix: crop\(-5\) to remove so many, truncate\(5\) to keep so many"):
            cache.crop(5)
        assert cache.get_seq_length() == 9
        cache.crop(torch.tensor(-4))
    assert cache.get_seq_length() == 5
    cache.crop(-100)
    assert (cache.get_seq_length(), cache.usage.pool_blocks_used) == (0, 0)


def test_truncate_keeps_so_many() -> None:
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    forward(made, zoo.prompt(9)["input_ids"], cache)
    cache.truncate(6)
    assert cache.get_seq_length() == 6
    with pytest.raises(IndexRangeError, match=r"at most the 6 tokens that every layer has, got 7"):
        cache.truncate(7)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_emptied_cache_takes_another_batch(name: str) -> None:
    made = zoo.model(name)
    cache = zoo.paged(made, num_blocks=48)
    for lengths in ((9,), (3, 5, 4), (12, 2)):
        assert torch.equal(greedy(made, zoo.prompt(*lengths), cache), greedy(made, zoo.prompt(*lengths)))
        cache.reset()
        assert (cache.get_seq_length(), cache.usage.pool_blocks_used, cache.is_initialized) == (0, 0, False)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_repeated_and_chosen_like_those_of_dynamic_cache(name: str) -> None:
    """What contrastive search does with a cache."""
    made = zoo.model(name)
    ids = zoo.prompt(7, 7)["input_ids"]
    results = []
    for cache in (zoo.dynamic(made), zoo.paged(made)):
        forward(made, ids, cache)
        cache.batch_repeat_interleave(3)
        logits = [forward(made, torch.arange(6)[:, None] + 20, cache)]
        cache.batch_select_indices(torch.tensor([4, 0]))
        logits.append(forward(made, torch.tensor([[8], [9]]), cache))
        cache.batch_select_indices(torch.tensor([False, True]))
        logits.append(forward(made, torch.tensor([[10, 11]]), cache))
        cache.reorder_cache(torch.tensor([0]))
        results.append(logits)
    for expected, got in zip(*results, strict=True):
        assert zoo.close(expected, got)
    assert cache.batch_size == 1
    cache.state.manager.allocator.check_integrity()


def test_changing_the_rows_of_an_empty_cache_is_nothing() -> None:
    cache = zoo.paged(zoo.model("llama-gqa"))
    cache.reorder_cache(torch.tensor([3]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == -1


def test_repeated_rows_take_no_blocks_before_they_differ() -> None:
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    forward(made, zoo.prompt(10)["input_ids"], cache)
    cache.batch_repeat_interleave(4)
    assert cache.usage.blocks == cache.usage.pool_blocks_used == 3
    assert cache.usage.tokens == 40
    forward(made, torch.tensor([[5], [6], [7], [8]]), cache)
    assert cache.usage.blocks == 2 + 4, "two full blocks are shared, the last one was copied three times"


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_values_can_be_looked_at(name: str) -> None:
    made = zoo.model(name)
    dynamic, paged = zoo.dynamic(made), zoo.paged(made)
    assert paged.layers[0].keys is None
    for cache in (dynamic, paged):
        forward(made, zoo.prompt(6, 6)["input_ids"], cache)
    assert len(dynamic) == len(paged)
    for theirs, ours in zip(dynamic.layers, paged.layers, strict=True):
        if theirs.keys is not None:
            assert torch.equal(theirs.keys, ours.keys)
            assert torch.equal(theirs.values, ours.values)
            assert ours.is_initialized


def test_usage_counts_tokens_blocks_and_bytes() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, PagedKVCacheConfig(max_kv_memory_bytes=100_000, block_size=4))
    forward(made, zoo.prompt(9, 9)["input_ids"], cache)
    block = 2 * 2 * 4 * 2 * 8 * 4  # keys and values, layers, tokens, heads, dim, bytes
    usage = cache.usage
    assert (usage.tokens, usage.blocks, usage.bytes) == (18, 6, 6 * block)
    assert (usage.pool_blocks, usage.pool_bytes) == (100_000 // block, 100_000 // block * block)
    assert "length=9" in repr(cache)
    assert "num_free=" in repr(cache)


def test_bind_uses_the_keyword_of_the_installed_version() -> None:
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    inputs = zoo.prompt(5)
    bound = cache.bind(**inputs)
    assert set(bound) == {"input_ids", "attention_mask", "use_cache", zoo.CACHE_KEYWORD}
    assert bound[zoo.CACHE_KEYWORD] is cache
    assert torch.equal(made.generate(**bound, **zoo.GREEDY), greedy(made, inputs))
