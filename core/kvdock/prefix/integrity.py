"""Proving that a radix tree is whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.inputs import namespace_key
from kvdock.prefix.node import Node

__all__ = ["check_tree"]


def check_tree(
    roots: Mapping[Hashable, Node],
    queue: Iterable[Node],
    *,
    key_bytes: int,
    stored: int,
    protected: int,
    num_locks: int,
    owned: npt.NDArray[np.int64],
) -> None:
    """Compare every node with its neighbours, and the sums with the counts that the cache keeps.

    Args:
        roots: the roots of all namespaces, by `namespace_key`.
        queue: the nodes that the queue of candidates has.
        key_bytes: bytes of one block of token ids.
        stored: blocks that the cache counts.
        protected: those of them that are held.
        num_locks: locks that the cache counts, of which some may be of handles to nothing.
        owned: ids of the blocks that the cache takes for its own, sorted.

    Raises:
        IntegrityError: something does not fit.
    """
    runs, held, locks, left = list[Any](), 0, 0, list(roots.values())
    queued = {id(node) for node in queue}
    for key, root in roots.items():
        _demand(namespace_key("namespace", root.namespace) == key, root, "the key of its namespace")
        _demand(root.parent is None and root.children and not root.label, root, "a root with children and no label")
    while left:
        node = left.pop()
        for key, child in (node.children or {}).items():
            _demand(child.parent is node, child, "a parent that is the node above")
            _demand(child.label[:key_bytes] == key, child, "the key that it is found by")
            left.append(child)
        if node.parent is not None:
            _check_node(node, key_bytes)
            _demand(node.is_queued == (id(node) in queued), node, "an entry in the queue where it says so")
            runs.append(node.blocks)
            held += len(node.blocks) if node.users else 0
            locks += node.locks
    blocks = np.sort(np.concatenate(runs)) if runs else np.empty(0, dtype=np.int32)
    numbers = {
        "blocks in the tree": (blocks.size, stored),
        "held blocks": (held, protected),
        "locks of nodes, at most": (min(locks, num_locks), locks),
    }
    wrong = {name: pair for name, pair in numbers.items() if pair[0] != pair[1]}
    if wrong or not np.array_equal(blocks, owned):
        raise IntegrityError(
            "RadixPrefixCache", expected="equal counts (found, kept), and each block in one node", got=wrong or "stray blocks"
        )


def _check_node(node: Node, key_bytes: int) -> None:
    """Compare a node with its parent and children."""
    parent = node.parent
    assert parent is not None  # noqa: S101 - roots are not passed
    behind = sum(1 for child in (node.children or {}).values() if child.users)
    _demand(len(node.blocks) > 0, node, "at least one block")
    _demand(len(node.blocks) * key_bytes <= len(node.label) <= 2 * len(node.blocks) * key_bytes, node, "a label as long as its blocks")
    _demand(len(node.label) == len(node.blocks) * key_bytes or not node.children, node, "a label as long as its blocks, or no children")
    _demand(node.users == node.locks + behind and node.locks >= 0, node, "users that are its locks and its held children")
    _demand(node.children is None or node.children, node, "no empty table of children")
    _demand(node.is_queued or not node.is_evictable, node, "a place in the queue, since it is evictable")
    _demand(parent.parent is None or parent.last_use >= node.last_use, node, "a last use not after its parent's")


def _demand(holds: object, node: Node, what: str) -> None:
    """Raise unless it holds."""
    if not holds:
        raise IntegrityError("RadixPrefixCache", expected=what, got=repr(node))
