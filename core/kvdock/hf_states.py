"""States that layers without keys and values keep, by the settings that a Transformers configuration has.

Each entry names the settings that it reads. A configuration that has none of these sets is not guessed at. Shapes are those that
Transformers' own cache holds, without the batch; recurrent states are float32 there, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from kvdock.layers.interface import Buffer
from kvdock.layers.state import StateLayerSpec

__all__ = ["READ_FOR_STATES", "state_of"]

Sizes = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Of the last inputs of a convolution, and of the recurrent state, if there is one."""


@attrs.frozen
class _Reader:
    """How to read one kind of state.

    Args:
        settings: what is read, all of it.
        read: returns the sizes, given these settings' values by name and the layer's configuration.
    """

    settings: frozenset[str]
    read: Callable[[dict[str, int], Any], Sizes]


def _gated_delta(n: dict[str, int], layer: Any) -> Sizes:
    """Gated delta networks (Yang et al., 2024, arXiv:2412.06464): queries, keys and values pass one convolution."""
    keys, values = n["linear_num_key_heads"] * n["linear_key_head_dim"], n["linear_num_value_heads"] * n["linear_value_head_dim"]
    state = n["linear_num_value_heads"], n["linear_key_head_dim"], n["linear_value_head_dim"]
    return (2 * keys + values, n["linear_conv_kernel_dim"]), state


def _delta(n: dict[str, int], layer: Any) -> Sizes:
    """Kimi delta attention (Kimi Team, 2025, arXiv:2510.26692): as many heads, of one size, for queries, keys and values."""
    heads, dim = n["linear_num_heads"], n["linear_head_dim"]
    return (3 * heads * dim, n["linear_conv_kernel_dim"]), (heads, dim, dim)


def _mamba_2(n: dict[str, int], layer: Any) -> Sizes:
    """State-space duality (Dao and Gu, 2024, arXiv:2405.21060): inputs, B and C pass one convolution."""
    heads, dim, state = n["mamba_n_heads"], n["mamba_d_head"], n["mamba_d_state"]
    return (heads * dim + 2 * n["mamba_n_groups"] * state, n["mamba_d_conv"]), (heads, dim, state)


def _mamba(n: dict[str, int], layer: Any) -> Sizes:
    """Selective state spaces (Gu and Dao, 2023, arXiv:2312.00752)."""
    inner = n["mamba_expand"] * layer.hidden_size
    return (inner, n["mamba_d_conv"]), (inner, n["mamba_d_state"])


def _convolution(n: dict[str, int], layer: Any) -> Sizes:
    """A gated short convolution, as in LFM2: nothing recurrent."""
    return (layer.hidden_size, n["conv_L_cache"]), None


_READERS = {
    "linear_attention": (
        _Reader(
            frozenset(
                ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"]
            ),
            _gated_delta,
        ),
        _Reader(frozenset(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")), _delta),
        _Reader(frozenset(["mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"]), _mamba_2),
        _Reader(frozenset(("mamba_expand", "mamba_d_state", "mamba_d_conv")), _mamba),
    ),
    "conv": (_Reader(frozenset(("conv_L_cache",)), _convolution),),
}
"""By the type of a layer, the first whose settings are all there."""

_HARMLESS = """
    mamba_expand mamba_dt_rank mamba_chunk_size mamba_conv_bias mamba_proj_bias use_mamba_kernels use_mambapy mamba_d_ssm
    mamba_rms_norm mamba_norm_before_gate key_multiplier lm_head_multiplier ssm_in_multiplier ssm_multipliers ssm_out_multiplier
    """

READ_FOR_STATES = frozenset(_HARMLESS.split()).union(*(reader.settings for of in _READERS.values() for reader in of))
"""Settings that are read, or known to change nothing about the sizes of a state."""


def state_of(kind: str, layer: Any, names: set[str], dtype: torch.dtype) -> StateLayerSpec | None:
    """Return what a layer of a type keeps; None where that is not known.

    Args:
        kind: the type, such as ``"linear_attention"``.
        layer: its configuration.
        names: the settings that the configuration's class knows.
        dtype: of the model.
    """
    for reader in _READERS.get(kind, ()):
        numbers = {name: getattr(layer, name, None) for name in reader.settings}
        if reader.settings <= names and all(type(value) is int for value in numbers.values()):
            conv, recurrent = reader.read(numbers, layer)  # type: ignore[arg-type]  # all of them are ints
            more = (Buffer("recurrent", recurrent, torch.float32),) if recurrent else ()
            return StateLayerSpec((Buffer("conv", conv, dtype), *more))
    return None
