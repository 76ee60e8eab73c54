"""Memory for blocks that a pool gives up: tiers that move bytes. `kvdock.scheduler.tier` is the contract, and says what is where."""

from kvdock.scheduler.tier import BlockPairs, NumberTier, Tier
from kvdock.scheduler.tier_blocks import TierUsage
from kvdock.tiers.host import HostTier

__all__ = ["BlockPairs", "HostTier", "NumberTier", "Tier", "TierUsage"]
