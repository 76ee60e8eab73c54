"""What is counted about a descriptor cache."""

from __future__ import annotations

import attrs

__all__ = ["CacheStats"]


@attrs.frozen
class CacheStats:
    """What happened in a descriptor cache since it was made.

    Args:
        hits: look-ups that found a descriptor.
        misses: look-ups that did not.
        evictions: descriptors that left to make room.
        destroyed: descriptors handed to the destroyer, for whatever reason.
        failures: destroyers that raised; each is logged.
        size: descriptors held now.
        capacity: how many are held at most, pinned ones aside.
        prepare_s: seconds spent preparing what was put in, as far as the caller said.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    destroyed: int = 0
    failures: int = 0
    size: int = 0
    capacity: int = 0
    prepare_s: float = 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))
