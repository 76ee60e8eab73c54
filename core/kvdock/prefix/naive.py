"""No reuse: the prefix cache of an engine that wants none. Also the shortest complete one, to copy from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import OutOfBlocksError, StaleHandleError
from kvdock.prefix.events import Cleared, EventStream, PrefixEvent
from kvdock.prefix.inputs import as_blocks, as_integers, check_block_size, check_distinct, check_priority, count_of, namespace_key
from kvdock.prefix.interface import (
    BlockIds,
    InsertResult,
    Namespace,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
    SizeInfo,
    StoredPrefix,
    other_namespace,
)
from kvdock.prefix.ownership import OneThread
from kvdock.prefix.stats import PrefixStats

__all__ = ["NaivePrefixCache"]


class _Handle(PrefixHandle):
    """Stands for nothing, and can be locked all the same."""

    __slots__ = ("locks", "owner", "space", "time")

    def __init__(self, owner: NaivePrefixCache, time: int, space: Hashable) -> None:
        super().__init__(0)
        self.owner, self.time, self.space, self.locks = owner, time, space, 0


class NaivePrefixCache(OneThread, PrefixCache):
    """Finds nothing and stores nothing; all blocks stay the caller's. Arguments are checked as by any other.

    It cannot be copied or pickled.

    Args:
        block_size: tokens in a block, 1 to 512.
    """

    can_store = False

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = check_block_size("NaivePrefixCache", block_size)
        self._events = EventStream()
        self._stats = PrefixStats()
        self._time = self._locks = 0

    def match_prefix(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, record: bool = True) -> PrefixMatch:
        """Find nothing."""
        self._enter()
        count = as_integers("match_prefix: tokens", tokens).size
        handle = _Handle(self, self._time, namespace_key("match_prefix: namespace", namespace))
        if record:
            self.record_match(handle, count)
        return PrefixMatch(handle, _none())

    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        """Count a miss."""
        self._enter()
        self._checked(handle)
        num_tokens = count_of("record_match: num_tokens", num_tokens)
        self._stats = attrs.evolve(self._stats, lookups=self._stats.lookups + 1, lookup_tokens=self._stats.lookup_tokens + num_tokens)

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Count a lock; there is nothing to protect."""
        self._enter()
        own = self._checked(handle)
        if unlock and not own.locks:
            raise StaleHandleError(
                "lock_handle: handle", expected="a locked one", got=f"{handle}, which is not", fix="unlock once per lock"
            )
        change = -1 if unlock else 1
        own.locks += change
        self._locks += change

    def _checked(self, handle: PrefixHandle) -> _Handle:
        """Return a handle of this cache, from after the last reset."""
        if isinstance(handle, _Handle) and handle.owner is self and handle.time == self._time:
            return handle
        raise StaleHandleError(
            "NaivePrefixCache: handle",
            expected="one of this cache, since its last reset",
            got=repr(handle),
            fix="match the tokens again, in this cache",
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
        """Store nothing."""
        self._enter()
        ids = as_integers("insert_prefix: tokens", tokens)
        passed = as_blocks("insert_prefix: blocks", blocks, ids.size // self.block_size)
        check_priority("insert_prefix: priority", priority)
        key = namespace_key("insert_prefix: namespace", namespace)
        check_distinct("insert_prefix: blocks", passed, self.block_size)
        if behind is not None and self._checked(behind).space != key:
            raise other_namespace(namespace, behind)
        return InsertResult(0, _Handle(self, self._time, key), _none(), self.block_size)

    def evict(self, num_blocks: int) -> BlockIds:
        """Evict nothing; more is an error."""
        self._enter()
        if count_of("evict: num_blocks", num_blocks):
            raise OutOfBlocksError("evict: num_blocks", expected="0: nothing is stored", got=num_blocks)
        return _none()

    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> BlockIds:
        """Forget nothing."""
        self._enter()
        self._checked(handle)
        count_of("discard_prefix: keep_blocks", keep_blocks)
        return _none()

    def reset(self) -> BlockIds:
        """Let all handles be stale."""
        self._enter()
        self._time += 1
        self._locks = 0
        if self._events:
            self._events.emit(Cleared())
        return _none()

    @property
    def size_info(self) -> SizeInfo:
        """Nothing."""
        return SizeInfo(0, 0)

    @property
    def num_locks(self) -> int:
        """Locks that were taken and not released."""
        return self._locks

    @property
    def stats(self) -> PrefixStats:
        """Look-ups that all missed."""
        return self._stats

    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        """Call ``observer`` at each reset."""
        self._check_thread()  # and claim nothing: who subscribes need not be who calls
        return self._events.subscribe(observer)

    def stored_blocks(self) -> BlockIds:
        """Return nothing."""
        return _none()

    def stored_prefixes(self) -> Iterator[StoredPrefix]:
        """Yield nothing."""
        self._enter()
        return iter(())

    def check_integrity(self) -> None:
        """Notice another thread; there is nothing else that could be wrong."""
        self._enter()


def _none() -> BlockIds:
    return np.empty(0, dtype=np.int32)
