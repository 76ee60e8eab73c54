"""What is refused: clearly, before anything changes, and nothing is silently wrong."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import transformers

from integration import zoo
from kvdock import KVDockError, PagedKVCacheConfig
from kvdock.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CapacityError,
    IndexRangeError,
    OutOfBlocksError,
    UnsupportedError,
    WrongThreadError,
)
from kvdock.integrations.transformers import PagedCacheForTransformers

CONF = PagedKVCacheConfig(num_blocks=8, block_size=4)


def forward(made: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = made(input_ids=ids, **{zoo.CACHE_KEYWORD: cache}).logits
    return result


def seen(cache: PagedCacheForTransformers) -> tuple[Any, ...]:
    """Everything about a cache that a failed call must leave alone."""
    state = cache.state
    content = [(state.pool.k_cache(i).clone(), state.pool.v_cache(i).clone()) for i in range(state.pool.num_layers)]
    return (
        cache.usage,
        list(state.lengths.of),
        zoo.table(cache).ravel().tolist(),
        state.manager.allocator.ref_counts(range(8)).tolist(),
        content,
    )


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[:-1] == after[:-1]
    for (k, v), (k_after, v_after) in zip(before[-1], after[-1], strict=True):
        assert torch.equal(k, k_after)
        assert torch.equal(v, v_after)


def test_a_full_pool_leaves_the_cache_as_it_was_and_usable() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    ids = zoo.prompt(14, 14)["input_ids"]
    forward(made, ids, cache)
    before = seen(cache)
    with pytest.raises(
        OutOfBlocksError, match=r"at most 0 blocks: 0 free and 0 evictable, .*of 8 in the pool, got a request for 2"
    ) as caught:
        forward(made, torch.full((2, 3), 5), cache)
    assert isinstance(caught.value, MemoryError)
    assert_same(before, seen(cache))
    expected = zoo.dynamic(made)
    forward(made, ids, expected)
    assert zoo.close(forward(made, torch.full((2, 2), 5), expected), forward(made, torch.full((2, 2), 5), cache))


def test_generate_stops_with_a_clear_error_when_the_pool_is_full() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    with pytest.raises(OutOfBlocksError, match="num_blocks or max_kv_memory_bytes"):
        made.generate(**cache.bind(**zoo.prompt(20)), do_sample=False, max_new_tokens=40, min_new_tokens=40)
    assert cache.get_seq_length() == 32
    cache.reset()
    made.generate(**cache.bind(**zoo.prompt(20)), do_sample=False, max_new_tokens=10)


def test_a_full_pool_with_a_copy_due_leaves_both_copies_as_they_were() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    forward(made, zoo.prompt(30)["input_ids"], cache)
    other = copy.deepcopy(cache)
    before = seen(cache), seen(other)
    with pytest.raises(OutOfBlocksError):
        forward(made, torch.tensor([[5]]), other)
    for cached, was in zip((cache, other), before, strict=True):
        assert_same(was, seen(cached))


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="max_kv_memory_bytes"):
        PagedCacheForTransformers.for_model(zoo.model("llama-gqa"), PagedKVCacheConfig(max_kv_memory_bytes=100, block_size=4))


def test_another_batch_size_is_refused() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    forward(made, zoo.prompt(5, 5)["input_ids"], cache)
    before = seen(cache)
    with pytest.raises(ArgumentValueError, match=r"batch size: expected 2, as in the 5 tokens that the cache holds, got 3. Fix: reset\(\)"):
        forward(made, torch.full((3, 1), 5), cache)
    assert_same(before, seen(cache))


def test_a_prompt_that_is_cached_already_is_refused_by_bind() -> None:
    """Transformers would feed it a second time, behind itself."""
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    inputs = zoo.prompt(6)
    assert cache.bind(**inputs)
    forward(made, inputs["input_ids"], cache)
    with pytest.raises(ArgumentValueError, match=r"more than the 6 tokens that the cache holds, got 6 tokens in all. Fix: .*truncate\(5\)"):
        cache.bind(**inputs)
    cache.truncate(5)
    expected = made.generate(**inputs, do_sample=False, max_new_tokens=5)
    assert torch.equal(expected, made.generate(**cache.bind(**inputs), do_sample=False, max_new_tokens=5))
    new = {"input_ids": torch.tensor([[7]]), "attention_mask": torch.ones(1, expected.shape[1])}
    assert cache.bind(**new), "only new ids, with a mask over everything"


def test_another_model_is_refused() -> None:
    """Same layers, other heads."""
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    forward(made, zoo.prompt(5)["input_ids"], cache)
    before = seen(cache)
    with pytest.raises(KVDockError, match=r"expected .*got "):
        forward(zoo.model("llama-mha"), torch.tensor([[5]]), cache)
    assert_same(before, seen(cache))


def test_another_dtype_is_refused() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    before = seen(cache)
    with pytest.raises(ArgumentTypeError, match=r"float32.*bfloat16|bfloat16.*float32"):
        forward(copy.deepcopy(made).to(torch.bfloat16), torch.tensor([[5]]), cache)
    assert_same(before, seen(cache))


class InterruptedPassError(Exception):
    """Raised by a hook between two layers."""


def interrupt(made: Any, cache: Any, ids: torch.Tensor) -> None:
    """Stop a forward pass after the first layer has written."""

    def stop(*args: object) -> None:
        raise InterruptedPassError

    hook = made.model.layers[1].register_forward_pre_hook(stop)
    try:
        with pytest.raises(InterruptedPassError):
            forward(made, ids, cache)
    finally:
        hook.remove()


def test_an_interrupted_forward_pass_is_noticed_and_can_be_taken_back() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    ids = zoo.prompt(7)["input_ids"]
    forward(made, ids, cache)
    interrupt(made, cache, torch.tensor([[5, 6]]))
    text = r"lengths from 7 to 9: a forward pass was interrupted.*Fix: go back with truncate\(7\)"
    go_on = (lambda: forward(made, torch.tensor([[5]]), cache), lambda: copy.deepcopy(cache), lambda: cache.batch_repeat_interleave(2))
    for refused in go_on:
        with pytest.raises(ArgumentValueError, match=text):
            refused()
    cache.truncate(7)
    expected = zoo.dynamic(made)
    forward(made, ids, expected)
    assert zoo.close(forward(made, torch.tensor([[5, 6]]), expected), forward(made, torch.tensor([[5, 6]]), cache))


def test_a_cache_can_be_reset_after_an_interrupted_pass() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    interrupt(made, cache, torch.tensor([[5, 6]]))
    cache.reset()
    assert cache.usage.pool_blocks_used == 0
    forward(made, torch.tensor([[5], [6]]), cache)


WHOLE = ("reset", "offload", "prefetch", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices")


@pytest.mark.parametrize("method", WHOLE)
def test_one_layer_alone_cannot_be_changed(method: str) -> None:
    layer = PagedCacheForTransformers.for_model(zoo.model("llama-gqa"), CONF).layers[1]
    arguments = [] if method in WHOLE[:3] else [1]
    text = rf"PagedLayer.{method}: expected a call on the whole cache, got one on layer 1. Fix: call cache.{method}"
    with pytest.raises(UnsupportedError, match=text):
        getattr(layer, method)(*arguments)
    with pytest.raises(UnsupportedError):
        copy.deepcopy(layer)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), IndexRangeError),
        (lambda cache: cache.reorder_cache(torch.tensor([0.0])), ArgumentTypeError),
        (lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), ArgumentValueError),
        (lambda cache: cache.batch_repeat_interleave(0), ArgumentValueError),
        (lambda cache: cache.truncate(6), IndexRangeError),
    ],
)
def test_bad_changes_of_the_batch_change_nothing(change: Any, error: type[KVDockError]) -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    forward(made, zoo.prompt(5, 5)["input_ids"], cache)
    before = seen(cache)
    with pytest.raises(error):
        change(cache)
    assert_same(before, seen(cache))


def test_a_backward_pass_through_the_cache_is_refused() -> None:
    """A forward pass with gradients on works; only a gradient that would be wrong is an error."""
    made = zoo.model("llama-gqa")
    ids = zoo.prompt(6)["input_ids"]
    caches = zoo.dynamic(made), PagedCacheForTransformers.for_model(made, CONF)
    first, second = ([made(input_ids=part, **{zoo.CACHE_KEYWORD: cache}).logits for part in (ids, ids[:, :1])] for cache in caches)
    for expected, got in zip(first, second, strict=True):
        assert torch.equal(expected, got)
    text = r"expected no backward pass, got one through cached keys and values. Fix: train with use_cache=False"
    with pytest.raises(UnsupportedError, match=text):
        second[1].sum().backward()


def test_a_pass_in_another_thread_meanwhile_is_refused_and_one_afterwards_is_not() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    other = copy.deepcopy(cache)
    results: list[Any] = []

    def use() -> None:
        try:
            results.append(forward(made, torch.tensor([[5]]), other))
        except KVDockError as error:
            results.append(error)

    def meanwhile(*args: object) -> None:
        hook.remove()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    hook = made.model.layers[1].register_forward_pre_hook(meanwhile)
    forward(made, zoo.prompt(6)["input_ids"], cache)
    assert isinstance(results[0], WrongThreadError)
    assert "MainThread" in str(results[0])
    assert cache.get_seq_length() == 6
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert isinstance(results[1], torch.Tensor)
    cache.state.manager.allocator.check_integrity()


def test_a_thread_that_failed_leaves_the_pool_to_others() -> None:
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    results: list[Any] = []
    failed, stay = threading.Event(), threading.Event()

    def use() -> None:
        for call in (lambda: forward(made, zoo.prompt(33)["input_ids"], cache), lambda: cache.truncate(1)):
            try:
                call()
            except KVDockError as error:
                results.append(type(error))
        failed.set()
        stay.wait(60)

    thread = threading.Thread(target=use)
    thread.start()
    assert failed.wait(60)
    assert results == [OutOfBlocksError, IndexRangeError]
    forward(made, torch.tensor([[5]]), cache)
    stay.set()
    thread.join()


def test_a_copy_of_blocks_that_fails_empties_the_cache_and_only_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a device runs out of memory: the table names the new blocks already, and nothing is in them."""
    made = zoo.model("llama-gqa")
    cache = PagedCacheForTransformers.for_model(made, CONF)
    ids = zoo.prompt(6)["input_ids"]
    forward(made, ids, cache)
    other = copy.deepcopy(cache)

    def fail(pairs: object) -> None:
        raise MemoryError("device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.state.pool, "copy_blocks", fail)
        with pytest.raises(MemoryError, match="device"):
            forward(made, torch.tensor([[5]]), cache)
    assert (cache.get_seq_length(), cache.usage.blocks) == (0, 0)
    expected = zoo.dynamic(made)
    for token in (ids, torch.tensor([[7]])):
        forward(made, token, expected)
    forward(made, torch.tensor([[7]]), other)
    assert zoo.close(other.layers[1].keys, expected.layers[1].keys)
    forward(made, ids, cache)
    cache.state.manager.allocator.check_integrity()


MORE = "layers that keep more"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("Mamba", {"state_size": 4}, "a layer with keys and values, .* got none but LinearAttentionLayer"),
    "mamba2": (
        "Mamba2",
        {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
        "none but LinearAttentionLayer|its own kind of cache",
    ),
    "indexed": ("DeepseekV32", {**zoo.MODELS["deepseek-v3"][1], "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}, MORE),
    "its own cache": ("Rwkv", {"attention_hidden_size": 32}, "its own kind of cache"),
    "cross-attention": ("GPT2", {"num_key_value_heads": None, "head_dim": None, "add_cross_attention": True}, "cross-attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_keep_more_than_keys_and_values_are_refused(case: str) -> None:
    family, changes, reason = REFUSED[case]
    made = zoo.build(family, changes, "eager")
    text = rf"PagedCacheForTransformers: {type(made).__name__}: expected .*({reason}).*Fix: use Transformers' own cache"
    with pytest.raises(UnsupportedError, match=text):
        PagedCacheForTransformers.for_model(made, CONF)


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedError, match="expected a decoder-only model"):
        PagedCacheForTransformers.for_model(transformers.T5ForConditionalGeneration(config), CONF)


class WrappingModel(transformers.LlamaForCausalLM):  # type: ignore[misc] # Transformers has no types here
    """Keeps a second cache beside the one that it is given, as Blt does, and returns both in one."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        output, given = super().forward(*args, **inputs), inputs[zoo.CACHE_KEYWORD]
        output[zoo.CACHE_KEYWORD] = transformers.EncoderDecoderCache(given, transformers.DynamicCache())
        return output


class ReplacingModel(transformers.LlamaForCausalLM):  # type: ignore[misc] # Transformers has no types here
    """Leaves alone what it is given, and returns a cache of its own."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **inputs | {zoo.CACHE_KEYWORD: transformers.DynamicCache()})


@pytest.mark.parametrize(("kind", "wrapper"), [(WrappingModel, "EncoderDecoderCache"), (ReplacingModel, "DynamicCache")])
def test_models_that_return_another_cache_are_refused(kind: type, wrapper: str) -> None:
    """What such a model keeps beside, a paged cache would neither store nor crop."""
    made = copy.deepcopy(zoo.model("llama-gqa"))
    made.__class__ = kind
    text = (
        rf"PagedCacheForTransformers: {kind.__name__}: expected a model that uses the cache it is given, "
        rf"got one that wraps it in {wrapper}\. Fix: use Transformers' own cache for this model"
    )
    with pytest.raises(UnsupportedError, match=text):
        PagedCacheForTransformers.for_model(made, CONF)


def convert(value: Any, to: Any) -> Any:
    """Move every tensor in nested arguments to a device, or every float to a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(to) if value.is_floating_point() or not isinstance(to, torch.dtype) else value
    if isinstance(value, (tuple, list)):
        return tuple(convert(item, to) for item in value)
    return {key: convert(item, to) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("to", "text"), [("meta", "one device, got cpu, meta"), (torch.bfloat16, "one dtype, got torch.bfloat16, torch.float32")]
)
def test_layers_of_several_devices_or_dtypes_are_refused(to: Any, text: str) -> None:
    """The second layer runs elsewhere; what it hands to the cache says so."""
    made = copy.deepcopy(zoo.model("llama-gqa"))
    layer = made.model.layers[1].to(to)
    layer.register_forward_pre_hook(lambda module, args, kwargs: convert((args, kwargs), to), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, output: torch.zeros(1, 1, 32))
    with pytest.raises(UnsupportedError, match=f"expected keys and values of {text}"):
        PagedCacheForTransformers.for_model(made, CONF)


def test_a_model_that_needs_other_inputs_fails_with_its_own_error_and_a_note() -> None:
    made = copy.deepcopy(zoo.model("llama-gqa"))

    def picky(*args: object) -> None:
        raise ValueError("where are the pixels?")

    made.register_forward_pre_hook(picky)
    with pytest.raises(ValueError, match="where are the pixels") as caught:
        PagedCacheForTransformers.for_model(made, CONF)
    assert any("kvdock ran tokens [[0]] through LlamaForCausalLM" in note for note in caught.value.__notes__)
