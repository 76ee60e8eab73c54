"""Attention with keys and values of its own: full, or in a sliding window."""

from __future__ import annotations

import attrs
import torch

from kvdock.checks import check_int, check_size
from kvdock.errors import ArgumentValueError
from kvdock.layers.interface import Buffer, LayerKind, Part, Split
from kvdock.layers.retention import KeepAll, KeepWindow, Retention

__all__ = ["LayerSpec", "keys_and_values"]


@attrs.frozen
class LayerSpec(LayerKind):
    """One attention layer with separate keys and values.

    Args:
        num_k_heads: key heads of the whole model, before the split over ranks.
        num_v_heads: value heads of the whole model; may differ from ``num_k_heads``.
        k_dim: elements of one key head.
        v_dim: elements of one value head; may differ from ``k_dim``.
        window: sliding window in tokens, a query's own included, or None for full attention. It says which tokens later ones need,
            and so which layers share a block table, see `kvdock.plan_blocks`; a cache takes whatever is written.
        sinks: first tokens of a sequence that are seen beside the window. Managers keep them; no op of kvdock's reads them so.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    sinks: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim"):
            check_size(f"LayerSpec: {name}", getattr(self, name))
        if self.window is not None:
            check_int("LayerSpec: window", self.window, 1)
        if check_int("LayerSpec: sinks", self.sinks, 0) and self.window is None:
            raise ArgumentValueError(
                "LayerSpec: sinks", expected="0 without a window", got=self.sinks, fix="give a window: without one all tokens are seen"
            )

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return keys and values of the rank's heads."""
        rule: Retention = KeepAll() if self.window is None else KeepWindow(self.window, self.sinks)
        return (keys_and_values(self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim, split, dtype, rule),)


def keys_and_values(k_heads: int, v_heads: int, k_dim: int, v_dim: int, split: Split, dtype: torch.dtype, rule: Retention) -> Part:
    """Return keys, ``[heads, k_dim]`` a token, and values, ``[heads, v_dim]``, of a rank's share of the heads."""
    k = Buffer("k", (len(split(k_heads, "num_k_heads")), k_dim), dtype)
    return Part((k, Buffer("v", (len(split(v_heads, "num_v_heads")), v_dim), dtype)), rule)
