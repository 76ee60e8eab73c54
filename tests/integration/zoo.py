"""Tiny models with random weights, and the ways to generate with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdock import PagedKVCacheConfig
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

VOCAB = 61
PAD = 0
EAGER_ONLY = ("bloom", "gemma2", "gpt-oss")
"""Models that Transformers has no other attention for."""

WINDOWED = ("mistral-window", "qwen2-window", "gemma2", "gemma3", "gpt-oss", "llama4-chunked", "gemma3n-shared")
"""Models with layers that see only the last 8 tokens."""

CROPS_WINDOWS = hasattr(DynamicSlidingWindowLayer, "activate_past_recording")
"""Whether DynamicCache can take back tokens behind a window, as prompt lookup needs. The paged cache always can."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,  # else a model with random weights repeats its last token
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": VOCAB - 1,
}

MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa": ("Llama", {}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "head_dim": None}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {"head_dim": None, "multi_query": True, "new_decoder_architecture": False}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": ("GptOss", {**MOE, "sliding_window": 8}),
    "llama4-chunked": (
        "Llama4",
        {**MOE, "attention_chunk_size": 8, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0], "attn_temperature_tuning": False},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma3n-shared": (
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "intermediate_size": 48,
            "activation_sparsity_pattern": [0.0] * 4,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
        },
    ),
}


@functools.cache
def model(name: str, attention: str = "sdpa") -> Any:
    """Make a model, the same at every call and in every process."""
    family, changes = MODELS[name]
    return build(family, changes, attention)


def build(family: str, changes: Mapping[str, Any], attention: str = "sdpa") -> Any:
    """Make a model of a family with random weights."""
    prefix = next(p for p in (f"{family}Text", family) if hasattr(transformers, f"{p}Config"))
    config = getattr(transformers, f"{prefix}Config")(**{name: value for name, value in {**SMALL, **changes}.items() if value is not None})
    config._attn_implementation = attention
    torch.manual_seed(11)
    kind = next(k for k in (f"{family}ForCausalLM", f"{family}LMHeadModel") if hasattr(transformers, k))
    return randomise(getattr(transformers, kind)(config).eval())


def randomise(made: Any) -> Any:
    """Fill the weights with values that are large enough for attention to matter."""
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.6 / weight.shape[-1] ** 0.5 if weight.shape[0] != VOCAB else 1.0)
    return made


def prompt(*lengths: int, seed: int = 5) -> dict[str, torch.Tensor]:
    """Make a batch of random prompts, padded on the left to the longest."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB - 1, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}


def repetitive() -> dict[str, torch.Tensor]:
    """Make a prompt in which looking up what followed before finds something."""
    ids = torch.tensor([[7, 8, 9, 10, 11, 12, 7, 8, 9, 10, 11, 12, 7, 8, 9]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


GREEDY = {"do_sample": False, "max_new_tokens": 14, "min_new_tokens": 12}
SAMPLE = {"do_sample": True, "max_new_tokens": 14, "min_new_tokens": 12}

SCENARIOS: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "greedy": (lambda: prompt(9), GREEDY),
    "batch": (lambda: prompt(7, 7, 7), GREEDY),
    "left-padded": (lambda: prompt(3, 11, 6), GREEDY),
    "beams": (lambda: prompt(5, 9), {**GREEDY, "num_beams": 3, "num_return_sequences": 2}),
    "sampling": (lambda: prompt(4, 10), {**SAMPLE, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}),
    "beam-sampling": (lambda: prompt(6), {**SAMPLE, "num_beams": 3}),
    "prompt-lookup": (repetitive, {**GREEDY, "prompt_lookup_num_tokens": 4}),
    "chunked-prefill": (lambda: prompt(13, 19), {**GREEDY, "prefill_chunk_size": 5}),
}


def conf(*, block_size: int = 4, num_blocks: int = 128) -> PagedKVCacheConfig:
    """Make a configuration of a pool."""
    return PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size)


def paged(of: Any, *, block_size: int = 4, num_blocks: int = 128, attention: str = "auto") -> PagedCacheForTransformers:
    """Make a paged cache."""
    return PagedCacheForTransformers.for_model(of, conf(block_size=block_size, num_blocks=num_blocks), attention=attention)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether states or logits are the same but for rounding in another order; those of other tokens are further apart."""
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def table(cache: PagedCacheForTransformers) -> npt.NDArray[np.int32]:
    """Return the blocks of each row, 0 behind the shorter ones; none without rows."""
    return cache.state.batch.block_table() if cache.state.batch else np.empty((0, 0), dtype=np.int32)


def dynamic(of: Any) -> DynamicCache:
    """Make the cache that it is compared with."""
    return DynamicCache(config=of.config)


def dynamic_of_all(of: Any) -> DynamicCache:
    """Make a cache that keeps every token, also of layers with a window."""
    made = DynamicCache(config=of.config)
    made.layers = [DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in made.layers]
    return made


def generate(of: Any, cache: Any, scenario: str, inputs: dict[str, torch.Tensor] | None = None) -> Any:
    """Generate with a cache, the random numbers started anew."""
    make, settings = SCENARIOS[scenario]
    torch.manual_seed(3)
    how = {**settings, CACHE_KEYWORD: cache, "use_cache": True}  # which some configurations deny
    return of.generate(**(inputs or make()), **how, return_dict_in_generate=True, output_logits=True)
