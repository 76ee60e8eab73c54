"""The same tokens as without reuse: heads x block sizes x padding x ways to generate, each over several turns of a chat.

After each turn everything that is stored is compared with what the model computes for its tokens from nothing, so that a
wrong key shows even where it changes no token.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from integration import zoo
from integration.prefixes import Watched, longer, padded, text
from support_slow import every

GREEDY = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7}
SAMPLE = {**GREEDY, "do_sample": True, "temperature": 1.3, "top_k": 20}

WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": SAMPLE,
    "beams": {**GREEDY, "num_beams": 3},
    "several results": {**SAMPLE, "num_return_sequences": 2},
    "several beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {**SAMPLE, "num_beams": 2},
    "prompt lookup": {**GREEDY, "prompt_lookup_num_tokens": 3},
    "chunked prefill": {**GREEDY, "prefill_chunk_size": 3},
}
BATCHES: dict[str, dict[str, torch.Tensor]] = {
    "one": padded(text(18)),
    "equal lengths": padded(text(18), text(18, 2)),
    "padding of whole blocks": padded(text(9), text(25, 2), text(17, 3)),
    "padding of any length": padded(text(20), text(23, 2), text(11, 3)),
}
"""Padding 16, 0, 8, and 3, 0, 12: rows go on at one place, which may be in the middle of a block of some of them."""


def cases() -> list[Any]:
    found = []
    for name, block_size, batch, way in itertools.product(("llama-gqa", "llama-mha"), (1, 4, 16), BATCHES, WAYS):
        if way == "prompt lookup" and batch != "one":
            continue  # Transformers has it for one row only
        by_turns = ([*WAYS].index(way) + 2) % len(BATCHES) == [*BATCHES].index(batch)
        quick = name == "llama-gqa" and block_size == 4 and by_turns
        marks = () if quick and way not in ("beam sampling", "several beams") else pytest.mark.slow
        found.append(pytest.param(name, block_size, batch, way, marks=marks, id=f"{name}-{block_size}-{batch}-{way}"))
    return found


CHUNKS_KNOW_OF_A_PAST = "past_length = cache.get_seq_length()" in inspect.getsource(GenerationMixin._prefill).split("Chunked prefill (")[-1]
"""Where they do not, chunked prefill is right, and computes everything again."""


def usable(pads: list[int], hits: list[int], length: int, block_size: int) -> int:
    """Return the tokens that need not be computed, by the rule as it is documented."""
    hits = [min(hit, (length - pad - 1) // block_size * block_size) for pad, hit in zip(pads, hits, strict=True)]
    past = min(pad + hit for pad, hit in zip(pads, hits, strict=True))
    return sum(max(past - pad, 0) for pad in pads)


@pytest.mark.parametrize(("name", "block_size", "batch", "way"), cases())
def test_turns_of_a_chat(name: str, block_size: int, batch: str, way: str) -> None:
    watched = Watched(name, block_size=block_size, num_blocks=1024 // block_size)
    inputs, settings = BATCHES[batch], WAYS[way]
    pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    length = inputs["input_ids"].shape[1]
    watched.same(inputs, **settings)
    assert watched.cached == 0, "nothing is cached at first"

    watched.same(inputs, **settings)
    knows = way != "chunked prefill" or CHUNKS_KNOW_OF_A_PAST
    hits = [(length - pad) // block_size * block_size for pad in pads]
    assert watched.cached == knows * usable(pads, hits, length, block_size), "the same again: all but the last token, in whole blocks"

    out = watched.same(inputs, **settings).sequences
    results = len(out) // len(pads)
    turn = longer(out, 5, 9, 12)
    turn["attention_mask"][:, :length] = inputs["attention_mask"].repeat_interleave(results, dim=0)
    computed = length if "beams" in way or "beam" in way else out.shape[1] - 1
    hits = [(computed - pad) // block_size * block_size for pad in pads for _ in range(results)]
    watched.same(turn, **GREEDY)
    expected = usable([pad for pad in pads for _ in range(results)], hits, turn["input_ids"].shape[1], block_size)
    assert watched.cached == expected
    watched.cache.reset()
    watched.check()


@pytest.mark.parametrize("name", every(2, [name for name in zoo.MODELS if name not in ("llama-gqa", "llama-mha")]))
@pytest.mark.parametrize(
    "way", ["greedy", pytest.param("beams", marks=pytest.mark.slow), pytest.param("prompt lookup", marks=pytest.mark.slow)]
)
def test_models(name: str, way: str) -> None:
    """Also those with windows: the pool keeps every token, and each layer reads what its window reaches."""
    if way == "prompt lookup" and name in zoo.WINDOWED and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    watched = Watched(name)
    inputs = padded(text(23)) if way == "prompt lookup" else padded(text(23), text(19, 2))
    for _ in range(2):
        out = watched.same(inputs, **WAYS[way]).sequences
    assert watched.cached == {"prompt lookup": 20}.get(way, 20 + 16)
    if way == "prompt lookup":
        watched.same(longer(out, 5, 9), **GREEDY)
        assert watched.cached == 28
    watched.same(padded([*text(23)[:17], 5, 6]), **GREEDY)
    assert watched.cached == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """Tokens may differ where logits are equal to the last bit, so only what is reused is looked at, and that it is close."""
    watched = Watched("llama-gqa")
    family, changes = zoo.MODELS["llama-gqa"]
    made = zoo.build(family, changes).to(dtype)
    watched.cache = cache = type(watched.cache).for_model(made, zoo.conf(block_size=4, num_blocks=64), prefix="radix")
    inputs = padded(text(23), text(19, 2))
    runs = []
    for _ in range(2):
        out = made.generate(**cache.bind(**inputs), **GREEDY, return_dict_in_generate=True, output_logits=True)
        cache.commit(out)
        runs.append(out.logits[0])
    assert cache.usage.cached_tokens == 36
    torch.testing.assert_close(runs[0], runs[1], rtol=0.05, atol=0.05)
