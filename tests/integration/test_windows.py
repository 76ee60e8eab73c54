"""Windows that free: what a layer's window has left behind is let go while the sequence grows, and tokens stay the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from integration import zoo
from integration.prefixes import reusing
from integration.uncached import Uncached
from kvdock.errors import IndexRangeError, OutOfBlocksError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.layer import PagedLayer
from support_slow import QUICK, every

WINDOW = 8

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    "gemma3n": zoo.MODELS["gemma3n-shared"],
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "vocab_size_per_layer_input": zoo.VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "global_head_dim": 8,
        },
    ),
    "gpt-oss": zoo.MODELS["gpt-oss"],
    "llama4": zoo.MODELS["llama4-chunked"],
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "mistral": zoo.MODELS["mistral-window"],
}

NEW = 14 if QUICK else 24
"""Tokens to generate: more than a window and a block."""

GREEDY = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}

WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "greedy": ((50,), {}),
    "left-padded": ((50, 23, 37), {}),
    "beams": ((30, 21), {"num_beams": 3}),
    "chunked": ((61, 40), {"prefill_chunk_size": 7}),
    "lookup": ((45,), {"prompt_lookup_num_tokens": 5}),
}


@functools.cache
def model(name: str) -> Any:
    """Make a model with windows of 8, the same at every call."""
    family, changes = MODELS[name]
    if not hasattr(__import__("transformers"), f"{family}ForCausalLM"):
        pytest.skip(f"this version of Transformers has no {family}")
    return zoo.build(family, changes, "eager" if name in zoo.EAGER_ONLY else "sdpa")


def paged(name: str, *, num_blocks: int = 512, **options: Any) -> PagedCacheForTransformers:
    return PagedCacheForTransformers.for_model(model(name), zoo.conf(num_blocks=num_blocks), **options)


def inputs_of(way: str) -> dict[str, torch.Tensor]:
    lengths, _ = WAYS[way]
    if way != "lookup":
        return zoo.prompt(*lengths)
    ids = zoo.repetitive()["input_ids"].repeat(1, 3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def needed(cache: PagedCacheForTransformers, tokens: int) -> int:
    """Return the blocks that one row of so many tokens needs in all groups, to the end of the unit that it is in."""
    groups = cache.state.pool.groups
    unit = cache.state.manager.block_size
    to_the_end = -(-tokens // unit) * unit
    return sum(
        -(-to_the_end // group.block_size) - int(group.retention.first_kept(np.array(tokens))) // group.block_size for group in groups
    )


def held(cache: PagedCacheForTransformers) -> int:
    """Return the blocks that nobody else can have, and prove that they are whole."""
    manager = cache.state.manager
    manager.check_integrity()
    manager.hand_over()
    return cache.usage.blocks


@functools.cache
def expected(name: str, way: str) -> torch.Tensor:
    """Return the tokens with the model's own cache."""
    if "lookup" in way and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    return torch.as_tensor(model(name).generate(**inputs_of(way), **GREEDY, **WAYS[way][1]))


def cases() -> Iterator[Any]:
    """Every combination. In quick ones, by turns, each model reads pages in one way, and every other one gathers in another.

    One model reads pages in every way.
    """
    for (at, name), (turn, way), attention in itertools.product(enumerate(MODELS), enumerate(WAYS), ("auto", "gather")):
        behind = (turn - at) % len(WAYS)
        quick = (behind == 1 or name == "gemma3") if attention == "auto" else behind == at % 2 == 0
        yield pytest.param(name, way, attention, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "way", "attention"), [*cases()])
