"""`mla_caching_` in Triton: the kernel of `paged_caching_` on the two parts of a latent pool."""

from __future__ import annotations

from kvdock.plugin import LatentKernel
from kvdock_triton.paged_caching import PagedCaching
from kvdock_triton.support import KernelOwner

__all__ = ["MLACaching"]


class MLACaching(LatentKernel):
    """Writes latents as keys and rotary parts as values.

    Args:
        owner: whose devices it runs on.
    """

    def __init__(self, owner: KernelOwner) -> None:
        super().__init__(PagedCaching(owner))
