"""The rows of a `generate` as sequences of one manager: one length for all, and what beams do to a batch.

::

    row 0:   - - - a b c d e f        pads[0] = 3: places without a token, which have slot -1
    row 1:   - p q r s t u v w        pads[1] = 1
             0 ............. length   the sequence of row i has the tokens from pads[i] on
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, StaleHandleError
from kvdock.prefix.inputs import as_integers, count_of, index_of
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.prefix.ownership import NotCopied
from kvdock.scheduler.batches import TOO_MANY, as_rows
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.exporters import dense_table
from kvdock.scheduler.rows import Index
from kvdock.scheduler.sequence import CacheSequence

__all__ = ["SequenceBatch"]

_ORDERS = itertools.count()


class SequenceBatch(NotCopied):
    """Sequences that grow and are cut together.

    A batch that is garbage collected aborts its sequences, at the next call of the manager. It belongs to the thread of its
    manager. It cannot be copied or pickled; `fork` shares its blocks.

    Args:
        manager: whose sequences they are.
        sequences: one for each row, at least one; the batch has them for its own from now on.
        length: places in use in each row; those behind are room that was made already.
        pads: places at the beginning of each row that have no token, integers ``[rows]``; none by default. They may go beyond
            ``length``: of such a row only padding is there so far.

    Raises:
        ArgumentValueError: no rows, a row that is there twice, pads that are not one for each row.
        IndexRangeError: a pad below 0, or a sequence with room for fewer tokens than its row has places.
        StaleHandleError: a sequence is over, or another manager's.
    """

    instead_of_copies = "share its blocks with fork()"

    def __init__(
        self, manager: CacheManager, sequences: Sequence[CacheSequence], *, length: int = 0, pads: npt.ArrayLike | None = None
    ) -> None:
        rows = as_rows(_checked(manager)._rows, "SequenceBatch: sequences", sequences)
        self._length = count_of("SequenceBatch: length", length)
        self._pads = np.zeros(rows.size, dtype=np.intp) if pads is None else as_integers("SequenceBatch: pads", pads).astype(np.intp)
        if not rows.size or self._pads.shape != rows.shape:
            raise ArgumentValueError(
                "SequenceBatch", expected="at least one row, and a pad for each", got=f"{rows.size} rows, {self._pads.size} pads"
            )
        room = np.array([seq.num_tokens for seq in sequences])
        if (self._pads < 0).any() or (room + self._pads < length).any():
            raise IndexRangeError(
                "SequenceBatch",
                expected=f"pads of at least 0, and room for what of the length, {length}, is behind them",
                got=f"pads {self._pads.tolist()} and room for {room.tolist()} tokens",
            )
        self._most_pads = int(self._pads.max())
        self._room, self._order = 0, next(_ORDERS)
        self._manager = manager
        self._tables = manager._pool.tables
        self._sequences = list(sequences)
        # The list itself: `select` and `close` change it in place, and what is in it at the end is to be aborted.
        finalizer = weakref.finalize(self, manager.abort_later, self._sequences)
        finalizer.atexit = False

    @classmethod
    def empty(cls, manager: CacheManager, batch_size: int, namespace: Namespace = ()) -> SequenceBatch:
        """Begin with rows of no tokens, whose ids come later or never."""
        count = count_of("SequenceBatch.empty: batch_size", batch_size, 1)
        return cls(manager, [_checked(manager).open_empty(namespace) for _ in range(count)])

    def __repr__(self) -> str:
        return f"SequenceBatch(batch_size={self.batch_size}, length={self.length}, block_size={self.block_size})"

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._manager.block_size

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self._sequences)

    @property
    def length(self) -> int:
        """Places that each row has in use, pads included."""
        return self._length

    @property
    def pads(self) -> npt.NDArray[np.intp]:
        """Places at the beginning of each row that have no token, ``[batch_size]``; the caller's own array."""
        return self._pads.copy()

    @property
    def most_pads(self) -> int:
        """The largest of them."""
        return self._most_pads

    @property
    def room(self) -> int:
        """Places behind `length` for which `reserve` has made room, which `grow` has not used: it asks nobody for them."""
        return self._room

    @property
    def seq_lens(self) -> Index:
        """Tokens of each row in its blocks, ``[batch_size]``: the places in use that are no padding."""
        return np.maximum(self._length - self._pads, 0)

    @property
    def sequences(self) -> tuple[CacheSequence, ...]:
        """The sequence of each row; `select` and `close` change them. They may have room beyond `seq_lens`, see `reserve`."""
        return tuple(self._sequences)

    @property
    def version(self) -> tuple[int, int]:
        """What is another one, of any batch, whenever the rows are others or blocks of one may be: to be compared in no time."""
        return self._order, self._manager._rows.last_version

    @property
    def table_versions(self) -> Index:
        """`CacheSequence.table_version` of each row, ``[batch_size]``."""
        return self._manager._rows.version[self._live("table_versions")]

    def block_table(self, group: int = 0) -> BlockIds:
        """Return block ids of each row's sequence, int32 ``[batch_size, most blocks]``, 0 behind the shorter ones; pads have no blocks.

        Args:
            group: which layer group; of what it has let go, anything is shown.
        """
        self._live("block_table")
        return dense_table(self._sequences, group=group)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks of the pool that the rows need, in all layer groups."""
        rows = self._live("num_blocks").tolist()
        return np.unique(np.concatenate([table.held(row) for table in self._tables for row in rows])).size

    def grow(self, n: int) -> npt.NDArray[np.int64]:
        """Make room for ``n`` more places in each row, in all rows or in none.

        Returns:
            pairs (source, destination), int64 ``[N, 2]``, of blocks to copy before the new tokens are written, at once.

        Raises:
            OutOfBlocksError: too few blocks are free or evictable. Nothing was changed.
        """
        if n.__class__ is int and 0 <= n <= self._room:
            self._manager._enter()  # as for any other call of it
            self._live("grow")
            pairs = np.empty((0, 2), dtype=np.int64)
        else:
            pairs = self.reserve(n)
        self._length += n
        self._room -= n
        return pairs

    def reserve(self, n: int, *, whole_blocks: bool = False) -> npt.NDArray[np.int64]:
        """Make room as `grow` does, and use none of it yet: the next calls of it do.

        `truncate`, `fork` and a `select` that repeats rows give back what is not used: nobody writes into what is shared.

        Args:
            n: places of each row.
            whole_blocks: make room for what else goes into the blocks, as steps of one token want it: it takes no more of them.
        """
        rows = self._live("grow")
        length = self._length + min(count_of("SequenceBatch.grow: n", n), TOO_MANY)
        room, wanted = self._manager._rows.num_tokens[rows], np.maximum(length - self._pads, 0)
        if whole_blocks:
            size = self._manager._pool.finest
            wanted = -(-wanted // size) * size
        # No match: all rows go on at one place, and a row that found more would run ahead of the others.
        pairs = self._manager.extend(self._sequences, np.maximum(wanted - room, 0), match=False)
        self._room = int((np.maximum(wanted, room) + self._pads).min()) - self._length
        return pairs

    def written(self) -> None:
        """Note that all places in use are written: what windows no longer reach may go, see `CacheManager.note_written`."""
        if self._manager.lets_go:
            self._manager.note_written(self._sequences, self.seq_lens)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` places of each row, and release the blocks behind them.

        Raises:
            IndexRangeError: the rows are shorter than that; or what the next token needs was let go. Nothing was changed.
        """
        self._live("truncate")
        count_of("SequenceBatch.truncate: length", length)
        if length > self._length:
            raise IndexRangeError("SequenceBatch.truncate: length", expected=f"at most the {self._length} places there are", got=length)
        shorter = [
            (seq, tokens)
            for seq, pad in zip(self._sequences, self._pads.tolist(), strict=True)
            if seq.num_tokens > (tokens := max(length - pad, 0))
        ]
        for seq, tokens in shorter:  # all rows are asked before the first is cut
            self._manager._pool.check_kept("SequenceBatch.truncate: length", seq._row, tokens)
        for seq, tokens in shorter:
            self._manager.truncate(seq, tokens)
        self._length, self._room = length, 0

    def select(self, rows: npt.ArrayLike) -> None:
        """Make row ``rows[i]`` the new row i. Rows may be repeated, left out and reordered; repeated rows share blocks.

        Args:
            rows: integers ``[new batch size]``, each from 0 to ``batch_size - 1``; at least one.

        Raises:
            IndexRangeError: a row that does not exist. Nothing was changed.
            ArgumentTypeError: not integers.
            ArgumentValueError: no rows, or more than one dimension.
        """
        self._live("select")
        chosen = as_integers("SequenceBatch.select: rows", rows).tolist()
        if not chosen:
            raise ArgumentValueError("SequenceBatch.select: rows", expected="at least one row", got="none")
        if min(chosen) < 0 or max(chosen) >= self.batch_size:
            raise IndexRangeError("SequenceBatch.select: rows", expected=f"rows from 0 to {self.batch_size - 1}", got=chosen)
        # The first use of a row keeps its sequence; only repetitions are forked.
        first = dict(zip(reversed(chosen), range(len(chosen) - 1, -1, -1), strict=True))
        forks = iter(self._forks([row for at, row in enumerate(chosen) if first[row] != at]))
        made = [self._sequences[row] if first[row] == at else next(forks) for at, row in enumerate(chosen)]
        # Behind the forks, which may be refused: then every row is as it was.
        for row, seq in enumerate(self._sequences):
            if row not in first:
                self._manager.abort(seq)
        self._sequences[:], self._order = made, next(_ORDERS)
        self._pads = self._pads[chosen]
        self._most_pads = int(self._pads.max())

    def repeat(self, times: int) -> None:
        """Put ``times`` of each row beside one another; see `select`."""
        count_of("SequenceBatch.repeat: times", times, 1)
        self.select(np.arange(self.batch_size).repeat(times))

    def fork(self) -> SequenceBatch:
        """Return a batch with the same tokens in the same blocks, shared until one of the two writes."""
        self._live("fork")
        return SequenceBatch(self._manager, self._forks(range(self.batch_size)), length=self._length, pads=self._pads)

    def slot_mapping(self, start: int, stop: int, group: int = 0) -> npt.NDArray[np.int64]:
        """Return the slots of places ``start`` to ``stop - 1``, int64 ``[batch_size, stop - start]``; -1 for pads and what is gone.

        Args:
            start: the first place.
            stop: the one behind the last.
            group: which layer group.

        Raises:
            IndexRangeError: not ``0 <= start <= stop <= length``; no such group.
        """
        rows = self._live("slot_mapping")
        start, stop = (index_of(f"SequenceBatch.slot_mapping: {name}", value) for name, value in (("start", start), ("stop", stop)))
        if not 0 <= start <= stop <= self._length:
            raise IndexRangeError(
                "SequenceBatch.slot_mapping", expected=f"0 <= start <= stop <= {self._length}", got=f"start={start}, stop={stop}"
            )
        places = np.arange(start, stop) - self._pads[:, None]
        table = self._manager._pool.table("SequenceBatch.slot_mapping: group", group)
        return np.where(places < 0, -1, table.slots_at(rows[:, None], np.maximum(places, 0)))

    def close(self, *, keep: bool = True) -> None:
        """End all sequences; what they published stays cached with ``keep``. The batch is of no use then.

        Raises:
            StaleHandleError: somebody else has ended one of them. Nothing was changed.
        """
        # All are checked before the first is ended.
        as_rows(self._manager._rows, "SequenceBatch.close", self._sequences)
        for seq in self._sequences:
            self._manager.finish(seq, keep=keep)
        self._sequences.clear()

    def _forks(self, rows: Iterable[int]) -> list[CacheSequence]:
        """Return a fork for each of ``rows``, or none where one of them is refused; then nothing is promised for their copies."""
        rows = list(rows)
        for row in set(rows):  # with room in a block that it shares, a row would write there without a copy
            if (seq := self._sequences[row]).num_tokens > (tokens := max(self._length - int(self._pads[row]), 0)):
                self._manager.truncate(seq, tokens)
                self._room = 0
        made, promised = list[CacheSequence](), {seq._row: int(self._manager._rows.promised[seq._row]) for seq in self._sequences}
        try:
            for row in rows:
                made.append(self._manager.fork(self._sequences[row], self._sequences[row].num_tokens))
        except BaseException:
            for fork in made:
                self._manager.abort(fork)
            for at, blocks in promised.items():
                self._manager._promises.add(at, blocks - int(self._manager._rows.promised[at]))
            raise
        return made

    def _live(self, what: str) -> Index:
        """Return the rows, or raise: there are none once the batch is closed, and somebody may have ended a sequence of it."""
        if not self._sequences:
            fix = "ask for it before close()"
            raise StaleHandleError(f"SequenceBatch.{what}", expected="an open batch", got="one that is closed", fix=fix)
        return as_rows(self._manager._rows, f"SequenceBatch.{what}", self._sequences)


def _checked(manager: object) -> CacheManager:
    if not isinstance(manager, CacheManager):
        raise ArgumentTypeError("SequenceBatch: manager", expected="a CacheManager", got=repr(manager)[:80])
    return manager
