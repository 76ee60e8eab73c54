"""What a Transformers configuration tells of the keys and values of its decoder, and where it does not tell enough."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.hf_states import READ_FOR_STATES, state_of
from kvdock.layers.attention import LayerSpec
from kvdock.layers.chunked import ChunkedLayerSpec
from kvdock.layers.hybrid import HybridLayerSpec
from kvdock.layers.interface import LayerKind
from kvdock.layers.latent import MLALayerSpec
from kvdock.layers.shared import SharedLayerSpec

__all__ = ["MOST_LAYERS", "read_dtype", "read_layers", "read_max_positions", "text_part"]

_SUBJECT = "KVSpec.from_hf_config"
_BY_HAND = "build KVSpec(layers=...) by hand"

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers that keep keys and values only."""

_STATES = ("linear_attention", "conv")
"""Types that keep a state only, where its size is known."""

_BOTH = {"hybrid": ("full_attention", "linear_attention")}
"""Types that keep keys and values and a state."""

MOST_LAYERS = 2**16
"""Layers of a model at most: a number that cannot be meant is refused before a list is made of it."""

# A decoder that was taken out of an encoder-decoder still has both halves' numbers: the decoder's come first.
_LAYERS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
_DECODERS_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")
_HEADS = (*_DECODERS_HEADS, "num_attention_heads")
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len")

_TELLING = re.compile(
    r"(^|_)(heads?|kv|keys?|values?|qk|qkv|cache|windows?|swa|loops?|cycles|recurren\w+|conv|ssm|mamba\w*|states?|mems?|memory|latent)(_|$)"
)
"""Parts of names that may speak of what is cached: how many, how large, how often, for how long."""

_READ = frozenset(
    """
    decoder_attention_heads num_decoder_attention_heads num_attention_heads n_head n_heads num_heads attention_heads
    num_key_value_heads num_kv_heads head_dim kv_channels use_cache num_kv_shared_layers
    sliding_window sliding_window_size window_size use_sliding_window
    """.split()  # noqa: SIM905 - as quoted words they are harder to read
)
"""Such names that are read here, or that stand for a name that is."""

_LATENT = frozenset("kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim".split())  # noqa: SIM905 - as above
"""Such names that are known in models with latent attention only."""

# First biases, norms, clipping and scales; then the encoder's half, the query's, outputs, the index of sparse layers, and what says
# again which layers are of which kind (`layer_types` does).
_HARMLESS = frozenset(
    """
    lm_head_bias qkv_bias use_qkv_bias conv_bias qk_norm use_qk_norm qk_norm_type qk_layernorm clip_qkv
    qk_scale_factor rotary_value attention_value_scale attention_k_eq_v
    encoder_attention_heads num_encoder_attention_heads num_attention_heads_per_layer
    output_hidden_states index_n_heads index_head_dim keep_window_size
    max_window_layers sliding_window_pattern prefix_dense_sliding_window_pattern conv_L_cache H_cycles L_cycles L_bp_cycles
    """.split()  # noqa: SIM905 - as above
)
"""Such names that change nothing about what is cached: seen so in models that ran, see tests/integration/test_spec_sweep.py."""


def text_part(config: Any) -> Any:
    """Return the configuration of the part that decodes text, which is the whole one for most models."""
    try:
        return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    except ValueError as error:  # several parts, and which of them decodes only the model's code knows
        raise _refusal(config, [str(error)]) from error


def read_layers(config: Any, text: Any, dtype: torch.dtype) -> list[LayerKind]:
    """Read what each layer caches.

    Args:
        config: the configuration of a model.
        text: its part that decodes text.
        dtype: of the model.

    Raises:
        UnsupportedError: the model keeps what no kind of layer describes, or may do so.
        ArgumentValueError: a number that is needed is missing.
    """
    layers = _layer_configs(text)
    kinds = _listed_kinds(text) or [_kind(layer) for layer in layers]
    names = _declared(text)
    made: list[LayerKind | None] = []
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        producer = _producer(text, kinds, index)
        made.append(_layer(kind, layer, names, dtype) if producer is None else SharedLayerSpec(producer))
    unknown = sorted({str(kind) for kind, layer in zip(kinds, made, strict=True) if layer is None})
    reasons = [f"layers of another kind: {', '.join(unknown)}"] if unknown else []
    reasons += [*_strange_layers(layers, kinds), *_strange(config, text, layers)]
    if reasons:
        raise _refusal(config, reasons)
    return [layer for layer in made if layer is not None]


def _layer(kind: str, layer: Any, names: set[str], dtype: torch.dtype) -> LayerKind | None:
    """Return what one layer keeps; None where that is not known."""
    if kind in _BOTH:
        both = [_layer(each, layer, names, dtype) for each in _BOTH[kind]]
        return HybridLayerSpec([each for each in both if each is not None]) if all(both) else None
    if kind not in _ATTENTION:
        return state_of(kind, layer, names, dtype)
    if _is_latent(layer):
        return MLALayerSpec(_number(layer, "kv_lora_rank"), _number(layer, "qk_rope_head_dim"))
    heads, dim = _sizes(layer)
    if kind == "chunked_attention" and (chunk := getattr(layer, "attention_chunk_size", None)) is not None:
        return ChunkedLayerSpec(heads, heads, dim, dim, chunk)
    return LayerSpec(heads, heads, dim, dim, getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None)


def _producer(text: Any, kinds: Sequence[str], index: int) -> int | None:
    """Return whose keys and values a layer reads: those of the last layer of its type that keeps any; None for its own."""
    modes = getattr(text, "kv_sharing_modes", None) or ()
    if index >= len(modes) or modes[index] != "reuse":
        return None
    own = [at for at in range(index) if modes[at] != "reuse" and kinds[at] == kinds[index]]
    return own[-1] if own else None


