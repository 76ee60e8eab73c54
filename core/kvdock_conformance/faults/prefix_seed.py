"""How a fault gets into a prefix cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any
from unittest import mock

import attrs

from kvdock.prefix import RadixPrefixCache
from kvdock.prefix.tree import RadixTree
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.faults.fault import Fault

__all__ = ["Change", "PrefixSeed", "adding", "changed"]

Change = Callable[..., Any]
"""What is done in place of a method: given the object, its method, and what that was called with. Of a property: its value."""


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


def changed(base: type[Any], **changes: Change) -> type[Any]:
    """Return a class like another, but for some methods and properties."""

    def around(was: Any, change: Change) -> Any:
        if isinstance(was, property):
            return property(lambda self: change(self, was.__get__(self)))
        if not callable(was):
            return change(None, was)
        return lambda self, *args, **how: change(self, functools.partial(was, self), *args, **how)

    return type(base.__name__, (base,), {name: around(getattr(base, name), change) for name, change in changes.items()})


def adding(faults: list[Fault]) -> Callable[..., None]:
    """Return a function that adds a fault to a list.

    It takes a name, a sentence, numbers of killers ("001 005"), and changes by method; ``tree`` has those of the tree inside.
    """

    def fault(name: str, sentence: str, killers: str, tree: Mapping[str, Change] = MappingProxyType({}), **changes: Change) -> None:
        def with_tree(cache: Any, init: Any, *args: Any, **how: Any) -> None:
            init(*args, **how)
            cache._tree = changed(RadixTree, **tree)(cache.block_size, cache.policy)

        killed = tuple(f"KVD-PREFIX-{killer}" for killer in killers.split())
        cache = changed(RadixPrefixCache, **changes, **({"__init__": with_tree} if tree else {}))
        faults.append(Fault(f"prefix-{name}", sentence, "prefix", killed, PrefixSeed(cache), "prefix"))

    return fault