def test_tokens_are_those_of_dynamic_cache_and_windows_let_go(name: str, way: str, attention: str) -> None:
    tokens, cache = expected(name, way), paged(name, attention=attention)
    got = model(name).generate(**cache.bind(**inputs_of(way)), **GREEDY, **WAYS[way][1])
    assert torch.equal(got, tokens)
    length, rows = cache.get_seq_length(), cache.batch_size
    assert held(cache) <= rows * needed(cache, length)
    unit = cache.state.manager.block_size
    whole = rows * -(-length // unit) * sum(unit // group.block_size for group in cache.state.pool.groups)
    assert held(cache) < whole, "that is what keeping all takes"


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4", "cohere2"])
def test_tokens_are_those_without_any_cache(name: str) -> None:
    cache, inputs = paged(name), zoo.prompt(50, 23)
    out = model(name).generate(**cache.bind(**inputs), **GREEDY, return_dict_in_generate=True, output_logits=True)
    Uncached(model(name)).assert_same(inputs, out)


@pytest.mark.parametrize("name", every(2, MODELS))
def test_a_pool_for_the_window_is_enough_for_a_long_prompt_in_chunks(name: str) -> None:
    """Chunks hold what they still need, so the pool of a window and a chunk serves any length; without chunks it is too small."""
    made, inputs = model(name), zoo.prompt(150)
    probe = paged(name)
    unit = probe.state.manager.block_size
    per_unit = sum(unit // group.block_size for group in probe.state.pool.groups)
    blocks = needed(probe, 180) + (-(-10 // unit) + 1) * per_unit
    if blocks >= -(-150 // unit) * per_unit:
        pytest.skip(f"a unit of {unit} tokens is as long as the prompt")
    cache = paged(name, num_blocks=blocks)
    got = made.generate(**cache.bind(**inputs), **GREEDY, prefill_chunk_size=10)
    assert torch.equal(got, made.generate(**inputs, **GREEDY))
    cache.reset()
    with pytest.raises(OutOfBlocksError, match="prefill_chunk_size"):
        made.generate(**cache.bind(**inputs), **GREEDY)


@pytest.mark.parametrize("name", MODELS)
def test_layers_return_what_dynamic_cache_would(name: str) -> None:
    made, ids = model(name), zoo.prompt(60)["input_ids"]
    cache, dynamic = paged(name, attention="gather"), zoo.dynamic(made)
    with torch.no_grad():
        for part in ids.split((20, 9, 1, 30), dim=1):
            count = part.shape[1]
            both = [(mine, theirs) for mine, theirs in zip(cache.layers, dynamic.layers, strict=False) if isinstance(mine, PagedLayer)]
            assert all(mine.get_mask_sizes(count) == theirs.get_mask_sizes(count) for mine, theirs in both)
            for one in (cache, dynamic):
                made(input_ids=part, use_cache=True, **{zoo.CACHE_KEYWORD: one})
            for mine, theirs in both:
                torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "gpt-oss"])
def test_prefixes_are_found_where_every_group_can_go_on(name: str) -> None:
    """Also in the middle of an earlier prompt, whose windows have moved on: what they left behind is there while there is room."""
    made, cache = model(name), reusing(model(name), num_blocks=1024)
    system, unit = zoo.prompt(48)["input_ids"], cache.state.manager.block_size
    cached = []
    for question in range(3):
        ids = torch.cat([system, torch.full((1, 9), 7 + question)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        got = made.generate(**cache.bind(**inputs), **GREEDY)
        assert torch.equal(got, made.generate(**inputs, **GREEDY))
        cached.append(cache.usage.cached_tokens)
        cache.commit(got)
        held(cache)
    assert cached == [0, 48 // unit * unit, 48 // unit * unit]


@pytest.mark.parametrize("name", ["gemma3", "mistral", "gpt-oss"])
def test_rows_with_padding_go_on_at_one_place(name: str) -> None:
    """Rows of which one has found more go on behind the one that has found less, in the middle of a block."""
    made, cache = model(name), reusing(model(name), num_blocks=1024)
    inputs = zoo.prompt(45, 30)
    for _ in range(2):
        got = made.generate(**cache.bind(**inputs), **GREEDY)
        assert torch.equal(got, made.generate(**inputs, **GREEDY))
        cache.commit(got)
        held(cache)
    assert cache.usage.cached_tokens > 0


@pytest.mark.parametrize("name", ["gemma3", "mistral", "gpt-oss"])
def test_what_was_let_go_comes_back_until_its_room_is_taken(name: str) -> None:
    made, ids = model(name), zoo.prompt(60)["input_ids"]
    cache = paged(name)
    told = {"input_ids": ids, "use_cache": True, zoo.CACHE_KEYWORD: cache}
    with torch.no_grad():
        expected = made(input_ids=ids[:, :21], use_cache=False).logits[:, -1]
        made(**told)
        cache.truncate(20)
        got = made(**{**told, "input_ids": ids[:, 20:21]}).logits[:, -1]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        cache.truncate(0)
        made(**told)
        before = held(cache)
        manager = cache.state.manager
        manager._pool.units.drop(1000, ends=False)  # as a sequence that wants all room would
        with pytest.raises(IndexRangeError, match=r"expected at least .* let go"):
            cache.truncate(20)
        assert (cache.get_seq_length(), held(cache)) == (60, before), "nothing was changed"
        cache.truncate(59)
    held(cache)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_free_blocks_hold_nothing_that_is_read(name: str) -> None:
    """With NaN in each block that nobody needs, what was let go too."""
    made, inputs = model(name), zoo.prompt(50, 33)
    cache = paged(name)
    out = made.generate(**cache.bind(**inputs), **{**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2})
    pool, units = cache.state.pool, cache.state.manager._pool.units
    units.drop(10_000, ends=False)
    free = np.flatnonzero(units.blocks.ref_counts(np.arange(pool.num_blocks)) == 0)
    cache.state.manager.hand_over()
    assert free.size < pool.num_blocks
    for layer in range(pool.num_layers):
        pool.k_cache(layer)[free] = torch.nan
        pool.v_cache(layer)[free] = torch.nan
    more = {"input_ids": out, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1)}
    got = made.generate(**cache.bind(**more), **GREEDY)
    assert torch.equal(got, made.generate(**more, **GREEDY))


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_captured_steps_let_go_too(name: str) -> None:
    made, inputs = model(name), zoo.prompt(30, 17)
    cache = paged(name)
    captured = cache.capture(batch_sizes=(2,), max_length=96)
    got = made.generate(**cache.bind(**inputs), **GREEDY)
    assert torch.equal(got, made.generate(**inputs, **GREEDY))
    assert captured.odd == ""
    assert held(cache) <= 2 * needed(cache, cache.get_seq_length())


def test_all_can_be_kept() -> None:
    made, inputs = model("gemma3"), zoo.prompt(50)
    cache = PagedCacheForTransformers.for_model(made, kvdock.PagedKVCacheConfig(num_blocks=64, block_size=4, keep_all=True))
    got = made.generate(**cache.bind(**inputs), **GREEDY)
    assert torch.equal(got, made.generate(**inputs, **GREEDY))
    assert (len(cache.state.pool.groups), cache.usage.blocks) == (1, -(-(50 + NEW - 1) // 4))
    cache.truncate(3)
    assert cache.get_seq_length() == 3
