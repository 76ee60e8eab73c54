"""Attention within chunks, as in Llama 4: a token sees those of its own chunk only."""

from __future__ import annotations

import attrs
import torch

from kvdock.checks import check_int, check_size
from kvdock.layers.attention import keys_and_values
from kvdock.layers.interface import LayerKind, Part, Split
from kvdock.layers.retention import KeepChunk

__all__ = ["ChunkedLayerSpec"]


@attrs.frozen
class ChunkedLayerSpec(LayerKind):
    """One layer of chunked attention.

    Args:
        num_k_heads: key heads of the whole model, before the split over ranks.
        num_v_heads: value heads of the whole model.
        k_dim: elements of one key head.
        v_dim: elements of one value head.
        chunk: tokens of a chunk; the first begins at position 0.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    chunk: int

    def __attrs_post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim"):
            check_size(f"ChunkedLayerSpec: {name}", getattr(self, name))
        check_int("ChunkedLayerSpec: chunk", self.chunk, 1)

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return keys and values of the rank's heads."""
        return (keys_and_values(self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim, split, dtype, KeepChunk(self.chunk)),)
