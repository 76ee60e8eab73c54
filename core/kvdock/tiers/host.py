"""Host memory as a tier: what the pool of a cache gives up is copied to it, and back when a prompt goes on with it.

A copy waits for what wrote the blocks, and what comes next on the device waits for the copy, in the order of the device's stream: so a
block can be handed out as soon as its copy is on its way, and no decision depends on how far copies are. Ranks decide alike.
"""

from __future__ import annotations

from typing import Self

from kvdock.cache.paged import PagedKVCache
from kvdock.cache.swapping import Swapper, host_cache
from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.scheduler.tier import BlockPairs, Tier, distinct_tiers
from kvdock.spec import check_int

__all__ = ["HostTier", "bound_tiers"]


class HostTier(Tier):
    """A tier in host memory.

    It takes memory when it is bound to a cache, of the size of its blocks: all layers of a block together, and page-locked in the
    background where the cache's device can. It belongs to the manager of that cache's blocks, and to its thread::

        tier = kvdock.HostTier(8 << 30).bind(cache)
        manager = kvdock.CacheManager(cache.num_blocks, groups=cache.groups, tiers=[tier])

    Args:
        nbytes: how much memory it may take, at least a block.

    Raises:
        ArgumentTypeError, ArgumentValueError: ``nbytes`` is no int above 0.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = check_int("HostTier: nbytes", nbytes, 1)
        self._ends: tuple[PagedKVCache, PagedKVCache] | None = None

    def __repr__(self) -> str:
        return f"HostTier({self.nbytes}{'' if self._ends is None else f', num_blocks={self._ends[1].num_blocks}'})"

    def bind(self, cache: PagedKVCache) -> Self:
        """Take memory for the blocks of a cache, and return the tier.

        Raises:
            ArgumentTypeError: no cache in blocks.
            ArgumentValueError: it is bound already.
            CapacityError: not even a block fits; or the host has not as much memory.
        """
        if not isinstance(cache, PagedKVCache):
            fix = "pass what create_cache makes of a PagedKVCacheConfig"
            raise ArgumentTypeError("HostTier.bind: cache", expected="a PagedKVCache", got=repr(cache)[:80], fix=fix)
        if self._ends is not None:
            raise ArgumentValueError("HostTier.bind", expected="a tier without a cache", got=repr(self), fix="make a tier for each cache")
        self._ends = cache, host_cache(cache, max_kv_memory_bytes=self.nbytes)
        self._swapper = Swapper()
        return self

    @property
    def memory(self) -> PagedKVCache:
        """The cache in host memory that holds its blocks."""
        return self._bound()[1]

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return self._bound()[1].num_blocks

    def _bound(self) -> tuple[PagedKVCache, PagedKVCache]:
        """Return the cache and the memory."""
        if self._ends is None:
            fix = "call bind(cache) with the cache of the manager's blocks"
            raise ArgumentValueError("HostTier", expected="one that is bound to a cache", got=repr(self), fix=fix)
        return self._ends

    def store(self, pairs: BlockPairs, source: Tier | None) -> None:
        """Copy blocks into it: from the pool, or from another `HostTier`."""
        cache, memory = self._bound()
        if source is None:
            self._copy(cache, memory, pairs)
            return
        if not isinstance(source, HostTier):
            fix = "put host tiers first, or write a Tier that reads the one before it"
            raise ArgumentTypeError("HostTier.store: source", expected="the pool or a HostTier", got=repr(source)[:80], fix=fix)
        source._swapper.synchronize()  # what is on its way from the device is there when the host reads it
        source.memory.swap_blocks(memory, pairs)

    def load(self, pairs: BlockPairs) -> None:
        """Copy blocks into the pool."""
        cache, memory = self._bound()
        self._copy(memory, cache, pairs)

    def _copy(self, src: PagedKVCache, dst: PagedKVCache, pairs: BlockPairs) -> None:
        # A block is copied whole, whichever group it is of: both ends have the same groups, and lie alike in a block.
        self._swapper.swap(src, dst, pairs).wait()


def bound_tiers(subject: str, tiers: object, cache: PagedKVCache) -> tuple[Tier, ...]:
    """Return tiers; of host tiers those that have no cache yet are bound to this one.

    Raises:
        ArgumentTypeError: no tiers.
        ArgumentValueError: one is there twice, or bound to another cache.
    """
    found = distinct_tiers(subject, tiers)
    hosts = [tier for tier in found if isinstance(tier, HostTier)]
    for tier in hosts:  # all before any takes memory
        if tier._ends is not None and tier._ends[0] is not cache:
            fix = "pass it unbound, or make a tier for each cache"
            raise ArgumentValueError(f"{subject}: tiers", expected="host tiers of this cache, or of none", got=repr(tier), fix=fix)
    for tier in hosts:
        if tier._ends is None:
            tier.bind(cache)
    return found
