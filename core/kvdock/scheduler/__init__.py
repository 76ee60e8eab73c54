"""Which blocks hold which tokens. Integers only: nothing here touches a device.

In the order of a call: `BlockTable` knows the block of every token of a batch, and asks the `BlockAllocator` for more.
"""

from kvdock.scheduler.block_allocator import BlockAllocator, BlockIds
from kvdock.scheduler.block_table import BlockTable

__all__ = ["BlockAllocator", "BlockIds", "BlockTable"]
