"""Models with latent attention: the cache holds latents, attention reads them as they are, and the tokens are those of no cache.

Which architectures these are is asked of the installed Transformers: those that expand latents, see `EXPANDING`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvdock
from integration import zoo
from integration.architectures import GROUPS, config_of
from integration.prefixes import CLOSE, padded, reusing, text
from integration.uncached import Uncached
from kvdock import KVSpec, MLAKVCache, MLALayerSpec, UnsupportedError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.compat import CACHE_KEYWORD
from kvdock.integrations.transformers.latent import absorbing, problem_of
from support_attention import ORDERS

MODELS = Path(transformers.__file__).parent / "models"
EXPANDING = {code.parent.name for code in MODELS.glob("*/modeling_*.py") if "def expand_kv" in code.read_text(encoding="utf-8")}

pytestmark = pytest.mark.skipif(not EXPANDING, reason="before Transformers 5.16 what a latent expands to is cached")

SERVED = {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu"}
INDEXED = "layers that keep more: DynamicIndexedLayer"
REFUSED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4"), INDEXED),
    "glm5_next": "layers that keep more: ",
}
"""Those that choose keys by an index keep one beside the latents."""

WITH_STATES = {"bailing_hybrid", "kimi_linear"}
"""Those with layers of linear attention beside latents, see test_states."""

PARTLY = {"kimi_k25", "sarvam_mla"}
"""Configurations of a type of their own, whose text is decoded by DeepSeek-V3."""

GREEDY = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "return_dict_in_generate": True, "output_logits": True}


def kind_of(model_type: str) -> tuple[str, Any]:
    """Return a group of architectures that a type of configurations is in, and the class of its models."""
    group = next(group for group in ("causal", "image") if model_type in GROUPS[group])
    name = GROUPS[group][model_type]
    return group, getattr(transformers, name if isinstance(name, str) else name[0])


def build(model_type: str, seed: int = 1) -> Any:
    """Make a small model with random weights."""
    group, kind = kind_of(model_type)
    torch.manual_seed(seed)
    made = zoo.randomise(kind(config_of(group, model_type, kind, "as it comes")).eval())
    made.generation_config.eos_token_id = zoo.VOCAB - 1  # which `Uncached` leaves out
    return made


small = functools.cache(build)


def installed(names: set[str]) -> list[str]:
    return sorted(names & EXPANDING)


def quick(names: list[str]) -> list[Any]:
    """Return names for a test, all but one slow."""
    return [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_every_architecture_that_expands_latents_is_named() -> None:
    """So that a new version's are looked at. Older versions have fewer."""
    named = SERVED | REFUSED.keys() | WITH_STATES
    assert named >= EXPANDING, "served or refused? Put it where it belongs"
    assert named == EXPANDING or transformers.__version__ != "5.24.0"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", installed(set(REFUSED)))
def test_an_architecture_that_keeps_more_is_refused(model_type: str) -> None:
    """By its configuration, before anything runs: some have parts that do not get small, so that none have weights."""
    group, kind = kind_of(model_type)
    with torch.device("meta"):
        made = kind(config_of(group, model_type, kind, "as it comes"))
    with pytest.raises(UnsupportedError, match=re.escape(REFUSED[model_type])):
        zoo.paged(made)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", quick(installed(SERVED)))
def test_the_tokens_of_no_cache_at_all(model_type: str, seed: int) -> None:
    """One row, and rows with padding on the left; on pages, and gathered and expanded."""
    made = build(model_type, seed)
    uncached, caches = Uncached(made), [zoo.paged(made, attention=attention) for attention in ("pages", "gather")]
    for lengths in ((9,), (3, 11, 6)):
        inputs = zoo.prompt(*lengths, seed=seed)
        for cache in caches:
            assert isinstance(cache.state.pool, MLAKVCache)
            cache.reset()
            uncached.assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
            assert cache.usage.tokens == len(lengths) * (max(lengths) + 9)
    assert caches[0].explain().last_pass == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scenario", zoo.SCENARIOS)
