"""Proving that a radix tree is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.errors import IntegrityError
from kvdock.prefix.inputs import namespace_key
from kvdock.prefix.interface import BlockIds
from kvdock.prefix.node import Node

if TYPE_CHECKING:
    from kvdock.prefix.tree import RadixTree

__all__ = ["check_tree"]


def check_tree(tree: RadixTree, *, num_locks: int, owned: BlockIds) -> None:
    """Compare every node with its neighbours, and the sums with the counts that the cache keeps.

    Args:
        tree: the tree.
        num_locks: locks that the cache counts, of which some may be of handles to nothing.
        owned: ids of the blocks that the cache takes for its own, sorted.

    Raises:
        IntegrityError: something does not fit.
    """
    for key, root in tree.roots.items():
        _demand(namespace_key("namespace", root.namespace) == key, root, "the key of its namespace")
        _demand(root.parent is None and root.children and not root.label and root.is_stored, root, "a root with children and no label")
    runs, held, locks, queued = list[Any](), 0, 0, {id(node) for node in tree.queue.items()}
    for node in [*tree.roots.values(), *tree.nodes()]:
        for key, child in (node.children or {}).items():
            _demand(child.parent is node and child.start == node.end, child, "a parent that is the node above, and ends where it starts")
            _demand(child.label[: tree.block_bytes] == key == child.key, child, "the key that it is found by")
        if node.parent is not None:
            _check_node(node, tree.block_bytes)
            _demand(node.is_queued == (id(node) in queued), node, "an entry in the queue where it says so")
            runs.append(node.blocks)
            held += node.held
            locks += sum((node.locks or {}).values())
    blocks = np.sort(np.concatenate(runs)) if runs else np.empty(0, dtype=np.int32)
    numbers = {
        "blocks in the tree": (blocks.size, tree.stored),
        "held blocks": (held, tree.protected),
        "locks of nodes, at most": (min(locks, num_locks), locks),
    }
    wrong = {name: pair for name, pair in numbers.items() if pair[0] != pair[1]}
    if wrong or not np.array_equal(blocks, owned):
        raise IntegrityError(
            "RadixPrefixCache",
            expected="equal counts (found, kept), and each block in one node",
            got=wrong or "stray blocks",
            fix="report it with the calls before",
        )


def _check_node(node: Node, block_bytes: int) -> None:
    parent, size, children, locks = node.parent, node.end - node.start, node.children, node.locks or {}
    assert parent is not None  # noqa: S101 - roots are not passed
    behind = sum(1 for child in (children or {}).values() if child.held)
    ends = [*(mark.end for mark in node.earlier or ()), node.end]
    _demand(
        size > 0 and len(node.blocks) == size and len(node.label) == size * block_bytes, node, "a block, and a label as long as its blocks"
    )
    _demand(node.is_stored and node.into is None, node, "a node of the tree to be stored")
    _demand(children is None or len(children) > 1, node, "no children, or a branch")
    _demand(node.held_children == behind, node, "held children to be counted")
    _demand(node.held == (size if behind else max(locks, default=node.start) - node.start), node, "to be held up to its last lock")
    _demand(all(node.start < at <= node.end and count > 0 for at, count in locks.items()), node, "locks at places of its own")
    _demand(node.start < ends[0] and ends == sorted(set(ends)), node, "parts in order")
    _demand(node.is_queued or not node.is_evictable, node, "a place in the queue, since it is evictable")
    _demand(
        parent.parent is None or parent.last_use >= max(node.last_use, *(mark.last_use for mark in node.earlier or ()), 0),
        node,
        "a last use not after its parent's",
    )


def _demand(holds: object, node: Node, what: str) -> None:
    if not holds:
        raise IntegrityError("RadixPrefixCache", expected=what, got=repr(node), fix="report it with the calls before")
