"""The baseline for prefix caches: a plain numpy radix tree, as short as such a tree gets.

It walks, splits and copies, locks nothing, checks nothing, and collects and heapifies its leaves at each eviction, which
frees whole leaves.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

__all__ = ["PlainTree"]


class Node:
    """A run of token ids and their slots."""

    def __init__(self, parent: Node | None, key: Any, value: Any) -> None:
        self.parent, self.key, self.value = parent, key, value
        self.children: dict[bytes, Node] = {}
        self.last = 0

    def __lt__(self, other: Node) -> bool:
        return self.last < other.last


class PlainTree:
    """A radix tree in blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size, self.clock, self.size = block_size, 0, 0
        self.root = Node(None, np.empty(0, np.int32), np.empty(0, np.int32))

    def walk(self, tokens: Any) -> tuple[Node, int, list[Any]]:
        """Return where the tokens end, how many that are, and their slots in pieces."""
        node, at, found = self.root, 0, []
        self.clock += 1
        while at < len(tokens):
            child = node.children.get(tokens[at : at + self.block_size].tobytes())
            if child is None:
                break
            size = min(len(child.key), len(tokens) - at)
            differ = child.key[:size] != tokens[at : at + size]
            same = int(differ.argmax()) if differ.any() else size
            same -= same % self.block_size
            if same < len(child.key):
                child = self.split(child, same)
            found.append(child.value)
            at += same
            node = child
            node.last = self.clock
            if same < size:
                break
        return node, at, found

    def split(self, node: Node, size: int) -> Node:
        """Put the first ``size`` tokens of a node into one above it."""
        upper = Node(node.parent, node.key[:size].copy(), node.value[:size].copy())
        upper.last = node.last
        node.parent.children[node.key[: self.block_size].tobytes()] = upper
        node.key, node.value, node.parent = node.key[size:].copy(), node.value[size:].copy(), upper
        upper.children[node.key[: self.block_size].tobytes()] = node
        return upper

    def match(self, tokens: Any) -> Any:
        """Return the slots of the longest stored prefix."""
        tokens = tokens[: len(tokens) // self.block_size * self.block_size]
        _, _, found = self.walk(tokens)
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def insert(self, tokens: Any, slots: Any) -> int:
        """Store tokens and slots; return how many were there."""
        size = len(tokens) // self.block_size * self.block_size
        tokens = tokens[:size]
        node, at, _ = self.walk(tokens)
        if at < size:
            child = Node(node, tokens[at:].copy(), slots[at:size].copy())
            child.last = self.clock
            node.children[child.key[: self.block_size].tobytes()] = child
            self.size += size - at
        return at

    def evict(self, size: int) -> Any:
        """Drop least recently used leaves until at least ``size`` tokens are free; return their slots."""
        leaves, left = [], [self.root]
        while left:
            node = left.pop()
            if node.children:
                left.extend(node.children.values())
            else:
                leaves.append(node)
        heapq.heapify(leaves)
        freed, pieces = 0, []
        while freed < size:
            node = heapq.heappop(leaves)
            pieces.append(node.value)
            freed += len(node.value)
            del node.parent.children[node.key[: self.block_size].tobytes()]
            if not node.parent.children and node.parent is not self.root:
                heapq.heappush(leaves, node.parent)
        self.size -= freed
        return np.concatenate(pieces)
