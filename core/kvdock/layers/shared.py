"""Layers without keys and values of their own: they read those of an earlier one, as in Gemma 3n and YOCO (arXiv:2405.05254)."""

from __future__ import annotations

import attrs
import torch

from kvdock.checks import check_int
from kvdock.layers.interface import LayerKind, Part, Split

__all__ = ["SharedLayerSpec"]


@attrs.frozen
class SharedLayerSpec(LayerKind):
    """One layer that reads what another keeps.

    Args:
        of: the layer that keeps it, an earlier one of the same `KVSpec` that is not shared itself.
    """

    of: int

    def __attrs_post_init__(self) -> None:
        check_int("SharedLayerSpec: of", self.of, 0)

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return nothing."""
        return ()
