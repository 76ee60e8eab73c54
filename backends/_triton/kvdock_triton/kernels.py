"""All Triton kernels by op. Importing this imports Triton."""

from __future__ import annotations

from collections.abc import Mapping

from kvdock.plugin import Kernel
from kvdock_triton.copy_blocks import CopyBlocks
from kvdock_triton.gather_paged import GatherPaged
from kvdock_triton.mla_caching import MLACaching
from kvdock_triton.mla_gather import MLAGather
from kvdock_triton.paged_attention import PagedAttention
from kvdock_triton.paged_caching import PagedCaching
from kvdock_triton.static_update import StaticUpdate
from kvdock_triton.support import KernelOwner
from kvdock_triton.swap_blocks import SwapBlocks

__all__ = ["kernels_for"]


def kernels_for(owner: KernelOwner) -> Mapping[str, Kernel]:
    """Return the kernels that run on the devices of ``owner``."""
    return {
        "paged_caching_": PagedCaching(owner),
        "static_update_": StaticUpdate(owner),
        "gather_paged": GatherPaged(owner),
        "copy_blocks_": CopyBlocks(owner),
        "swap_blocks_": SwapBlocks(owner),
        "paged_attention": PagedAttention(owner),
        "mla_caching_": MLACaching(owner),
        "mla_gather": MLAGather(owner),
    }
