"""The nodes of a radix tree, and handles to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import PrefixHandle

__all__ = ["BlockRun", "Node", "RadixHandle"]

BlockRun = npt.NDArray[np.int32]
"""Block ids of a node; never written once it is there."""


class Node:
    """A run of blocks with their token ids, behind another.

    Attributes:
        parent: the node before it; None for a root, and for a node that is no longer stored.
        children: nodes behind it, by the bytes of their first block of token ids; None without any.
        label: token ids as bytes, so that one call compares a run with a prompt wherever that one is. Longer than the blocks
            where their tail was evicted, until that matters.
        blocks: ids of the blocks.
        users: locks of handles to the end of this node, plus children that have users: the path is protected while > 0.
        locks: locks of handles to the end of this node.
        generation: counted up when the end of this node moves or goes: handles to it are stale then.
        namespace: of a root, as the caller wrote it.
    """

    __slots__ = (
        "blocks",
        "children",
        "created",
        "generation",
        "is_queued",
        "label",
        "last_use",
        "locks",
        "namespace",
        "number",
        "parent",
        "priority",
        "users",
        "uses",
    )

    def __init__(self, parent: Node | None, label: bytes, blocks: BlockRun, number: int, time: int, priority: int) -> None:
        self.parent = parent
        self.label = label
        self.blocks = blocks
        self.children: dict[bytes, Node] | None = None
        self.users = self.locks = self.generation = self.uses = 0
        self.number = number
        self.created = self.last_use = time
        self.priority = priority
        self.is_queued = False
        self.namespace: Any = None

    def __repr__(self) -> str:
        return f"Node(number={self.number}, blocks={len(self.blocks)}, users={self.users}, children={len(self.children or ())})"

    @property
    def is_evictable(self) -> bool:
        """Whether its last block may go: it is stored, nobody uses it, and nothing is behind it."""
        return self.users == 0 and not self.children and self.parent is not None

    def add_child(self, key: bytes, node: Node) -> None:
        """Put a node behind this one."""
        if self.children is None:
            self.children = {}
        self.children[key] = node


class RadixHandle(PrefixHandle):
    """The end of a node, as it was when the handle was made."""

    __slots__ = ("epoch", "generation", "locks", "node", "owner")

    def __init__(self, owner: object, epoch: int, node: Node | None, cached_len: int) -> None:
        self.cached_len = cached_len
        self.owner = owner
        self.epoch = epoch
        self.node = node
        self.generation = 0 if node is None else node.generation
        self.locks = 0
