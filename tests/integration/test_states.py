"""Models whose layers keep states: tokens as without any cache, with Transformers' own, and behind prefixes that were found."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers

from integration import zoo
from integration.architectures import GROUPS
from integration.prefixes import CLOSE, padded, reusing, text
from integration.served import build, configured
from integration.uncached import Uncached
from kvdock import ArgumentValueError, OutOfBlocksError, PagedKVCacheConfig, UnsupportedError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.states import STATES, StateLayer

LISTED_FOR = "5.24.0"
"""The version of Transformers whose families are listed."""

SERVED = [
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
]
"""Families with states of which there are small models."""

OTHERS = [
    "falcon_mamba",
    "inkling2_loop_text",
    "inkling2_text",
    "mamba",
    "mamba2",
    "minimax",
    "qwen4_exp",
    "qwen4_exp_text",
    "recurrent_gemma",
]
"""The other families whose caches have such layers. See test_architectures_page for what comes of each."""

SPLIT = ("jamba", "zamba")
"""Families whose models forget the recurrent state in a pass of several tokens behind others: Transformers' own chunks are wrong, too."""

WAYS = ("greedy", "left-padded", "beams", "sampling", "beam-sampling", "prompt-lookup", "chunked-prefill")

GREEDY = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "return_dict_in_generate": True, "output_logits": True}


small = functools.cache(build)


def assert_same(made: Any, uncached: Uncached, inputs: dict[str, torch.Tensor], got: Any) -> None:
    """Compare tokens with those without any cache, and logits with those of Transformers' own.

    Some models' steps of one token give slightly other logits than their passes over many, with any cache and in float64 too.
    """
    ids, _ = uncached.generate(inputs, len(got.logits))
    assert torch.equal(ids, got.sequences)
    for expected, logits in zip(made.generate(**inputs, **GREEDY).logits, got.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)  # another state makes them differ by 0.02 to 30


IS_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
"""Whether Transformers makes a layer with states for each of nemotron_h's layers without any, so that they seem to be elsewhere."""

HERE = [name for name in SERVED if name in GROUPS["causal"] and not (IS_OLD and name == "nemotron_h")]

served = pytest.mark.parametrize("model_type", HERE)
some = pytest.mark.parametrize("model_type", [name for name in ("qwen3_next", "falcon_h1", "lfm3") if name in HERE])
"""States in layers of their own, beside keys and values, and convolutions only."""


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ != LISTED_FOR, reason="other versions have other families; those that are listed run there")
@pytest.mark.filterwarnings("ignore")
def test_no_family_with_states_is_forgotten() -> None:
    found = set()
    for model_type in GROUPS["causal"]:
        try:
            layers = transformers.DynamicCache(config=configured(model_type)[1]).layers
        except Exception:  # noqa: BLE001, S112 - no small configuration, or a cache of its own
            continue
        if {type(layer) for layer in layers} & {*STATES}:
            found.add(model_type)
    assert found == {*SERVED, *OTHERS}


@served
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tokens_are_those_without_any_cache(model_type: str) -> None:
    """Of rows with padding and without; a later turn of the same rows goes on from their states."""
    made = build(model_type)
    uncached, cache = Uncached(made), zoo.paged(made)
    first = made.generate(**cache.bind(**padded(text(18), text(11, 2))), **GREEDY)
    assert_same(made, uncached, padded(text(18), text(11, 2)), first)
    assert cache.usage.state_bytes > 0
    assert cache.explain().states == sum(isinstance(layer, StateLayer) for layer in cache.layers) > 0
    if model_type not in SPLIT:
        cache.reset()
        whole = padded(text(18))
        turn = {name: torch.cat([value, torch.ones_like(value[:, :3])], dim=1) for name, value in whole.items()}
        made(**cache.bind(**whole))
        assert_same(made, uncached, turn, made.generate(**cache.bind(**turn), **GREEDY))


@served
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["auto", "gather"])
def test_tokens_are_those_of_the_own_cache(model_type: str, attention: str) -> None:
    made = small(model_type)
    cache = zoo.paged(made, attention=attention)
    for way in WAYS:
        if way == "prompt-lookup" and made._is_stateful:  # which Transformers refuses for any cache
            continue
        expected = zoo.generate(made, zoo.dynamic(made), way)
        cache.reset()
        got = zoo.generate(made, cache, way)
        assert torch.equal(expected.sequences, got.sequences), way
        for left, right in zip(expected.logits, got.logits, strict=True):
            torch.testing.assert_close(left, right, **CLOSE, equal_nan=True)


PROMPTS = (
    (padded(text(18)), 0),  # nothing is there: states are kept behind 16 tokens
    (padded(text(18)), 16),
    (padded([*text(14), 5, 6, 7]), 0),  # keys and values of 12 tokens are there, and now states behind them, too
    (padded([*text(14), 9, 6, 7]), 12),
    (padded(text(21), text(13, 2)), 0),  # the second row is new, and all rows go on at one place
    (padded(text(21), text(13, 2)), 20 + 12),
)
"""Prompts, and how many tokens of each are found, in blocks of 4."""


