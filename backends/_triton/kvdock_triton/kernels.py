"""All Triton kernels by op. Importing this imports Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import kvdock
from kvdock_triton.copy_blocks import CopyBlocks
from kvdock_triton.gather_paged import GatherPaged
from kvdock_triton.paged_caching import PagedCaching
from kvdock_triton.static_update import StaticUpdate

if TYPE_CHECKING:
    from kvdock_triton.base import TritonBackend

__all__ = ["kernels_for"]


def kernels_for(backend: TritonBackend) -> Mapping[str, kvdock.Kernel]:
    """Return the kernels of a backend."""
    return {
        "paged_caching_": PagedCaching(backend),
        "static_update_": StaticUpdate(backend),
        "gather_paged": GatherPaged(backend),
        "copy_blocks_": CopyBlocks(backend),
    }
