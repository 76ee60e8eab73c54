"""What an observer of a prefix cache can know from its events alone."""

from __future__ import annotations

import numpy as np

from kvdock.prefix import Cleared, PrefixEvent, Removed, Stored
from kvdock_conformance.checking.prefix_model import SlowPrefixCache

__all__ = ["Place", "Replayed", "where"]

Place = tuple[str, int | None, tuple[int, ...]]
"""Where a block is: the namespace's repr, the block before it, its tokens."""


class Replayed:
    """An observer: subscribe it, then read `where` and `wrong`.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.where: dict[int, Place] = {}
        """What is stored, by block."""
        self.events: list[PrefixEvent] = []
        self.wrong: list[str] = []
        """Events that do not fit those before; noted and not raised, since a cache goes on when an observer raises."""

    def __call__(self, event: PrefixEvent) -> None:
        """Follow an event."""
        self.events.append(event)
        if isinstance(event, Stored):
            self._stored(event)
        elif isinstance(event, Removed):
            self._removed(event)
        elif isinstance(event, Cleared):
            self.where.clear()
        else:
            self.wrong.append(f"{event!r} is no event")

    def _stored(self, event: Stored) -> None:
        parent, size, space = event.parent, self.block_size, repr(event.namespace)
        is_right = event.tokens.dtype == np.int64 and event.blocks.dtype == np.int32
        if not is_right or not event.tokens.size == event.blocks.size * size > 0:
            self.wrong.append(f"Stored with {event.blocks!r} for {event.tokens!r}")
            return
        for at, block in enumerate(event.blocks.tolist()):
            if block in self.where:
                self.wrong.append(f"block {block} was stored twice")
            if parent is not None and self.where.get(parent, ("no namespace",))[0] != space:
                self.wrong.append(f"block {block} of namespace {space} was stored behind block {parent}, which is not there")
            self.where[block] = space, parent, tuple(event.tokens[at * size : (at + 1) * size].tolist())
            parent = block

    def _removed(self, event: Removed) -> None:
        gone = set(event.blocks.tolist())
        if event.blocks.dtype != np.int32 or not len(gone) == event.blocks.size > 0 or gone - self.where.keys():
            self.wrong.append(f"Removed with {event.blocks!r}, of {sorted(self.where)}")
        for block in gone & self.where.keys():
            del self.where[block]
        behind = gone & {parent for _, parent, _ in self.where.values()}
        if behind:
            self.wrong.append(f"blocks {sorted(behind)} were removed, but not what is behind them")


def where(model: SlowPrefixCache) -> dict[int, Place]:
    """Return what `Replayed.where` must say."""
    found: dict[int, Place] = {}
    for namespace, block in model.blocks():
        found[block.number] = namespace, block.above.number if block.above.parent else None, block.tokens
    return found
