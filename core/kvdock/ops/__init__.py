"""The ops: what moves keys and values. Call these; `kvdock.ops.api` says what each takes and raises.

In the order of a call: `schema` and `catalog` (what an op is, as data), `signature` (its key and quick checks), `validate`
(what it refuses), `selection` (the seam to backends), `dispatcher`, and `portable` (kernels for any device).
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

__all__ = [
    "copy_blocks_",
    "gather_paged",
    "mla_caching_",
    "mla_gather",
    "paged_attention",
    "paged_caching_",
    "static_update_",
    "swap_blocks_",
]
