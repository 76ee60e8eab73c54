"""A prefix cache over a radix tree of token ids, in whole blocks.

::

    root ── [a b c d | e f g h] ──┬── [i j k l]              a node is a run of blocks that nothing branches off; what is
            blocks 7, 3           │   block 9                published behind a leaf makes it longer
                                  └── [i j x y | ...]        a branch begins with a block of its own, so that a child
                                      block 4, ...           is found by the bytes of its first block

    what is held lies at the top of the tree, what can be evicted below: ends of leaves first

A run and a prompt are compared by one comparison of bytes, which costs what reading them costs. The tree and its paths
may be as deep as memory allows: nothing recurses. After SGLang's RadixAttention (arXiv:2312.07104), with the differences
that `kvdock.prefix.interface` states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import OutOfBlocksError, StaleHandleError
from kvdock.prefix.events import Cleared, EventStream, PrefixEvent, Removed, Stored
from kvdock.prefix.eviction import EvictionPolicy, policy_of
from kvdock.prefix.handle import RadixHandle, find
from kvdock.prefix.inputs import as_blocks, as_integers, check_block_size, check_priority, count_of, namespace_key
from kvdock.prefix.integrity import check_tree
from kvdock.prefix.interface import (
    BlockIds,
    InsertResult,
    Namespace,
    PartialMatch,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
    SizeInfo,
    StoredPrefix,
    other_namespace,
)
from kvdock.prefix.labels import WIDE, TokenIds, as_narrow
from kvdock.prefix.node import Node
from kvdock.prefix.owners import StoredBlocks
from kvdock.prefix.ownership import OneThread
from kvdock.prefix.stats import PrefixStats
from kvdock.prefix.tree import RadixTree
from kvdock.prefix.walk import ends_of_uses, joined, most_alike, path_tokens, walk

__all__ = ["RadixPrefixCache"]

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class RadixPrefixCache(OneThread, PrefixCache):
    """Prefixes in a radix tree.

    A match and a lock cost time in the tokens and nodes of one path, an insertion in what is behind ``behind``; evicting k runs
    of blocks among n costs O(k log n). Token ids may be any 64-bit integers. They take 4 bytes each while all of them fit, 8
    from the first that does not on. It cannot be copied or pickled.

    Args:
        block_size: tokens in a block, 1 to 512.
        policy: what is evicted first: ``"lru"``, ``"lfu"``, ``"fifo"``, ``"priority"``, or an `EvictionPolicy`. What is stored
            behind a leaf is worth what the leaf is, but for its priority.
    """

    def __init__(self, block_size: int = 16, policy: str | EvictionPolicy = "lru") -> None:
        self.block_size = check_block_size("RadixPrefixCache", block_size)
        self.policy = policy_of(policy)
        self._events = EventStream()
        self._tree = RadixTree(block_size, self.policy)
        self._owned = StoredBlocks(block_size)
        self._era = object()
        self._num_locks = 0
        self._lookups = self._lookup_tokens = self._hit_tokens = self._inserted = self._evicted = 0

    def __repr__(self) -> str:
        return f"RadixPrefixCache(block_size={self.block_size}, policy={self.policy.name!r}, {self.size_info})"

    def match_prefix(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, record: bool = True) -> PrefixMatch:
        """Find the longest stored prefix; see `PrefixCache.match_prefix`."""
        self._enter()
        ids = as_integers("match_prefix: tokens", tokens)
        key = namespace_key("match_prefix: namespace", namespace)
        root = self._tree.roots.get(key)
        if root is None:
            node, at, runs = None, 0, list[BlockIds]()
        else:
            node, at, runs = walk(root, 0, self._whole(ids), self.block_size)
        if record:
            self._record(node, at, ids.size)
        return PrefixMatch(self._handle(key, node, at), joined(runs))

    def match_partial(self, handle: PrefixHandle, tokens: npt.ArrayLike) -> PartialMatch | None:
        """Find a block that begins alike; see `PrefixCache.match_partial`. Costs time in the branches at that place."""
        self._enter()
        own = self._checked(handle)
        ids = as_integers("match_partial: tokens", tokens)[: self.block_size]
        node = own.node or self._tree.roots.get(own.space)
        found = None if node is None else most_alike(node, own.position, self._fitting(ids), self.block_size)
        if found is None:
            return None
        at, end, count = found
        return PartialMatch(self._handle(own.space, at, end), at.block_before(end), count)

    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        """Count a match that was not recorded; see `PrefixCache.record_match`."""
        self._enter()
        own = self._checked(handle)
        count = count_of("record_match: num_tokens", num_tokens, own.cached_len)
        self._record(own.node, own.position, count)

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Protect a prefix, or give back one protection; see `PrefixCache.lock_handle`."""
        self._enter()
        own = self._checked(handle)
        if not unlock:
            own.locks += 1
            self._num_locks += 1
            if own.node is not None:
                self._tree.lock(own.node, own.position)
        elif own.locks:
            own.locks -= 1
            self._num_locks -= 1
            if own.node is not None:
                self._tree.unlock(own.node, own.position)
        else:
            raise StaleHandleError(
                "lock_handle: handle", expected="a locked one", got=f"{handle}, which is not", fix="unlock once per lock"
            )

    def insert_prefix(
        self,
        tokens: npt.ArrayLike,
        blocks: npt.ArrayLike,
        namespace: Namespace = (),
        *,
        behind: PrefixHandle | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """Store whole blocks; see `PrefixCache.insert_prefix`."""
        self._enter()
        ids = as_integers("insert_prefix: tokens", tokens)
        passed = as_blocks("insert_prefix: blocks", blocks, ids.size // self.block_size)
        if type(priority) is not int:
            check_priority("insert_prefix: priority", priority)
        key = namespace_key("insert_prefix: namespace", namespace)
        tree, whole = self._tree, self._whole(ids)
        node, start = self._place(key, namespace, behind)
        end, at, runs = walk(node, start, whole, self.block_size) if node is not None else (None, start, list[BlockIds]())
        known = joined(runs) if runs else _NO_BLOCKS
        canonical = self._owned.claim("insert_prefix: blocks", passed, known)
        reached, fresh = start + passed.size, passed[known.size :] if known.size else passed
        event = None
        if fresh.size:
            whole = self._all_whole(ids, whole, known.size)
            end = tree.root(key, namespace) if end is None else end
            if self._events:
                before = end.block_before(at) if at else None
                event = Stored(namespace, before, whole.astype(np.int64), fresh.copy())
            end = tree.append(end, at, whole, fresh, priority)
            self._inserted += fresh.size
        else:
            tree.use(end, reached, priority)
        result = InsertResult(at * self.block_size, self._handle(key, end, reached), canonical, self.block_size)
        if event:
            self._events.emit(event)
        return result

    def append_blocks(
        self, handles: Sequence[PrefixHandle], tokens: npt.NDArray[Any], blocks: BlockIds, priorities: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Let leaves grow whose end is locked by their handle only; see `PrefixCache.append_blocks`."""
        self._enter()
        tree, stored = self._tree, np.zeros(len(handles), dtype=np.bool_)
        if self._events or tokens.dtype != tree.dtype:
            return stored
        places, nodes, own = list[int](), list[Node](), list[RadixHandle]()
        for place, (given, priority) in enumerate(zip(handles, priorities, strict=True)):
            handle = self._checked(given)
            node = handle.node
            if node is not None and handle.locks == 1 and node.can_grow(handle.position, priority):
                places.append(place)
                nodes.append(node)
                own.append(handle)
        if len(set(nodes)) < len(nodes):  # two at one place: the second would branch off
            return stored
        chosen = blocks[places]
        self._owned.claim("append_blocks: blocks", chosen, _NO_BLOCKS)
        tree.grow_locked(nodes, tokens[places].tobytes(), chosen.tolist())
        for handle in own:
            handle.position += 1
            handle.cached_len += self.block_size
        self._inserted += len(places)
        stored[places] = True
        return stored

    def evict(self, num_blocks: int) -> BlockIds:
        """Forget blocks, ends of prefixes first; see `PrefixCache.evict`."""
        self._enter()
        count = count_of("evict: num_blocks", num_blocks)
        evictable = self._tree.stored - self._tree.protected
        if count > evictable:
            raise OutOfBlocksError(
                "evict: num_blocks",
                expected=f"at most the {evictable} blocks that nobody has locked, of {self._tree.stored}",
                got=count,
                fix="unlock handles, or ask for size_info.evictable_size (tokens) first",
            )
        return self._removed(self._tree.evict(count))

    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> BlockIds:
        """Forget the end of a prefix; see `PrefixCache.discard_prefix`."""
        self._enter()
        own, keep = self._checked(handle), count_of("discard_prefix: keep_blocks", keep_blocks)
        return self._removed(self._tree.discard(own.node, own.position, keep))

    def reset(self) -> BlockIds:
        """Forget everything; see `PrefixCache.reset`."""
        self._enter()
        blocks = self._owned.ids()
        self._tree.clear()
        self._owned.clear()
        self._era = object()
        self._num_locks = 0
        if self._events:
            self._events.emit(Cleared())
        return blocks

    @property
    def size_info(self) -> SizeInfo:
        """How much is stored, in tokens."""
        tree = self._tree
        return SizeInfo((tree.stored - tree.protected) * self.block_size, tree.protected * self.block_size)

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
            evictions=self._tree.evictions,
            age_sum=self._tree.age_sum,
            age_max=self._tree.age_max,
        )

    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        """Call ``observer`` with each event from now on; see `PrefixCache.subscribe`."""
        self._check_thread()  # and claim nothing: who subscribes need not be who calls
        return self._events.subscribe(observer)

    def stored_blocks(self) -> BlockIds:
        """Return the ids of all stored blocks, sorted."""
        return self._owned.ids()

    def stored_prefixes(self) -> Iterator[StoredPrefix]:
        """Yield the prefixes that were used by themselves, those used last first; see `PrefixCache.stored_prefixes`."""
        self._enter()
        for node, at in ends_of_uses(self._tree.nodes()):
            root, ids = path_tokens(node, at, self.block_size, self._tree.dtype)
            yield StoredPrefix(ids.astype(np.int64), root.namespace)

    def check_integrity(self) -> None:
        """Walk over the whole tree; see `PrefixCache.check_integrity`."""
        self._enter()
        check_tree(self._tree, num_locks=self._num_locks, owned=self.stored_blocks())

    def _handle(self, key: Hashable, node: Node | None, position: int) -> RadixHandle:
        """Make a handle to a position."""
        return RadixHandle(self, self._era, key, node if position else None, position, position * self.block_size)

    def _place(self, key: Hashable, namespace: Namespace, behind: PrefixHandle | None) -> tuple[Node | None, int]:
        """Return the node and the position that an insertion starts from; the root, if it is there, without ``behind``."""
        if behind is None:
            return self._tree.roots.get(key), 0
        own = self._checked(behind)
        if own.space != key:
            raise other_namespace(namespace, behind)
        return own.node or self._tree.roots.get(key), own.position

    def _whole(self, ids: TokenIds) -> TokenIds:
        """Return the whole blocks of token ids, as `_fitting` returns them."""
        fits = self._fitting(ids)
        rest = fits.size % self.block_size
        return fits[:-rest] if rest else fits

    def _fitting(self, ids: TokenIds) -> TokenIds:
        """Return token ids in this tree's dtype, up to the first that does not fit: none such is stored.

        It may be the caller's memory: what is to be kept is copied out of it.
        """
        dtype = self._tree.dtype
        if ids.dtype is dtype:  # there is one such object; a comparison takes several times as long
            return ids
        return ids.astype(WIDE) if dtype is WIDE else as_narrow(ids)

    def _all_whole(self, ids: TokenIds, whole: TokenIds, known: int) -> TokenIds:
        """Return the whole blocks behind the ``known`` first, all of them: where a token id does not fit, the tree gets wider."""
        if whole.size < ids.size - ids.size % self.block_size:
            self._tree.widen()
            whole = self._whole(ids)
        return whole[known * self.block_size :] if known else whole

    def _removed(self, runs: list[BlockIds]) -> BlockIds:
        """Give blocks back to the caller."""
        blocks = joined(runs)
        if blocks.size:
            self._owned.release(blocks)
            self._evicted += blocks.size
            if self._events:
                self._events.emit(Removed(blocks.copy()))
        return blocks

    def _record(self, node: Node | None, position: int, num_tokens: int) -> None:
        """Count a match of all that is before a position."""
        self._lookups += 1
        self._lookup_tokens += num_tokens
        self._hit_tokens += position * self.block_size
        self._tree.use(node, position, None)

    def _checked(self, handle: PrefixHandle) -> RadixHandle:
        """Return a handle whose place is still there, with the node that has it now."""
        if isinstance(handle, RadixHandle) and handle.era is self._era:
            node = handle.node
            if node is None or (node.is_stored and node.start < handle.position <= node.end):
                return handle
        return self._sought(handle)

    def _sought(self, handle: PrefixHandle) -> RadixHandle:
        """Return a handle whose node is another one now, or raise."""
        if not isinstance(handle, RadixHandle) or handle.owner is not self:
            raise StaleHandleError(
                "RadixPrefixCache: handle",
                expected="one of this cache",
                got=f"{handle!r}, which is not",
                fix="pass the handle of a match in this very cache",
            )
        why = "from before a reset"
        if handle.era is self._era and handle.node is not None:
            found = find(handle.node, handle.position)
            if found is not None:
                handle.node = found
                return handle
            why = "evicted"
        raise StaleHandleError(
            "RadixPrefixCache: handle", expected="one of what is stored", got=f"{handle}, which is {why}", fix="match the tokens again"
        )
