"""Which blocks hold which tokens. Integers only: nothing here touches a device.

In the order of a call: `CacheManager` gives each `CacheSequence` its blocks, out of a prefix cache and the `BlockAllocator`;
`exporters` write its tables in the forms that kernels read. `BlockTable` is for a batch whose rows have one length.
"""

from kvdock.scheduler.block_allocator import BlockAllocator, BlockIds
from kvdock.scheduler.block_table import BlockTable
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.exporters import CSRTable, csr_table, dense_table, sequence_lengths, token_table
from kvdock.scheduler.sequence import CacheSequence

__all__ = [
    "BlockAllocator",
    "BlockIds",
    "BlockTable",
    "CSRTable",
    "CacheManager",
    "CacheSequence",
    "csr_table",
    "dense_table",
    "sequence_lengths",
    "token_table",
]
