"""The guard watches what `generate` runs, whatever is around it, and notices where it does not; it leaves a model with the last cache."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import accelerate
import pytest
import torch

from integration import zoo
from integration.prefixes import Watched, padded, reusing, text
from integration.uncached import Uncached
from integration.wrappers import Wrapper
from kvdock.errors import ArgumentValueError
from kvdock.integrations.transformers.hook import prepare_pass
from support_slow import first_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT asks Transformers by an old name

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}


def compiled(model: Any) -> Any:
    """Compile a model, without a compiler."""
    return torch.compile(model, backend="eager")


def lora(model: Any) -> Any:
    """Wrap a model by PEFT itself."""
    peft = pytest.importorskip("peft", reason="PEFT is optional; what it does is also done by a wrapper of our own")
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()


WRAPPERS = {"a wrapper": Wrapper, "compiled": compiled, "compiled in a wrapper": lambda model: Wrapper(compiled(model)), "peft": lora}


@pytest.fixture(params=first_of(WRAPPERS))
def around(request: pytest.FixtureRequest) -> Any:
    """A model in another."""
    yield WRAPPERS[request.param](zoo.build("Llama", {}))
    torch.compiler.reset()


@pytest.mark.parametrize("rows", first_of([[text(18)], [text(18), text(10, 2)]]), ids=["one", "padded"])
def test_generate_of_a_wrapper_is_watched(around: Any, rows: list[list[int]]) -> None:
    watched, uncached, inputs = Watched("wrapped", model=around), Uncached(around), padded(*rows)
    for way in ({}, {}, {"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}, {}):
        if len(rows) > 1 and "prompt_lookup_num_tokens" in way:
            continue
        got = around.generate(**watched.cache.bind(**inputs), **GREEDY, **way)
        uncached.assert_same(inputs, got)
        watched.cache.commit(got)
        watched.check()
    assert watched.cached == (16 if len(rows) == 1 else 24)


@pytest.mark.slow
def test_forward_of_a_wrapper_is_watched(around: Any) -> None:
    """Padded rows by hand, told nothing: their positions are filled in all the same."""
    watched, uncached, inputs = Watched("wrapped", model=around), Uncached(around), padded(text(18), text(10, 2))
    expected = uncached.logits(inputs["input_ids"], inputs["attention_mask"])[:, -1]
    for _ in range(2):
        watched.cache.bind(**inputs)
        with torch.no_grad():
            got = around(input_ids=inputs["input_ids"], **{zoo.CACHE_KEYWORD: watched.cache}).logits[:, -1]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        watched.cache.commit(inputs["input_ids"])
        watched.check()
    assert watched.cached == 24


@pytest.mark.parametrize("cached", [False, True])
def test_adapters_beside_bind_never_reach_the_model_and_are_noticed(cached: bool) -> None:
    around = Wrapper(zoo.build("Llama", {}))
    watched, inputs = Watched("wrapped", model=around), padded(text(18))
    if cached:
        watched.cache.commit(around.generate(**watched.cache.bind(**inputs), **GREEDY))
    bound = watched.cache.bind(**inputs)
    if cached:
        with pytest.raises(
            ArgumentValueError, match=r"first pass: expected .*16 tokens.*hooks that came or went .*adapter_names. Fix: name"
        ):
            around.generate(**bound, **GREEDY, adapter_names=["a"])
    else:
        out = around.generate(**bound, **GREEDY, adapter_names=["a"])
        assert not torch.equal(out.logits[0], around.generate(**inputs, **GREEDY).logits[0]), "else there is nothing to notice"
        with pytest.raises(ArgumentValueError, match="computed with hooks that came or went"):
            watched.cache.commit(out)
    watched.check()


def test_adapters_of_peft_beside_bind_are_noticed() -> None:
    around = lora(zoo.build("Llama", {}))
    around.add_adapter("b", around.peft_config["default"])
    watched, inputs = Watched("wrapped", model=around), padded(text(18))
    out = around.generate(**watched.cache.bind(**inputs), **GREEDY, adapter_names=["b"])
    with pytest.raises(ArgumentValueError, match="computed with hooks that came or went"):
        watched.cache.commit(out)
    own = watched.cache.bind(**inputs, adapter_names=["b"], namespace=("adapter", "b"))
    watched.cache.commit(around.generate(**own, **GREEDY))
    own = watched.cache.bind(**inputs, adapter_names=["b"], namespace=("adapter", "b"))
    got = around.generate(**own, **GREEDY)
    assert watched.cached == 16
    around.set_adapter("b")
    Uncached(around).assert_same(inputs, got)


def test_a_model_that_is_not_watched_stores_nothing() -> None:
    """Another model than the cache was made for, perhaps of other weights."""
    watched = Watched("llama-gqa")
    other = copy.deepcopy(watched.model)
    other._forward_pre_hooks.clear()
    inputs = padded(text(18))
    for pass_by in (lambda bound: other.generate(**bound, **GREEDY).sequences, lambda bound: (other(**bound), inputs["input_ids"])[1]):
        out = pass_by(watched.cache.bind(**inputs))
        with pytest.raises(ArgumentValueError, match=r"computed by a model that is not watched.*Fix: make the cache for the model that is"):
            watched.cache.commit(out)
    assert not watched.stored


@pytest.mark.slow
def test_what_was_compiled_before_is_noticed_or_watched() -> None:
    """torch.compile may keep what it traced without the hook."""
    made = zoo.build("Llama", {})
    around, uncached, inputs = compiled(made), Uncached(made), padded(text(18))
    around(**inputs, use_cache=False)
    watched = Watched("compiled", model=around)
    with torch.no_grad():
        logits = around(**watched.cache.bind(**inputs)).logits
    torch.testing.assert_close(logits, uncached.logits(inputs["input_ids"]), rtol=1e-3, atol=1e-4)
    oddity = watched.cache.state.bound.seen.judge()
    if oddity is None:
        watched.cache.commit(inputs["input_ids"])
        watched.check()
    else:
        with pytest.raises(ArgumentValueError, match="not watched"):
            watched.cache.commit(inputs["input_ids"])
    torch.compiler.reset()


def hooks(model: Any) -> int:
    """Count the hooks of ours."""
    return sum(hook is prepare_pass for hook in model._forward_pre_hooks.values())


def test_the_hook_leaves_with_the_last_cache() -> None:
    made = zoo.build("Llama", {})
    caches = [reusing(made), zoo.paged(made), reusing(made)]
    caches.append(copy.deepcopy(caches[2]))
    assert hooks(made) == 1
    while caches:
        assert hooks(made) == 1
        caches.pop(0)
        gc.collect()
    assert (hooks(made), len(made._forward_pre_hooks_with_kwargs)) == (0, 0)
    assert hooks(made) == 0
    cache = reusing(made)
    assert hooks(made) == 1
    assert torch.equal(made.generate(**cache.bind(**padded(text(9))), max_new_tokens=3), made.generate(**padded(text(9)), max_new_tokens=3))


def test_a_model_goes_while_its_cache_stays() -> None:
    made = zoo.build("Llama", {})
    cache = reusing(made)
    del made
    gc.collect()
    cache.bind(**padded(text(9)))


def test_a_watched_model_can_be_copied_and_pickled() -> None:
    made = zoo.build("Llama", {})
    cache = reusing(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301 - our own
        assert torch.equal(other.generate(**padded(text(9)), max_new_tokens=3), made.generate(**padded(text(9)), max_new_tokens=3))
    assert cache.get_seq_length() == 0


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # older versions, which take "meta" for a place to be
@pytest.mark.parametrize("prefix", [None, "radix"])
def test_weights_that_accelerate_has_put_away(prefix: str | None) -> None:
    """They are on "meta" between the passes, and the model says so of itself."""
    made = zoo.build("Llama", {})
    uncached, inputs = Uncached(made), padded(text(18))
    accelerate.cpu_offload(made, execution_device="cpu")
    assert made.device.type == "meta"
    cache = reusing(made) if prefix else zoo.paged(made)
    for _ in range(2):
        got = made.generate(**cache.bind(**inputs), **GREEDY)
        uncached.assert_same(inputs, got)
        if prefix:
            cache.commit(got)
        else:
            cache.reset()
    assert cache.usage.cached_tokens == (16 if prefix else 0)