@pytest.mark.parametrize("model_type", quick(installed(SERVED)))
def test_the_tokens_of_transformers_own_cache(model_type: str, scenario: str) -> None:
    """With beams, sampling, assistance and chunks, too."""
    made = small(model_type)
    expected, cache = zoo.generate(made, zoo.dynamic(made), scenario), zoo.paged(made, attention="pages")
    got = zoo.generate(made, cache, scenario)
    assert torch.equal(expected.sequences, got.sequences)
    for left, right in zip(expected.logits, got.logits, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)
    assert cache.explain().last_pass == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["pages", "gather"])
@pytest.mark.parametrize("model_type", quick(installed(SERVED)))
def test_a_prefix_is_computed_once(model_type: str, attention: str) -> None:
    """What is found of a prompt does not run through the model again; the tokens are those of no cache."""
    made = build(model_type)
    uncached, cache, computed = Uncached(made), reusing(made, attention=attention), list[int]()
    made.get_input_embeddings().register_forward_hook(lambda part, given, out: computed.append(given[0].numel()))
    for prompt, found in ((text(18), 0), ([*text(14), 5, 6, 7], 12), ([*text(18), 9, 9, 9, 9], 16)):
        inputs = padded(prompt)
        got = made.generate(**cache.bind(**inputs), **GREEDY)
        uncached.assert_same(inputs, got)
        assert computed == [len(prompt) - found] + [1] * 9
        assert cache.usage.cached_tokens == found
        cache.commit(got)
        computed.clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", quick(installed(SERVED)))
def test_no_step_expands_what_is_cached(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small(model_type)
    kind = next(type(part) for part in made.modules() if hasattr(part, "expand_kv"))
    expanded, expand = list[int](), kind.expand_kv

    def counted(part: Any, latents: torch.Tensor, rotary: torch.Tensor) -> Any:
        expanded.append(latents.shape[2])
        return expand(part, latents, rotary)

    inputs, caches = zoo.prompt(9), {reads: zoo.paged(made, attention=reads) for reads in ("pages", "gather")}
    monkeypatch.setattr(kind, "expand_kv", counted)
    for reads, cache in caches.items():
        made.generate(**cache.bind(**inputs), max_new_tokens=3, do_sample=False)
        layers = cache.state.pool.num_layers
        assert expanded == [9] * layers + [1 if reads == "pages" else 10] * layers + [1 if reads == "pages" else 11] * layers
        expanded.clear()


@pytest.mark.parametrize("chunk", [15, 16, 17, 18])
def test_many_new_tokens_expand_what_is_cached(chunk: int) -> None:
    """Where that is less work: 2 * 12 - 14 products more for each query, against 12 * 14 for all of them, so from 17 tokens on."""
    made = zoo.model("deepseek-v3")
    cache, uncached, ids = zoo.paged(made, attention="pages"), Uncached(made), zoo.prompt(7 + chunk)["input_ids"]
    with torch.no_grad():
        for part in (ids[:, :7], ids[:, 7:]):
            got = made(input_ids=part, **{CACHE_KEYWORD: cache}).logits
        assert zoo.close(got, uncached.logits(ids)[:, 7:])
        expands = f"{chunk} new tokens of each row, for which expanding the latents is less work"
        assert cache.explain().last_pass == (expands if chunk >= 17 else "")
        got = made(input_ids=ids[:, :1], **{CACHE_KEYWORD: cache}).logits
        assert zoo.close(got, uncached.logits(torch.cat([ids, ids[:, :1]], 1))[:, -1:])
        assert cache.explain().last_pass == ""


def test_a_token_takes_what_its_latent_needs() -> None:
    """At the sizes of DeepSeek-V3: 512 + 64 elements in each layer, whatever the heads, of which it has 128."""
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
    made = zoo.build("DeepseekV3", {**zoo.MODELS["deepseek-v3"][1], **sizes})
    cache = PagedCacheForTransformers.for_model(made, kvdock.PagedKVCacheConfig(num_blocks=4, block_size=16))
    made.generate(**cache.bind(**zoo.prompt(20)), max_new_tokens=13, do_sample=False)
    assert cache.usage.tokens == 32
    assert cache.usage.bytes == 32 * 576 * 4 * 2, "float32, two layers"
    assert cache.state.pool.spec == KVSpec.from_hf_config(made.config, torch.float32)
    assert cache.attention == "pages"


@pytest.mark.parametrize(("layout", "heads"), ORDERS)
def test_any_memory_order_of_the_pool(layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    made, inputs = zoo.model("deepseek-v3"), zoo.prompt(3, 11, 6)
    conf = kvdock.PagedKVCacheConfig(num_blocks=64, block_size=4, layout=layout, head_layout=heads)
    cache = PagedCacheForTransformers.for_model(made, conf, attention="pages")
    Uncached(made).assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))


