"""Reading a Transformers configuration, against what Transformers' own cache holds after a forward pass."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import kvdock
from integration.recording import TOKENS, build, record
from integration.sweep import recorded_as
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,  # not hidden_size / heads: a configuration that says so is to be believed
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, heads not grouped": ("Llama", {"num_key_value_heads": None, "head_dim": None}),
    "llama, one head": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "layer_types": SLIDING}),
    "gemma3": ("Gemma3Text", {"sliding_window": 6, "layer_types": SLIDING}),
    "gpt-oss": ("GptOss", {**MOE, "sliding_window": 6, "layer_types": SLIDING}),
    "llama4": ("Llama4Text", {**MOE, "attention_chunk_size": 6, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0, 1]}),
    "mixtral": ("Mixtral", MOE),
    "phi3": ("Phi3", {"head_dim": None}),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "head_dim": None}),
    "gpt-neo": (
        "GPTNeo",
        {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "head_dim": None,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
        },
    ),
    "falcon, one head": ("Falcon", {"num_key_value_heads": None, "head_dim": None, "multi_query": True, "new_decoder_architecture": False}),
    "falcon, a head each": ("Falcon", {"num_key_value_heads": None, "head_dim": None, "multi_query": False}),
    "falcon, new": (
        "Falcon",
        {"num_key_value_heads": None, "head_dim": None, "num_kv_heads": 2, "multi_query": True, "new_decoder_architecture": True},
    ),
    "gpt-bigcode": ("GPTBigCode", {"num_key_value_heads": None, "head_dim": None}),
    "gpt-bigcode, a head each": ("GPTBigCode", {"num_key_value_heads": None, "head_dim": None, "multi_query": False}),
}


def config_of(family: str, changes: dict[str, Any]) -> Any:
    numbers = {name: value for name, value in {**SMALL, **changes}.items() if value is not None or name == "sliding_window"}
    return getattr(transformers, f"{family}Config")(**copy.deepcopy(numbers))  # some write to the lists that they are given


def cached(config: Any) -> tuple[list[tuple[int, int, int, int, int | None]], torch.dtype]:
    """Run three tokens through a tiny model: heads and dims of each layer's keys and values, and the window."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True, **{CACHE_KEYWORD: cache})
    assert {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    found = [(*layer.keys.shape[1::2], *layer.values.shape[1::2], getattr(layer, "sliding_window", None)) for layer in cache.layers]
    return [(kh, vh, kd, vd, window) for kh, kd, vh, vd, window in found], cache.layers[0].keys.dtype


def described(spec: kvdock.KVSpec) -> list[Any]:
    return [recorded_as(layer) for layer in spec.layers]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # GPTBigCode does so when imported, up to 5.18
@pytest.mark.parametrize("name", EXACT)
def test_the_spec_is_what_transformers_caches(name: str) -> None:
    config = config_of(*EXACT[name])
    layers, dtype = cached(config)
    spec = kvdock.KVSpec.from_hf_config(config, dtype)
    assert described(spec) == layers
    assert spec.dtype == dtype
    assert spec.max_positions in (96, 1024, 2048), "max_position_embeddings, where the family reads it"


def test_the_cases_cover_what_can_differ() -> None:
    specs = [kvdock.KVSpec.from_hf_config(config_of(*case), torch.float32) for case in EXACT.values()]
    layers = [layer for spec in specs for layer in described(spec)]
    assert {layer[0] for layer in layers} == {1, 2, 4}
    assert {layer[4] for layer in layers} == {None, 6}
    assert any(len({layer[4] for layer in described(spec)}) == 2 for spec in specs), "windows on some layers only"


def test_of_latent_attention_the_spec_is_what_is_cached_or_there_is_none() -> None:
    config = config_of("DeepseekV3", {**MOE, **LATENT})
    layers, _ = cached(config)
    if layers == [(4, 4, 12, 6, None)] * 3:  # before Transformers 5.16: what the latent expands to
        with pytest.raises(kvdock.UnsupportedError, match="latent attention of which kvdock does not know whether the latent is cached"):
            kvdock.KVSpec.from_hf_config(config, torch.float32)
        return
    assert described(kvdock.KVSpec.from_hf_config(config, torch.float32)) == layers == [(1, 1, 12, 4, None)] * 3


def test_latent_attention_in_code_from_elsewhere_may_cache_anything() -> None:
    numbers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    with pytest.raises(kvdock.UnsupportedError, match="latent attention of which kvdock does not know"):
        kvdock.KVSpec.from_hf_config(types.SimpleNamespace(**numbers), torch.float32)


@pytest.mark.parametrize("name", ["num_global_kv_heads", "recurrent_kv_cache_mode", "n_loops", "v_head_dim", "ssm_state_size"])
def test_a_setting_that_may_bear_on_the_cache_is_refused_until_it_is_known(name: str) -> None:
    class NewConfig(transformers.LlamaConfig):  # type: ignore[misc]
        model_type = "new"
        __annotations__ = {name: int}

    setattr(NewConfig, name, 1)
    NewConfig = dataclasses.dataclass(NewConfig, kw_only=True)
    with pytest.raises(kvdock.UnsupportedError, match=f"kvdock does not know what they mean for the cache: {name}. Fix: build KVSpec"):
        kvdock.KVSpec.from_hf_config(NewConfig(), torch.float32)


def test_what_a_file_says_besides_is_read_by_nobody() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, n_loops=3, my_kv_heads=4)
    assert len(kvdock.KVSpec.from_hf_config(config, torch.float32).layers) == 2


