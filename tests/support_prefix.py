"""What can be seen of the real prefix caches, beside the slow one of `kvdock_conformance.checking.prefix_model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvdock.prefix import RadixPrefixCache
from kvdock.prefix.node import Node
from kvdock_conformance.checking.prefix_model import Path, SlowPrefixCache

Blocks = dict[tuple[str, Path], tuple[int, object, int]]
"""By namespace and path: the id of the block, what the policy thinks of it, and how often that place is locked."""


def blocks_of(model: SlowPrefixCache) -> Blocks:
    """All blocks of the slow cache."""
    found: Blocks = {}
    for namespace, block in model.blocks():
        found[namespace, tuple(one.tokens for one in block.path())] = (block.number, model.key(block), block.locks)
    return found


def tree_of(cache: RadixPrefixCache) -> Blocks:
    """What `blocks_of` says, read from the nodes of a radix tree."""
    found: Blocks = {}
    left: list[tuple[Any, str, Path]] = [(root, repr(root.namespace), ()) for root in cache._tree.roots.values()]
    while left:
        node, namespace, path = left.pop()
        for at, (tokens, number) in enumerate(zip(_tokens(cache, node), node.blocks.tolist(), strict=True), node.start + 1):
            path = (*path, tokens)
            key: Any = cache.policy.key(next((mark for mark in node.earlier or () if mark.end >= at), node))
            found[namespace, path] = (number, key if isinstance(key, tuple) else (key,), (node.locks or {}).get(at, 0))
        left.extend((child, namespace, path) for child in (node.children or {}).values())
    return found


def _tokens(cache: RadixPrefixCache, node: Node) -> Iterator[tuple[int, ...]]:
    """The token ids of each block of a node."""
    ids = np.frombuffer(bytes(node.label), dtype=cache._tree.dtype).tolist()
    return (tuple(ids[at : at + cache.block_size]) for at in range(0, len(ids), cache.block_size))


def seen(cache: RadixPrefixCache) -> tuple[object, ...]:
    """All that a call which raises must leave alone: each block and how it was used, the clock, sizes, statistics, locks."""
    stored = cache.stored_blocks().tolist()
    return tree_of(cache), cache._tree.clock, cache.size_info, cache.stats, cache.num_locks, stored


def inside(cache: RadixPrefixCache) -> tuple[object, ...]:
    """`seen`, and how the tree holds it: its nodes, their numbers, the queue."""
    tree = cache._tree
    nodes = sorted((node.number, node.start, node.end, node.held, node.held_children, node.is_queued) for node in cache._tree.nodes())
    queue = sorted((key, number) for key, number, *_ in tree.queue._entries())
    return *seen(cache), nodes, queue, tree._number, tree.dtype
