"""The token ids of sequences: what is known of them, by row.

::

    ids of a row:   | long: whole chunks, in an array that grows | tail: fewer than a chunk, in one array for all rows |

A step of decoding writes the tails of all rows at once; a tail that is full moves to the row's own array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.scheduler.decisions import Decisions
from kvdock.scheduler.rows import Index, Rows

__all__ = ["Growing", "TokenIds"]

_CHUNK = 128
_INT32 = np.iinfo(np.int32)


class Growing:
    """An array that grows at its end, at a constant cost per element.

    Args:
        values: what it begins with. An array that owns its memory is taken over, and nobody else may write to it.
    """

    __slots__ = ("_room", "size")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._room = values if values.base is None else values.copy()
        self.size = values.size

    @property
    def view(self) -> npt.NDArray[Any]:
        """The elements in use; good until the next change."""
        return self._room[: self.size]

    def append(self, values: npt.NDArray[Any]) -> None:
        """Add elements. Integers that do not fit the dtype widen it; there are none beyond int64."""
        size, dtype = self.size + values.size, np.promote_types(self._room.dtype, values.dtype)
        if size > self._room.size or dtype != self._room.dtype:  # narrow values find room among wide ones
            room = np.empty(max(size, 2 * self._room.size), dtype=dtype)
            room[: self.size] = self.view
            self._room = room
        self._room[self.size : size] = values
        self.size = size

    def cut(self, size: int) -> None:
        """Keep the first elements, and no more than twice the room for them."""
        self.size = size
        if 2 * size < self._room.size:
            self._room = self.view.copy()


class TokenIds:
    """Ids by row; how many are known is in ``num_known`` of the rows.

    Args:
        rows: whose rows they are.

    Attributes:
        decisions: where it notes what it is told, if anywhere.
    """

    decisions: Decisions | None = None

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        # Whole blocks, so that `last_blocks` finds each block that was just completed in the tail alone.
        self._chunk = rows.block_size * max(1, _CHUNK // rows.block_size)
        self._long: list[Growing] = []
        self._tail: npt.NDArray[Any] = np.zeros((0, self._chunk), dtype=np.int32)

    def begin(self, row: int, ids: npt.NDArray[Any]) -> None:
        """Let a row have these ids; nothing that is kept aliases them."""
        if row >= len(self._long):
            more = len(self._rows.sequences) - len(self._long)
            # The same empty array for all: `begin` gives each row its own before anything is added.
            self._long += [Growing(ids[:0])] * more
            self._tail = np.concatenate((self._tail, np.zeros((more, self._chunk), dtype=self._tail.dtype)))
        whole = ids.size // self._chunk * self._chunk
        rest = self._fitting(ids[whole:])
        self._long[row] = Growing(ids[:whole])
        self._tail[row, : rest.size] = rest
        self._rows.num_known[row] = ids.size
        if self.decisions is not None:
            self.decisions.note(b"begin", row, ids)

    def get(self, row: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return ids ``start`` to ``stop - 1``; good until the row changes."""
        long = self._long[row]
        if stop <= long.size:
            return long.view[start:stop]
        if start >= long.size:
            return self._tail[row, start - long.size : stop - long.size]
        return np.concatenate((long.view[start:], self._tail[row, : stop - long.size]))

    def append(self, rows: Index, ids: npt.NDArray[Any], counts: Index, *, is_one_each: bool) -> None:
        """Add ids, ``counts`` of them to each row, one row behind the other."""
        known = self._rows.num_known[rows]
        ids = self._fitting(ids)
        if is_one_each:
            offsets = known % self._chunk
            self._tail[rows, offsets] = ids
            # A full tail is copied and not cleared: `last_blocks` still reads it in this step.
            for row in rows[offsets == self._chunk - 1].tolist():
                self._long[row].append(self._tail[row])
        else:
            for row, length, stop, count in zip(rows.tolist(), known.tolist(), counts.cumsum().tolist(), counts.tolist(), strict=True):
                self._append_many(row, length % self._chunk, ids[stop - count : stop])
        self._rows.num_known[rows] = known + counts
        if self.decisions is not None:
            self.decisions.note(b"append", rows, counts, ids)

    def last_blocks(self, rows: Index) -> npt.NDArray[Any]:
        """Return the last block of ids of rows that have just completed it, id by id: ``[rows, block_size]``."""
        size = self._rows.block_size
        blocks = (self._rows.num_known[rows] - 1) % self._chunk // size
        found: npt.NDArray[Any] = self._tail.reshape(len(self._tail), -1, size)[rows, blocks]
        return found

    def truncate(self, row: int, known: int) -> None:
        """Keep the first ``known`` ids of a row, of which there are as many."""
        long, whole = self._long[row], known // self._chunk * self._chunk
        if whole < long.size:
            self._tail[row, : known - whole] = long.view[whole:known]
            long.size = whole
        self._rows.num_known[row] = known
        if self.decisions is not None:
            self.decisions.note(b"truncate", row, known)

    def check(self, row: int) -> bool:
        """Whether a row has ids of whole chunks in its own array, and no others."""
        return self._long[row].size == int(self._rows.num_known[row]) // self._chunk * self._chunk

    def _append_many(self, row: int, offset: int, ids: npt.NDArray[Any]) -> None:
        """Add several ids behind ``offset`` ones in the tail of a row."""
        both = np.concatenate((self._tail[row, :offset], ids))
        whole = both.size // self._chunk * self._chunk
        if whole:
            self._long[row].append(both[:whole])
        self._tail[row, : both.size - whole] = both[whole:]

    def _fitting(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return ids in the type of the tails, which get wider with the first that does not fit 32 bits."""
        if ids.dtype != self._tail.dtype:
            if self._tail.dtype == np.int32 and ids.size and (ids.max() > _INT32.max or ids.min() < _INT32.min):
                self._tail = self._tail.astype(np.int64)
            ids = ids.astype(self._tail.dtype)
        return ids
