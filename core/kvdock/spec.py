"""What the layers of a model need from a KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from kvdock.checks import COPY_DTYPES, QUANTISED_DTYPES, check_cache_dtype, check_int, check_op_words, check_size
from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.hf_config import MOST_LAYERS, read_dtype, read_layers, read_max_positions, text_part
from kvdock.layers.attention import LayerSpec
from kvdock.layers.interface import LayerKind
from kvdock.layers.latent import MLALayerSpec
from kvdock.layers.shared import SharedLayerSpec

__all__ = [
    "COPY_DTYPES",
    "QUANTISED_DTYPES",
    "KVSpec",
    "LayerSpec",
    "MLALayerSpec",
    "check_cache_dtype",
    "check_int",
    "check_op_words",
    "device_of",
]


def device_of(subject: str, value: object) -> torch.device:
    """Turn what a user writes for a device into a `torch.device`, or raise an error that names ``subject``.

    Raises:
        ArgumentTypeError: neither a device nor what torch makes one of.
        ArgumentValueError: a device that torch does not know.
    """
    if isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ArgumentTypeError(subject, expected='a torch.device or a string such as "cpu"', got=repr(value))
    try:
        device = torch.device(value)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ArgumentValueError(
            subject, expected='a device that torch knows, such as "cpu"', got=repr(value), fix=str(error).splitlines()[0]
        ) from error
    index = str(value).rpartition(":")[2]
    if index.isdigit() and int(index) != device.index:
        raise ArgumentValueError(
            subject,
            expected="an index that torch can hold",
            got=f"{value!r}, which torch takes for {device}",
            fix="count devices from 0",
        )
    return device


def _to_layers(value: Iterable[LayerKind]) -> tuple[LayerKind, ...]:
    if not isinstance(value, Iterable):
        raise ArgumentTypeError("KVSpec: layers", expected="a sequence of layers", got=repr(value), fix="write (layer,) for a single one")
    layers = tuple(value)
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerKind):
            raise ArgumentTypeError(f"KVSpec: layers[{index}]", expected="a kind of layer, such as a LayerSpec", got=repr(layer))
        if isinstance(layer, SharedLayerSpec) and (layer.of >= index or isinstance(layers[layer.of], SharedLayerSpec)):
            expected = f"an earlier layer, 0 to {index - 1}, that keeps something of its own" if index else "a layer that keeps something"
            raise ArgumentValueError(
                f"KVSpec: layers[{index}]", expected=expected, got=layer, fix="name the layer whose keys and values are read"
            )
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

    layers: tuple[LayerKind, ...] = attrs.field(converter=_to_layers)
    max_positions: int
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        check_int("KVSpec: max_positions", self.max_positions, 1)
        check_cache_dtype("KVSpec: dtype", self.dtype)

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, max_positions: int, dtype: torch.dtype) -> KVSpec:
        """Describe ``num_layers`` equal layers whose keys and values have the same heads and dims."""
        check_size("KVSpec.uniform: num_layers", num_layers, MOST_LAYERS)
        return cls((LayerSpec(num_kv_heads, num_kv_heads, head_dim, head_dim),) * num_layers, max_positions, dtype)

    @classmethod
    def from_hf_config(cls, config: Any, dtype: torch.dtype | None = None) -> KVSpec:
        """Read a Transformers configuration.

        The result is what Transformers' own cache holds; of latent attention one row of latent and rotary part. A setting that may
        bear on that and is not known to be harmless is a reason to refuse, for what only a model's code knows a configuration
        cannot tell; `PagedCacheForTransformers` measures the model instead. The longest sequence is ``sys.maxsize`` where the
        configuration sets no limit. States are those of the whole model: ranks that share one say their own.

        Args:
            config: a ``PretrainedConfig`` of a decoder; of a multimodal model its text part is taken.
            dtype: dtype of keys and values; default ``config.dtype``.

        Raises:
            UnsupportedError: the model keeps what no kind of layer describes, or may do so.
            ArgumentValueError: a number that is needed is missing.
        """
        text = text_part(config)
        dtype = dtype or read_dtype(text)
        return cls(read_layers(config, text, dtype), read_max_positions(text), dtype)
