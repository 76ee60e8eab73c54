"""What can be seen of the real prefix caches, beside the slow one of `kvdock_conformance.checking.prefix_model`."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdock.prefix import RadixPrefixCache
from kvdock_conformance.checking.prefix_model import Path, SlowPrefixCache


def runs_of(model: SlowPrefixCache) -> dict[tuple[str, Path], tuple[object, ...]]:
    """By namespace and path of its last block, each run: its ids, and how it was used."""
    found: dict[tuple[str, Path], tuple[object, ...]] = {}
    for namespace, block in model.blocks():
        if block.ends_run:
            path = block.path()
            run = [block]
            while len(run) < len(path) and not path[-len(run) - 1].ends_run:
                run.append(path[-len(run) - 1])
            how = (block.created, block.last_use, block.uses, block.priority)
            assert all((one.created, one.last_use, one.uses, one.priority) == how for one in run)
            found[namespace, tuple(one.tokens for one in path)] = ([one.number for one in run[::-1]], *how, block.locks)
    return found


def tree_of(cache: RadixPrefixCache) -> dict[tuple[str, Path], tuple[object, ...]]:
    """What `runs_of` says, read from the nodes of a radix tree."""
    found: dict[tuple[str, Path], tuple[object, ...]] = {}
    width, size = cache._token_bytes, cache.block_size
    dtype = {4: np.int32, 8: np.int64}[width]
    left: list[tuple[Any, str, Path]] = [(root, repr(root.namespace), ()) for root in cache._roots.values()]
    while left:
        node, namespace, path = left.pop()
        tokens = np.frombuffer(node.label, dtype=dtype)[: len(node.blocks) * size].tolist()
        path = (*path, *(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)))
        left.extend((child, namespace, path) for child in (node.children or {}).values())
        if node.parent is not None:
            found[namespace, path] = (node.blocks.tolist(), node.created, node.last_use, node.uses, node.priority, node.locks)
    return found


def seen(cache: RadixPrefixCache) -> tuple[object, ...]:
    """All that a call which raises must leave alone: each block and how it was used, the clock, sizes, statistics, locks."""
    blocks = {}
    for (namespace, path), (numbers, *how, locks) in tree_of(cache).items():
        assert isinstance(numbers, list)
        start = len(path) - len(numbers)
        for at, number in enumerate(numbers):
            blocks[namespace, path[: start + at + 1]] = (number, tuple(how), locks if at == len(numbers) - 1 else 0)
    return blocks, cache._clock, cache._epoch, cache.size_info, cache.stats, cache.num_locks, cache.stored_blocks().tolist()


def inside(cache: RadixPrefixCache) -> tuple[object, ...]:
    """`seen`, and how the tree holds it: its nodes, their numbers, the queue."""
    nodes = sorted((node.number, node.users, node.locks, node.generation, node.is_queued, node.label) for node in cache.nodes())
    queue = sorted((key, number) for key, number, *_ in cache._queue._entries())
    return *seen(cache), nodes, queue, cache._number, cache._token_bytes
