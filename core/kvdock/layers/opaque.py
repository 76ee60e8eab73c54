"""Layers whose format is somebody else's: so many bytes a token."""

from __future__ import annotations

import attrs
import torch

from kvdock.checks import check_size
from kvdock.layers.interface import Buffer, LayerKind, Part, Split
from kvdock.layers.retention import KeepAll

__all__ = ["OpaqueLayerSpec"]


@attrs.frozen
class OpaqueLayerSpec(LayerKind):
    """One layer that keeps bytes in a format of another package.

    Args:
        bytes_per_token: what it keeps of each token, on one rank.
    """

    bytes_per_token: int

    def __attrs_post_init__(self) -> None:
        check_size("OpaqueLayerSpec: bytes_per_token", self.bytes_per_token)

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return a row of bytes for each token."""
        return (Part((Buffer("bytes", (self.bytes_per_token,), torch.uint8),), KeepAll()),)
