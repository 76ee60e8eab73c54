"""A prefix cache under a manager of several layer groups, whose block numbers are numbers of units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.prefix import InsertResult, PrefixCache, PrefixEvent, PrefixHandle, PrefixMatch, PrefixStats, SizeInfo
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.group_calls import drive_engine
from kvdock_conformance.checking.group_engine import GroupEngine, must_be, unit_of
from kvdock_conformance.checking.prefix_calls import stores_nothing
from kvdock_conformance.checking.prefix_model import Block, SlowPrefixCache, StoresNothing
from kvdock_conformance.checking.prefix_target import PrefixTarget

__all__ = ["FollowedCache", "check_groups"]


@attrs.define(eq=False)
class _Place:
    """A handle, what it stands for in the slow cache, and how often it is locked."""

    handle: PrefixHandle
    block: Block
    namespace: Namespace
    locks: int


class FollowedCache(PrefixCache):
    """A prefix cache beside the slow one, which says at each call of the manager what must be found and stored, and what may go.

    Args:
        cache: the cache, empty.
        slow: the slow one.
    """

    def __init__(self, cache: PrefixCache, slow: SlowPrefixCache) -> None:
        self._cache = cache
        self._slow = slow
        self.block_size, self.can_store = cache.block_size, cache.can_store
        self._places: dict[int, _Place] = {}  # by the identity of the handle, which is in it so that no other gets that

    def _note(self, handle: PrefixHandle, path: Sequence[Block], namespace: Namespace, locks: int = 0) -> None:
        block = path[-1] if path else self._slow.roots.setdefault(repr(namespace), Block((), -1, None))
        block.locks += locks
        self._places[id(handle)] = _Place(handle, block, namespace, locks)

    def match_prefix(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, record: bool = True) -> PrefixMatch:
        """Find as much as the slow one, in the same blocks."""
        found = self._cache.match_prefix(tokens, namespace, record=record)
        path = self._slow.find(np.asarray(tokens).tolist(), namespace)
        must_be("match_prefix: units that are found", [block.number for block in path], found.blocks.tolist())
        must_be("match_prefix: cached_len of the handle", len(path) * self.block_size, found.handle.cached_len)
        self._note(found.handle, path, namespace)
        return found

    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        """Count a match."""
        self._cache.record_match(handle, num_tokens)

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Protect a prefix, in both."""
        self._cache.lock_handle(handle, unlock=unlock)
        place = self._places[id(handle)]
        place.locks += -1 if unlock else 1
        place.block.locks += -1 if unlock else 1

    def insert_prefix(
        self,
        tokens: npt.ArrayLike,
        blocks: npt.ArrayLike,
        namespace: Namespace = (),
        *,
        behind: PrefixHandle | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """Store the same as the slow one."""
        before = [] if behind is None else self._places[id(behind)].block.path()
        made = self._cache.insert_prefix(tokens, blocks, namespace, behind=behind, priority=priority)
        path = self._insert(before, np.asarray(tokens).tolist(), np.asarray(blocks).tolist(), namespace, made.cached_len)
        must_be("insert_prefix: units that count", [block.number for block in path[len(before) :]], made.blocks.tolist())
        must_be("insert_prefix: cached_len of the handle", len(path) * self.block_size, made.handle.cached_len)
        self._note(made.handle, path, namespace)
        return made

    def _insert(self, before: Sequence[Block], tokens: list[int], blocks: list[int], namespace: Namespace, cached_len: int) -> list[Block]:
        whole, numbers = [token for block in before for token in block.tokens] + tokens, [block.number for block in before] + blocks
        known, path = self._slow.insert(whole, numbers, namespace, 0)
        must_be("tokens that were stored before", known * self.block_size, cached_len)
        return path

    def append_blocks(
        self, handles: Sequence[PrefixHandle], tokens: npt.NDArray[Any], blocks: BlockIds, priorities: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Store units behind handles, and move these, in both."""
        stored = self._cache.append_blocks(handles, tokens, blocks, priorities)
        for at in np.flatnonzero(stored).tolist():
            place = self._places[id(handles[at])]
            before, numbers = place.block.path(), [int(blocks[at])]
            place.block.locks -= place.locks
            path = self._insert(before, tokens[at].tolist(), numbers, place.namespace, len(before) * self.block_size)
            must_be("append_blocks: cached_len of a handle that was moved", len(path) * self.block_size, place.handle.cached_len)
            self._note(place.handle, path, place.namespace, place.locks)
        return stored

    def evict(self, num_blocks: int) -> BlockIds:
        """Let units go that nobody holds and that nothing is behind."""
        gone = self._cache.evict(num_blocks)
        must_be("evict: how many units go", num_blocks, gone.size)
        return self._gone(gone)

    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> BlockIds:
        """Let the end of a prefix go."""
        return self._gone(self._cache.discard_prefix(handle, keep_blocks))

    def _gone(self, gone: BlockIds) -> BlockIds:
        wrong = self._slow.follow(gone.tolist())
        if wrong:
            raise NonconformanceError("units that go", expected="ends of prefixes that nobody holds", got=wrong)
        return gone

    def reset(self) -> BlockIds:
        """Forget everything."""
        stored = sorted(block.number for _, block in self._slow.blocks())
        gone = self._cache.reset()
        must_be("reset: units that go", stored, gone.tolist())
        self._slow.reset()
        self._places.clear()
        return gone

    @property
    def size_info(self) -> SizeInfo:
        """How much is stored, as the slow one has it."""
        size = self._cache.size_info
        must_be("size_info", self._slow.size_info(), size)
        return size

    @property
    def num_locks(self) -> int:
        """Locks that were taken and not released."""
        return self._cache.num_locks

    @property
    def stats(self) -> PrefixStats:
        """What happened so far."""
        return self._cache.stats

    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        """Call ``observer`` with each event."""
        return self._cache.subscribe(observer)

    def stored_blocks(self) -> BlockIds:
        """Return the numbers of all units that are stored."""
        return self._cache.stored_blocks()

    def check_integrity(self) -> None:
        """Prove that the bookkeeping is whole."""
        self._cache.check_integrity()

    def hand_over(self) -> None:
        """Belong to the thread that uses it next."""
        self._cache.hand_over()


def check_groups(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Serve two managers that are called alike, one of them beside the slow prefix cache.

    Raises:
        NonconformanceError: a hit is shorter than it could be, something that is read is not what was written there, a manager does not
            add up, or the two decide otherwise.
    """
    name, size = data["model"], unit_of(data["model"])
    slow = (StoresNothing if stores_nothing(target) else SlowPrefixCache)(size, "lru")
    told = list[list[Any]]()
    for prefix in (FollowedCache(target.make(size), slow), target.make(size)):
        engine = GroupEngine(name, data["num_blocks"], prefix=prefix, null_block=data["null_block"])
        drive_engine(engine, data["seed"], data["steps"], data["longest"])
        told.append(engine.told)
    for number, (one, other) in enumerate(zip(*told, strict=True)):
        must_be(f"call {number}: sequences and tables of two managers that are called alike", one, other)
