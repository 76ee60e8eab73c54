"""Which blocks hold the keys and values of which tokens: prefixes that requests share. Integers only.

In the order of reading: `interface` is the contract, `naive` the shortest prefix cache, `radix` the one to use, with `node`,
`tree`, `handle`, `labels` (token ids as bytes), `eviction` (policies and the queue), `integrity` and `events`; `factory` makes one by name.
`names` calls blocks by what they hold, outside any tree.
"""

from kvdock.prefix.events import Cleared, PrefixEvent, Removed, Stored
from kvdock.prefix.eviction import FIFO, LFU, LRU, EvictionPolicy, LowestPriority, Usage
from kvdock.prefix.factory import create_prefix_cache
from kvdock.prefix.interface import (
    BlockIds,
    InsertResult,
    Namespace,
    PartialMatch,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
    SizeInfo,
    Slots,
    StoredPrefix,
)
from kvdock.prefix.naive import NaivePrefixCache
from kvdock.prefix.names import NAME_BYTES, block_names, root_name, tagged_namespace
from kvdock.prefix.radix import RadixPrefixCache
from kvdock.prefix.stats import PrefixStats

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "NAME_BYTES",
    "BlockIds",
    "Cleared",
    "EvictionPolicy",
    "InsertResult",
    "LowestPriority",
    "NaivePrefixCache",
    "Namespace",
    "PartialMatch",
    "PrefixCache",
    "PrefixEvent",
    "PrefixHandle",
    "PrefixMatch",
    "PrefixStats",
    "RadixPrefixCache",
    "Removed",
    "SizeInfo",
    "Slots",
    "Stored",
    "StoredPrefix",
    "Usage",
    "block_names",
    "create_prefix_cache",
    "root_name",
    "tagged_namespace",
]
