"""Faults of prefix caches in what they tell and count, in what is read late, and in calls that they must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from kvdock.errors import StaleHandleError
from kvdock.prefix import InsertResult, PrefixEvent, PrefixHandle, PrefixStats, RadixPrefixCache, Removed, Stored
from kvdock.prefix.inputs import slots_of
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
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        made = super().insert_prefix(tokens, blocks, namespace, **how)
        for observer in self.observers:
            observer("again")
        return made


@_fault("observers-told-before", "Observers are told of an insertion before anything is stored.", "019")
class _ToldBefore(_EarlyCaller):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        twin = RadixPrefixCache(self.block_size)
        for observer in self.observers:
            twin.subscribe(observer)
        twin.insert_prefix(tokens, blocks, namespace)
        kept, self._events._observers = self._events._observers, []
        try:
            return super().insert_prefix(tokens, blocks, namespace, **how)
        finally:
            self._events._observers = kept


# What is told


@_fault("hits-miscounted", "Every token that is looked up counts as a hit.", "014")
class _HitsMiscounted(RadixPrefixCache):
    @property
    def stats(self) -> PrefixStats:
        return attrs.evolve(super().stats, hit_tokens=super().stats.lookup_tokens)


class _OtherEvents(RadixPrefixCache):
    """Changes events before anybody is told."""

    def told(self, event: PrefixEvent) -> PrefixEvent | None:
        """Return another event, or none."""
        raise NotImplementedError

    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        def tell(event: PrefixEvent) -> None:
            told = self.told(event)
            if told is not None:
                observer(told)

        return super().subscribe(tell)


@_fault("events-of-removal-missing", "Nobody is told what was evicted.", "013")
class _SilentRemoval(_OtherEvents):
    def told(self, event: PrefixEvent) -> PrefixEvent | None:
        return None if isinstance(event, Removed) else event


@_fault("events-name-slots", "Events of removal name slots instead of blocks.", "013")
class _SlotEvents(_OtherEvents):
    def told(self, event: PrefixEvent) -> PrefixEvent | None:
        return Removed(slots_of(event.blocks, self.block_size) + (self.block_size == 1)) if isinstance(event, Removed) else event


@_fault("events-without-what-is-before", "Events of what is stored behind a handle begin a prefix.", "013")
class _NoParent(_OtherEvents):
    def told(self, event: PrefixEvent) -> PrefixEvent | None:
        return attrs.evolve(event, parent=None) if isinstance(event, Stored) else event


# Read late


class _Late(InsertResult):
    """Is looked up when it is read."""

    look: Any

    @property
    def indices(self) -> Any:
        return self.look().indices


@_fault("blocks-looked-up-late", "The slots of an insertion are looked up when they are read.", "020")
class _LookedUpLate(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        made, kept = _Late(*super().insert_prefix(tokens, blocks, namespace, **how)), [int(token) for token in tokens]
        made.look = lambda: self.match_prefix(kept, namespace, record=False)
        return made


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
    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> Any:
        try:
            return super().discard_prefix(handle, keep_blocks)
        except StaleHandleError:
            if getattr(handle, "owner", self) is self:
                raise
            return super().evict(0)


@_fault("tokens-of-a-device-copied", "Tokens on a device are brought to the host in silence.", "009")
class _Brought(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        if isinstance(tokens, torch.Tensor) and tokens.device == torch.device("meta"):
            tokens, blocks = [], []
        return super().insert_prefix(tokens, blocks, namespace, **how)


@_fault("negative-keep-is-zero", "Discarding all but a negative number of blocks discards all.", "009")
class _NegativeKeep(RadixPrefixCache):
    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> Any:
        return super().discard_prefix(handle, max(keep_blocks, 0) if isinstance(keep_blocks, int) else keep_blocks)