def test_latents_in_some_layers_only_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No architecture does this without more: one pool has rows of latents, or heads of their own."""
    made, inputs = build("deepseek_v3"), zoo.prompt(3, 11, 6)
    monkeypatch.setattr("kvdock.integrations.transformers.measure.latent_layers_of", lambda model: {0, 1, 3})
    cache = zoo.paged(made)
    assert not isinstance(cache.state.pool, MLAKVCache)
    Uncached(made).assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
    assert str(cache.explain()) == "gather (DeepseekV3ForCausalLM has an attention of its own, or one on other keys)"


class Scaled(torch.nn.Linear):
    """A layer that does more than its weights say, as one with adapters or of a quantised model does."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return more than a linear layer would."""
        return 1.5 * super().forward(states)


def scaled(up: torch.nn.Linear) -> torch.nn.Linear:
    other = Scaled(up.in_features, up.out_features, bias=False)
    other.load_state_dict(up.state_dict())
    return other


def hooked(up: torch.nn.Linear) -> torch.nn.Linear:
    up.register_forward_hook(lambda part, given, out: 1.5 * out)
    return up


def biased(up: torch.nn.Linear) -> torch.nn.Linear:
    up.bias = torch.nn.Parameter(torch.full((up.out_features,), 0.5))
    return up


def replaced(up: torch.nn.Linear) -> torch.nn.Linear:
    def forward(states: torch.Tensor) -> torch.Tensor:
        return 1.5 * torch.nn.functional.linear(states, up.weight)

    up.forward = forward  # type: ignore[method-assign] # as accelerate does
    return up


CHANGES: dict[str, tuple[Callable[[torch.nn.Linear], torch.nn.Linear], str]] = {
    "another kind of layer": (scaled, "a kv_b_proj that is no plain linear layer, but a .*Scaled"),
    "a hook": (hooked, "a kv_b_proj with a bias, hooks or a forward of its own"),
    "a bias": (biased, "a kv_b_proj with a bias, hooks or a forward of its own"),
    "a forward of its own": (replaced, "a kv_b_proj with a bias, hooks or a forward of its own"),
}


def change(made: Any, how: Callable[[torch.nn.Linear], torch.nn.Linear]) -> Any:
    """Change what all layers of a model expand latents by."""
    for part in list(made.modules()):
        if hasattr(part, "expand_kv"):
            part.kv_b_proj = how(part.kv_b_proj)
    return made


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_cannot_be_absorbed_is_expanded(case: str, when: str) -> None:
    """Whether it was so when the cache was made, or has become so: the tokens are the changed model's, and the reason is said."""
    how, reason = CHANGES[case]
    made = build("deepseek_v3")
    if when == "before":
        change(made, how)
    cache = zoo.paged(made)
    if when == "after":
        assert cache.attention == "pages"
        change(made, how)
    inputs = zoo.prompt(3, 11, 6)
    expected = made.generate(**inputs, **GREEDY)
    got = made.generate(**cache.bind(**inputs), **GREEDY)
    assert torch.equal(expected.sequences, got.sequences)
    told = cache.explain().reason if when == "before" else cache.explain().last_pass
    assert re.search(reason, told), told
    assert isinstance(cache.state.pool, MLAKVCache)
    cache.reset()
    for refused in (cache.capture, lambda: cache.decoding(3)):
        with pytest.raises(UnsupportedError, match=reason):
            refused()


