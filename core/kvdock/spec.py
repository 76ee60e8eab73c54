"""What the layers of a model need from a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

__all__ = ["COPY_DTYPES", "QUANTISED_DTYPES", "KVSpec", "LayerSpec", "MLALayerSpec", "check_cache_dtype", "check_int"]

COPY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes a cache stores as they come, bit for bit."""

QUANTISED_DTYPES = (
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
"""Dtypes that are stored as ``x / scale``. The names are settled; the kernels are not there yet."""


def check_int(subject: str, value: object, minimum: int) -> int:
    """Return an int of at least ``minimum``, or raise an error that names ``subject``. Booleans are no ints here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(subject, expected=f"an int of at least {minimum}", got=repr(value))
    if value < minimum:
        raise ArgumentValueError(subject, expected=f"at least {minimum}", got=value)
    return value


_MOST_LAYERS = 2**16
_MOST_ELEMENTS = 2**31 - 1
"""Bounds on what a model's configuration may say, so that what cannot be meant is refused before anything is made of it."""


def _check_size(subject: str, value: object, most: int = _MOST_ELEMENTS) -> int:
    """Return a size from 1 to ``most``, or raise an error that names ``subject``."""
    size = check_int(subject, value, 1)
    if size > most:
        raise ArgumentValueError(subject, expected=f"at most {most}", got=size, fix="look for a unit or a product that is meant otherwise")
    return size


def check_cache_dtype(subject: str, dtype: object) -> torch.dtype:
    """Return a dtype that a cache can store today, or raise an error that names ``subject``."""
    names = ", ".join(str(d) for d in COPY_DTYPES)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(subject, expected=f"one of {names}", got=repr(dtype))
    if dtype in QUANTISED_DTYPES:
        raise UnsupportedError(
            subject, expected=f"one of {names}", got=f"{dtype}: quantised caches are not there yet", fix="store the model's own dtype"
        )
    if dtype not in COPY_DTYPES:
        raise ArgumentTypeError(subject, expected=f"one of {names}", got=dtype)
    return dtype


@attrs.frozen
class LayerSpec:
    """One attention layer with separate keys and values.

    Args:
        num_k_heads: key heads of the whole model, before the split over ranks.
        num_v_heads: value heads of the whole model; may differ from ``num_k_heads``.
        k_dim: elements of one key head.
        v_dim: elements of one value head; may differ from ``k_dim``.
        window: sliding window in tokens, or None for full attention. A cache keeps all tokens either way; the window
            tells an engine which of them it may drop.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim"):
            _check_size(f"LayerSpec: {name}", getattr(self, name))
        if self.window is not None:
            check_int("LayerSpec: window", self.window, 1)


@attrs.frozen
class MLALayerSpec:
    """One layer of multi-head latent attention: a compressed latent and the rotary part, shared by all heads.

    Args:
        kv_lora_rank: elements of the latent.
        rope_dim: elements of the rotary part.
    """

    kv_lora_rank: int
    rope_dim: int

    def __attrs_post_init__(self) -> None:
        _check_size("MLALayerSpec: kv_lora_rank", self.kv_lora_rank)
        _check_size("MLALayerSpec: rope_dim", self.rope_dim)


def _to_layers(value: Iterable[LayerSpec | MLALayerSpec]) -> tuple[LayerSpec | MLALayerSpec, ...]:
    """Freeze the layers, refusing anything that is no layer."""
    if not isinstance(value, Iterable):
        raise ArgumentTypeError("KVSpec: layers", expected="a sequence of layers", got=repr(value), fix="write (layer,) for a single one")
    layers = tuple(value)
    for index, layer in enumerate(layers):
        if not isinstance(layer, (LayerSpec, MLALayerSpec)):
            raise ArgumentTypeError(f"KVSpec: layers[{index}]", expected="a LayerSpec or an MLALayerSpec", got=repr(layer))
    if not layers:
        raise ArgumentValueError("KVSpec: layers", expected="at least one layer", got="none")
    return layers


@attrs.frozen
class KVSpec:
    """What the layers that this rank runs need.

    Args:
        layers: one entry per layer, in order; they may differ.
        max_positions: longest sequence the model supports, in tokens.
        dtype: dtype of the keys and values that the model makes.
    """

    layers: tuple[LayerSpec | MLALayerSpec, ...] = attrs.field(converter=_to_layers)
    max_positions: int
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        check_int("KVSpec: max_positions", self.max_positions, 1)
        check_cache_dtype("KVSpec: dtype", self.dtype)

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, max_positions: int, dtype: torch.dtype) -> KVSpec:
        """Describe ``num_layers`` equal layers whose keys and values have the same heads and dims."""
        _check_size("KVSpec.uniform: num_layers", num_layers, _MOST_LAYERS)
        return cls((LayerSpec(num_kv_heads, num_kv_heads, head_dim, head_dim),) * num_layers, max_positions, dtype)

    @classmethod
    def from_hf_config(cls, config: Any, dtype: torch.dtype | None = None) -> KVSpec:
        """Read a Transformers configuration.

        The result describes the keys and values that attention reads. Transformers caches the same, except for latent
        attention: the expanded keys and values of every head are described here, while it caches the latent since 5.16.
        What only a model's code knows a configuration cannot tell; `PagedCacheForTransformers` measures the model instead.

        Args:
            config: a ``PretrainedConfig`` of a decoder; of a multimodal model its text part is taken.
            dtype: dtype of keys and values; default ``config.dtype``.

        Raises:
            UnsupportedError: the model keeps other state than each layer's own keys and values.
            ArgumentValueError: a number that is needed is missing.
        """
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        layers = _layer_configs(text)
        kinds = _layer_kinds(text, layers)
        _refuse_strange(config, text, layers, kinds)
        specs = [_layer_spec(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
        return cls(specs, _number(text, "max_position_embeddings"), dtype or _dtype(text))


_WINDOWS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The kinds of layers that keep keys and values only, and which number says how far each looks back."""


def _number(config: Any, name: str) -> int:
    """Read a number that every decoder's configuration has."""
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ArgumentValueError(
            f"KVSpec.from_hf_config: {type(config).__name__}.{name}",
            expected="an int",
            got=repr(value),
            fix="build KVSpec(layers=...) by hand",
        )
    return value


def _dtype(config: Any) -> torch.dtype:
    """Read the dtype of the weights."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ArgumentValueError(
        f"KVSpec.from_hf_config: {type(config).__name__}.dtype", expected="a torch.dtype", got=repr(dtype), fix="pass dtype=model.dtype"
    )


def _layer_configs(config: Any) -> Sequence[Any]:
    """Return one configuration per layer: newer versions of Transformers have models whose layers differ."""
    count = len(_listed_kinds(config) or ()) or _number(config, "num_hidden_layers")
    _check_size(f"KVSpec.from_hf_config: {type(config).__name__}.num_hidden_layers", count, _MOST_LAYERS)
    own: Any = getattr(config, "per_layer_config", None)
    return list(own) if own is not None and len(own) == count else [config] * count


def _listed_kinds(config: Any) -> Sequence[str] | None:
    """Return the kinds of the layers where the configuration lists them."""
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)


def _layer_kinds(config: Any, layers: Sequence[Any]) -> Sequence[str]:
    """Return the kind of each layer."""
    return list(_listed_kinds(config) or map(_kind, layers))


def _kind(layer: Any) -> str:
    """Tell the kind of a layer from its numbers."""
    if getattr(layer, "sliding_window", None) is not None and getattr(layer, "use_sliding_window", True):
        return "sliding_attention"
    return "full_attention" if getattr(layer, "attention_chunk_size", None) is None else "chunked_attention"


def _layer_spec(layer: Any, kind: str) -> LayerSpec:
    """Describe one layer."""
    heads, window = _number(layer, "num_attention_heads"), _WINDOWS[kind]
    kv_heads, k_dim, v_dim = _sizes(layer, heads)
    return LayerSpec(kv_heads, kv_heads, k_dim, v_dim, getattr(layer, window, None) if window else None)


def _sizes(layer: Any, heads: int) -> tuple[int, int, int]:
    """Return heads, and elements of one key and of one value."""
    if getattr(layer, "kv_lora_rank", None):  # what the latent expands to
        return heads, _number(layer, "qk_nope_head_dim") + _number(layer, "qk_rope_head_dim"), _number(layer, "v_head_dim")
    dim = getattr(layer, "head_dim", None) or _number(layer, "hidden_size") // heads
    if hasattr(layer, "multi_query"):  # one head for all, or one for each, whatever else the configuration says
        return 1 if layer.multi_query and not getattr(layer, "new_decoder_architecture", False) else heads, dim, dim
    return getattr(layer, "num_key_value_heads", None) or heads, dim, dim


def _refuse_strange(config: Any, text: Any, layers: Sequence[Any], kinds: Sequence[str]) -> None:
    """Refuse models that keep other state, share it between layers, or do not say how large it is."""
    reasons = list(_strange(config, text, layers, kinds))
    if reasons:
        raise UnsupportedError(
            f"KVSpec.from_hf_config: {type(config).__name__}",
            expected=f"only layers of {', '.join(_WINDOWS)}, each with keys and values of its own",
            got="; ".join(reasons),
            fix="build KVSpec(layers=...) by hand, or use Transformers' own cache for this model",
        )


def _strange(config: Any, text: Any, layers: Sequence[Any], kinds: Sequence[str]) -> Iterator[str]:
    """Say what a KVSpec could not describe."""
    unknown = sorted({str(kind) for kind in kinds} - set(_WINDOWS))
    if unknown:
        yield f"layers of another kind: {', '.join(unknown)}"
    crossing = ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers")
    if any(getattr(part, name, False) for part in (config, text) for name in crossing):
        yield "cross-attention, whose keys and values belong to another sequence"
    if "reuse" in (getattr(text, "kv_sharing_modes", None) or ()) or bool(getattr(text, "num_kv_shared_layers", None)):
        yield "layers that reuse the keys and values of another layer"
    latent = any(hasattr(layer, "kv_lora_rank") for layer in layers)
    unsaid = [name for name in ("global_head_dim", "v_head_dim") if not latent and any(hasattr(layer, name) for layer in layers)]
    if unsaid:
        yield f"{', '.join(unsaid)}: sizes that differ between layers in ways that only the model's code knows"
