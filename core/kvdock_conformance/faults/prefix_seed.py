"""How a fault gets into a prefix cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs

from kvdock.prefix import RadixPrefixCache
from kvdock.prefix.tree import RadixTree
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.faults.fault import Fault

__all__ = ["Change", "PrefixSeed", "after", "answered", "changed", "faults_of", "first", "forgiving"]

Change = Callable[..., Any]
"""What is done in place of a method: given the object, its method, and what that was called with. Of a property: its value."""


@attrs.frozen
class PrefixSeed:
    """A faulty class in place of the radix tree's.

    Args:
        cache: the class.
        told: name of the fault, for fresh interpreters; None where they need not have it, which saves their start.
    """

    cache: type[RadixPrefixCache]
    told: str | None = None

    def why_not(self, target: PrefixTarget) -> str:
        """Return why not: what is tested is another class, of whose inside nothing is known."""
        return "" if target.kind is RadixPrefixCache else f"the faults of prefix caches are the radix tree's, and {target.name} is none"

    def seeded(self, target: PrefixTarget) -> AbstractContextManager[Any]:
        """Let the target make faulty caches for a block."""
        return mock.patch.multiple(target, make=lambda block_size: self.cache(block_size=block_size), fault=self.told)


def changed(base: type[Any], **changes: Change) -> type[Any]:
    """Return a class like another, but for some methods and properties."""

    def around(was: Any, change: Change) -> Any:
        if isinstance(was, property):
            return property(lambda self: change(self, was.__get__(self)))
        if not callable(was):
            return change(None, was)
        return lambda self, *args, **how: change(self, functools.partial(was, self), *args, **how)

    return type(base.__name__, (base,), {name: around(getattr(base, name), change) for name, change in changes.items()})


def answered(change: Callable[[Any], Any]) -> Change:
    """Return a change of what a method answers."""
    return lambda cache, call, *args, **how: change(call(*args, **how))


def after(change: Change) -> Change:
    """Return a change that does something more at last; takes the object, the answer, and what the method was called with."""
    return lambda cache, call, *args, **how: [made := call(*args, **how), change(cache, made, *args, **how)][0]


def first(changes: Change) -> Change:
    """Return a change of a method's first argument; takes the object and that."""
    return lambda cache, call, value, *rest, **how: call(changes(cache, value), *rest, **how)


def forgiving(error: type[Exception], text: str, instead: Change) -> Change:
    """Return a change that does something else where a call is refused with an error of such a text."""

    def call(cache: Any, call: Any, *args: Any, **how: Any) -> Any:
        try:
            return call(*args, **how)
        except error as refused:
            if text not in str(refused):
                raise
            return instead(cache, call, *args, **how)

    return call


def faults_of(table: str, changes: Mapping[str, Mapping[str, Any]]) -> list[Fault]:
    """Return the faults of a table.

    Args:
        table: a line for each: its name, numbers of its killers ("001 005") and a sentence, with | between them.
        changes: by its name, changes by method; ``tree`` has those of the tree inside.
    """
    rows = [tuple(map(str.strip, line.split("|"))) for line in table.strip().splitlines()]
    return [_fault(name, killers.split(), sentence, {**changes[name]}) for name, killers, sentence in rows]


def _fault(name: str, killers: list[str], sentence: str, changes: dict[str, Any]) -> Fault:
    tree = changes.pop("tree", {})

    def with_tree(cache: Any, init: Any, *args: Any, **how: Any) -> None:
        init(*args, **how)
        cache._tree = changed(RadixTree, **tree)(cache.block_size, cache.policy)

    cache = changed(RadixPrefixCache, **changes, **({"__init__": with_tree} if tree else {}))
    seed = PrefixSeed(cache, f"prefix-{name}" if "015" in killers else None)
    return Fault(f"prefix-{name}", sentence, "prefix", tuple(f"KVD-PREFIX-{killer}" for killer in killers), seed, "prefix")
