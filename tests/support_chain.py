"""A prefix cache of another make, written from the pages for plugins: a dict of blocks, each found by the one before it and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from kvdock import runtime
from kvdock.errors import OutOfBlocksError
from kvdock.plugin import (
    ArgumentValueError,
    Cleared,
    EventStream,
    InsertResult,
    IntegrityError,
    OneThread,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
    PrefixStats,
    Removed,
    SizeInfo,
    StaleHandleError,
    Stored,
    as_blocks,
    as_integers,
    check_block_size,
    check_distinct,
    check_priority,
    count_of,
    hookimpl,
    namespace_key,
    other_namespace,
)


@attrs.define(eq=False)
class Entry:
    """A stored block; ``held`` counts the locks of it and of what is behind it."""

    key: Any
    block: int
    parent: Entry | None
    last_use: int = 0
    held: int = 0
    behind: int = 0
    is_stored: bool = True


class Handle(PrefixHandle):
    __slots__ = ("entry", "era", "locks", "space")

    def __init__(self, era: object, space: Hashable, path: list[Entry], block_size: int) -> None:
        super().__init__(len(path) * block_size)
        self.era, self.space, self.entry, self.locks = era, space, path[-1] if path else None, 0


class ChainCache(OneThread, PrefixCache):
    """Keeps block by block, and evicts what was used least recently."""

    policy = "lru"

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = check_block_size("ChainCache", block_size)
        self.events, self.counts, self.era = EventStream(), PrefixStats(), object()
        self.entries: dict[Any, Entry] = {}
        self.owners: dict[int, Entry] = {}
        self.clock = self.locks = 0

    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        self._enter()
        ids = as_integers("match_prefix: tokens", tokens)
        space = namespace_key("match_prefix: namespace", namespace)
        path = self.walk(ids, space, [])
        handle = Handle(self.era, space, path, self.block_size)
        if record:
            self.record_match(handle, ids.size)
        return PrefixMatch(handle, blocks_of(path))

    def record_match(self, handle: Any, num_tokens: Any) -> None:
        self._enter()
        path = self.path(handle)
        count, counts = count_of("record_match: num_tokens", num_tokens, handle.cached_len), self.counts
        self.count(lookups=counts.lookups + 1, lookup_tokens=counts.lookup_tokens + count, hit_tokens=counts.hit_tokens + handle.cached_len)
        self.use(path)

    def lock_handle(self, handle: Any, unlock: bool = False) -> None:
        self._enter()
        path, change = self.path(handle), -1 if unlock else 1
        if handle.locks + change < 0:
            raise StaleHandleError("lock_handle: handle", expected="a locked one", got=repr(handle))
        handle.locks += change
        self.locks += change
        for entry in path:
            entry.held += change

    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        self._enter()
        ids, size = as_integers("insert_prefix: tokens", tokens), self.block_size
        passed = as_blocks("insert_prefix: blocks", blocks, ids.size // size)
        check_priority("insert_prefix: priority", priority)
        space = namespace_key("insert_prefix: namespace", namespace)
        check_distinct("insert_prefix: blocks", passed, size)
        before = self.path(behind) if behind is not None else []
        if behind is not None and behind.space != space:
            raise other_namespace(namespace, behind)
        path = self.walk(ids, space, before)
        known = len(path) - len(before)
        own = [entry.block for entry in path[len(before) :]]
        for at, block in enumerate(passed.tolist()):
            if block in self.owners and (at >= known or own[at] != block):
                raise ArgumentValueError("insert_prefix: blocks", expected="blocks that are not stored", got=block)
        for at in range(known, passed.size):
            above = path[-1] if path else None
            key = space, id(above) if above else None, tuple(ids[at * size : (at + 1) * size].tolist())
            entry = self.entries[key] = self.owners[int(passed[at])] = Entry(key, int(passed[at]), above)
            if above:
                above.behind += 1
            path.append(entry)
        self.count(inserted_tokens=self.counts.inserted_tokens + (passed.size - known) * size)
        self.use(path)
        if self.events and known < passed.size:
            parent = path[len(before) + known - 1].block if before or known else None
            self.events.emit(
                Stored(namespace, parent, ids[known * size : passed.size * size].astype(np.int64), passed[known:].astype(np.int32))
            )
        there = (len(before) + known) * size
        return InsertResult(there, Handle(self.era, space, path, size), blocks_of(path[len(before) :]), size)

    def evict(self, num_blocks: Any) -> Any:
        self._enter()
        count, free = count_of("evict: num_blocks", num_blocks), sum(not entry.held for entry in self.owners.values())
        if count > free:
            raise OutOfBlocksError("evict: num_blocks", expected=f"at most {free}", got=count)
        gone = []
        for _ in range(count):
            ends = (entry for entry in self.owners.values() if not entry.held and not entry.behind)
            gone.append(self.remove(min(ends, key=lambda entry: entry.last_use)))
        return self.told(gone)

    def discard_prefix(self, handle: Any, keep_blocks: Any) -> Any:
        self._enter()
        path, keep = self.path(handle), count_of("discard_prefix: keep_blocks", keep_blocks)
        gone = []
        while len(path) > keep and not path[-1].held and not path[-1].behind:
            gone.append(self.remove(path.pop()))
        return self.told(gone)

    def reset(self) -> Any:
        self._enter()
        blocks, self.era = self.stored_blocks(), object()
        self.entries.clear()
        self.owners.clear()
        self.locks = 0
        self.events.emit(Cleared())
        return blocks

    @property
    def size_info(self) -> SizeInfo:
        held = sum(entry.held > 0 for entry in self.owners.values())
        return SizeInfo((len(self.entries) - held) * self.block_size, held * self.block_size)

    @property
    def num_locks(self) -> int:
        return self.locks

    @property
    def stats(self) -> PrefixStats:
        return self.counts

    def subscribe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        self._enter()
        return self.events.subscribe(observer)

    def stored_blocks(self) -> Any:
        return np.array(sorted(self.owners), dtype=np.int32)

    def check_integrity(self) -> None:
        self._enter()
        left = {None: self.locks} | {entry: entry.held for entry in self.owners.values()}
        for entry in self.owners.values():
            left[entry.parent] -= entry.held
        if list(self.entries.values()) != list(self.owners.values()) or min(left.values()) < 0:
            raise IntegrityError("ChainCache", expected="each entry in both books, held with those behind it", got=left)

    def walk(self, ids: Any, space: Hashable, before: list[Entry]) -> list[Entry]:
        path, size = list(before), self.block_size
        for at in range(0, ids.size - size + 1, size):
            found = self.entries.get((space, id(path[-1]) if path else None, tuple(ids[at : at + size].tolist())))
            if found is None:
                break
            path.append(found)
        return path

    def path(self, handle: Any) -> list[Entry]:
        entry = handle.entry if isinstance(handle, Handle) and handle.era is self.era else None
        if not isinstance(handle, Handle) or handle.era is not self.era or (entry is not None and not entry.is_stored):
            raise StaleHandleError("handle", expected="one of this cache that is stored", got=repr(handle))
        path = []
        while entry is not None:
            path.append(entry)
            entry = entry.parent
        return path[::-1]

    def use(self, path: list[Entry]) -> None:
        self.clock += 1
        for entry in path:
            entry.last_use = self.clock

    def remove(self, entry: Entry) -> int:
        del self.entries[entry.key], self.owners[entry.block]
        entry.is_stored = False
        if entry.parent is not None:
            entry.parent.behind -= 1
        age, counts = self.clock - entry.last_use, self.counts
        self.count(evicted_tokens=counts.evicted_tokens + self.block_size, evictions=counts.evictions + 1)
        self.count(age_sum=counts.age_sum + age, age_max=max(counts.age_max, age))
        return entry.block

    def told(self, gone: list[int]) -> Any:
        if gone:
            self.events.emit(Removed(np.array(gone, dtype=np.int32)))
        return np.array(gone, dtype=np.int32)

    def count(self, **counts: int) -> None:
        self.counts = attrs.evolve(self.counts, **counts)


def blocks_of(path: list[Entry]) -> Any:
    return np.array([entry.block for entry in path], dtype=np.int32)


class SaltedCache(ChainCache):
    """Evicts what has the least hash, which each process salts in its own way."""

    policy = "salted"

    def evict(self, num_blocks: Any) -> Any:
        for entry in self.owners.values():
            entry.last_use = hash(str(entry.block))
        return super().evict(num_blocks)


CACHES = {"chain": ChainCache, "chain-salted": SaltedCache}


def register() -> None:
    """Make them known as a plugin's."""
    plugin: Any = SimpleNamespace(KVDOCK_API=(1, 0), kvdock_prefix_caches=hookimpl(lambda: CACHES))
    runtime.default().registry.register(plugin, "chain")
