"""In which order a pool lies in memory.

Whatever the order, every op sees a layer's cache as ``[num_blocks, block_size, heads, dim]``: other orders arrive as a
permuted view. So a layout changes locality and what an attention kernel can read, and never a kernel's logic.
"""

from __future__ import annotations

import enum

__all__ = ["HeadLayout", "KVCacheLayout"]


class KVCacheLayout(enum.Enum):
    """Which of layer and block is outermost in a pool."""

    LAYER_FIRST = "layer_first"
    """``[layers, num_blocks, ...]``: all blocks of a layer lie together. What attention kernels read; the default."""

    PAGE_FIRST = "page_first"
    """``[num_blocks, layers, ...]``: all layers of a block lie together. What moving whole blocks wants."""


class HeadLayout(enum.Enum):
    """Which of token and head is outermost within a block."""

    NHD = "nhd"
    """``[block_size, heads, dim]``: a token's heads lie together. The default."""

    HND = "hnd"
    """``[heads, block_size, dim]``: a head's tokens lie together."""
