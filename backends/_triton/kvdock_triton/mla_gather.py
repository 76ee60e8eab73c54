"""`mla_gather` in Triton: the kernel of `gather_paged` on the two parts of a latent pool."""

from __future__ import annotations

from kvdock.plugin import LatentKernel
from kvdock_triton.gather_paged import GatherPaged
from kvdock_triton.support import KernelOwner

__all__ = ["MLAGather"]


class MLAGather(LatentKernel):
    """Reads latents as keys and rotary parts as values.

    Args:
        owner: whose devices it runs on.
    """

    def __init__(self, owner: KernelOwner) -> None:
        super().__init__(GatherPaged(owner))
