"""The nodes of a radix tree.

::

    position (in blocks):   start ......... start + held ......... end
    blocks of a node:       | protected     | not                  |      `held` reaches to the last lock, or to the end
                                                                          where a lock is held behind the node

How a node was used is said in `kvdock.prefix.marks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvdock.prefix.interface import BlockIds
from kvdock.prefix.labels import TokenIds
from kvdock.prefix.marks import Mark, Marked

__all__ = ["Node"]


class Node(Marked):
    """A run of blocks with their token ids, behind another.

    Attributes:
        parent: the node before it; None for a root. Of a node that is no longer stored, the one that was before it.
        children: nodes behind it, by their keys; None without any.
        key: bytes of its first block of token ids.
        label: token ids as bytes, so that one call compares a run with a prompt wherever that one is.
        room: ids of its blocks, and room for more of them behind.
        start: position of its first block, counted from the root. `Mark.end` is that behind its last.
        locks: how often each position in it is locked, by position; None before the first lock.
        held_children: how many of its children have a lock in or behind them.
        held: blocks of it that are protected, from its first on.
        into: the node that has taken this one's blocks over; None for one that is stored, or was evicted.
        is_stored: whether it is in the tree.
        was_trimmed: whether handles may exist to positions behind its end.
        namespace: of a root, as the caller wrote it.
    """

    __slots__ = (
        "children",
        "held",
        "held_children",
        "into",
        "is_queued",
        "is_stored",
        "key",
        "label",
        "locks",
        "namespace",
        "number",
        "parent",
        "room",
        "start",
        "was_trimmed",
    )

    def __init__(self, parent: Node | None, start: int, key: bytes, label: bytearray, blocks: BlockIds, number: int) -> None:
        self.parent = parent
        self.key = key
        self.label = label
        self.room = blocks
        self.start = start
        self.end = start + blocks.size
        self.number = number
        self.children: dict[bytes, Node] | None = None
        self.locks: dict[int, int] | None = None
        self.earlier: list[Mark] | None = None
        self.into: Node | None = None
        self.held = self.held_children = 0
        self.created = self.last_use = self.uses = self.priority = 0
        self.is_queued = self.was_trimmed = False
        self.is_stored = True
        self.namespace: Any = None

    @classmethod
    def root(cls, namespace: Any, number: int) -> Node:
        """Make the root of a namespace."""
        root = cls(None, 0, b"", bytearray(), np.empty(0, dtype=np.int32), number)
        root.namespace = namespace
        return root

    def __repr__(self) -> str:
        return f"Node(number={self.number}, blocks {self.start} to {self.end}, held={self.held}, children={len(self.children or ())})"

    @property
    def blocks(self) -> BlockIds:
        """Ids of its blocks; a view, good until the node changes."""
        return self.room[: self.end - self.start]

    def block_before(self, position: int) -> int:
        """Return the id of the block that ends at a position in this node."""
        return int(self.room[position - self.start - 1])

    @property
    def is_evictable(self) -> bool:
        """Whether its last block may go: it is stored, nothing is behind it, and nobody holds all of it."""
        return not self.children and self.held < self.end - self.start and self.is_stored and self.parent is not None

    def count_held(self) -> int:
        """Return how many of its blocks are protected: all before a lock in it, or behind it."""
        if self.held_children:
            return self.end - self.start
        return max(self.locks) - self.start if self.locks else 0

    def can_grow(self, position: int, priority: int) -> bool:
        """Whether this is a leaf that ends at a position, and what is appended there is worth as much."""
        return self.end == position and not self.children and not self.was_trimmed and self.priority == priority

    def add_child(self, node: Node) -> None:
        """Put a node behind this one."""
        if self.children is None:
            self.children = {}
        self.children[node.key] = node

    def grow(self, ids: TokenIds, blocks: BlockIds) -> None:
        """Append blocks with their token ids, at a cost in their number only."""
        size = self.end - self.start
        if size + blocks.size > self.room.size:
            room = np.empty(size + blocks.size + size // 8, dtype=np.int32)
            room[:size] = self.room[:size]
            self.room = room
        self.room[size : size + blocks.size] = blocks
        self.label += ids.tobytes()
        self.end += blocks.size

    def grow_one(self, label: bytes, block: int) -> None:
        """Append one block: what `grow` does, at a third of the time."""
        size = self.end - self.start
        if size == self.room.size:
            room = np.empty(size + 1 + size // 8, dtype=np.int32)
            room[:size] = self.room
            self.room = room
        self.room[size] = block
        self.label += label
        self.end += 1

    def trim(self, end: int, block_bytes: int) -> BlockIds:
        """Take off the blocks from position ``end`` on, and return them; a view, good until the node changes again."""
        size = end - self.start
        gone = self.room[size : self.end - self.start]
        del self.label[size * block_bytes :]
        self.end_at(end)
        self.was_trimmed = True
        if 2 * size < self.room.size:
            self.room = self.room[:size].copy()
        return gone

    def split(self, at: int, block_bytes: int, number: int) -> Node:
        """Return a new node with the blocks before position ``at``, between the parent and this one, which keeps the rest."""
        size = at - self.start
        upper = Node(self.parent, self.start, self.key, self.label[: size * block_bytes], self.blocks[:size].copy(), number)
        self.share_marks(upper)
        self._share_locks(upper)
        self.label, self.room = self.label[size * block_bytes :], self.blocks[size:].copy()
        self.key = bytes(self.label[:block_bytes])
        self.start, self.parent = at, upper
        return upper

    def absorb(self, upper: Node, key: Callable[[Any], Any]) -> None:
        """Take over the blocks of the parent, whose only child this is."""
        self.earlier = [*(upper.earlier or ()), Mark(upper.end, upper), *(self.earlier or ())]
        self.room = np.concatenate((upper.blocks, self.blocks))
        self.label = upper.label + self.label
        self.held = upper.held + self.held
        if upper.locks:
            self.locks = {**upper.locks, **(self.locks or {})}
        self.start, self.parent, self.key = upper.start, upper.parent, upper.key
        upper.into, upper.is_stored, upper.children = self, False, None
        self.join_marks(key)

    def renew(self) -> Node:
        """Return a node that takes this leaf's place: handles behind its end, and its place in the queue, stay with the old one."""
        fresh = Node(self.parent, self.start, self.key, self.label, self.room, self.number)
        fresh.end, fresh.held, fresh.locks, fresh.earlier = self.end, self.held, self.locks, self.earlier
        fresh.be_like(self)
        self.into, self.is_stored = fresh, False
        return fresh

    def _share_locks(self, upper: Node) -> None:
        """Give the part above its locks, and what it holds."""
        locks, at = self.locks, upper.end
        if locks:
            upper.locks = {position: count for position, count in locks.items() if position <= at}
            self.locks = {position: count for position, count in locks.items() if position > at}
        upper.held = min(self.held, at - upper.start)
        self.held -= upper.held
        upper.held_children = 1 if self.held else 0
