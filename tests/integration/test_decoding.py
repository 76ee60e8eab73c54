"""Decoding in place: one graph for steps of any length, the same tokens, and a cache that goes on behind them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from integration import zoo
from integration.prefixes import reusing
from integration.uncached import Uncached
from kvdock import ArgumentValueError, OutOfBlocksError, UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

pytestmark = pytest.mark.skipif(CACHE_KEYWORD != "cache", reason="before Transformers 5.24 a layer cannot hand itself over")

NEW = 12


def decode(made: Any, step: Any, inputs: dict[str, torch.Tensor], cache: Any, new: int = NEW) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute prompts, then decode greedily by steps in place; return the sequences and the logits of each new token."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = [made(**inputs, position_ids=positions, **{CACHE_KEYWORD: cache}).logits[:, -1]]
        with cache.decoding(new, mask) as steps:
            for _ in range(new):
                tokens = logits[-1][:, : zoo.VOCAB - 1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, tokens], dim=1)
                logits.append(step(input_ids=tokens, **steps.next()).logits[:, -1])
    return ids, logits


CASES = [
    pytest.param(name, compiled, marks=pytest.mark.slow if compiled and name != "gemma3" else ())
    for name in ("llama-gqa", "gpt2", "mistral-window", "gemma3", "gpt-oss", "deepseek-v3")
    for compiled in (False, True)
]


@pytest.mark.parametrize(("name", "compiled"), CASES)
def test_the_same_tokens_as_without_a_cache(name: str, compiled: bool) -> None:
    """Eagerly it is the same code. Compiled it is one graph, without breaks and for all lengths."""
    family, changes = zoo.MODELS[name]
    made = zoo.build(family, changes, "eager" if name in zoo.EAGER_ONLY else "sdpa")
    uncached, cache, counter = Uncached(made), zoo.paged(made), CompileCounterWithBackend("eager")
    step = torch.compile(made, fullgraph=True, backend=counter) if compiled else made
    for lengths in ((3, 11, 6), (9, 9, 9)):
        inputs = zoo.prompt(*lengths)
        ids, logits = decode(made, step, inputs, cache)
        expected_ids, expected = uncached.generate(inputs, NEW)
        assert torch.equal(ids, expected_ids)
        for got, right in zip(logits, expected, strict=False):
            torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)
        assert cache.get_seq_length() == ids.shape[1]
        cache.reset()
    assert counter.frame_count == (1 if compiled else 0), "another batch of as many rows needs no other graph"
    assert made.config._attn_implementation == ("eager" if name in zoo.EAGER_ONLY else "sdpa")
    cache.state.manager.check_integrity()
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inductor_compiles_it_once_for_four_thousand_lengths() -> None:
    made = zoo.build("Llama", {"max_position_embeddings": 4200})
    cache, counter = zoo.paged(made, num_blocks=1050), CompileCounterWithBackend("inductor")
    inputs, expected = zoo.prompt(9), zoo.dynamic(made)
    ids, logits = decode(made, torch.compile(made, fullgraph=True, backend=counter), inputs, cache, 4100)
    with torch.no_grad():
        for place in range(9, ids.shape[1]):
            right = made(input_ids=ids[:, :place] if place == 9 else ids[:, place - 1 : place], **{CACHE_KEYWORD: expected}).logits[:, -1]
            torch.testing.assert_close(logits[place - 9], right, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_the_cache_goes_on_by_other_ways() -> None:
    made = zoo.build("Llama", {})
    cache, uncached, inputs = zoo.paged(made), Uncached(made), zoo.prompt(7, 7)
    ids, _ = decode(made, made, inputs, cache, 5)
    free = cache.state.manager.available_size
    more = torch.cat([ids, torch.tensor([[20], [21]])], dim=1)
    with torch.no_grad():
        logits = made(input_ids=more[:, -1:], **{CACHE_KEYWORD: cache}).logits
    assert zoo.close(logits, uncached.logits(more)[:, -1:])
    assert cache.state.odd == ""
    cache.truncate(12)
    with cache.decoding(40) as steps:
        steps.next()
    assert cache.get_seq_length() == 13
    assert cache.state.manager.available_size == free - 8, "room that was not used is free again; the first token of a block takes one"


def test_a_step_that_fails_is_taken_back() -> None:
    made = zoo.build("Llama", {})
    cache, inputs = zoo.paged(made), zoo.prompt(6)
    with torch.no_grad():
        made(**inputs, **{CACHE_KEYWORD: cache})
        steps = cache.decoding(9)

        def fail() -> None:
            with steps:
                made(input_ids=torch.tensor([[5]]), **steps.next())
                made(input_ids=torch.tensor([[zoo.VOCAB]]), **steps.next())

        with pytest.raises(IndexError):
            fail()
    assert cache.get_seq_length() == 7
    assert made.config._attn_implementation == "sdpa"
    cache.state.manager.check_integrity()


def test_a_copy_shares_no_block_that_is_written() -> None:
    made = zoo.build("Llama", {})
    cache, uncached, inputs = zoo.paged(made), Uncached(made), zoo.prompt(6)
    with torch.no_grad():
        made(**inputs, **{CACHE_KEYWORD: cache})
        other = copy.deepcopy(cache)
        with cache.decoding(3) as steps:
            for token in (5, 6, 7):
                made(input_ids=torch.tensor([[token]]), **steps.next())
        got = made(input_ids=torch.tensor([[9]]), **{CACHE_KEYWORD: other}).logits
    assert zoo.close(got, uncached.logits(torch.cat([inputs["input_ids"], torch.tensor([[9]])], dim=1))[:, -1:])


def test_prefixes_that_were_found_are_decoded_on() -> None:
    made = zoo.build("Llama", {})
    cache, uncached, inputs = reusing(made), Uncached(made), zoo.prompt(18)
    cache.commit(made.generate(**cache.bind(**inputs), max_new_tokens=1))
    bound = cache.bind(**inputs)
    assert cache.usage.cached_tokens == 16
    with torch.no_grad():
        made(**bound)
        with cache.decoding(2) as steps:
            got = made(input_ids=torch.tensor([[5]]), **steps.next()).logits
    assert zoo.close(got, uncached.logits(torch.cat([inputs["input_ids"], torch.tensor([[5]])], dim=1))[:, -1:])
    with pytest.raises(ArgumentValueError, match="went on in steps of decoding"):
        cache.commit(torch.cat([inputs["input_ids"], torch.tensor([[5]])], dim=1))


def test_what_is_refused() -> None:
    made = zoo.build("Llama", {})
    cache = zoo.paged(made, num_blocks=8)
    with pytest.raises(ArgumentValueError, match="expected a cache with the tokens of a prompt, got an empty cache"):
        cache.decoding(3)
    with torch.no_grad():
        made(**zoo.prompt(6, 6), **{CACHE_KEYWORD: cache})
    with pytest.raises(ArgumentValueError, match=r"attention_mask: expected padding on the left only, \[2, 6\]"):
        cache.decoding(3, torch.tensor([[1, 1, 0, 1, 1, 1]] * 2))
    with pytest.raises(OutOfBlocksError):
        cache.decoding(30)
    assert cache.usage.blocks == 4
    with cache.decoding(2) as steps:
        with pytest.raises(ArgumentValueError, match="Fix: leave the `with` block"):
            made(input_ids=torch.tensor([[5], [6]]), **{CACHE_KEYWORD: cache})
        with pytest.raises(ArgumentValueError, match="got a decoding that is not over"):
            cache.decoding(2)
        for _ in range(2):
            steps.next()
        with pytest.raises(ArgumentValueError, match="expected at most 2 steps, got one more"):
            steps.next()
    cache.state.manager.check_integrity()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("falcon", "an attention of its own"), ("llama4-chunked", "a mask that is not plain"), ("gemma3n-shared", "share another's keys")],
)
def test_models_that_do_not_read_pages_alone_are_refused(name: str, reason: str) -> None:
    cache = zoo.paged(zoo.model(name))
    with pytest.raises(UnsupportedError, match=reason):
        cache.decoding(2)
