"""What cached blocks hold: the token ids before and in each, from when they were published to when they are given up.

::

    run 3:   | 0 | 1 | 2 | 3 | 4 |            blocks that were published one behind the other, with their token ids
    run 8:           | 3 | 4 | 5 | 6 |        another that follows block 2 of run 3: its ids begin there

Prefix caches tell which blocks they evict, and not of which tokens. What was published is known here, so that any prefix cache will do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.scheduler.ids import Growing

__all__ = ["GivenUp", "Published"]

_FEW_PARTS = 8
"""Parts of an eviction that are not worth sorting."""


@attrs.frozen(eq=False)
class GivenUp:
    """Blocks of one prefix, one behind the other.

    Args:
        namespace: of the prefix.
        ids: token ids from its beginning to the end of the last block.
        blocks: the blocks.
        priority: the highest that one of them was published with.
    """

    namespace: Namespace
    ids: npt.NDArray[Any]
    blocks: BlockIds
    priority: int


class _Run:
    """Blocks that were published one behind the other, from the ``start``-th of a prefix on."""

    __slots__ = ("above", "ids", "left", "namespace", "number", "start")

    def __init__(self, number: int, namespace: Namespace, above: _Run | None, start: int, ids: npt.NDArray[Any]) -> None:
        self.number, self.namespace, self.above, self.start = number, namespace, above, start
        self.ids, self.left = Growing(ids), 0

    def path(self, stop: int, size: int) -> npt.NDArray[Any]:
        """Return the token ids of the first ``stop`` blocks of the prefix, the last of which is in this run."""
        parts, run = list[npt.NDArray[Any]](), self
        while True:
            parts.append(run.ids.view[: (stop - run.start) * size])
            if run.above is None:
                return np.concatenate(parts[::-1])
            run, stop = run.above, run.start


class Published:
    """Runs of published blocks.

    Args:
        num_blocks: blocks that there may be.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._run = np.full(num_blocks, -1, dtype=np.int64)  # of each block; of what is not cached -1
        self._place = np.zeros(num_blocks, dtype=np.int32)  # in its prefix
        self._priority = np.zeros(num_blocks, dtype=np.int64)
        self._has_priorities = False
        self._runs: dict[int, _Run] = {}
        self._number = 0

    def add(self, namespace: Namespace, before: int | None, ids: npt.NDArray[Any], blocks: BlockIds, priority: int) -> None:
        """Note blocks that are cached now.

        Args:
            namespace: where.
            before: the block that they follow; None at the beginning of a prefix.
            ids: their token ids.
            blocks: their numbers, at least one.
            priority: what they were published with.
        """
        above = None if before is None else self._runs[int(self._run[before])]
        start = 0 if before is None else int(self._place[before]) + 1
        if above is not None and above.start * self._size + above.ids.size == start * self._size:
            run = above  # it grows: so a sequence that is decoded is one run
            run.ids.append(ids)
        else:
            run = self._runs[self._number] = _Run(self._number, namespace, above, start, ids)
            self._number += 1
        run.left += blocks.size
        at = blocks.astype(np.intp)  # once: indices of another width take twice the time
        self._run[at] = run.number
        self._place[at] = np.arange(start, start + blocks.size, dtype=np.int32)
        if priority or self._has_priorities:
            self._has_priorities, self._priority[at] = True, priority

    def raise_priority(self, blocks: BlockIds, priority: int) -> None:
        """Note that cached blocks were published again."""
        self._has_priorities, self._priority[blocks] = True, np.maximum(self._priority[blocks], priority)

    def forget(self, blocks: BlockIds) -> None:
        """Note that blocks are cached no longer."""
        blocks = blocks[self._run[blocks.astype(np.intp)] >= 0]
        if blocks.size:
            for begin, end in self._parts(blocks):
                self._cut(blocks[begin:end])

    def give_up(self, blocks: BlockIds) -> list[GivenUp]:
        """Note that blocks are cached no longer, with all behind them; return what they held, in parts of one prefix each, ends first."""
        blocks = blocks.astype(np.intp)
        parts = self._parts(blocks)
        if len(parts) > _FEW_PARTS and 2 * len(parts) > blocks.size:  # not in the order of the prefixes: any prefix cache has its own
            blocks = blocks[np.lexsort((self._place[blocks], self._run[blocks]))]
            parts = self._parts(blocks)[::-1]
        # All are read before any is cut: one may follow another.
        found = [self._held(blocks[begin:end]) for begin, end in parts]
        for each in found:
            self._cut(each.blocks)
        return found

    def _held(self, part: BlockIds) -> GivenUp:
        last = int(part[-1])
        run, stop = self._runs[int(self._run[last])], int(self._place[last]) + 1
        priority = int(self._priority[part].max()) if self._has_priorities else 0
        return GivenUp(run.namespace, run.path(stop, self._size), part, priority)

    def _parts(self, blocks: BlockIds) -> list[tuple[int, int]]:
        """Return where parts begin and end in which each block follows the one before."""
        runs, places = self._run[blocks], self._place[blocks]
        cuts = [0]
        for at in np.flatnonzero((places[1:] - places[:-1] != 1) | (runs[1:] != runs[:-1])).tolist():
            # The next run may go on where this one was left: both are one part.
            run, place = self._runs[int(runs[at + 1])], int(places[at + 1])
            if place != places[at] + 1 or place != run.start or run.above is not self._runs[int(runs[at])]:
                cuts.append(at + 1)
        return list(pairwise([*cuts, blocks.size]))

    def _cut(self, part: BlockIds) -> None:
        """Take the blocks of a part out of their runs."""
        runs = self._run[part]
        for begin, end in pairwise([0, *(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), part.size]):
            run = self._runs[int(runs[begin])]
            run.left -= end - begin
            run.ids.size = min(run.ids.size, (int(self._place[part[begin]]) - run.start) * self._size)
            if not run.left:
                del self._runs[run.number]
        self._run[part] = -1

    def clear(self) -> None:
        """Forget all."""
        self._run[:] = -1
        self._runs.clear()

    def check_integrity(self, cached: BlockIds) -> None:
        """Compare with the blocks that the prefix cache has; raises IntegrityError."""
        known = np.flatnonzero(self._run >= 0)
        runs = self._run[known]
        facts = {
            "the blocks that are cached": np.array_equal(known, cached),
            "runs with blocks, as many as are counted": {n: run.left for n, run in self._runs.items()}
            == dict(zip(*(each.tolist() for each in np.unique(runs, return_counts=True)), strict=True)),
            "ids of each block": all(
                run.start <= place < run.start + run.ids.size // self._size
                for run, place in ((self._runs[n], p) for n, p in zip(runs.tolist(), self._place[known].tolist(), strict=True))
            ),
        }
        wrong = ", ".join(what for what, holds in facts.items() if not holds)
        if wrong:
            raise IntegrityError("Published", expected=wrong, got="something else", fix="report it with the calls before")
