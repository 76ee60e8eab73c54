"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed row for all heads."""

from __future__ import annotations

import attrs
import torch

from kvdock.checks import check_size
from kvdock.layers.interface import Buffer, LayerKind, Part, Split
from kvdock.layers.retention import KeepAll

__all__ = ["MLALayerSpec"]


@attrs.frozen
class MLALayerSpec(LayerKind):
    """One layer of multi-head latent attention: a compressed latent and the rotary part, shared by all heads.

    Args:
        kv_lora_rank: elements of the latent.
        rope_dim: elements of the rotary part.
    """

    kv_lora_rank: int
    rope_dim: int

    def __attrs_post_init__(self) -> None:
        check_size("MLALayerSpec: kv_lora_rank", self.kv_lora_rank)
        check_size("MLALayerSpec: rope_dim", self.rope_dim)

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return one row of ``kv_lora_rank + rope_dim`` elements a token, the same on each rank: there are no heads to split."""
        row = Buffer("kv", (self.kv_lora_rank + self.rope_dim,), dtype, values=self.kv_lora_rank)
        return (Part((row,), KeepAll()),)
