"""Which blocks hold which tokens. Integers only; but for `BatchTables`, nothing here touches a device.

In the order of a call: `CacheManager` gives each `CacheSequence` its blocks, out of a prefix cache and the `BlockAllocator`
(`pool_blocks`: what can be had; `steps`: a batch grows; `publishing`: who owns what; `rows`: the numbers of all sequences);
`BatchTables` and the exporters put the tables in the forms that kernels read. `SequenceBatch` is a batch whose rows have one
length.
"""

from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.batch_tables import BatchTables, HostTables, TableViews
from kvdock.scheduler.block_allocator import BlockAllocator
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.exporters import CSRTable, csr_table, dense_table, sequence_lengths, token_table
from kvdock.scheduler.pins import Pin
from kvdock.scheduler.planning import Fit
from kvdock.scheduler.sequence import CacheSequence
from kvdock.scheduler.sequence_batch import SequenceBatch
from kvdock.scheduler.tier import NumberTier, Tier
from kvdock.scheduler.tier_blocks import TierUsage

__all__ = [
    "BatchTables",
    "BlockAllocator",
    "BlockIds",
    "CSRTable",
    "CacheManager",
    "CacheSequence",
    "Fit",
    "HostTables",
    "NumberTier",
    "Pin",
    "SequenceBatch",
    "TableViews",
    "Tier",
    "TierUsage",
    "csr_table",
    "dense_table",
    "sequence_lengths",
    "token_table",
]
