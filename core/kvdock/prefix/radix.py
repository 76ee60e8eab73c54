"""A radix tree over token ids, in whole blocks.

::

    root ── [a b c d | e f g h] ──┬── [i j k l]              a node is a run of blocks that nothing branches off;
            blocks 7, 3           │   block 9                a branch begins with a block of its own, so that a child
                                  └── [i j x y | ...]        is found by the bytes of its first block
                                      block 4, ...

    held nodes form the top of the tree, evictable ones hang below: whatever is not held can be evicted, leaves first

A run and a prompt are compared by one `bytes.startswith`, which costs what reading the bytes costs. The tree and its paths
may be as deep as memory allows: nothing recurses. After SGLang's RadixAttention (arXiv:2312.07104), with the differences
that `kvdock.prefix.interface` states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, IntegrityError, OutOfBlocksError, StaleHandleError
from kvdock.prefix.events import Cleared, EventStream, PrefixEvent, Removed, Stored
from kvdock.prefix.eviction import EvictionPolicy, EvictionQueue, policy_of
from kvdock.prefix.inputs import (
    as_integers,
    block_count,
    blocks_of,
    check_block_size,
    check_priority,
    check_start,
    count_of,
    namespace_key,
    slots_of,
)
from kvdock.prefix.integrity import check_tree
from kvdock.prefix.interface import InsertResult, MatchResult, Namespace, PrefixCache, PrefixHandle, SizeInfo, Slots
from kvdock.prefix.labels import common_blocks, first_wide, token_data, tokens_of, widened
from kvdock.prefix.node import BlockRun, Node, RadixHandle
from kvdock.prefix.owners import StoredBlocks
from kvdock.prefix.ownership import OneThread
from kvdock.prefix.stats import PrefixStats

__all__ = ["RadixPrefixCache"]

_NO_BLOCKS: BlockRun = np.empty(0, dtype=np.int32)


class RadixPrefixCache(OneThread, PrefixCache):
    """Prefixes in a radix tree.

    A match, a lock and an insertion cost time in the tokens and nodes of one path; evicting k runs of blocks among n costs
    O(k log n). Token ids may be any 64-bit integers. They take 4 bytes each while all of them fit, 8 from the first that does not on.

    Args:
        block_size: tokens in a block, 1 to 512.
        policy: what is evicted first: ``"lru"``, ``"lfu"``, ``"fifo"``, ``"priority"``, or an `EvictionPolicy`.
    """

    def __init__(self, block_size: int = 16, policy: str | EvictionPolicy = "lru") -> None:
        self.block_size = check_block_size("RadixPrefixCache", block_size)
        self.policy = policy_of(policy)
        self._token_bytes = 4
        self._events = EventStream()
        self._roots: dict[Hashable, Node] = {}
        self._queue: EvictionQueue[Node] = EvictionQueue(self.policy)
        self._owned = StoredBlocks(self.block_size)
        self._clock = self._epoch = self._number = 0
        self._stored = self._protected = self._num_locks = 0  # blocks, blocks, locks
        self._lookups = self._lookup_tokens = self._hit_tokens = self._inserted = 0
        self._evicted = self._evictions = self._age_sum = self._age_max = 0

    def __repr__(self) -> str:
        return f"RadixPrefixCache(block_size={self.block_size}, policy={self.policy.name!r}, {self.size_info})"

    def match_prefix(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, record: bool = True) -> MatchResult:
        """Find the longest stored prefix; see `PrefixCache.match_prefix`. A node that matches in part is split, for the handle."""
        self._enter()
        ids = as_integers("match_prefix: tokens", tokens)
        root = self._roots.get(namespace_key("match_prefix: namespace", namespace))
        node, count, blocks = self._walk(root, self._data(ids))
        handle = RadixHandle(self, self._epoch, self._settled(node, count), blocks.size * self.block_size)
        if record:
            self._record(handle, ids.size)
        return MatchResult(handle, slots_of(blocks, self.block_size))

    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        """Count a match that was not recorded; see `PrefixCache.record_match`."""
        self._enter()
        own = self._checked(handle)
        self._record(own, count_of("record_match: num_tokens", num_tokens, own.cached_len))

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Protect a prefix, or give back one protection; see `PrefixCache.lock_handle`."""
        self._enter()
        own = self._checked(handle)
        if not unlock:
            own.locks += 1
            self._num_locks += 1
            if own.node is not None:
                own.node.locks += 1
                self._hold(own.node)
        elif own.locks:
            own.locks -= 1
            self._num_locks -= 1
            if own.node is not None:
                own.node.locks -= 1
                self._let_go(own.node)
        else:
            raise StaleHandleError(
                "lock_handle: handle", expected="a locked one", got=f"{handle}, which is not", fix="unlock once per lock"
            )

    def insert_prefix(self, tokens: npt.ArrayLike, slots: npt.ArrayLike, namespace: Namespace = (), *, priority: int = 0) -> InsertResult:
        """Store whole blocks; see `PrefixCache.insert_prefix`."""
        self._enter()
        ids, places = as_integers("insert_prefix: tokens", tokens), as_integers("insert_prefix: slots", slots)
        if ids.size != places.size:
            raise ArgumentValueError("insert_prefix: slots", expected=f"{ids.size}, one for each token", got=places.size)
        check_priority("insert_prefix: priority", priority)
        key = namespace_key("insert_prefix: namespace", namespace)
        size = places.size - places.size % self.block_size
        blocks = blocks_of("insert_prefix: slots", places[:size], self.block_size)
        data, root = self._data(ids), self._roots.get(key)
        node, count, known = self._walk(root, data)
        is_canonical, length = self._owned.claim("insert_prefix: slots", blocks, known), known.size
        if len(data) < size * self._token_bytes:  # an id that does not fit
            self._widen()
            data = self._data(ids)
        node = self._settled(node, count)
        if length < blocks.size:
            root = self._root(key, namespace) if root is None else root
            node = self._append(node or root, data, blocks, length, priority)
        self._use(node, priority)
        canonical = blocks if is_canonical else np.concatenate((known, blocks[length:]))
        handle = RadixHandle(self, self._epoch, node, size)
        if self._events and node is not None and length < blocks.size:
            self._events.emit(self._stored_event(node))
        return InsertResult(length * self.block_size, handle, functools.partial(slots_of, canonical, self.block_size))

    def evict(self, size: int) -> Slots:
        """Forget blocks, ends of prefixes first; see `PrefixCache.evict`."""
        self._enter()
        count = block_count("evict: size", size, self.block_size)
        evictable = self._stored - self._protected
        if count > evictable:
            raise OutOfBlocksError(
                "evict: size",
                expected=f"at most the {evictable * self.block_size} tokens that nobody has locked, of {self.size_info.total_size}",
                got=size,
                fix="unlock handles, or ask for size_info.evictable_size first",
            )
        runs: list[BlockRun] = []
        while count:
            node = self._queue.pop()
            runs.append(self._remove(node) if len(node.blocks) <= count else self._trim(node, count))
            count -= len(runs[-1])
        return self._removed(runs)

    def discard_prefix(self, handle: PrefixHandle, start: int) -> Slots:
        """Forget the end of a prefix; see `PrefixCache.discard_prefix`."""
        self._enter()
        node, position = self._checked(handle).node, handle.cached_len // self.block_size
        first = check_start("discard_prefix: start", start, self.block_size) // self.block_size
        runs: list[BlockRun] = []
        while node is not None and node.is_evictable and position > first:
            parent, count = node.parent, min(len(node.blocks), position - first)
            runs.append(self._remove(node) if count == len(node.blocks) else self._trim(node, count))
            node, position = parent, position - count
        return self._removed(runs)

    def reset(self) -> Slots:
        """Forget everything; see `PrefixCache.reset`."""
        self._enter()
        slots = slots_of(self.stored_blocks().astype(np.int32), self.block_size)
        self._roots.clear()
        self._queue.clear()
        self._owned.clear()
        self._epoch += 1
        self._stored = self._protected = self._num_locks = 0
        if self._events:
            self._events.emit(Cleared())
        return slots

    @property
    def size_info(self) -> SizeInfo:
        """How much is stored, in tokens."""
        return SizeInfo((self._stored - self._protected) * self.block_size, self._protected * self.block_size)

    @property
    def num_locks(self) -> int:
        """Locks that were taken and not given back."""
        return self._num_locks

    @property
    def stats(self) -> PrefixStats:
        """What happened so far."""
        return PrefixStats(
            lookups=self._lookups,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            inserted_tokens=self._inserted * self.block_size,
            evicted_tokens=self._evicted * self.block_size,
            evictions=self._evictions,
            age_sum=self._age_sum,
            age_max=self._age_max,
        )

    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        """Call ``observer`` with each event from now on; see `PrefixCache.subscribe`."""
        self._enter()
        return self._events.subscribe(observer)

    def stored_blocks(self) -> npt.NDArray[np.int64]:
        """Return the ids of all stored blocks, sorted."""
        return self._owned.ids()

    def check_integrity(self) -> None:
        """Walk over the whole tree; see `PrefixCache.check_integrity`."""
        self._enter()
        check_tree(
            self._roots,
            self._queue.items(),
            key_bytes=self.block_size * self._token_bytes,
            stored=self._stored,
            protected=self._protected,
            num_locks=self._num_locks,
            owned=self.stored_blocks(),
        )

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents before children."""
        left = list(self._roots.values())
        while left:
            node = left.pop()
            left.extend(node.children.values() if node.children else ())
            if node.parent is not None:
                yield node

    def _data(self, ids: npt.NDArray[Any]) -> memoryview:
        """Return the whole blocks of token ids in this tree's width, up to the first that do not fit: none such is stored.

        It may be the caller's memory: what is to be kept is copied out of it.
        """
        whole = ids[: ids.size - ids.size % self.block_size]
        found = token_data(whole, self._token_bytes)
        if found is None:
            fits = first_wide(whole)
            found = whole[: fits - fits % self.block_size].astype(np.int32).data.cast("B")
        return found

    def _widen(self) -> None:
        """Store token ids in 8 bytes from now on."""
        self._token_bytes = 8
        width = 8 * self.block_size
        for node in [*self._roots.values(), *self.nodes()]:
            node.label = widened(node.label)
            if node.children:
                node.children = {widened(key): child for key, child in node.children.items()}
                assert all(len(key) == width for key in node.children)  # noqa: S101 - what `_walk` looks children up by

    def _walk(self, root: Node | None, data: memoryview) -> tuple[Node | None, int, BlockRun]:
        """Follow token ids down as far as they are stored. Changes nothing; see `_settled`.

        Returns:
            the node where they end or differ, or None at the root; how many of its blocks are theirs; and all blocks that are.
        """
        width, end, position = self.block_size * self._token_bytes, len(data), 0
        node = root
        runs: list[BlockRun] = []
        while node is not None and position < end and node.children is not None:
            child = node.children.get(data[position : position + width].tobytes())
            if child is None:
                break
            node, label, length = child, child.label, len(child.blocks) * width
            if len(label) != length:
                label = self._shorten(child)
            stop = position + length
            # Where the last block is the same, so are mostly all: then one comparison of the whole tells. Else it would read in vain.
            if data[stop - width : stop].tobytes() != label[-width:] or data[position:stop].tobytes() != label:
                runs.append(child.blocks[: common_blocks(label, data, position, width)])
                break
            runs.append(child.blocks)
            position = stop
        if not runs:
            return None, 0, _NO_BLOCKS
        return node, len(runs[-1]), runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _settled(self, node: Node | None, count: int) -> Node | None:
        """Return the node that ends behind ``count`` blocks of a node, splitting it where that is in its midst."""
        return node if node is None or count == len(node.blocks) else self._split(node, count)

    def _split(self, node: Node, count: int) -> Node:
        """Put the first ``count`` blocks of a node into one before it, and return that. Handles to the end stay good."""
        parent, siblings, width = *_above(node), self.block_size * self._token_bytes
        upper = Node(parent, node.label[: count * width], node.blocks[:count].copy(), node.number, node.created, node.priority)
        upper.last_use, upper.uses = node.last_use, node.uses
        upper.users = 1 if node.users else 0
        node.label, node.blocks, node.parent = node.label[count * width :], node.blocks[count:].copy(), upper
        siblings[upper.label[:width]] = upper
        upper.add_child(node.label[:width], node)
        return upper

    def _root(self, key: Hashable, namespace: Namespace) -> Node:
        """Make the root of a namespace."""
        root = self._roots[key] = Node(None, b"", _NO_BLOCKS, self._next_number(), 0, 0)
        root.namespace = namespace
        return root

    def _append(self, parent: Node, data: memoryview, blocks: BlockRun, start: int, priority: int) -> Node:
        """Store blocks from ``start`` on behind a node."""
        width = self.block_size * self._token_bytes
        fresh = blocks[start:]
        node = Node(parent, data[start * width :].tobytes(), fresh.copy(), self._next_number(), self._clock + 1, priority)
        parent.add_child(node.label[:width], node)
        self._stored += fresh.size
        self._inserted += fresh.size
        self._queue.push(node)
        return node

    def _stored_event(self, node: Node) -> Stored:
        """Describe a node that was just appended."""
        parent, _ = _above(node)
        before = int(parent.blocks[-1]) if parent.blocks.size else None
        return Stored(self._root_of(node).namespace, before, tokens_of(node.label, self._token_bytes), node.blocks.astype(np.int64))

    def _remove(self, node: Node) -> BlockRun:
        """Take a leaf out of the tree, and return its blocks."""
        parent, siblings = _above(node)
        del siblings[node.label[: self.block_size * self._token_bytes]]
        node.parent = None
        node.generation += 1
        self._queue.discard(node)
        if not siblings:
            parent.children = None
            if parent.parent is None:
                del self._roots[namespace_key("", parent.namespace)]
            elif not parent.users:
                self._queue.push(parent)
        self._count_eviction(node)
        return node.blocks

    def _trim(self, node: Node, count: int) -> BlockRun:
        """Take the last ``count`` blocks off a leaf that has more, and return them."""
        keep = len(node.blocks) - count
        tail = node.blocks[keep:]
        node.blocks = node.blocks[:keep]
        node.generation += 1
        if 2 * keep * self.block_size * self._token_bytes < len(node.label):
            self._shorten(node)  # else it is left: the next eviction would copy the label again
        self._queue.push(node)
        self._count_eviction(node)
        return tail

    def _shorten(self, node: Node) -> bytes:
        """Bring a node's label to the length of its blocks, holding on to no memory beyond; return the label."""
        node.blocks = node.blocks.copy()
        node.label = node.label[: len(node.blocks) * self.block_size * self._token_bytes]
        return node.label

    def _count_eviction(self, node: Node) -> None:
        """Count a run that goes."""
        age = self._clock - node.last_use
        self._evictions += 1
        self._age_sum += age
        self._age_max = max(self._age_max, age)

    def _removed(self, runs: list[BlockRun]) -> Slots:
        """Give blocks back to the caller: their slots."""
        if not runs:
            return np.empty(0, dtype=np.int32)
        blocks = runs[0] if len(runs) == 1 else np.concatenate(runs)
        self._owned.release(blocks)
        self._stored -= blocks.size
        self._evicted += blocks.size
        if self._events:
            self._events.emit(Removed(blocks.astype(np.int64)))
        return slots_of(blocks, self.block_size)

    def _hold(self, node: Node) -> None:
        """Count a user of a path. A node that has one already holds the rest of its path."""
        while node.parent is not None:
            node.users += 1
            if node.users > 1:
                return
            self._protected += len(node.blocks)
            node = node.parent

    def _let_go(self, node: Node) -> None:
        """Take a user from a path; where none is left, the path may go."""
        while node.parent is not None:
            node.users -= 1
            if node.users:
                return
            self._protected -= len(node.blocks)
            if not node.children:
                self._queue.push(node)
            node = node.parent

    def _record(self, handle: RadixHandle, num_tokens: int) -> None:
        """Count a match."""
        self._lookups += 1
        self._lookup_tokens += num_tokens
        self._hit_tokens += handle.cached_len
        self._use(handle.node, None)

    def _use(self, node: Node | None, priority: int | None) -> None:
        """Note a use of a whole path, now."""
        self._clock += 1
        now = self._clock
        while node is not None and node.parent is not None:
            node.last_use = now
            node.uses += 1
            if priority is not None and priority > node.priority:
                node.priority = priority
            node = node.parent

    def _checked(self, handle: PrefixHandle) -> RadixHandle:
        """Return a handle whose place is still there."""
        if not isinstance(handle, RadixHandle) or handle.owner is not self:
            raise StaleHandleError("RadixPrefixCache: handle", expected="one of this cache", got=f"{handle!r}, which is not")
        node = handle.node
        if handle.epoch != self._epoch or (node is not None and node.generation != handle.generation):
            why = "evicted" if handle.epoch == self._epoch else "from before a reset"
            raise StaleHandleError(
                "RadixPrefixCache: handle", expected="one of what is stored", got=f"{handle}, which is {why}", fix="match the tokens again"
            )
        return handle

    def _root_of(self, node: Node) -> Node:
        """Return the root above a node."""
        while node.parent is not None:
            node = node.parent
        return node

    def _next_number(self) -> int:
        """Return a number that no node has."""
        self._number += 1
        return self._number


def _above(node: Node) -> tuple[Node, dict[bytes, Node]]:
    """Return the parent of a node that is stored, and its children."""
    parent = node.parent
    if parent is None or parent.children is None:
        raise IntegrityError("RadixPrefixCache", expected="a stored node", got=repr(node))
    return parent, parent.children
