"""Numbers for what is cached in the pool or kept in tiers, by token ids.

A unit gets its number when it is published, and keeps it while it is in the pool or in a tier, or something behind it is. So nothing
has to be looked up when the pool gives it up: prefix caches tell which units they evict, and not of which tokens, and any will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.scheduler.rows import Index
from kvdock.scheduler.tier_runs import TierRuns

__all__ = ["TierIndex"]

_NONE = -1

_FEW_PARTS = 8
"""Parts of what the pool gives up that are not worth sorting."""


class TierIndex:
    """Which units of the pool have which numbers, and the numbers of a prefix.

    Args:
        num_units: units of the pool.
        num_numbers: numbers that there are.
        block_size: tokens of a unit.
        is_kept: says which numbers stand for something in a tier.
        make_room: called with how many numbers are missing, to let tiers give up as much.

    Attributes:
        has_priorities: whether any unit was published with one.
    """

    def __init__(
        self,
        num_units: int,
        num_numbers: int,
        block_size: int,
        is_kept: Callable[[Index], npt.NDArray[np.bool_]],
        make_room: Callable[[int], None],
    ) -> None:
        self._size, self._is_kept, self._make_room = block_size, is_kept, make_room
        self._runs = TierRuns(num_numbers, block_size, self._is_useful)
        self._is_cached = np.zeros(num_numbers, dtype=np.bool_)  # by number
        self._number = np.full(num_units, _NONE, dtype=np.intp)  # of each unit of the pool that is cached, as the next
        self._priority = np.zeros(num_units, dtype=np.int64)
        self.has_priorities = False

    @property
    def num_free(self) -> int:
        """Numbers that stand for nothing."""
        return self._runs.num_free

    def add(self, namespace: Namespace, before: int | None, ids: npt.NDArray[Any], units: BlockIds, priority: int) -> None:
        """Note units that are cached now.

        Args:
            namespace: where.
            before: the unit that they follow; None at the beginning of a prefix.
            ids: their token ids, taken over as `Growing` does.
            units: their numbers in the pool, at least one.
            priority: what they were published with.
        """
        behind = None if before is None else self._number[before]
        run, place, numbers = self._runs.follow(namespace, behind, ids)
        if (missing := units.size - numbers.size - self.num_free) > 0:
            self._make_room(missing)
            run, place, numbers = self._runs.follow(namespace, behind, ids)  # what it let go may have been on this way
        if (known := numbers.size) < units.size:
            fresh = self._runs.append(run, place, namespace, ids[known * self._size :] if known else ids, units.size - known)
            numbers = np.concatenate((numbers, fresh)) if known else fresh
        self.note(units, numbers, priority)

    def note(self, units: BlockIds, numbers: Index, priority: int) -> None:
        """Note units that are cached now and have numbers."""
        at = units.astype(np.intp)  # once: indices of another width take twice the time
        self._number[at] = numbers
        self._is_cached[numbers] = True
        if priority or self.has_priorities:
            self.has_priorities, self._priority[at] = True, priority

    def raise_priority(self, units: BlockIds, priority: int) -> None:
        """Note that cached units were published again."""
        self.has_priorities, self._priority[units] = True, np.maximum(self._priority[units], priority)

    def find(self, ids: npt.NDArray[Any], namespace: Namespace, cached: BlockIds) -> Index:
        """Return the numbers of a prefix behind its ``cached`` units, as far as it has any, not to be written to. Changes nothing."""
        behind = self._number[cached[-1]] if cached.size else None
        return self._runs.find(namespace, behind, ids[cached.size * self._size :])

    def leaving(self, units: Index) -> Iterator[tuple[Index, Index, int]]:
        """Yield cached units that the pool gives up, with their numbers and their priority, low ones first.

        Beginnings of prefixes come before what is behind them, and what the pool let go last comes first.
        """
        numbers = self._number[units]
        places = self._runs.place[numbers]
        cuts = (np.flatnonzero(places[1:] - places[:-1] != 1) + 1).tolist()
        if _FEW_PARTS < len(cuts) > units.size // 2:  # not in the order of the prefixes: any prefix cache has its own
            order = np.lexsort((places, self._runs.run[numbers]))
            units, numbers = units[order], numbers[order]
        elif cuts:
            parts = list(pairwise([0, *cuts, units.size]))[::-1]
            units, numbers = (np.concatenate([each[start:stop] for start, stop in parts]) for each in (units, numbers))
        if not self.has_priorities:
            yield units, numbers, 0
            return
        priorities = self._priority[units]
        for priority in np.unique(priorities).tolist():
            chosen = priorities == priority
            yield units[chosen], numbers[chosen], priority

    def forget(self, units: BlockIds) -> None:
        """Note that units are cached no longer."""
        at = units.astype(np.intp)
        numbers = self._number[at]
        self._number[at] = _NONE
        self._is_cached[numbers] = False
        self.drop(numbers)

    def drop(self, numbers: Index) -> None:
        """Take back numbers that stand for nothing any more, as far as nothing is behind them."""
        self._runs.drop(numbers)

    def clear(self) -> None:
        """Forget everything."""
        self._runs.clear()
        self._is_cached[:] = False
        self._number[:] = _NONE

    def check_integrity(self, cached: BlockIds) -> Index:
        """Return the numbers in use; prove that they are those of ``cached`` units, of tiers, and before these. Raises IntegrityError."""
        mine = np.flatnonzero(self._number != _NONE)
        facts = {
            "the units that are cached": np.array_equal(mine, cached),
            "a number of its own for each": np.array_equal(np.flatnonzero(self._is_cached), np.sort(self._number[mine])),
        }
        wrong = ", ".join(what for what, holds in facts.items() if not holds)
        if wrong:
            raise IntegrityError("TierIndex", expected=wrong, got="something else", fix="report it with the calls before")
        return self._runs.check_integrity()

    def _is_useful(self, numbers: Index) -> npt.NDArray[np.bool_]:
        """Return which numbers stand for something, in the pool or in a tier."""
        useful: npt.NDArray[np.bool_] = self._is_cached[numbers] | self._is_kept(numbers)
        return useful