def read_max_positions(text: Any) -> int:
    """Read the longest sequence, in tokens; models without position embeddings name none, and get ``sys.maxsize``."""
    found = [name for name in _POSITIONS if getattr(text, name, None) is not None]
    return _number(text, found[0]) if found else sys.maxsize


def read_dtype(text: Any) -> torch.dtype:
    """Read the dtype of the weights."""
    dtype = getattr(text, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ArgumentValueError(
        f"{_SUBJECT}: {type(text).__name__}.dtype", expected="a torch.dtype", got=repr(dtype), fix="pass dtype=model.dtype"
    )


def _number(config: Any, *names: str) -> int:
    name = next((name for name in names if getattr(config, name, None) is not None), names[-1])
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentValueError(f"{_SUBJECT}: {type(config).__name__}.{name}", expected="an int", got=repr(value), fix=_BY_HAND)
    return value


def _layer_configs(text: Any) -> Sequence[Any]:
    """Return one configuration per layer: newer versions of Transformers have models whose layers differ."""
    count = len(_listed_kinds(text) or ()) or _number(text, *_LAYERS)
    # Checked before a list of that length is made.
    if not 0 < count <= MOST_LAYERS:
        raise ArgumentValueError(f"{_SUBJECT}: number of layers", expected=f"1 to {MOST_LAYERS}", got=count, fix=_BY_HAND)
    own: Any = getattr(text, "per_layer_config", None)
    return list(own) if own is not None and len(own) == count else [text] * count


def _listed_kinds(text: Any) -> Sequence[str] | None:
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)


def _kind(layer: Any) -> str:
    if getattr(layer, "sliding_window", None) is not None and getattr(layer, "use_sliding_window", True):
        return "sliding_attention"
    return "full_attention" if getattr(layer, "attention_chunk_size", None) is None else "chunked_attention"


def _sizes(layer: Any) -> tuple[int, int]:
    """Return heads, and elements of a key or a value."""
    heads = _number(layer, *_HEADS)
    dim = _number(layer, "head_dim") if getattr(layer, "head_dim", None) else _number(layer, "hidden_size") // heads
    return _kv_heads(layer, heads), dim


def _kv_heads(layer: Any, heads: int) -> int:
    """Return the heads of keys and values, given those of queries."""
    if hasattr(layer, "multi_query"):  # one head for all, or one for each, whatever else the configuration says
        return 1 if layer.multi_query and not getattr(layer, "new_decoder_architecture", False) else heads
    if any(getattr(layer, name, None) is not None for name in _DECODERS_HEADS):  # other numbers of heads are the encoder's
        return heads
    return _number(layer, "num_key_value_heads") if getattr(layer, "num_key_value_heads", None) else heads


def _is_latent(layer: Any) -> bool:
    return bool(getattr(layer, "kv_lora_rank", None))


def _caches_latents(layer: Any) -> bool:
    """Return whether a model with latent attention caches the latent. Code from elsewhere may cache anything."""
    if not type(layer).__module__.startswith("transformers.models."):
        return False
    major, minor = sys.modules["transformers"].__version__.split(".")[:2]
    return (int(major), int(minor)) >= (5, 16)


def _refusal(config: Any, reasons: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{_SUBJECT}: {type(config).__name__}",
        expected=f"only layers of {', '.join((*_ATTENTION, *_STATES, *_BOTH))}, of which kvdock knows what each keeps",
        got="; ".join(reasons),
        fix=f"{_BY_HAND}, or use Transformers' own cache for this model",
    )


def _strange(config: Any, text: Any, layers: Sequence[Any]) -> Iterator[str]:
    """Report what of a whole model a KVSpec could not describe."""
    crossing = ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers", "cross_attention_hidden_size")
    if any(getattr(part, name, False) for part in (config, text) for name in crossing):
        yield "cross-attention, whose keys and values belong to another sequence"
    modes = getattr(text, "kv_sharing_modes", None)
    if (getattr(text, "num_kv_shared_layers", None) and modes is None) or (modes and modes[0] == "reuse"):
        yield "layers that reuse the keys and values of another layer, and nothing that says of which"
    names = _declared(text)
    known = _READ | _HARMLESS | (_LATENT if any(map(_is_latent, layers)) else set())
    known |= READ_FOR_STATES if any(kind in _STATES or kind in _BOTH for kind in _listed_kinds(text) or ()) else set()
    # What is unknown is refused and not ignored: a spec that is wrong would go unnoticed until a model writes into it.
    unknown = sorted(name for name in names - known if _TELLING.search(name))
    if unknown:
        yield f"settings of which kvdock does not know what they mean for the cache: {', '.join(unknown)}"
    if {"num_layers", "num_hidden_layers"} <= names:
        yield "two numbers of layers, num_layers and num_hidden_layers, of which only the model's code knows the one that counts"
    if names and "use_cache" not in names:
        yield "no setting use_cache, so that it may keep nothing, or something of its own"


def _strange_layers(layers: Sequence[Any], kinds: Sequence[str]) -> Iterator[str]:
    of_attention = (layer for layer, kind in zip(layers, kinds, strict=True) if kind in _ATTENTION)
    if any(_is_latent(layer) and not _caches_latents(layer) for layer in of_attention):
        yield "latent attention of which kvdock does not know whether the latent is cached or what it expands to"


def _declared(text: Any) -> set[str]:
    """Return the settings that the configuration's class knows. What else a file may say no model's code reads."""
    found = inspect.signature(type(text).__init__).parameters.values()
    return {p.name for p in found if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD} - {"self"}