@served
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_prompts_go_on_from_states_that_are_kept(model_type: str) -> None:
    made = build(model_type)
    if model_type in SPLIT:
        with pytest.raises(UnsupportedError, match="got others when four tokens came in two passes"):
            reusing(made)
        return
    uncached, cache = Uncached(made), reusing(made, num_blocks=256)
    for inputs, found in PROMPTS:
        got = made.generate(**cache.bind(**inputs), **GREEDY)
        assert cache.usage.cached_tokens == found
        cache.commit(got)
        assert_same(made, uncached, inputs, got)
    assert cache.usage.kept_state_bytes > 0
    cache.state.manager.check_integrity()


@some
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {"prefill_chunk_size": 5}])
def test_any_call_goes_on_from_states(model_type: str, settings: dict[str, Any]) -> None:
    """Rows are repeated for beams and for several results; a prompt may come in parts. Copies commit for themselves."""
    made = small(model_type)
    cache = reusing(made)
    how = {**GREEDY, **settings}
    for found in (0, 16):
        torch.manual_seed(3)
        expected = made.generate(**padded(text(18)), **how)
        torch.manual_seed(3)
        got = made.generate(**cache.bind(**padded(text(18))), **how)
        # Older versions cut prompts into chunks from the first token on, also where they are known: then all is computed.
        is_cut = "prefill_chunk_size" in settings and transformers.__version__ != LISTED_FOR
        assert cache.usage.cached_tokens == found or (is_cut and not cache.usage.cached_tokens)
        copy.deepcopy(cache).commit(got)
        assert torch.equal(expected.sequences, got.sequences)


def test_states_belong_to_a_namespace_and_go_with_the_prefixes() -> None:
    made = small("qwen3_next")
    cache = reusing(made)
    for namespace, found in ((("a",), 0), (("b",), 0), (("a",), 16)):
        cache.commit(made.generate(**cache.bind(**padded(text(18)), namespace=namespace), **GREEDY))
        assert cache.usage.cached_tokens == found
    cache.forget_prefixes()
    assert cache.usage.kept_state_bytes == 0
    made.generate(**cache.bind(**padded(text(18)), namespace=("a",)), **GREEDY)
    assert cache.usage.cached_tokens == 0


def test_states_take_no_more_bytes_than_they_may() -> None:
    """Those of two prefixes: the one that was used longest ago makes room."""
    made = small("qwen3_next")
    conf = PagedKVCacheConfig(num_blocks=256, block_size=4)
    one = reusing(made)._found.state_group.nbytes
    with pytest.raises(ArgumentValueError, match=rf"state_bytes: expected at least {one}, the bytes of one prefix, got {one - 1}"):
        PagedCacheForTransformers.for_model(made, conf, prefix="radix", state_bytes=one - 1)
    cache = PagedCacheForTransformers.for_model(made, conf, prefix="radix", state_bytes=2 * one)
    for seed, found in ((1, 0), (2, 0), (1, 16), (3, 0), (2, 0), (3, 16)):
        cache.commit(made.generate(**cache.bind(**padded(text(18, seed))), **GREEDY))
        assert (seed, cache.usage.cached_tokens) == (seed, found)
        assert cache.usage.kept_state_bytes <= 2 * one


@some
def test_a_copy_has_states_of_its_own(model_type: str) -> None:
    made = build(model_type)
    uncached, cache = Uncached(made), zoo.paged(made)
    made(**cache.bind(**padded(text(18))))
    turns = [padded([*text(18), *more]) for more in ((5, 9), (33, 34))]
    other = copy.deepcopy(cache)
    uncached.assert_same(turns[0], made.generate(**other.bind(**turns[0]), **GREEDY))
    uncached.assert_same(turns[1], made.generate(**cache.bind(**turns[1]), **GREEDY))


@some
def test_rows_come_and_go(model_type: str) -> None:
    """In any order, some of them repeated; behind a reset any number of others, in and outside of inference mode."""
    made = small(model_type)
    mine, own = zoo.paged(made), zoo.dynamic(made)
    prompts, steps = padded(text(9), text(9, 2), text(9, 3)), torch.tensor([[5], [9], [7], [5]])
    for inference in (True, False):
        mine.reset()
        own = zoo.dynamic(made)
        with torch.inference_mode(inference), torch.no_grad():
            for cache in (mine, own):
                made(**prompts, **{zoo.CACHE_KEYWORD: cache})
        with torch.no_grad():
            mine.batch_repeat_interleave(2)
            mine.batch_select_indices(torch.tensor([4, 0, 2, 0]))
            own.reorder_cache(torch.tensor([2, 0, 1, 0]))
            left, right = (made(steps, **{zoo.CACHE_KEYWORD: cache}).logits for cache in (mine, copy.deepcopy(own)))
        torch.testing.assert_close(left, right, **CLOSE)
    mine.reset()
    assert (mine.usage.state_bytes, mine.batch_size) == (0, -1)
    Uncached(made).assert_same(padded(text(9)), made.generate(**mine.bind(**padded(text(9))), **GREEDY))


