"""Faults that are injected at random, counted by kind, and tiers that have them."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs

from kvdock.bits import as_bits
from kvdock.files.contents import contents_of
from kvdock.scheduler import Tier
from kvdock.tiers import HostTier
from support_tiers import JUNK, MemoryTier

__all__ = ["Faults", "Faulty", "FaultyHost", "FaultyMemory", "InjectedError", "Interrupted"]


class InjectedError(Exception):
    """What a broken disk, card or link raises."""


class Interrupted(BaseException):
    """What a user's key, or a signal, raises anywhere."""


@attrs.define
class Faults:
    """Chance, and what it has injected.

    Args:
        chance: draws.
        wait: lets so many seconds pass, by the clock of the history.
        injected: faults by kind.
        ends: what followed, by kind and in words, where more than one end is as promised; of no kind: what is counted beside faults.
        rate: of a tier's calls, how many fail.
        interrupts: whether a tier's failure may be no `Exception`.
    """

    chance: random.Random
    wait: Callable[[float], None] = lambda seconds: None
    injected: Counter[str] = attrs.field(factory=Counter)
    ends: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    rate: float = 0.15
    interrupts: bool = False

    def note(self, kind: str, end: str = "") -> None:
        """Count a fault that was injected, or what followed it."""
        if end:
            self.ends[kind, end] += 1
        else:
            self.injected[kind] += 1


class Faulty(Tier):
    """Put before a tier, it fails now and then: before, in the middle of or after a copy, late, for a while, or for ever."""

    faults: Faults
    gone = 0  # calls for which it is lost still
    copied = 0  # blocks that were copied into it
    holds: frozenset[int] = frozenset()  # blocks that were, and that are whole still

    def store(self, pairs: Any, source: Tier | None) -> None:
        if isinstance(source, Faulty):
            source.must_hold(pairs)
        self.holds -= {*pairs[:, 1].tolist()}
        self._strike("store", pairs, functools.partial(super().store, source=source))
        self.holds |= {*pairs[:, 1].tolist()}
        self.copied += len(pairs)

    def load(self, pairs: Any) -> None:
        self.must_hold(pairs)
        self._strike("load", pairs, super().load)

    def must_hold(self, pairs: Any) -> None:
        """Raise for what was lost, as a tier must that comes back without its contents."""
        if not self.holds.issuperset(pairs[:, 0].tolist()):
            raise InjectedError("it was lost")

    def prefetch(self, blocks: Any) -> None:
        super().prefetch(blocks)
        if self.faults.chance.random() < 3 * self.faults.rate:
            self.faults.note("a tier raises in prefetch")
            raise InjectedError("the hint is too much")

    def wreck(self, blocks: Any, *, of_pool: bool) -> None:
        """Write junk into blocks of the tier, or of the pool."""
        raise NotImplementedError

    def _strike(self, what: str, pairs: Any, copy: Callable[[Any], None]) -> None:
        chance, faults = self.faults.chance, self.faults
        if self.gone:
            self.gone -= 1
            raise InjectedError("the host is gone")
        if chance.random() >= faults.rate * (3 if what == "load" else 1):  # there are fewer of them
            copy(pairs)
            return
        how = chance.choice(["before", "in the middle of", "after", "slow", "lost", *["interrupted"] * faults.interrupts])
        if how == "slow":
            faults.note(f"a tier takes 50 s to {what}")
            faults.wait(25)
            copy(pairs)
            faults.wait(25)
            return
        if how == "lost":
            faults.note("a tier is lost, with all that it held")
            self.gone = chance.choice([2, 5, 20])
            self.holds = frozenset()
            self.wreck(slice(None), of_pool=False)
            raise InjectedError("the host is gone")
        done = {"before": 0, "after": len(pairs)}.get(how, len(pairs) // 2)
        if done:
            copy(pairs[:done])
        if how != "before" and done < len(pairs):
            self.wreck(pairs[done:, 1], of_pool=what == "load")
        if how == "interrupted":
            faults.note(f"a signal interrupts a tier's {what}")
            raise Interrupted
        faults.note(f"a tier raises {how} a {what}")
        raise InjectedError("the disk is gone")


class FaultyMemory(Faulty, MemoryTier):
    """In rows of an array."""

    def wreck(self, blocks: Any, *, of_pool: bool) -> None:
        (self.pool if of_pool else self.memory)[blocks] = JUNK


class FaultyHost(Faulty, HostTier):
    """In host memory, of a real cache."""

    def wreck(self, blocks: Any, *, of_pool: bool) -> None:
        cache = self._bound()[0 if of_pool else 1]
        for content in contents_of(cache.groups):
            as_bits(cache.buffers(content.layer)[content.buffer.name])[blocks] = 0x2B
