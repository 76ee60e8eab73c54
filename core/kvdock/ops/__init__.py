"""The ops: what moves keys and values, and reads them. Call these; `kvdock.ops.api` says what each takes and raises.

In the order of a call: `calls` (the code of each op's call, written from its schema), `signatures` (what a thread knows of earlier
calls), `entry` (what happens when that is not enough), `validate` (what is refused), `selection` (the seam to backends),
`dispatcher`, and `portable` (kernels for any device). `schema` and `catalog` are what an op is, as data.
"""

from kvdock.ops.api import (
    copy_blocks_,
    gather_paged,
    mla_caching_,
    mla_gather,
    paged_attention,
    paged_caching_,
    static_update_,
    swap_blocks_,
)
from kvdock.ops.attention import merge_attention

__all__ = [
    "copy_blocks_",
    "gather_paged",
    "merge_attention",
    "mla_caching_",
    "mla_gather",
    "paged_attention",
    "paged_caching_",
    "static_update_",
    "swap_blocks_",
]