def test_new_values_in_the_weights_are_read() -> None:
    """Nothing is kept of them."""
    made = build("deepseek_v3")
    cache = zoo.paged(made, attention="pages")
    made.generate(**cache.bind(**zoo.prompt(9)), **GREEDY)
    zoo.randomise(made)
    cache.reset()
    Uncached(made).assert_same(zoo.prompt(5, 9), made.generate(**cache.bind(**zoo.prompt(5, 9)), **GREEDY))
    assert cache.explain().last_pass == ""


def test_gradients_and_attention_weights_are_expanded_for() -> None:
    made = build("deepseek_v3")
    made.set_attn_implementation("eager")
    caches = zoo.dynamic(made), zoo.paged(made)
    ids = zoo.prompt(7)["input_ids"]
    for told, reason in (({}, "gradients are recorded"), ({"output_attentions": True}, "attention weights are asked for")):
        with torch.set_grad_enabled(not told):
            expected, got = (made(input_ids=ids, **{CACHE_KEYWORD: cache}, **told) for cache in caches)
            expected, got = (made(input_ids=ids[:, :2], **{CACHE_KEYWORD: cache}, **told) for cache in caches)
        assert zoo.close(expected.logits, got.logits)
        assert reason in caches[1].explain().last_pass


def test_heads_that_do_not_divide_and_other_dtypes_are_problems() -> None:
    up = torch.nn.Linear(5, 4 * (6 + 3), bias=False)
    module = torch.nn.Module()
    module.kv_b_proj = up
    assert problem_of(module, torch.zeros(1, 4, 1, 6 + 2), 2) == ""
    assert "36 rows of kv_b_proj" in problem_of(module, torch.zeros(1, 5, 1, 6 + 2), 2)
    assert "36 rows of kv_b_proj" in problem_of(module, torch.zeros(1, 4, 1, 9 + 2), 2), "no values are left"
    assert "queries in torch.float64" in problem_of(module, torch.zeros(1, 4, 1, 8, dtype=torch.float64), 2)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_absorbed_form_is_the_expanded_one(scale: float | None) -> None:
    heads, rank, nope, rope, values, tokens = 3, 7, 6, 2, 5, 11
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.kv_b_proj = torch.nn.Linear(rank, heads * (nope + values), bias=False).double()
    latents, rotary, query = (torch.randn(*size).double() for size in ((2, tokens, rank), (2, tokens, rope), (2, heads, 4, nope + rope)))
    expanded = module.kv_b_proj(latents).view(2, tokens, heads, -1).transpose(1, 2)
    keys = torch.cat([expanded[..., :nope], rotary[:, None].expand(-1, heads, -1, -1)], -1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, expanded[..., nope:], scale=scale)

    def attend(absorbed: torch.Tensor, scale: float) -> torch.Tensor:
        rows = torch.cat([latents, rotary], -1)[:, None]
        return ((absorbed @ rows.mT * scale).softmax(-1) @ latents[:, None]).transpose(1, 2)

    torch.testing.assert_close(absorbing(module, query, rope, scale, attend), expected.transpose(1, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(PARTLY & set(GROUPS["causal"]) | PARTLY & set(GROUPS["image"])))
def test_configurations_whose_text_is_decoded_by_another_model(model_type: str) -> None:
    group, kind = kind_of(model_type)
    small_vision = {"vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}}
    config = config_of(group, model_type, kind, "as it comes")
    if hasattr(config, "vision_config"):
        config.vision_config = type(config.vision_config)(**small_vision["vision_config"])
    made = zoo.randomise(kind(config).eval())
    assert [type(layer) for layer in zoo.paged(made, attention="pages").state.pool.spec.layers] == [MLALayerSpec] * 4
