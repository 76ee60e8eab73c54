"""`mla_gather` in portable torch: `gather_paged` on the two parts of a latent pool."""

from __future__ import annotations

from kvdock.ops.latents import LatentKernel
from kvdock.ops.portable.gather_paged import GatherPaged

__all__ = ["MLAGather"]


class MLAGather(LatentKernel):
    """Reads latents as keys and rotary parts as values."""

    def __init__(self) -> None:
        super().__init__(GatherPaged())
