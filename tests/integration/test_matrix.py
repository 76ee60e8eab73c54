"""The same tokens and logits as with DynamicCache: models x attention x block sizes x ways to generate, on pages and gathered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from integration import zoo

HEADS = ("llama-mha", "llama-gqa", "llama-mqa")
OTHERS = tuple(name for name in zoo.MODELS if name not in HEADS)


def attentions(name: str) -> tuple[str, ...]:
    return ("eager",) if name in zoo.EAGER_ONLY else ("sdpa", "eager")


def reference(made: Any, name: str, scenario: str) -> Any:
    """Generate without the paged cache."""
    if scenario == "prompt-lookup" and name in zoo.WINDOWED and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    return zoo.generate(made, zoo.dynamic(made), scenario)


def assert_identical(expected: Any, got: Any) -> None:
    """Compare tokens exactly, and logits but for their last bits: attention on pages rounds otherwise, and so does eager attention where
    keys have other strides."""
    assert torch.equal(expected.sequences, got.sequences)
    assert len(expected.logits) == len(got.logits) > 0
    for step, (left, right) in enumerate(zip(expected.logits, got.logits, strict=True)):
        differ = float((left - right).abs().max())
        assert differ < 1e-5, f"step {step}: logits differ by up to {differ}"


def cases(names: Iterable[str], block_sizes: Iterable[int]) -> list[Any]:
    """Every combination; those that repeat what another one shows are slow ones.

    In quick ones, one model generates in every way, and in two that copy or take back with other blocks, and gathered. The others
    generate in one of the eight ways, and each way has two models or three: by turns.
    """
    found = []
    ways, models = [*zoo.SCENARIOS], [*zoo.MODELS]
    for name, block_size, scenario, reads in itertools.product(names, block_sizes, ways, ("auto", "gather")):
        is_its_turn = name == "llama-gqa" or (ways.index(scenario) - 3 * models.index(name)) % len(ways) == 0
        is_odd = name == "llama-gqa" and scenario in ("beams", "prompt-lookup")
        for attention in attentions(name):
            telling = is_odd or (block_size == 4 and reads == "auto")
            quick = telling and attention == attentions(name)[0] and is_its_turn
            found.append(pytest.param(name, attention, block_size, scenario, reads, marks=() if quick else pytest.mark.slow))
    return found


GATHERING = ("bloom", "falcon")
"""Models with an attention of their own."""


def paged(made: Any, name: str, reads: str, **sizes: int) -> Any:
    """Make a cache whose attention reads pages, unless it is told otherwise or cannot."""
    cache = zoo.paged(made, attention=reads, **sizes)
    assert cache.attention == ("gather" if reads == "gather" or name in GATHERING else "pages"), cache
    return cache


@pytest.mark.parametrize(("name", "attention", "block_size", "scenario", "reads"), cases(HEADS, (1, 4, 16)))
def test_heads_and_blocks(name: str, attention: str, block_size: int, scenario: str, reads: str) -> None:
    made = zoo.model(name, attention)
    cache = paged(made, name, reads, block_size=block_size, num_blocks=512 // block_size)
    assert_identical(reference(made, name, scenario), zoo.generate(made, cache, scenario))
    assert cache.usage.tokens > 0
    cache.reset()
    assert cache.state.manager.allocator.num_used == 0


@pytest.mark.parametrize(("name", "attention", "block_size", "scenario", "reads"), cases(OTHERS, (4,)))
def test_models(name: str, attention: str, block_size: int, scenario: str, reads: str) -> None:
    made = zoo.model(name, attention)
    cache = paged(made, name, reads, block_size=block_size)
    assert_identical(reference(made, name, scenario), zoo.generate(made, cache, scenario))
    assert not cache.state.odd or cache.attention == "gather", "the last pass read pages"


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    family, changes = zoo.MODELS[name]
    made = zoo.build(family, changes).to(dtype)
    cache = paged(made, name, "gather")
    assert cache.state.pool.dtype == dtype
    assert_identical(zoo.generate(made, zoo.dynamic(made), "beams"), zoo.generate(made, cache, "beams"))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_on_pages(name: str, dtype: torch.dtype) -> None:
    """Over the same tokens, whichever would be chosen: pages round otherwise, and two tokens may be as good."""
    family, changes = zoo.MODELS[name]
    made = zoo.build(family, changes).to(dtype)
    caches, inputs = (zoo.dynamic(made), paged(made, name, "auto")), zoo.prompt(3, 11, 6)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 9, dtype=torch.long)], dim=1)
    for start, stop in ((0, 11), (11, 15), *((token, token + 1) for token in range(15, 20))):
        ids = torch.cat([inputs["input_ids"], zoo.prompt(9, 9, 9, seed=8)["input_ids"]], dim=1)[:, start:stop]
        with torch.no_grad():
            expected, got = (
                made(input_ids=ids, attention_mask=mask[:, :stop], **{zoo.CACHE_KEYWORD: cache}).logits[:, -1] for cache in caches
            )
        assert float((expected - got).abs().max()) <= 16 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert not caches[1].state.odd


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gemma3"])
def test_an_assistant_model_drafts(name: str) -> None:
    """Drafts are taken back when the model disagrees."""
    made, assistant = zoo.model(name), zoo.model("llama-mqa")
    if name in zoo.WINDOWED and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    expected, got = (
        made.generate(**zoo.prompt(11), **{zoo.CACHE_KEYWORD: cache}, **zoo.GREEDY, assistant_model=assistant)
        for cache in (zoo.dynamic(made), zoo.paged(made))
    )
    assert torch.equal(expected, got)


@pytest.mark.parametrize("name", zoo.WINDOWED)
def test_windows_are_really_left_behind(name: str) -> None:
    """The models with windows are worth their tests: what is behind the window does change the output of others."""
    cache = zoo.paged(zoo.model(name, "eager"))
    zoo.generate(zoo.model(name, "eager"), cache, "greedy")
    length = cache.get_seq_length()
    seen = [cache.get_mask_sizes(1, index) for index, stored in enumerate(cache._found.stored) if stored]
    assert length >= 20
    assert (8, length - 7) in seen


def test_the_matrix_would_notice_one_wrong_key() -> None:
    """One key of one token in one layer: the comparison of logits sees it."""
    made = zoo.model("llama-gqa")
    caches = zoo.dynamic(made), zoo.paged(made)
    inputs = zoo.prompt(9)
    for cache in caches:
        with torch.no_grad():
            made(**inputs, **{zoo.CACHE_KEYWORD: cache})
    caches[1].state.pool.k_cache(1)[1, 2].neg_()
    longer = zoo.prompt(9)["input_ids"], torch.tensor([[3]])
    inputs = {"input_ids": torch.cat(longer, dim=1), "attention_mask": torch.ones(1, 10)}
    expected, got = (zoo.generate(made, cache, "greedy", inputs) for cache in caches)
    with pytest.raises(AssertionError):
        assert_identical(expected, got)
