"""How a fault gets into a prefix cache."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs

from kvdock.prefix import RadixPrefixCache
from kvdock_conformance.checking.prefix_target import PrefixTarget

__all__ = ["PrefixSeed"]


@attrs.frozen
class PrefixSeed:
    """A faulty class in place of the radix tree's.

    Args:
        cache: the class.
    """

    cache: type[RadixPrefixCache]

    def why_not(self, target: PrefixTarget) -> str:
        """Return why not: what is tested is another class, of whose inside nothing is known."""
        return "" if target.kind is RadixPrefixCache else f"the faults of prefix caches are the radix tree's, and {target.name} is none"

    def seeded(self, target: PrefixTarget) -> AbstractContextManager[Any]:
        """Let the target make faulty caches for a block."""
        return mock.patch.object(target, "make", lambda block_size: self.cache(block_size=block_size))
