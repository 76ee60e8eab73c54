"""Which prefixes go first: a policy says how much each is worth, a queue finds the least.

A policy is one small class. Its key may only grow while a prefix is stored; that is what lets the queue look at an entry
again only when it comes up, so that a use costs nothing and k evictions among n leaves O(k log n) at most.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from kvdock.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["FIFO", "LFU", "LRU", "POLICIES", "Evictable", "EvictionPolicy", "EvictionQueue", "LowestPriority", "Usage", "policy_of"]


class Usage(Protocol):
    """What a policy may look at. Times are the cache's logical clock: a counter of matches and insertions."""

    last_use: int
    """When it was last matched or inserted."""
    uses: int
    """How often."""
    created: int
    """When it was first inserted."""
    priority: int
    """The highest priority it was inserted with."""


class EvictionPolicy(ABC):
    """What a stored run of blocks is worth."""

    name: str

    @abstractmethod
    def key(self, usage: Usage) -> Any:
        """Return what to compare: the least goes first, of equal ones the first inserted. It may only grow, use by use."""


class LRU(EvictionPolicy):
    """What was used least recently."""

    name = "lru"

    def key(self, usage: Usage) -> int:
        """Return the last use."""
        return usage.last_use


class LFU(EvictionPolicy):
    """What was used least often; of those, least recently."""

    name = "lfu"

    def key(self, usage: Usage) -> tuple[int, int]:
        """Return the number of uses, and the last."""
        return usage.uses, usage.last_use


class FIFO(EvictionPolicy):
    """What was stored first."""

    name = "fifo"

    def key(self, usage: Usage) -> int:
        """Return when it was stored."""
        return usage.created


class LowestPriority(EvictionPolicy):
    """What was inserted with the lowest priority; of those, what was used least recently."""

    name = "priority"

    def key(self, usage: Usage) -> tuple[int, int]:
        """Return the priority, and the last use."""
        return usage.priority, usage.last_use


POLICIES: Mapping[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRU, LFU, FIFO, LowestPriority)}
"""The policies that can be asked for by name."""


def policy_of(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return a policy by name, or the one that was passed.

    Raises:
        ArgumentValueError: no policy has that name.
        ArgumentTypeError: neither a name nor a policy.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    names = ", ".join(repr(name) for name in POLICIES)
    if not isinstance(policy, str):
        raise ArgumentTypeError("policy", expected=f"one of {names}, or an EvictionPolicy", got=repr(policy)[:80])
    if policy not in POLICIES:
        raise ArgumentValueError(
            "policy", expected=f"one of {names}", got=repr(policy), fix="pass an EvictionPolicy of your own as an object"
        )
    return POLICIES[policy]()


class Evictable(Usage, Protocol):
    """What the queue orders."""

    number: int
    """Growing: decides between equal keys, alike on all ranks. The parts of a run have its number; of those only ends are queued."""
    is_queued: bool
    """Whether the queue has an entry for it."""

    @property
    def is_evictable(self) -> bool:
        """Whether it may go now."""


E = TypeVar("E", bound=Evictable)


_Entry = tuple[Any, int, int, E]


class EvictionQueue(Generic[E]):
    """Candidates by what they are worth. Each has one entry at most; entries of others are dropped when they come up.

    Most come in the order in which they will go, as what was used now is worth the most. These stand in a line, which costs the
    same however long it is; the others are in a heap.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy.key
        self._line: deque[_Entry[E]] = deque()
        self._heap: list[_Entry[E]] = []
        self._first: _Entry[E] | None = None  # what was the least, apart: a run that is trimmed, and trimmed again
        self._serial = 0
        self._dead = 0

    def push(self, item: E) -> None:
        """Add a candidate, unless it is there."""
        if item.is_queued:
            return
        item.is_queued = True
        self._serial += 1
        entry, line = (self._key(item), item.number, self._serial, item), self._line
        if not line or line[-1] < entry:
            line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def least(self) -> E:
        """Return the candidate of the least key, which stays one: its end may go, and then it is looked at again. Raises IndexError."""
        while True:
            self._first = first = self._take_least()
            key, _, _, item = first
            is_evictable = item.is_evictable
            # Keys are compared here and not updated at each use. They only grow, so an old entry comes up too early, never too late.
            if is_evictable and self._key(item) == key:
                return item
            self._first = None
            item.is_queued = False
            if is_evictable:
                self.push(item)  # used since: its turn comes later

    def _take_least(self) -> _Entry[E]:
        # `_first` stays apart until something less comes: a run that is trimmed block by block sifts nothing.
        first, line, heap = self._first, self._line, self._heap
        if line and (not heap or line[0] < heap[0]):
            if first is None:
                return line.popleft()
            if first < line[0]:
                return first
            heapq.heappush(heap, first)
            return line.popleft()
        return heapq.heappop(heap) if first is None else heapq.heappushpop(heap, first)

    def discard(self, item: E) -> None:
        """Note that an item is no longer stored. Once such entries are half of all, they are dropped."""
        if self._first is not None and self._first[3] is item:
            self._first = None
            item.is_queued = False
        elif item.is_queued:
            self._dead += 1
            # At half of all, each rebuild is paid for by as many discards, so that one costs O(1) on average.
            if 2 * self._dead > len(self._line) + len(self._heap) + 1:
                self._rebuild()

    def _rebuild(self) -> None:
        """Keep the entries of candidates only."""
        entries = self._entries()
        for item in self.items():
            item.is_queued = item.is_evictable
        self.clear()
        self._heap = [entry for entry in entries if entry[3].is_queued]
        heapq.heapify(self._heap)

    def items(self) -> list[E]:
        """Return what there is an entry for."""
        return [entry[3] for entry in self._entries()]

    def _entries(self) -> list[_Entry[E]]:
        """Return all entries, in no order."""
        return [*([] if self._first is None else [self._first]), *self._line, *self._heap]

    def clear(self) -> None:
        """Forget all candidates."""
        self._line.clear()
        self._heap = []
        self._first = None
        self._dead = 0
