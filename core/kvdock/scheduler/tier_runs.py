"""Numbers by token ids: a tree of runs, as far as a number is of use, or followed by one that is.

::

    run 3:   | 0 | 1 | 2 | 3 | 4 |            numbers one behind the other, with their token ids
    run 8:           | 3 | 4 | 5 | 6 |        others that go on behind the first three of run 3: their ids begin there

Runs are never split or joined. Token ids are compared, whole runs at once, so that no two prefixes are ever taken for one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.inputs import namespace_key
from kvdock.prefix.interface import Namespace
from kvdock.prefix.labels import NARROW, common_ids
from kvdock.scheduler.ids import Growing
from kvdock.scheduler.rows import Index

__all__ = ["Looked", "Run", "TierRuns"]

_NOTHING: Index = np.empty(0, dtype=np.intp)

_STEP = 16
"""Numbers at the end of a run that are looked at together; then so many times as many, and so on."""


class Run:
    """Numbers one behind the other, from the ``start``-th of a prefix on, and the runs that go on from within it."""

    __slots__ = ("above", "forks", "ids", "key", "name", "numbers", "start")

    def __init__(self, name: int, above: Run | None, start: int, key: Hashable, ids: npt.NDArray[Any], numbers: Index) -> None:
        self.name, self.above, self.start, self.key = name, above, start, key
        self.ids, self.numbers = Growing(ids), Growing(numbers)
        self.forks: dict[int, dict[Hashable, Run]] = {}  # by the place where they begin, and the ids of their first number

    @property
    def end(self) -> int:
        """The place behind its last number."""
        return self.start + self.numbers.size


class Looked(NamedTuple):
    """What was found last, and what that follows from, as bytes: whoever passed the ids may write to them meanwhile.

    Args:
        behind: the number or the namespace behind which it was looked, and the type of the ids.
        stop: ids that were compared: those of the numbers, and of one more.
        ids: these, or as many as there were.
        numbers: what was found.
    """

    behind: tuple[Hashable, str]
    stop: int
    ids: bytes
    numbers: Index


class TierRuns:
    """The runs, and the numbers that are free.

    Args:
        num_numbers: numbers that there are.
        block_size: tokens that each stands for.
        is_useful: says which numbers must stay.

    Attributes:
        run: the name of the run of each number in use.
        place: its place in its prefix.
        num_free: numbers that stand for nothing.
    """

    def __init__(self, num_numbers: int, block_size: int, is_useful: Callable[[Index], npt.NDArray[np.bool_]]) -> None:
        self._size, self._is_useful = block_size, is_useful
        self._free, self.num_free = np.arange(num_numbers - 1, -1, -1, dtype=np.intp), num_numbers  # those that are free come first
        self._runs: dict[int, Run] = {}
        self._roots: dict[Hashable, Run] = {}
        self._name = 0
        self._last: Looked | None = None
        self.run = np.zeros(num_numbers, dtype=np.int64)
        self.place = np.zeros(num_numbers, dtype=np.int32)

    def find(self, namespace: Namespace, before: Any, ids: npt.NDArray[Any]) -> Index:
        """Return the numbers that `follow` finds, not to be written to.

        The last answer is kept until the runs change: a prompt is planned and then begun. It costs a tenth of following again.
        """
        behind, last = (namespace_key("", namespace) if before is None else int(before), ids.dtype.char), self._last
        if last is None or last.behind != behind or last.ids != ids[: last.stop].tobytes():
            numbers = self.follow(namespace, before, ids)[2]
            stop = (numbers.size + 1) * self._size
            self._last = last = Looked(behind, stop, ids[:stop].tobytes(), numbers)
        return last.numbers

    def follow(self, namespace: Namespace, before: Any, ids: npt.NDArray[Any]) -> tuple[Run | None, int, Index]:
        """Return how far token ids have numbers, behind a number or from the beginning of a prefix: run, place, and the numbers."""
        run: Run | None
        if before is None:
            run, place = self._roots.get(namespace_key("", namespace)), 0
        else:
            run, place = self._runs[int(self.run[before])], int(self.place[before]) + 1
        size = self._size
        found: list[Index] = []  # `list[Index]()` takes a fifth of the time that most prompts need here
        while run is not None and ids.size >= size:
            at = (place - run.start) * size
            if place < run.end and run.ids.view[at] == ids[0]:  # the first, since mostly all differ or none
                count = common_ids(run.ids.view[at:], ids) // size
                found.append(run.numbers.view[place - run.start :][:count])
                place, ids = place + count, ids[count * size :]
            forks = run.forks.get(place) if ids.size >= size else None
            if not forks or (after := forks.get(_key(ids[:size]))) is None:
                break
            run = after
        if not found:
            return run, place, _NOTHING
        return run, place, np.concatenate(found) if len(found) > 1 else found[0].copy()

    def append(self, run: Run | None, place: int, namespace: Namespace, ids: npt.NDArray[Any], count: int) -> Index:
        """Put numbers behind a place that was followed to: into the run that ends there, as in decoding, or a new one; return them.

        The ids are taken over as `Growing` does.
        """
        self._last = None
        numbers, ids = self._take(count), _narrow(ids)
        if run is None or place < run.end:
            self._name += 1
            key = namespace_key("", namespace) if run is None else _key(ids[: self._size])
            among = self._roots if run is None else run.forks.setdefault(place, {})
            run = among[key] = self._runs[self._name] = Run(self._name, run, place, key, ids, numbers)
        else:
            run.ids.append(ids)
            run.numbers.append(numbers)
        self.run[numbers] = run.name
        self.place[numbers] = np.arange(place, place + count, dtype=np.int32)
        return numbers

    def drop(self, numbers: Index) -> None:
        """Take back numbers, as far as they are of no use and nothing is behind them."""
        names = self.run[numbers[~self._is_useful(numbers)]]
        if not names.size:
            return
        bounds = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), names.size]
        # Mostly it is all of a run, which is known before the first is cut.
        runs = [(run, stop - start == run.numbers.size) for start, stop in pairwise(bounds) for run in [self._runs[int(names[start])]]]
        for each, is_all in runs:
            run: Run | None = each
            while run is not None and run.name in self._runs:
                run, is_all = self._trim(run, is_all), False

    def clear(self) -> None:
        """Forget everything."""
        self._last = None
        for run in self._runs.values():
            self._release(run.numbers.view)
        self._runs.clear()
        self._roots.clear()

    def check_integrity(self) -> Index:
        """Return the numbers in use, and prove that each is where it is noted, and of use. Raises IntegrityError."""
        runs = list(self._runs.values())
        known = np.concatenate([np.empty(0, dtype=np.intp), *(run.numbers.view for run in runs)])
        noted = [(self.run[at], self.place[at], run) for run in runs for at in [run.numbers.view]]
        facts = {
            "each number free, or in one run": np.bincount(np.concatenate((known, self._free[: self.num_free]))).tolist()
            == [1] * self._free.size,
            "each where it is noted": all((n == run.name).all() and (p == np.arange(run.start, run.end)).all() for n, p, run in noted),
            "token ids of each": all(run.ids.size == run.numbers.size * self._size for run in runs),
            "nothing behind what is used": all(self._useful(run) == run.numbers.size and (run.forks or run.numbers.size) for run in runs),
        }
        wrong = ", ".join(what for what, holds in facts.items() if not holds)
        if wrong:
            raise IntegrityError("TierRuns", expected=wrong, got="something else", fix="report it with the calls before")
        return known

    def _take(self, count: int) -> Index:
        """Take free numbers."""
        left = self.num_free - count
        if left < 0:  # tiers have nothing more, and what the pool has can all have numbers
            raise IntegrityError("TierRuns", expected=f"{count} free numbers", got=self.num_free, fix="report it with the calls before")
        self.num_free = left
        return self._free[left : left + count][::-1].copy()

    def _release(self, numbers: Index) -> None:
        """Let numbers be free; those that came last are taken first, in their order."""
        self._free[self.num_free : self.num_free + numbers.size] = numbers[::-1]
        self.num_free += numbers.size

    def _trim(self, run: Run, is_all: bool) -> Run | None:
        """Cut a run behind what is useful: nothing if ``is_all`` can go. Return the run above, where that may have to be cut, too."""
        self._last = None
        count, above = 0 if is_all and not run.forks else self._useful(run), run.above
        self._release(run.numbers.view[count:])
        if count or run.forks:
            run.numbers.cut(count)
            run.ids.cut(count * self._size)
            return None
        del self._runs[run.name]
        if above is None:
            del self._roots[run.key]
            return None
        forks = above.forks[run.start]
        del forks[run.key]
        if forks:
            return None
        del above.forks[run.start]
        return above if run.start == above.end else None

    def _useful(self, run: Run) -> int:
        """Return how many numbers of a run there are up to the last that is of use, or followed."""
        least, count, step = max(run.forks, default=run.start) - run.start, run.numbers.size, _STEP
        while count > least:
            part = run.numbers.view[max(least, count - step) : count]
            if (useful := np.flatnonzero(self._is_useful(part))).size:
                return count - part.size + int(useful[-1]) + 1
            count, step = count - part.size, _STEP * step
        return count


def _key(ids: npt.NDArray[Any]) -> bytes:
    """Return what to compare the ids of a number by, whatever their width."""
    return ids.astype(np.int64).tobytes()


def _narrow(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return token ids in half the memory, if they fit: there are as many of them as tokens in all tiers."""
    fits = ids.dtype.itemsize > NARROW.itemsize and np.iinfo(NARROW).min <= ids.min() and ids.max() <= np.iinfo(NARROW).max
    return ids.astype(NARROW) if fits else ids
