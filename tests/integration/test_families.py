"""Every family of decoders that Transformers has: the same tokens as with its own cache, or a clear refusal. Never wrong in silence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from integration import zoo
from integration.architectures import known_settings
from integration.prefixes import CLOSE, padded, reusing, text
from kvdock import UnsupportedError

LAYERS: dict[str, Any] = dict.fromkeys(
    ("num_layers", "n_layer", "n_layers", "decoder_layers", "max_window_layers", "first_k_dense_replace"), 2
)
HEADS: dict[str, Any] = dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
DIMS: dict[str, Any] = dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size", "embedding_size"), 32)
INNER: dict[str, Any] = dict.fromkeys(("ffn_dim", "d_ff", "decoder_ffn_dim"), 48)
EXPERTS: dict[str, Any] = {
    **zoo.MOE,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
TINY = {**LAYERS, **HEADS, **DIMS, **INNER, **EXPERTS, **LATENT, **LINEAR, **zoo.SMALL, "sliding_window": 8, "is_decoder": True}
GATHERING = {
    *("big_bird", "bloom", "diffllama", "doge", "falcon", "gpt_neox_japanese", "jetmoe", "megatron-bert", "mpt", "mvp"),
    *("rembert", "roformer", "trocr", "xglm", "xlm"),
    *("llama4_text", "moshi"),
    "inkling_text",
}
"""Families that do not read pages: most have an attention of their own, two masks, and the last biases of positions."""

NOT_CAPTURED: set[str] = set()
"""Families that read pages whose steps cannot be captured."""

WAYS = ("left-padded", "beams", "chunked-prefill", "prompt-lookup")


def configure(model_type: str, windows: bool) -> Any:
    """Make a small configuration; settings that the family names in an error are left out one after another."""
    settings = {name: value for name, value in TINY.items() if windows or name != "sliding_window"}
    if "kv_lora_rank" in known_settings(CONFIG_MAPPING[model_type]):
        settings |= {"num_key_value_heads": 4, "head_dim": 4}  # which are those of what a latent expands to
    while True:
        try:
            return CONFIG_MAPPING[model_type](**settings)
        except Exception as error:
            named = [name for name in settings if name in str(error)]
            if not named:
                raise
            for name in named:
                del settings[name]


@functools.cache
def small_model(model_type: str, windows: bool = True) -> Any:
    """Make a model, or skip: some families have parts whose size no common setting reaches."""
    try:
        config = configure(model_type, windows)
        config._attn_implementation = "eager"
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind(config).parameters())
        if size > 4_000_000:
            pytest.skip(f"it does not get small: {size} weights")
        torch.manual_seed(1)
        made = kind(config).eval()
    except Exception as error:  # noqa: BLE001 - whatever a family does not like about the settings
        pytest.skip(f"it cannot be built: {type(error).__name__}: {error}")
    zoo.randomise(made)
    return made


def model_for(model_type: str, attention: str) -> Any:
    """Make a model; one without windows where pages are read only then: what a family never looks at, Transformers' caches do."""
    made = small_model(model_type)
    if attention == "auto" and getattr(attempt(lambda: zoo.paged(made)), "attention", "") == "gather":
        return small_model(model_type, windows=False)
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["auto", "gather"])
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_family_is_right_or_refused(model_type: str, attention: str) -> None:
    """With captured steps, too, which are the same code on a device that captures nothing."""
    made = model_for(model_type, attention)
    if "input_ids" not in inspect.signature(made.forward).parameters:
        pytest.skip("it takes no token ids")
    cache = attempt(lambda: zoo.paged(made, num_blocks=1024, attention=attention))
    if isinstance(cache, UnsupportedError):
        assert "Fix: use Transformers' own cache" in str(cache)
        return
    reads = getattr(cache, "attention", None)
    assert attention == "gather" or reads is None or (reads == "gather") == (model_type in GATHERING), cache
    compared = sum(compare(made, cache, way) for way in WAYS)
    if getattr(cache, "attention", "") == "pages":
        cache.reset()
        refused = attempt(lambda: cache.capture(batch_sizes=(4, 8)))
        assert isinstance(refused, UnsupportedError) == (model_type in NOT_CAPTURED or cache.explain().states > 0), refused
        compared += sum(compare(made, cache, way) for way in WAYS)
    if not compared:
        pytest.skip("Transformers' own cache fails too, with these settings")


