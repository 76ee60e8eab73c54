"""``use_cache=False``, which trainers leave in a configuration and MPT brings along: `generate` then feeds the whole text at each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from integration import zoo
from integration.prefixes import padded, reusing, text
from integration.uncached import Uncached
from kvdock.errors import ArgumentValueError

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}


def mpt() -> Any:
    """Make an MPT model."""
    config = transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=zoo.VOCAB, max_seq_len=64, pad_token_id=0, eos_token_id=60
    )
    torch.manual_seed(11)
    return zoo.randomise(transformers.MptForCausalLM(config).eval())


def trained() -> Any:
    """Make a model as a trainer leaves it."""
    made = zoo.build("Llama", {})
    made.config.use_cache = made.generation_config.use_cache = False
    return made


MODELS = {"mpt": mpt, "trained": trained}


@pytest.mark.parametrize("given", ["nothing", "a configuration"])
@pytest.mark.parametrize("prefix", [None, "radix"])
@pytest.mark.parametrize("name", MODELS)
def test_bind_makes_it_work(name: str, prefix: str | None, given: str) -> None:
    made = MODELS[name]()
    inputs = padded(text(18))
    expected = made.generate(**inputs, **GREEDY, use_cache=False)
    cache = reusing(made) if prefix else zoo.paged(made)
    more = (
        {} if given == "nothing" else {"generation_config": transformers.GenerationConfig(use_cache=False, pad_token_id=0, eos_token_id=60)}
    )
    for cached in (0, 16 if prefix else 0):
        got = made.generate(**cache.bind(**inputs), **GREEDY, **more)
        assert torch.equal(got.sequences, expected.sequences)
        for left, right in zip(expected.logits, got.logits, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
        assert (cache.get_seq_length(), cache.usage.cached_tokens) == (23, cached)
        cache.commit(got) if prefix else cache.reset()


@pytest.mark.parametrize("prefix", [None, "radix"])
@pytest.mark.parametrize("name", MODELS)
def test_without_bind_it_is_refused(name: str, prefix: str | None) -> None:
    made = MODELS[name]()
    inputs = padded(text(18))
    cache = reusing(made) if prefix else zoo.paged(made)
    with pytest.raises(
        ArgumentValueError, match=r"use_cache: expected True where a cache is passed, got False.*Fix: .*cache.bind.*use_cache=True"
    ):
        made.generate(**inputs, **GREEDY, **{zoo.CACHE_KEYWORD: cache})
    assert cache.get_seq_length() == 0
    got = made.generate(**inputs, **GREEDY, use_cache=True, **{zoo.CACHE_KEYWORD: cache})
    if name == "trained":
        Uncached(trained()).assert_same(inputs, got)
    assert cache.get_seq_length() == 23


@pytest.mark.parametrize("prefix", [None, "radix"])
def test_bind_refuses_a_call_that_wants_none(prefix: str | None) -> None:
    made = zoo.model("llama-gqa")
    cache = reusing(made) if prefix else zoo.paged(made)
    with pytest.raises(ArgumentValueError, match=r"bind: use_cache: expected True, or none, got False. Fix: leave it out"):
        cache.bind(**padded(text(18)), use_cache=False)
    assert cache.bind(**padded(text(18)), use_cache=True)["use_cache"] is True


def test_what_dynamic_cache_has_besides() -> None:
    made = zoo.model("gemma3")
    cache, own = zoo.paged(made), zoo.dynamic(made)
    for each in (cache, own):
        made.generate(**padded(text(6)), do_sample=False, max_new_tokens=2, **{zoo.CACHE_KEYWORD: each})
    for layer, expected in zip(cache.layers, own.layers, strict=True):
        assert (layer.device, layer.dtype) == (expected.device, expected.keys.dtype)
    for mine, theirs in zip(cache, own, strict=True):
        assert zoo.close(mine[0], theirs[0])
        assert zoo.close(mine[1], theirs[1])
        assert (mine[2] is None) == (theirs[2] is None)
        assert mine[2] is None or int(mine[2]) == int(theirs[2])
    cache.reset()
    assert [layer[:2] for layer in cache] == [(None, None)] * 2
