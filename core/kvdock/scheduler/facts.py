"""What a manager says of itself: numbers that change nothing."""

from __future__ import annotations

from kvdock.prefix.ownership import NotCopied
from kvdock.scheduler.decisions import Digested
from kvdock.scheduler.pins import Pins
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Rows
from kvdock.scheduler.tier_blocks import TierUsage

__all__ = ["Facts"]


class Facts(NotCopied, Digested):
    """The part of a `kvdock.CacheManager` that only answers."""

    _pool: PoolBlocks
    _rows: Rows
    _pins: Pins
    block_size: int

    @property
    def null_block(self) -> int | None:
        """The block that is never handed out; None where there is none."""
        return self._pool.null_block

    @property
    def available_size(self) -> int:
        """Tokens of the blocks that are free or evictable, and not promised.

        A prompt of fewer new tokens may still not fit: what it finds in the cache is locked for it, and cannot be evicted
        then. `plan` counts that.
        """
        self._enter()
        return self._pool.available * self.block_size

    @property
    def lets_go(self) -> bool:
        """Whether a layer group lets tokens go that no later token reads."""
        return self._pool.lets_go

    @property
    def blocks_used(self) -> int:
        """Blocks of the pool that sequences or the prefix cache hold; any thread may ask."""
        return self._pool.used

    @property
    def num_sequences(self) -> int:
        """Sequences that are open."""
        return len(self._rows.open())

    @property
    def num_pins(self) -> int:
        """Pins that are held."""
        self._enter()
        return len(self._pins)

    @property
    def tier_usage(self) -> tuple[TierUsage, ...]:
        """What is in each tier, and what has been copied, in blocks; nothing without tiers."""
        self._enter()
        return () if self._pool.tiers is None else self._pool.tiers.usage()