def compare(made: Any, cache: Any, way: str) -> bool:
    """Compare one way to generate; False if Transformers' own cache fails too."""
    expected = expected_of(made, way)
    if isinstance(expected, Exception):
        return False
    cache.reset()
    got = zoo.generate(made, cache, way)
    assert cache.usage.tokens > 0, "it was not used"
    assert torch.equal(expected.sequences, got.sequences), way
    for left, right in zip(expected.logits, got.logits, strict=True):
        torch.testing.assert_close(left, right, **CLOSE, equal_nan=True, msg=way)  # matrices of other strides are rounded otherwise
    return True


@functools.cache
def expected_of(made: Any, way: str) -> Any:
    """Return what a model, which is made once, generates with Transformers' own cache, or the error that it raises."""
    return attempt(lambda: zoo.generate(made, zoo.dynamic(made), way))


PROMPTS = (padded(text(18)), padded(text(18)), padded([*text(14), 5, 6, 7]), padded(text(18), text(10)), padded(text(21), text(13, 2)))
"""The first stores, the second finds 16 tokens, the third 12; then rows with padding 8, of which one knows the other's tokens."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["auto", "gather"])
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_family_reuses_prefixes_or_is_refused(model_type: str, attention: str) -> None:
    """Without windows that a family does not have, but Transformers' caches would see in its configuration all the same."""
    made = small_model(model_type, windows=False)
    if "input_ids" not in inspect.signature(made.forward).parameters:
        pytest.skip("it takes no token ids")
    cache = attempt(lambda: reusing(made, num_blocks=512, attention=attention))
    if isinstance(cache, UnsupportedError):
        assert "Fix: use Transformers' own cache" in str(cache) or "make the cache without prefix=" in str(cache)
        return
    if not goes_on(made):
        pytest.skip("Transformers' own cache cannot go on, with these settings")
    settings = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for inputs in PROMPTS:
        expected = made.generate(**inputs, **settings)
        got = made.generate(**cache.bind(**inputs), **settings)
        found.append(cache.usage.cached_tokens)
        cache.commit(got)
        assert torch.equal(expected.sequences, got.sequences)
        for left, right in zip(expected.logits, got.logits, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)
    if cache.explain().states:  # which were kept behind 16 tokens only, and behind none of the second row
        assert found[:4] == [0, 16, 0, 0]
        return
    unit = cache.state.manager.block_size  # of several layer groups a whole number of blocks of each, however unlike their sizes are
    eight, twelve, sixteen = (tokens // unit * unit for tokens in (8, 12, 16))
    assert found[:3] == [0, sixteen, twelve]
    assert found[3] == (sixteen + eight if cache.state.bound.sharing.padded else eight), (
        "without padding row 0 finds what row 1 has as padding"
    )


def goes_on(made: Any) -> bool:
    """Return whether the family goes on behind what Transformers' own cache holds, and feeds each token once."""
    cache = zoo.dynamic(made)
    first = attempt(lambda: made.generate(**PROMPTS[0], **{zoo.CACHE_KEYWORD: cache}, max_new_tokens=3, do_sample=False))
    if isinstance(first, Exception) or cache.get_seq_length() != first.shape[1] - 1:
        return False
    ids = torch.cat([first, first[:, :3]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return not isinstance(attempt(lambda: made.generate(**inputs, **{zoo.CACHE_KEYWORD: cache}, max_new_tokens=2)), Exception)


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return error
