"""Every architecture of the installed Transformers, made tiny."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

GROUPS: dict[str, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
VOCAB = 61


def _all(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    # Of an encoder and a decoder in one configuration every number differs.
    **_all(4, "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers"),
    **_all(3, "encoder_layers num_encoder_layers"),
    **_all(
        4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads decoder_num_attention_heads num_decoder_attention_heads"
    ),
    **_all(2, "encoder_attention_heads encoder_num_attention_heads num_encoder_attention_heads"),
    **_all(2, "num_key_value_heads num_kv_heads decoder_num_key_value_heads"),
    **_all(32, "hidden_size d_model n_embd word_embed_proj_dim attention_hidden_size embedding_size embed_dim decoder_hidden_size dim"),
    **_all(48, "intermediate_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size intermediate_size_mlp"),
    **_all(VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 4,
    "is_decoder": True,
    "num_kv_shared_layers": 0,
    **_all(64, "max_position_embeddings n_positions max_seq_len max_sequence_length"),
    **_all(4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
    **_all(2, "num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts"),
    **_all(16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank"),
    **_all(1, "n_group topk_group first_k_dense_replace n_shared_experts"),
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    **_all(8, "hidden_size_per_layer_input laurel_rank embedding_dim linear_key_head_dim linear_value_head_dim"),
    **_all(2, "linear_num_key_heads linear_num_value_heads"),
}
"""What makes models small, by the names that their configurations know."""

VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "other dims": _all(12, "head_dim kv_channels d_kv attention_head_dim"),
    "dims that fit": _all(8, "head_dim kv_channels d_kv attention_head_dim"),
    "windows": {
        **_all(5, "sliding_window sliding_window_size attention_chunk_size window_size"),
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "a head each": {**_all(4, "num_key_value_heads num_kv_heads"), "multi_query": False},
    "one head": {**_all(1, "num_key_value_heads num_kv_heads"), "multi_query": True},
    "new": {"new_decoder_architecture": True, "attention_k_eq_v": True, "H_cycles": 1},
    "encoder": {"is_decoder": False},
}
"""What can change the heads, dims and windows of a family that knows the names."""


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


SMALL_PART = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_blocks": 1}

MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_expand": 2}
MAMBA_2 = {**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
TWO_TYPES = {"layer_types": ["linear_attention", "full_attention"] * 2}

HELP: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA_2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA_2, **TWO_TYPES},
    "jamba": {**MAMBA, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 6, **TWO_TYPES},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "phi4_multimodal": {"vision_config": SMALL_PART, "audio_config": SMALL_PART},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 4},
    "ernie4_5_vl_moe_text": _mrope(1, 1, 2),
    "apertus1p5_text": {"vocab_size": 266_752},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "hunyuan_vl_text": {**_mrope(2, 1, 1), "head_dim": 8},
    "kyutai_speech_to_text": {"audio_pad_token_id": 0},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 32}},
    "muse_spark": {"audio_config": {"out_hidden_size": 32}},
    "xmod": {"default_language": "en_XX"},
    "qwen2_vl_text": _mrope(2, 1, 1),
    "qwen2_5_vl_text": _mrope(2, 1, 1),
    "qwen2_5_omni_text": _mrope(2, 1, 1),
    "glm4v_text": _mrope(2, 1, 1),
    "glm4v_moe_text": _mrope(1, 1, 0),
    "glm46v_text": _mrope(2, 1, 1),
    "glm_ocr_text": _mrope(2, 1, 1),
}
"""What single families need besides, by the type of their configuration."""


def known_settings(kind: Any) -> set[str]:
    """Return the settings that a class of configurations knows."""
    return {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)


def settings(kind: Any, variant: str) -> dict[str, Any]:
    """Return settings that make a small configuration of a class."""
    known = known_settings(kind)
    found = {name: value for name, value in {**SIZES, **VARIANTS[variant]}.items() if name in known}
    if "kv_lora_rank" in known:
        found["num_key_value_heads"] = 4
        found |= {"head_dim": 4} if "head_dim" in known else {}
    twice = [name for name, of in kind.attribute_map.items() if name in found and of in found]
    return {name: value for name, value in found.items() if name not in twice} | HELP.get(kind.model_type, {})


def text_parts(kind: Any, variant: str) -> dict[str, Any]:
    """Return small configurations of the parts that decode text, of a class that has such parts."""
    made = {}
    for name in {"decoder", "generator", "text_config"} & set(kind.sub_configs):
        part = kind.sub_configs[name]
        part = type(getattr(kind(), name)) if part.__name__ == "AutoConfig" else part
        made[name] = configure(part, variant).to_dict()
    return made


def configure(kind: Any, variant: str, **given: Any) -> Any:
    """Make a small configuration; settings that an error names are left out one after another."""
    given = {**text_parts(kind, variant), **given}
    left = settings(kind, variant)
    while True:
        try:
            return kind(**{**left, **given})
        except Exception as error:
            named = [name for name in left if name in str(error)]
            if not named:
                raise
            for name in named:
                del left[name]


def config_of(group: str, model_type: str, of: Any, variant: str) -> Any:
    """Make the configuration that a model of a group is made from."""
    kind = CONFIG_MAPPING[model_type]
    own = of.config_class
    if own is not None and own in kind.sub_configs.values():
        kind = own
    alone = group == "causal" and kind().is_encoder_decoder
    return configure(kind, variant, **({"is_encoder_decoder": False} if alone else {}))


def decoder_of(of: Any, config: Any) -> tuple[Any, Any]:
    """Return class and configuration of the part of a model that decodes text."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) is type(config):
        return of, config
    try:
        with torch.device("meta"):
            whole = of(copy.deepcopy(config))
        text_now = whole.config.get_text_config(decoder=True)
        found = next(
            part for part in whole.modules() if getattr(part, "config", None) is text_now and hasattr(part, "get_input_embeddings")
        )
        return type(found), text
    except Exception:  # noqa: BLE001 - the other parts of a model may need more than text
        return alone(text), text


def alone(text: Any) -> Any:
    """Return the class of models that a text part's configuration belongs to."""
    code = importlib.import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    kinds = [kind for kind in vars(code).values() if isinstance(kind, type) and getattr(kind, "config_class", None) is type(text)]
    return next(kind for kind in kinds if kind.__name__.endswith(("Model", "ForCausalLM")) and "PreTrained" not in kind.__name__)
