"""The tree itself: nodes, what is held of them, and the queue of those that may go.

It knows token ids in one width, and positions in blocks; arguments, handles, who owns a block and statistics are the prefix
cache's. Each node but the roots is there for one reason: prompts branch off at its end, or it is a leaf. So what grows at
its end grows in place, and where the last but one branch goes, the other is joined to what is before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from kvdock.errors import IntegrityError
from kvdock.prefix.eviction import EvictionPolicy, EvictionQueue
from kvdock.prefix.inputs import namespace_key
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.prefix.labels import NARROW, WIDE, TokenIds, widened
from kvdock.prefix.node import Node

__all__ = ["RadixTree"]


class RadixTree:
    """Runs of blocks by their token ids.

    Args:
        block_size: tokens in a block.
        policy: what goes first.

    Attributes:
        dtype: of token ids, int32 or int64.
        stored: blocks in the tree.
        protected: those of them that are held.
        clock: counts uses.
        evictions, age_sum, age_max: runs that went, and how many uses ago they were used last.
    """

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self.block_size = block_size
        self.dtype = NARROW
        self.roots: dict[Hashable, Node] = {}
        self.queue: EvictionQueue[Node] = EvictionQueue(policy)
        self.stored = self.protected = self.clock = self._number = 0
        self.evictions = self.age_sum = self.age_max = 0
        self._alike = lambda usage: (policy.key(usage), usage.last_use)  # the last use is for the statistics

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of token ids."""
        return self.block_size * self.dtype.itemsize

    def clear(self) -> None:
        """Forget everything, but not the width of token ids and the time."""
        self.roots.clear()
        self.queue.clear()
        self.stored = self.protected = 0

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents before children."""
        left = list(self.roots.values())
        while left:
            node = left.pop()
            left.extend(node.children.values() if node.children else ())
            if node.parent is not None:
                yield node

    def widen(self) -> None:
        """Store token ids in 8 bytes from now on."""
        self.dtype = WIDE
        for node in [*self.roots.values(), *self.nodes()]:
            node.label = bytearray(widened(node.label))
            if node.children:
                node.children = {widened(key): child for key, child in node.children.items()}
                for key, child in node.children.items():
                    child.key = key

    def root(self, key: Hashable, namespace: Namespace) -> Node:
        """Return the root of a namespace, a new one if there is none."""
        found = self.roots.get(key)
        if found is None:
            found = self.roots[key] = Node.root(namespace, self._next_number())
        return found

    def append(self, node: Node, at: int, ids: TokenIds, blocks: BlockIds, priority: int) -> Node:
        """Store blocks at a position of a node, where their token ids branch off or go on, and note that use.

        Returns:
            the node that has them.
        """
        if at == node.end and not node.children and node.parent is not None:
            node = self._grown(node, ids, blocks, priority)
        else:
            parent = node if at == node.end else self._split(node, at)
            key = ids[: self.block_size].tobytes()
            node = Node(parent, at, key, bytearray(ids.data), blocks.copy(), self._next_number())
            node.created, node.priority = self.clock + 1, priority
            parent.add_child(node)
        self.stored += blocks.size
        self.use(node, node.end, priority)
        self.queue.push(node)  # last: one that is used after it came is looked at once more
        return node

    def grow_locked(self, nodes: list[Node], labels: bytes, blocks: list[int]) -> None:
        """Append a block to each of several leaves, and move one lock of its end behind it; a use of it all, as appending is."""
        width, at = self.block_bytes, 0
        for node, block in zip(nodes, blocks, strict=True):
            end, locks = node.end, node.locks
            assert locks is not None  # noqa: S101 - the handle has counted its locks
            node.grow_one(labels[at : at + width], block)
            at += width
            if locks[end] == 1:
                del locks[end]
            else:
                locks[end] -= 1
            locks[end + 1] = 1
            node.held += 1  # all of it was held, and is
            self.use(node, end + 1, None)
        self.protected += len(nodes)
        self.stored += len(nodes)

    def use(self, node: Node | None, upto: int, priority: int | None) -> None:
        """Note a use of all that is before a position, now."""
        self.clock += 1
        now, key = self.clock, self._alike
        while node is not None and node.parent is not None:
            if node.earlier is None and upto == node.end:  # as `Node.use` would, at a fifth of the time; mostly it is this
                node.last_use = now
                node.uses += 1
                if priority is not None and priority > node.priority:
                    node.priority = priority
            else:
                node.use(upto, now, priority, key)
            upto, node = node.start, node.parent

    def lock(self, node: Node, position: int) -> None:
        """Protect all that is before a position of a node, once more."""
        locks = node.locks
        if locks is None:
            node.locks = {position: 1}
        else:
            locks[position] = locks.get(position, 0) + 1
        if position - node.start > node.held:
            self._hold(node, position - node.start)

    def unlock(self, node: Node, position: int) -> None:
        """Give back one protection."""
        locks = node.locks
        assert locks is not None  # noqa: S101 - the handle has counted its locks
        locks[position] -= 1
        if not locks[position]:
            del locks[position]
            self._hold(node, node.count_held())

    def evict(self, count: int) -> list[BlockIds]:
        """Take out ``count`` blocks, of which there are as many; return them in runs."""
        runs: list[BlockIds] = []
        while count:
            node = self.queue.least()
            end = node.start + node.held
            if node.earlier and node.earlier[-1].end > end:
                end = node.earlier[-1].end
            if node.end - end > count:
                end = node.end - count
            count -= node.end - end
            runs.append(self.cut(node, end))
        return runs

    def discard(self, node: Node | None, at: int, keep: int) -> list[BlockIds]:
        """Take out what is before position ``at``, from the end on, as far as nothing goes on there and nobody holds it.

        Args:
            node: the node that has the position; None for the root.
            at: where the prefix ends.
            keep: blocks of it that stay in any case.
        """
        runs: list[BlockIds] = []
        while node is not None and node.is_evictable and node.end == at > keep:
            end = max(keep, node.start + node.held)
            parent, is_whole = node.parent, end == node.start
            runs.append(self.cut(node, end))
            node, at = parent if is_whole else None, end
        return runs

    def cut(self, node: Node, end: int) -> BlockIds:
        """Take out the blocks of a leaf from position ``end`` on, which nobody holds; return them."""
        self.stored -= node.end - end
        self.evictions += 1
        age = self.clock - node.last_use
        self.age_sum += age
        if age > self.age_max:
            self.age_max = age
        if end == node.start:
            self._remove(node)
            return node.blocks
        return node.trim(end, self.block_bytes)

    def _grown(self, node: Node, ids: TokenIds, blocks: BlockIds, priority: int) -> Node:
        """Append blocks to a leaf; what differs in priority is a part of its own."""
        if node.was_trimmed or priority < node.priority:
            # Handles behind the end must stay stale, and in the queue nothing may come to be worth less.
            _, siblings = _above(node)
            fresh = siblings[node.key] = node.renew()
            self.queue.discard(node)
            node = fresh
        if priority < node.priority:
            node.mark_end()
            node.priority, node.created, node.uses = priority, self.clock + 1, 0
        node.grow(ids, blocks)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Put what is before a position into a node of its own, above the rest."""
        _, siblings = _above(node)
        upper = node.split(at, self.block_bytes, node.number)
        siblings[upper.key] = upper
        upper.add_child(node)
        return upper

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        parent, siblings = _above(node)
        del siblings[node.key]
        node.is_stored = False
        self.queue.discard(node)
        if not siblings:
            parent.children = None
            if parent.parent is None:
                parent.is_stored = False
                del self.roots[namespace_key("", parent.namespace)]
        elif len(siblings) == 1 and parent.parent is not None:
            self._join(parent, *siblings.values())

    def _join(self, upper: Node, node: Node) -> None:
        """Make one node of a node and its only child."""
        _, siblings = _above(upper)
        siblings[upper.key] = node
        node.absorb(upper, self._alike)
        self.queue.discard(upper)
        if node.is_evictable:
            self.queue.push(node)

    def _hold(self, node: Node, held: int) -> None:
        """Note what is held of a node, and of those above as far as that changes anything."""
        while held != (before := node.held):
            node.held = held
            self.protected += held - before
            if held < before and not node.children:
                self.queue.push(node)
            parent = node.parent
            if (held and before) or parent is None or parent.parent is None:
                return
            parent.held_children += 1 if held else -1
            node, held = parent, parent.count_held()

    def _next_number(self) -> int:
        """Return a number that no node has, but the parts of one run."""
        self._number += 1
        return self._number


def _above(node: Node) -> tuple[Node, dict[bytes, Node]]:
    """Return the parent of a node that is stored, and its children."""
    parent = node.parent
    if parent is None or parent.children is None:
        raise IntegrityError("RadixPrefixCache", expected="a stored node", got=repr(node), fix="report it with the calls before")
    return parent, parent.children
