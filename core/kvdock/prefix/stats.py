"""What happened in a prefix cache, in numbers."""

from __future__ import annotations

import attrs

__all__ = ["PrefixStats"]


@attrs.frozen
class PrefixStats:
    """Counts since the cache was made. Ages are uses: how many matches that were recorded, and insertions, ago.

    Which of the blocks that go in one call are one run is the cache's affair; a run is as old as its end.

    Args:
        lookups: matches.
        lookup_tokens: tokens that were looked up.
        hit_tokens: tokens of those that were there.
        inserted_tokens: tokens that insertions added.
        evicted_tokens: tokens that were evicted.
        evictions: runs of blocks that were evicted or trimmed.
        age_sum: sum over those of the age at eviction.
        age_max: the greatest of these ages, which is that of the block that was used longest ago.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    inserted_tokens: int = 0
    evicted_tokens: int = 0
    evictions: int = 0
    age_sum: int = 0
    age_max: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens per token that was looked up; 0 without any."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def mean_age(self) -> float:
        """Mean age at eviction, in uses; 0 without any."""
        return self.age_sum / self.evictions if self.evictions else 0.0
