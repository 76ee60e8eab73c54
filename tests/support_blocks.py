"""A pool that is really written, and what a prefix cache holds as its events tell it: what models of block managers look at."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdock.prefix import PrefixCache, PrefixEvent, Removed, Stored

__all__ = ["FREE", "JUNK", "Contents", "Path", "Pool", "chain"]

FREE, JUNK = -1, -2

Path = tuple[str, tuple[int, ...]]
"""A namespace, and the token ids of a prefix."""


def chain(namespace: object, ids: Sequence[int]) -> list[int]:
    """Return what keys and values stand for at each position: the token there and all before it, in its namespace."""
    name = namespace if isinstance(namespace, str) else repr(namespace)
    value, found = zlib.crc32(name.encode()), list[int]()  # not its hash: another process finds the same
    for token in ids:
        value = hash((value, token))
        found.append(value)
    return found


class Pool:
    """One number in the place of the keys and values of each slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.full(num_blocks * block_size, FREE, dtype=np.int64)
        self.blocks = self.slots.reshape(num_blocks, block_size)

    def copy(self, pairs: Any) -> None:
        """Copy blocks, all sources first."""
        self.blocks[pairs[:, 1]] = self.blocks[pairs[:, 0]].copy()

    def write(self, slots: Any, namespace: object, ids: Sequence[int]) -> None:
        """Compute the last of ``ids``, as many as there are slots."""
        self.slots[slots] = chain(namespace, ids)[len(ids) - len(slots) :]


class Contents:
    """Which prefix each block of a cache ends, from the events of the cache alone."""

    def __init__(self, cache: PrefixCache) -> None:
        self.paths: dict[int, Path] = {}
        self._events: list[PrefixEvent] = []
        cache.subscribe(self._events.append)

    def read(self) -> list[Path]:
        """Take in what has happened; return what was stored."""
        stored = list[Path]()
        for event in self._events:
            if isinstance(event, Stored):
                stored += self._store(event)
            elif isinstance(event, Removed):
                for block in event.blocks.tolist():
                    del self.paths[block]
            else:
                self.paths.clear()
        self._events.clear()
        return stored

    def longest(self, namespace: object, ids: Sequence[int], block_size: int) -> int:
        """Return how many tokens are stored of a prompt."""
        stored, length = set(self.paths.values()), 0
        while length + block_size <= len(ids) and (repr(namespace), tuple(ids[: length + block_size])) in stored:
            length += block_size
        return length

    def _store(self, event: Stored) -> list[Path]:
        namespace, ids = (repr(event.namespace), ()) if event.parent is None else self.paths[event.parent]
        size, found = event.tokens.size // event.blocks.size, list[Path]()
        for at, block in enumerate(event.blocks.tolist()):
            ids = (*ids, *event.tokens[at * size : (at + 1) * size].tolist())
            assert block not in self.paths
            self.paths[block] = namespace, ids
            found.append((namespace, ids))
        return found