def test_a_decoder_taken_out_of_an_encoder_decoder_has_the_decoders_numbers() -> None:
    halves = {"encoder_layers": 1, "encoder_attention_heads": 2, "decoder_layers": 3, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=40, d_model=32, is_encoder_decoder=False, is_decoder=True, **halves)
    assert described(kvdock.KVSpec.from_hf_config(config, torch.float32)) == [(4, 4, 8, 8, None)] * 3


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="a family of newer versions")
def test_dims_that_differ_between_layers() -> None:
    numbers = {**SMALL, "sliding_window": 6, "layer_types": SLIDING[:2], "num_hidden_layers": 2, "global_head_dim": 16}
    config = transformers.Gemma4TextConfig(**numbers, vocab_size_per_layer_input=40, hidden_size_per_layer_input=8, num_kv_shared_layers=0)
    if hasattr(config, "global_head_dim"):  # versions whose configuration does not say it per layer
        with pytest.raises(kvdock.UnsupportedError, match="global_head_dim"):
            kvdock.KVSpec.from_hf_config(config, torch.float32)
        return
    spec = kvdock.KVSpec.from_hf_config(config, torch.float32)
    assert described(spec) == cached(config)[0]
    assert {layer[2] for layer in described(spec)} == {8, 16}


TWO = ["linear_attention", "full_attention"] * 2
DELTA = {
    f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8), ("value_head_dim", 12))
}
MAMBA_2 = {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_chunk_size": 8}
SHARED = {"sliding_window": 6, "vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 8, "layer_types": [*SLIDING, *SLIDING]}

KEEPS_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {**MOE, **DELTA, "linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 16, "layer_types": TWO}),
    "qwen3.5": ("Qwen3_5Text", {**DELTA, "layer_types": TWO}),
    "qwen3.5, mixture": ("Qwen3_5MoeText", {**MOE, **DELTA, "shared_expert_intermediate_size": 16, "layer_types": TWO}),
    "olmo, hybrid": ("OlmoHybrid", {"head_dim": None, "layer_types": TWO}),
    "kimi, linear": (
        "KimiLinear",
        {**LATENT, "num_experts": 4, "num_experts_per_token": 2, "linear_num_heads": 4, "linear_head_dim": 6, "layer_types": TWO},
    ),
    "jamba": (
        "Jamba",
        {"head_dim": None, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    ),
    "bamba": ("Bamba", {**MAMBA_2, "head_dim": None, "attn_layer_indices": [1, 3]}),
    "granite, hybrid": ("GraniteMoeHybrid", {**MOE, **MAMBA_2, "head_dim": None, "shared_intermediate_size": 16, "layer_types": TWO}),
    "lfm2": ("Lfm2", {"head_dim": None, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}),
    "gemma3n": ("Gemma3nText", {**SHARED, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 6}),
    "gemma4": ("Gemma4Text", {**SHARED, "num_hidden_layers": 6, "num_kv_shared_layers": 3}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KEEPS_MORE)
def test_states_and_shared_layers_are_what_is_cached(name: str) -> None:
    family, changes = KEEPS_MORE[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of Transformers has no {family}")
    config = config_of(family, {"num_hidden_layers": 4, **changes})
    got = record(build(transformers.AutoModelForCausalLM._model_mapping[type(config)], config))
    assert TOKENS > 3, "the states were written"
    assert described(kvdock.KVSpec.from_hf_config(config, torch.float32)) == got.layers
    assert got.more == set()


def test_a_shared_layer_reads_the_last_of_its_type_that_keeps_any() -> None:
    family, changes = KEEPS_MORE["gemma3n"]
    spec = kvdock.KVSpec.from_hf_config(config_of(family, changes), torch.float32)
    assert [layer.of for layer in spec.layers if isinstance(layer, kvdock.layers.SharedLayerSpec)] == [1, 3]
    assert list(map(type, spec.layers)) == [kvdock.LayerSpec] * 4 + [kvdock.layers.SharedLayerSpec] * 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": (
        "Mamba",
        {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None},
        "layers of another kind: |num_attention",
    ),
    "t5": ("T5", {"num_attention_heads": None, "head_dim": None}, "cross-attention"),
    "bart": ("Bart", {"num_attention_heads": None, "head_dim": None}, "cross-attention"),
    "gpt2 with an encoder": ("GPT2", {"add_cross_attention": True, "head_dim": None}, "cross-attention"),
    "trocr, reading pictures": (
        "TrOCR",
        {"cross_attention_hidden_size": 16, "num_attention_heads": None, "head_dim": None, "num_hidden_layers": None, "decoder_layers": 2},
        "cross-attention",
    ),
    "mllama": ("MllamaText", {"cross_attention_layers": [1]}, "cross-attention"),
    "mimo, heads that only code knows": (
        "MiMoV2Flash",
        {**MOE, "v_head_dim": 6, "sliding_window": 6},
        "mean for the cache: .*v_head_dim",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_spec_cannot_describe_is_refused(name: str) -> None:
    family, changes, text = REFUSED[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of Transformers has no {family}")
    with pytest.raises(kvdock.KVDockError, match=text) as caught:
        kvdock.KVSpec.from_hf_config(config_of(family, changes), torch.float32)
    assert f"KVSpec.from_hf_config: {family}Config" in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_of_a_multimodal_model_the_text_part_is_taken() -> None:
    text = config_of("Gemma3Text", {"sliding_window": 6, "layer_types": SLIDING})
    whole = transformers.Gemma3Config(text_config=text.to_dict())
    assert kvdock.KVSpec.from_hf_config(whole, torch.float32) == kvdock.KVSpec.from_hf_config(text, torch.float32)
    assert len(kvdock.KVSpec.from_hf_config(whole, torch.float32).layers) == 3


def test_the_dtype_is_the_configurations_unless_given() -> None:
    config = config_of("Llama", {"dtype": torch.bfloat16})
    assert kvdock.KVSpec.from_hf_config(config).dtype == torch.bfloat16
    assert kvdock.KVSpec.from_hf_config(config, torch.float16).dtype == torch.float16
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"LlamaConfig.dtype: expected a torch.dtype, got None. Fix: pass dtype=model.dtype"
    ):
        kvdock.KVSpec.from_hf_config(config_of("Llama", {}))
    with pytest.raises(kvdock.UnsupportedError, match="dtype"):
        kvdock.KVSpec.from_hf_config(config, torch.float8_e4m3fn)


def test_numbers_that_are_missing_are_named() -> None:
    empty = types.SimpleNamespace()
    with pytest.raises(kvdock.ArgumentValueError, match=r"SimpleNamespace.num_hidden_layers: expected an int, got None"):
        kvdock.KVSpec.from_hf_config(empty, torch.float32)


def test_a_number_that_is_none_of_one_layer_is_named() -> None:
    numbers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": [2, 4]}
    with pytest.raises(kvdock.ArgumentValueError, match=r"SimpleNamespace.num_key_value_heads: expected an int, got \[2, 4\]. Fix: build"):
        kvdock.KVSpec.from_hf_config(types.SimpleNamespace(**numbers), torch.float32)


def test_without_position_embeddings_there_is_no_longest_sequence() -> None:
    bloom = transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=32)
    assert kvdock.KVSpec.from_hf_config(bloom, torch.float32) == kvdock.KVSpec.uniform(
        num_layers=2, num_kv_heads=4, head_dim=8, max_positions=sys.maxsize, dtype=torch.float32
    )
    mpt = transformers.MptConfig(n_layers=2, n_heads=4, d_model=32, max_seq_len=77)
    assert kvdock.KVSpec.from_hf_config(mpt, torch.float32).max_positions == 77


def test_any_object_with_the_numbers_will_do() -> None:
    config = types.SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, max_position_embeddings=10, dtype=torch.float16
    )
    assert described(kvdock.KVSpec.from_hf_config(config)) == [(4, 4, 8, 8, None)] * 2


def test_reading_a_configuration_changes_nothing() -> None:
    config = config_of("Gemma2", {"sliding_window": 6, "layer_types": SLIDING})
    before = config.to_json_string()
    kvdock.KVSpec.from_hf_config(config, torch.float32)
    assert config.to_json_string() == before


@pytest.mark.parametrize(
    ("numbers", "window"),
    [
        ({"sliding_window": 6}, 6),
        ({"sliding_window": 6, "use_sliding_window": True}, 6),
        ({"sliding_window": 6, "use_sliding_window": False}, None),
        ({"sliding_window": None, "use_sliding_window": True}, None),
        ({"attention_chunk_size": 5}, 5),
        ({"attention_chunk_size": None}, None),
        ({"sliding_window": 6, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_a_window_that_is_not_used_is_none(numbers: dict[str, Any], window: int | None) -> None:
    needed = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 10}
    spec = kvdock.KVSpec.from_hf_config(types.SimpleNamespace(**needed, **numbers), torch.float16)
    assert [layer[4] for layer in described(spec)] == [window] * 2
