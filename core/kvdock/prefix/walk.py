"""Reading a radix tree: how far token ids are stored below a node, which stored block begins most like others, and what there is.

Nothing here changes a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvdock.prefix.interface import BlockIds
from kvdock.prefix.labels import TokenIds, common_tokens
from kvdock.prefix.node import Node

__all__ = ["ends_of_uses", "joined", "most_alike", "path_tokens", "walk"]


def walk(node: Node, at: int, ids: TokenIds, block: int) -> tuple[Node, int, list[BlockIds]]:
    """Follow token ids down from a position, as far as they are stored.

    Args:
        node: where to start.
        at: position in it; ``node.end`` to begin with its children.
        ids: token ids of whole blocks, of the tree's dtype.
        block: tokens in a block.

    Returns:
        the node where they end or differ, the position there, and the blocks on the way, as views.
    """
    end, done = ids.size, 0
    runs: list[BlockIds] = []
    if at < node.end:
        first = at - node.start
        count = common_tokens(node.label, first * block, ids) // block
        runs.append(node.blocks[first : first + count])
        at, done = at + count, count * block
        if at < node.end:
            return node, at, runs
    while done < end and node.children is not None:
        child = node.children.get(ids[done : done + block].tobytes())
        if child is None:
            break
        node, label = child, child.label
        stop = done + (node.end - node.start) * block
        # Where the last block is the same, so are mostly all: then one comparison of the whole tells. Else it would read in vain.
        if not label.endswith(ids[stop - block : stop].tobytes()) or stop > end or ids[done:stop].tobytes() != label:
            count = common_tokens(label, 0, ids[done:]) // block
            runs.append(node.blocks[:count])
            return node, node.start + count, runs
        runs.append(node.room[: node.end - node.start])
        done = stop
    return node, node.end, runs


def most_alike(node: Node, at: int, ids: TokenIds, block: int) -> tuple[Node, int, int] | None:
    """Find the block behind a position that has most first tokens in common with others, and at least half of a block.

    Args:
        node: the node that has the position.
        at: the position.
        ids: token ids, of the tree's dtype; at most one block of them counts.
        block: tokens in a block.

    Returns:
        the node that has the block, the position behind it, and how many tokens they have in common, less than a block and
        at most as many as there are ``ids``; None where no block has so many.
    """
    most = min(ids.size, block - 1)
    if 2 * most < block:
        return None
    wanted = np.zeros(block, dtype=ids.dtype)
    wanted[: ids.size] = ids
    size = ids.dtype.itemsize
    candidates = _candidates(node, at, wanted[: (block + 1) // 2].tobytes(), block * size)
    alike = [_common_tokens(key, wanted.tobytes(), size) for key, _, _ in candidates]
    count = min(max(alike, default=0), most)
    if 2 * count < block:
        return None
    _, found, end = candidates[alike.index(max(alike))]
    return found, end, count


def _candidates(node: Node, at: int, half: bytes, width: int) -> list[tuple[bytes, Node, int]]:
    """Return token ids, node and end of each block of ``width`` bytes behind a position; of branches those that begin with ``half``."""
    if at < node.end:
        first = (at - node.start) * width
        return [(bytes(node.label[first : first + width]), node, at + 1)]
    return [(key, child, child.start + 1) for key, child in (node.children or {}).items() if key.startswith(half)]


def _common_tokens(key: bytes, wanted: bytes, token_bytes: int) -> int:
    """Return how many first tokens two blocks have in common."""
    differ = np.frombuffer(key, dtype=np.uint8) != np.frombuffer(wanted, dtype=np.uint8)
    return int(differ.argmax()) // token_bytes if differ.any() else len(key) // token_bytes


def joined(runs: list[BlockIds]) -> BlockIds:
    """Return blocks in one array of its own."""
    if len(runs) == 1:
        return runs[0].copy()
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)


def ends_of_uses(nodes: Iterable[Node]) -> list[tuple[Node, int]]:
    """Return where uses ended, node and position there, those of the last uses first.

    A use is one of all that is before its end, so a part was used by itself if what is behind it was used longer ago.
    """
    found: list[tuple[int, Node, int]] = []
    for node in nodes:
        behind = max((_first_use(child) for child in (node.children or {}).values()), default=-1)
        for part in (node, *reversed(node.earlier or ())):
            if part.last_use > behind:
                found.append((part.last_use, node, part.end))
            behind = part.last_use
    return [(node, at) for _, node, at in sorted(found, key=lambda each: -each[0])]


def _first_use(node: Node) -> int:
    return node.earlier[0].last_use if node.earlier else node.last_use


def path_tokens(node: Node, at: int, block: int, dtype: np.dtype[Any]) -> tuple[Node, TokenIds]:
    """Return the root above a node, and the token ids before a position of the node, an array of its own."""
    labels = [bytes(node.label[: (at - node.start) * block * dtype.itemsize])]
    while node.parent is not None:
        node = node.parent
        labels.append(bytes(node.label))
    return node, np.frombuffer(b"".join(reversed(labels)), dtype=dtype).copy()
