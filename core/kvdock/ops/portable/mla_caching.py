"""`mla_caching_` in portable torch: `paged_caching_` on the two parts of a latent pool."""

from __future__ import annotations

from kvdock.ops.latents import LatentKernel
from kvdock.ops.portable.paged_caching import PagedCaching

__all__ = ["MLACaching"]


class MLACaching(LatentKernel):
    """Writes latents as keys and rotary parts as values."""

    def __init__(self) -> None:
        super().__init__(PagedCaching())
