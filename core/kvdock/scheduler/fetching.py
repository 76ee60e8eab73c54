"""Bringing what tiers have of a prompt back to the pool, before a sequence begins with it.

::

    prompt:    | in the pool | in a tier         | nowhere        |
                             | taken, loaded,    |
                             | published         | then it begins as if all of this had been in the pool

Whole units come back, as many as fit beside the rest of the prompt, or none. A unit is published once its blocks are loaded, so that
nothing half loaded is ever found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds, Namespace, PrefixHandle, PrefixMatch
from kvdock.scheduler.planning import Needs, Planner, Prompt
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.publishing import Publisher
from kvdock.scheduler.tier_columns import columns_of
from kvdock.scheduler.tiers import Found, Tiers

__all__ = ["Fetching", "Reach"]

_STATES = 2
"""States that must find room, where there are any: the checkpoint that comes back, and that of the sequence."""


@attrs.frozen(eq=False)
class Reach:
    """How far a prompt could go on with what tiers have.

    Args:
        longest: what the pool has of it.
        found: what tiers have behind that.
        count: units behind which it could go on, of the pool and of tiers.
    """

    longest: PrefixMatch
    found: Found
    count: int


class Fetching:
    """Looks in tiers, and loads from them.

    Args:
        pool: the blocks.
        publisher: notes who published what.
        planner: says what a prompt needs.
        tiers: what was given up.
    """

    def __init__(self, pool: PoolBlocks, publisher: Publisher, planner: Planner, tiers: Tiers) -> None:
        self._pool = pool
        self._publisher = publisher
        self._planner = planner
        self._tiers = tiers
        self._columns = columns_of(pool)
        self._size = pool.prefix.block_size

    def look(self, prompt: Prompt, needs: Needs) -> tuple[Reach, Needs] | None:
        """Return how far a prompt could go on, and what it would need then; None where tiers have nothing for it. Changes nothing."""
        longest, ids = self._pool.longest(needs.match), self._planner.looked_up(prompt)
        found = self._tiers.find(ids, prompt.namespace, longest.blocks)
        if found is None:
            return None
        count = self._columns.reach(longest.blocks, found.there)
        if count <= max(needs.cached_len // self._size, longest.blocks.size):
            return None
        return Reach(longest, found, count), self._planner.behind(prompt, longest, count)

    def plan(self, prompt: Prompt, needs: Needs) -> Needs | None:
        """Return what a prompt needs with what tiers have, if it fits, and tell these that it is planned; else None."""
        seen = self.look(prompt, needs)
        if seen is None:
            return None
        reach, more = seen
        with self._held(reach, needs, more) as has_room:
            pass
        if has_room:
            self._tiers.prefetch(reach.found)
        return more if has_room else None

    def bring(self, prompt: Prompt, needs: Needs, priority: int) -> PrefixMatch | None:
        """Bring what tiers have of a prompt, if all of it fits then; return what the pool has of it now, if that is more."""
        seen = self.look(prompt, needs)
        if seen is None:
            return None
        reach, more = seen
        with self._held(reach, needs, more) as has_room:
            if not has_room:
                return None
            self._tiers.hold(reach.found)
            try:
                longest = self._load(prompt.ids, prompt.namespace, reach, priority)
            finally:
                self._tiers.release(reach.found)
        return longest and self._pool.usable(longest, self._planner.looked_up(prompt), prompt.namespace)

    @contextmanager
    def _held(self, reach: Reach, needs: Needs, more: Needs) -> Iterator[bool]:
        """Keep what a prompt would go on with in the pool, and what it goes on with should tiers fail.

        Yields whether there is room either way: a prompt that was said to fit does, though a tier fails.
        """
        pool, longest = self._pool, reach.longest
        pool.prefix.lock_handle(needs.handle)
        alone = pool.hold(needs.match.blocks)
        try:
            fits = pool.has(needs.blocks, 1)
            pool.prefix.lock_handle(longest.handle)
            held = self._columns.hold(longest.blocks, reach.count)
            try:
                yield fits and pool.has(more.blocks, _STATES)
            finally:
                pool.unlock(longest.handle, held)
        finally:
            pool.unlock(needs.handle, alone)

    def _load(self, ids: npt.NDArray[Any], namespace: Namespace, reach: Reach, priority: int) -> PrefixMatch | None:
        """Take units, load and publish them; return the longest prefix that is cached now, if there are any."""
        have = reach.longest.blocks.size
        fresh = self._pool.take(reach.count - have, "CacheManager.begin", states=1)
        kept = 0
        try:
            places = self._columns.places(fresh)
            done = self._tiers.load(reach.found, np.where(reach.found.there[: fresh.size], places, -1))
            kept = self._columns.reach(reach.longest.blocks, done) - have
            if kept <= 0:
                return None
            handle = self._publish(ids, namespace, reach, fresh[:kept], done[:kept], priority)
            return PrefixMatch(handle, np.concatenate((reach.longest.blocks, fresh[:kept])))
        finally:
            self._columns.give_back(fresh[max(kept, 0) :])

    def _publish(
        self, ids: npt.NDArray[Any], namespace: Namespace, reach: Reach, units: BlockIds, done: npt.NDArray[np.bool_], priority: int
    ) -> PrefixHandle:
        """Let units be found that hold what they should, each with the priority that it had before, or a higher one; return their end."""
        priorities = np.maximum(self._tiers.priorities(reach.found.units[: units.size]), priority)
        bounds = [0, *(np.flatnonzero(priorities[1:] != priorities[:-1]) + 1).tolist(), units.size]
        handle, start = reach.longest.handle, reach.longest.blocks.size
        for begin, end in pairwise(bounds):
            part, priority = ids[(start + begin) * self._size : (start + end) * self._size], int(priorities[begin])
            handle = self._publisher.adopt(handle, namespace, part, units[begin:end], priority)
            self._tiers.index.note(units[begin:end], reach.found.units[begin:end], priority)
        self._columns.keep(units, done)
        return handle
