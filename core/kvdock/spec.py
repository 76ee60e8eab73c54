"""What the layers of a model need from a KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from kvdock.hf_config import MOST_LAYERS, read_dtype, read_layers, read_max_positions, text_part

__all__ = ["COPY_DTYPES", "QUANTISED_DTYPES", "KVSpec", "LayerSpec", "MLALayerSpec", "check_cache_dtype", "check_int", "device_of"]

COPY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8)
"""Dtypes a cache stores as they come, bit for bit. ``uint8`` is for bytes in whatever format: no op looks into them."""

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


_MOST_ELEMENTS = 2**31 - 1
"""Bound on heads and dims: what cannot be meant is refused before anything is made of it."""


def _check_size(subject: str, value: object, most: int = _MOST_ELEMENTS) -> int:
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
        _check_size("KVSpec.uniform: num_layers", num_layers, MOST_LAYERS)
        return cls((LayerSpec(num_kv_heads, num_kv_heads, head_dim, head_dim),) * num_layers, max_positions, dtype)

    @classmethod
    def from_hf_config(cls, config: Any, dtype: torch.dtype | None = None) -> KVSpec:
        """Read a Transformers configuration.

        The result is what Transformers' own cache would hold: of latent attention the latent as key and the rotary part as
        value, one head each. A setting that may bear on that and is not known to be harmless is a reason to refuse, for
        what only a model's code knows a configuration cannot tell; `PagedCacheForTransformers` measures the model instead.
        The longest sequence is ``sys.maxsize`` where the configuration sets no limit.

        Args:
            config: a ``PretrainedConfig`` of a decoder; of a multimodal model its text part is taken.
            dtype: dtype of keys and values; default ``config.dtype``.

        Raises:
            UnsupportedError: the model keeps other state than each layer's own keys and values, or may do so.
            ArgumentValueError: a number that is needed is missing.
        """
        text = text_part(config)
        layers = [LayerSpec(heads, heads, k_dim, v_dim, window) for heads, k_dim, v_dim, window in read_layers(config, text)]
        return cls(layers, read_max_positions(text), dtype or read_dtype(text))
