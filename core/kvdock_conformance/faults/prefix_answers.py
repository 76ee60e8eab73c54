"""Faults of prefix caches in what they tell observers, in what is read late, and in calls that they must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvdock.errors import StaleHandleError
from kvdock.prefix import InsertResult, PrefixHandle, RadixPrefixCache
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import adding

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Observers


@_fault("subscriptions-without-end", "An observer is told for ever.", "019")
class _ToldForEver(RadixPrefixCache):
    def subscribe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        super().subscribe(observer)
        return lambda: None


@_fault("end-of-all-subscriptions", "The end of one subscription is that of all.", "019")
class _EndOfAll(RadixPrefixCache):
    def subscribe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        super().subscribe(observer)
        return self._events._observers.clear


class _EarlyCaller(RadixPrefixCache):
    """Knows its observers."""

    def __init__(self, block_size: int = 16, policy: Any = "lru") -> None:
        super().__init__(block_size, policy)
        self.observers: list[Callable[[Any], None]] = []

    def subscribe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        self.observers.append(observer)
        end = super().subscribe(observer)

        def both() -> None:
            self.observers.remove(observer)
            end()

        return both


@_fault("errors-of-observers-raised", "What an observer raises is raised by the call that told it.", "019")
class _ErrorsRaised(_EarlyCaller):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        made = super().insert_prefix(tokens, slots, namespace, priority=priority)
        for observer in self.observers:
            observer("again")
        return made


@_fault("observers-told-before", "Observers are told of an insertion before anything is stored.", "019")
class _ToldBefore(_EarlyCaller):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        twin = RadixPrefixCache(self.block_size)
        for observer in self.observers:
            twin.subscribe(observer)
        twin.insert_prefix(tokens, slots, namespace)
        kept, self._events._observers = self._events._observers, []
        try:
            return super().insert_prefix(tokens, slots, namespace, priority=priority)
        finally:
            self._events._observers = kept


# Read late


@_fault("slots-looked-up-late", "The slots of an insertion are looked up when they are read.", "020")
class _LookedUpLate(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        made, kept = super().insert_prefix(tokens, slots, namespace, priority=priority), [int(token) for token in tokens]
        return InsertResult(made.cached_len, made.handle, lambda: self.match_prefix(kept, namespace, record=False).indices)


@_fault("list-of-blocks-shared", "stored_blocks is the list of the cache itself.", "012")
class _ListShared(RadixPrefixCache):
    last: Any = None

    def stored_blocks(self) -> Any:
        now = super().stored_blocks()
        if self.last is None or self.last.size != now.size:
            self.last = now
        return self.last


# Taken, and to be refused


@_fault("foreign-handles-recorded", "A match of another cache is recorded as its own.", "008")
class _ForeignRecorded(RadixPrefixCache):
    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        if getattr(handle, "owner", self) is not self:
            handle = super().match_prefix([], record=False).handle
        super().record_match(handle, num_tokens)


@_fault("foreign-handles-discarded", "Discarding by a handle of another cache does nothing.", "008")
class _ForeignDiscarded(RadixPrefixCache):
    def discard_prefix(self, handle: PrefixHandle, start: int) -> Any:
        try:
            return super().discard_prefix(handle, start)
        except StaleHandleError:
            if getattr(handle, "owner", self) is self:
                raise
            return super().evict(0)


@_fault("tokens-of-a-device-copied", "Tokens on a device are brought to the host in silence.", "009")
class _Brought(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        if isinstance(tokens, torch.Tensor) and tokens.device == torch.device("meta"):
            tokens, slots = [], []
        return super().insert_prefix(tokens, slots, namespace, priority=priority)


@_fault("negative-start-is-zero", "Discarding from a negative position on discards all.", "009")
class _NegativeStart(RadixPrefixCache):
    def discard_prefix(self, handle: PrefixHandle, start: int) -> Any:
        return super().discard_prefix(handle, max(start, 0) if isinstance(start, int) else start)
