"""Handles to places in a radix tree, and where these are by now."""

from __future__ import annotations

from kvdock.prefix.interface import PrefixHandle
from kvdock.prefix.node import Node

__all__ = ["RadixHandle", "find"]


class RadixHandle(PrefixHandle):
    """A position, and the node that it is in; later it may be in another, which `find` finds.

    Attributes:
        position: blocks before it.
        owner: the cache that made it.
        era: what that cache had for this then: another object after each reset.
        space: key of its namespace.
        node: None at the root.
        locks: how often it is locked.
    """

    __slots__ = ("era", "locks", "node", "owner", "position", "space")

    def __init__(self, owner: object, era: object, space: object, node: Node | None, position: int, cached_len: int) -> None:
        self.cached_len = cached_len
        self.owner = owner
        self.era = era
        self.space = space
        self.node = node
        self.position = position
        self.locks = 0


def find(node: Node, position: int) -> Node | None:
    """Return the node that now has the position that ``node`` had, or None if that is no longer stored.

    A node that was split keeps its lower part, so what was above is in its parents; one that was joined or renewed says
    what it has gone into.
    """
    while True:
        if node.into is not None:
            if position > node.end:
                return None
            node = node.into
        elif position <= node.start:
            assert node.parent is not None  # noqa: S101 - a root starts at 0, and no handle to a node is there
            node = node.parent
        else:
            return node if position <= node.end and node.is_stored else None