@some
def test_a_full_pool_changes_no_state(model_type: str) -> None:
    """Though layers with states come before the first one that needs a block."""
    made = build(model_type)
    uncached = Uncached(made)
    cache = zoo.paged(made, num_blocks=8)
    made(**cache.bind(**padded(text(18))))
    with pytest.raises(OutOfBlocksError, match=r"Fix: reset\(\) copies of the cache, or make the pool larger"):
        made(torch.tensor([text(18, 4)]), **{zoo.CACHE_KEYWORD: cache})
    turn = padded([*text(18), 5, 9])
    uncached.assert_same(turn, made.generate(**cache.bind(**turn), **GREEDY))
    cache.state.manager.check_integrity()


class InterruptedPassError(Exception):
    """Ends a pass in the middle."""


@some
@pytest.mark.parametrize("layer", [0, -1])
def test_a_pass_that_fails_is_noticed(model_type: str, layer: int) -> None:
    """The first one leaves nothing, and no later one can be taken back."""
    made = build(model_type)
    uncached, cache = Uncached(made), zoo.paged(made)

    def interrupt(*args: Any) -> None:
        raise InterruptedPassError

    def run(*tokens: int, fails: bool) -> None:
        hook = made.model.layers[layer].register_forward_hook(interrupt) if fails else None
        try:
            made(torch.tensor([tokens]), **{zoo.CACHE_KEYWORD: cache})
        except InterruptedPassError:
            assert fails
        finally:
            if hook:
                hook.remove()

    run(*text(5), fails=True)
    if layer or not cache.state.lengths.is_whole:
        cache.reset()  # keys and values were written
    run(*text(18), fails=False)
    run(5, fails=True)
    calls = (lambda: run(5, fails=False), lambda: copy.deepcopy(cache), lambda: cache.reorder_cache(torch.tensor([0])))
    for call in (*calls, lambda: cache.truncate(17)):
        with pytest.raises(ArgumentValueError, match=r"a forward pass (was interrupted|which failed has left).*reset\(\)"):
            call()
    cache.reset()
    uncached.assert_same(padded(text(18)), made.generate(**cache.bind(**padded(text(18))), **GREEDY))
    cache.state.manager.check_integrity()


def test_what_states_cannot_do_is_refused() -> None:
    made = small("qwen3_next")
    cache = zoo.paged(made)
    with pytest.raises(UnsupportedError, match="capture: expected attention on pages in all layers, got layers that keep a state"):
        cache.capture()
    made(**cache.bind(**padded(text(18))))
    with pytest.raises(UnsupportedError, match="decoding: expected attention on pages in all layers, got layers that keep a state"):
        cache.decoding(4)
    for cut in (lambda: cache.truncate(17), lambda: cache.crop(-1)):
        with pytest.raises(UnsupportedError, match=r"got a recurrent state. Fix: reset\(\) the cache, or copy.deepcopy\(\) it before"):
            cut()
    cache.truncate(18)
    assert cache.get_seq_length() == 18
    assert str(cache.explain()) == "pages, and states of 3 layers"


@pytest.mark.skipif("lfm3" not in GROUPS["causal"], reason="this version has no model of convolutions alone")
def test_convolutions_take_back_what_they_have_recorded() -> None:
    made = build("lfm3")
    uncached, cache = Uncached(made), zoo.paged(made)
    made(**cache.bind(**padded(text(18))))
    with pytest.raises(UnsupportedError, match="got a convolution of which no inputs before the last 2 are recorded"):
        cache.truncate(16)
    cache.activate_past_recording()
    made(torch.tensor([[5, 6, 7]]), **{zoo.CACHE_KEYWORD: cache})
    cache.crop(-2)
    turn = padded([*text(18), 5, 9])
    uncached.assert_same(turn, made.generate(**cache.bind(**turn), **GREEDY))


REFUSED = {
    "mamba": "expected a layer with keys and values, which are what a pool pages, got none but LinearAttentionLayer",
    "recurrent_gemma": "got a layer that (keeps them elsewhere|does not): 0",  # before 5.24 a trial step finds it out
    "minimax": "got one that brings its own kind of cache",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [name for name in REFUSED if name in GROUPS["causal"]])
def test_what_is_none_of_these_is_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{REFUSED[model_type]}. Fix: use Transformers' own cache for this model"):
        zoo.paged(build(model_type))
