"""Every architecture of the installed Transformers, made tiny, and what it really caches: recorded while it runs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import attrs
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvdock import KVDockError, KVSpec
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

GROUPS: dict[str, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
TOKENS = 12
VOCAB = 61

Layer = tuple[int, int, int, int, int | None]
"""Heads of keys and of values, elements of a key and of a value, window."""


def _all(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    # Of an encoder and a decoder in one configuration every number differs.
    **_all(4, "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers"),
    **_all(3, "encoder_layers num_encoder_layers"),
    **_all(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads decoder_num_attention_heads num_decoder_attention_heads"),
    **_all(2, "encoder_attention_heads encoder_num_attention_heads num_encoder_attention_heads"),
    **_all(2, "num_key_value_heads num_kv_heads decoder_num_key_value_heads"),
    **_all(32, "hidden_size d_model n_embd word_embed_proj_dim attention_hidden_size embedding_size embed_dim decoder_hidden_size dim"),
    **_all(48, "intermediate_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size intermediate_size_mlp"),
    **_all(VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 4, "is_decoder": True, "num_kv_shared_layers": 0},
    **_all(64, "max_position_embeddings n_positions max_seq_len max_sequence_length"),
    **_all(4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
    **_all(2, "num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts"),
    **_all(16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank"),
    **_all(1, "n_group topk_group first_k_dense_replace n_shared_experts"),
    **{"kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **_all(8, "hidden_size_per_layer_input laurel_rank embedding_dim linear_key_head_dim linear_value_head_dim"),
    **_all(2, "linear_num_key_heads linear_num_value_heads"),
}
"""What makes models small, by the names that their configurations know."""

VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "other dims": _all(12, "head_dim kv_channels d_kv attention_head_dim"),
    "dims that fit": _all(8, "head_dim kv_channels d_kv attention_head_dim"),
    "windows": {**_all(5, "sliding_window sliding_window_size attention_chunk_size window_size"), "use_sliding_window": True, "max_window_layers": 1},
    "a head each": {**_all(4, "num_key_value_heads num_kv_heads"), "multi_query": False},
    "one head": {**_all(1, "num_key_value_heads num_kv_heads"), "multi_query": True},
    "new": {"new_decoder_architecture": True},
    "encoder": {"is_decoder": False},
}
"""What can change the heads, dims and windows of a family that knows the names."""


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


HELP: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2}},
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
        found = next(part for part in whole.modules() if getattr(part, "config", None) is text_now and hasattr(part, "get_input_embeddings"))
        return type(found), text
    except Exception:  # noqa: BLE001 - the other parts of a model may need more than text
        return alone(text), text


def alone(text: Any) -> Any:
    """Return the class that Transformers makes of the configuration of a text part."""
    for names in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES):
        name = names.get(text.model_type)
        if isinstance(name, str):
            return getattr(transformers, name)
    raise LookupError(f"no model of a {text.model_type} alone")


class Recording(DynamicCache):
    """Transformers' own cache, which remembers what it was handed."""

    def __init__(self, config: Any = None) -> None:
        self.seen: dict[int, list[tuple[Any, ...]]] = {}
        self.more: set[str] = set()
        super().__init__(config=config)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        shapes = (key_states.shape, value_states.shape)
        self.seen.setdefault(layer_idx, []).append((*(s[1] for s in shapes), *(s[-1] for s in shapes)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("update_"):  # of recurrences, convolutions, indexers
            self.more.add(name)
        return super().__getattribute__(name)

    def layer(self, index: int) -> Layer | str:
        """Return what a layer caches, or what is strange about it."""
        of, seen = self.layers[index], self.seen.get(index, [])
        if type(of) not in (DynamicLayer, DynamicSlidingWindowLayer) or len(seen) != 1:
            return f"{type(of).__name__}, updated with {seen}"
        return (*seen[0], getattr(of, "sliding_window", None))


@attrs.frozen
class Recorded:
    """What a model cached, by layer; how far each layer saw, by the masks that its attention got; other state that it kept."""

    layers: list[Layer | str]
    sight: dict[int, int]
    more: set[str]


_SIGHT: dict[int, int] = {}


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Attend, and note how many keys a query sees at most."""
    if attention_mask is not None and not getattr(module, "is_cross_attention", False):
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > -1e4
        _SIGHT[getattr(module, "layer_idx", -1)] = int(visible.sum(-1).max())
    taken = {name: of for name, of in kwargs.items() if name not in ("position_bias", "softcap")}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **taken)


AttentionInterface.register("recording", _attention)
AttentionMaskInterface.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def build(of: Any, config: Any) -> Any:
    """Make a model with random weights, whose attention notes its masks where the model has no attention of its own."""
    torch.manual_seed(0)
    try:
        return of._from_config(copy.deepcopy(config), attn_implementation="recording").eval()
    except (ValueError, KeyError):
        return of._from_config(copy.deepcopy(config), attn_implementation="eager").eval()


def caches(config: Any) -> Iterator[Recording]:
    """Yield the caches to try: Transformers' own for a configuration, then one that takes any number of layers."""
    try:
        yield Recording(config)
    except KeyError:  # it lists layers that only caches of the model's own know
        pass
    yield Recording()


def inputs_of(made: Any) -> dict[str, torch.Tensor | BaseModelOutput]:
    """Return what a model reads."""
    ids = torch.arange(3, 3 + TOKENS).repeat(getattr(made.config, "num_codebooks", 1) if "musicgen" in made.config.model_type else 1, 1)
    text = made.config.get_text_config(decoder=True)
    if not (made.config.is_encoder_decoder or text.is_encoder_decoder):
        return {"input_ids": ids}
    size = getattr(made.config.get_text_config(encoder=True), "hidden_size", 32)
    return {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=torch.zeros(1, 7, size))}


def record(made: Any) -> Recorded:
    """Run some tokens through a model, and return what it caches."""
    inputs = inputs_of(made)
    for cache in caches(made.config):
        _SIGHT.clear()
        whole = EncoderDecoderCache(cache, DynamicCache()) if "encoder_outputs" in inputs else cache
        try:
            with torch.no_grad():
                made(**inputs, use_cache=True, **{CACHE_KEYWORD: whole})
            break
        except IndexError as error:  # the configuration counts the encoder's layers
            last = error
    else:
        raise last
    return Recorded([cache.layer(index) for index in range(len(cache.layers))], dict(_SIGHT), cache.more)
