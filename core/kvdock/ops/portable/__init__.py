"""Kernels for any device that torch has: vectorised, without a synchronisation, so that they can be captured.

They serve what a backend lacks. On host memory they check index values first, as the contract asks; elsewhere they skip
what is out of range and count it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvdock.interface import Kernel
from kvdock.ops.portable.copy_blocks import CopyBlocks
from kvdock.ops.portable.gather_paged import GatherPaged
from kvdock.ops.portable.mla_caching import MLACaching
from kvdock.ops.portable.mla_gather import MLAGather
from kvdock.ops.portable.paged_attention import PagedAttention
from kvdock.ops.portable.paged_caching import PagedCaching
from kvdock.ops.portable.rows import SKIPPED
from kvdock.ops.portable.static_update import StaticUpdate
from kvdock.ops.portable.swap_blocks import SwapBlocks

__all__ = ["PORTABLE_KERNELS", "SKIPPED"]

PORTABLE_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "paged_caching_": PagedCaching(),
        "static_update_": StaticUpdate(),
        "gather_paged": GatherPaged(),
        "copy_blocks_": CopyBlocks(),
        "swap_blocks_": SwapBlocks(),
        "paged_attention": PagedAttention(),
        "mla_caching_": MLACaching(),
        "mla_gather": MLAGather(),
    }
)
"""Portable kernels by op."""
