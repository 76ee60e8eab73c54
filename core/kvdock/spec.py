"""What the layers of a model need from a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
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
            check_int(f"LayerSpec: {name}", getattr(self, name), 1)
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
        check_int("MLALayerSpec: kv_lora_rank", self.kv_lora_rank, 1)
        check_int("MLALayerSpec: rope_dim", self.rope_dim, 1)


def _to_layers(value: Sequence[LayerSpec | MLALayerSpec]) -> tuple[LayerSpec | MLALayerSpec, ...]:
    """Freeze the layers, refusing anything that is no layer."""
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
        check_int("KVSpec.uniform: num_layers", num_layers, 1)
        return cls((LayerSpec(num_kv_heads, num_kv_heads, head_dim, head_dim),) * num_layers, max_positions, dtype)

    @classmethod
    def from_hf_config(cls, config: Any, dtype: torch.dtype | None = None) -> KVSpec:
        """Read a Transformers configuration.

        The result describes what Transformers itself caches: for a model with latent attention those are the expanded
        keys and values of every head.

        Args:
            config: a ``PretrainedConfig`` of a decoder; of a multimodal model its text part is taken.
            dtype: dtype of keys and values; default ``config.dtype``.

        Raises:
            UnsupportedError: the model has layers that keep another state than keys and values.
            ArgumentValueError: a number that is needed is missing.
        """
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        kinds = _layer_kinds(text)
        heads = _number(text, "num_attention_heads")
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        k_dim, v_dim = _head_dims(text, heads)
        window = getattr(text, "sliding_window", None)
        layers = [LayerSpec(kv_heads, kv_heads, k_dim, v_dim, window if kind in _WINDOWED else None) for kind in kinds]
        return cls(layers, _number(text, "max_position_embeddings"), dtype or _dtype(text))


_WINDOWED = ("sliding_attention", "chunked_attention")


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


def _head_dims(config: Any, heads: int) -> tuple[int, int]:
    """Return elements of one key head and of one value head."""
    if getattr(config, "kv_lora_rank", None):
        return _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim"), _number(config, "v_head_dim")
    dim = getattr(config, "head_dim", None) or _number(config, "hidden_size") // heads
    return dim, dim


def _layer_kinds(config: Any) -> Sequence[str]:
    """Return the kind of each layer, refusing models that keep other state or share layers."""
    known = ("full_attention", *_WINDOWED)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * _number(config, "num_hidden_layers")
    strange = sorted({str(kind) for kind in kinds} - set(known))
    if strange:
        raise UnsupportedError(
            f"KVSpec.from_hf_config: {type(config).__name__}.layer_types",
            expected=f"only {', '.join(known)}",
            got=", ".join(strange),
            fix="use Transformers' own cache for this model: these layers keep other state than keys and values",
        )
    return list(kinds)
