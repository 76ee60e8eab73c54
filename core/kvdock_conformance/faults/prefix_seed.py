"""How a fault gets into a prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs

from kvdock.prefix import RadixPrefixCache
from kvdock.prefix.tree import RadixTree
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.faults.fault import Fault

__all__ = ["Added", "FaultyTree", "PrefixSeed", "adding"]


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


class FaultyTree(RadixPrefixCache):
    """Base of caches that are faulty in their tree.

    Attributes:
        tree: its class.
    """

    tree: type[RadixTree]

    def __init__(self, block_size: int = 16, policy: Any = "lru") -> None:
        super().__init__(block_size, policy)
        self._tree = self.tree(block_size, self.policy)


Added = Callable[[type[RadixPrefixCache]], type[RadixPrefixCache]]
"""Adds a class of faulty caches to a list."""


def adding(faults: list[Fault]) -> Callable[..., Added]:
    """Return a decorator of classes of faulty caches, which takes a name, a sentence, and the numbers of the killers."""

    def fault(name: str, sentence: str, *killers: str) -> Added:
        def add(cache: type[RadixPrefixCache]) -> type[RadixPrefixCache]:
            killed = tuple(f"KVD-PREFIX-{killer}" for killer in killers)
            faults.append(Fault(f"prefix-{name}", sentence, "prefix", killed, PrefixSeed(cache), "prefix"))
            return cache

        return add

    return fault
