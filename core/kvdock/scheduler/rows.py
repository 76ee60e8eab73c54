"""What a manager knows of its sequences, in arrays with a row for each: a step of a batch is a few operations of numpy.

::

    tokens of a row:   0 ..... cached_len ..... computed ..... num_tokens        ids are known of the first `num_known`
    blocks of a row:   | 7 | 3 | 12 | 5 | 9 | 1 |                                ceil(num_tokens / block_size)
                       |<-- shared -->|<- own ->|                                shared ones belong to the prefix cache and are
                                                                                 locked; of its own ones the sequence is a holder
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds, Namespace, PrefixHandle
from kvdock.prefix.ownership import NotCopied

__all__ = ["Index", "Owner", "Rows", "positions_of", "steps"]

Index = npt.NDArray[np.intp]
"""Rows, tokens or positions, as numpy counts them."""


class Owner(NotCopied):
    """Whose a row is: a sequence, as far as what counts rows knows it.

    Attributes:
        namespace: where its prefix is shared.
    """

    def __init__(self, rows: Rows, namespace: Namespace, handle: PrefixHandle, serial: int) -> None:
        self.namespace = namespace
        self._rows = rows
        self._row = -1
        self._handle: PrefixHandle | None = handle  # what it has locked
        self._serial = serial  # by which the manager knows which blocks it has published
        self._cached_len = 0
        self._left: list[npt.NDArray[Any]] = []  # token ids of prefixes that it published and was cut from

    @property
    def is_open(self) -> bool:
        """Whether it was neither finished nor aborted."""
        return self._row >= 0


class Rows:
    """The arrays. A row belongs to one open sequence, or to nobody.

    Args:
        block_size: tokens in a block.

    Attributes:
        table: block ids, int32 ``[rows, width]``; 0 behind ``num_blocks`` of a row.
        num_tokens: tokens that there is room for, ``[rows]`` as all that follow.
        num_known: tokens whose ids are known.
        prompt_len: tokens to match again when the row grows; 0 for none.
        computed: tokens whose keys and values are written, and whose ids are known.
        written: tokens whose keys and values are written; what is less than ``computed`` says nothing.
        num_blocks: blocks.
        shared: leading blocks that belong to the prefix cache.
        published: leading blocks that the prefix cache was asked to store.
        limit: tokens up to which blocks were promised.
        promised: blocks that were promised and not taken yet.
        version: another number whenever blocks of the row change, and in no two rows the same.
        replaced: the version since which the row has only got more blocks behind those that it had.
        serial: the number by which the publisher knows the sequence.
        locked: blocks before the place that the sequence has locked in the prefix cache.
        priority: for the eviction policy.
        least: tokens that it cannot have fewer of and go on, but for none: of blocks before it had only a part written; 0 for no such.
        last_version: the last number that was one.
        last_batch: the sequences that came last, all of them open still, and their rows.
    """

    _INTEGERS = (
        "num_tokens",
        "num_known",
        "prompt_len",
        "computed",
        "written",
        "num_blocks",
        "shared",
        "published",
        "limit",
        "promised",
        "version",
        "replaced",
        "serial",
        "locked",
        "priority",
        "least",
    )

    num_tokens: Index
    num_known: Index
    prompt_len: Index
    computed: Index
    written: Index
    num_blocks: Index
    shared: Index
    published: Index
    limit: Index
    promised: Index
    version: Index
    replaced: Index
    serial: Index
    locked: Index
    priority: Index
    least: Index

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.table: BlockIds = np.zeros((0, 8), dtype=np.int32)
        self.sequences: list[Owner | None] = []
        self.num_chunked = 0
        self.last_batch: tuple[list[Owner], Index] = [], np.empty(0, dtype=np.intp)
        self._free: list[int] = []
        self.last_version = 0
        for name in self._INTEGERS:
            setattr(self, name, np.zeros(0, dtype=np.intp))

    def sequence(self, row: int) -> Owner:
        """Return the sequence of a row that is somebody's."""
        seq = self.sequences[row]
        assert seq is not None  # noqa: S101 - callers have rows of open sequences
        return seq

    def handle(self, row: int) -> PrefixHandle:
        """Return what the sequence of a row has locked."""
        seq = self.sequences[row]
        assert seq is not None and seq._handle is not None  # noqa: S101, PT018 - callers have rows of open sequences
        return seq._handle

    def open(self) -> list[Owner]:
        """Return the open sequences, in the order of their rows."""
        return [seq for seq in self.sequences if seq is not None]

    def add(self, seq: Owner, blocks: BlockIds, **values: int) -> int:
        """Give a sequence a row with these blocks and values, 0 for those that are not named; return the row."""
        if not self._free:
            self._more_rows()
        row = self._free.pop()
        self.reserve_width(blocks.size)
        self.sequences[row] = seq
        self.table[row, : blocks.size] = blocks
        for name in self._INTEGERS:
            getattr(self, name)[row] = values.get(name, 0)
        handle = self.handle(row)
        self.num_blocks[row], self.serial[row], self.locked[row] = blocks.size, seq._serial, handle.cached_len // self.block_size
        self.num_chunked += self.prompt_len[row] > 0
        self.touch(np.array([row]))
        return row

    def remove(self, row: int) -> None:
        """Take a row back."""
        self.end_chunks(row)
        self.cut(row, 0)
        self.sequences[row] = None
        # It may name this sequence, and holds open ones only.
        self.last_batch = [], np.empty(0, dtype=np.intp)
        self._free.append(row)

    def cut(self, row: int, keep: int) -> None:
        """Keep the first ``keep`` blocks of a row."""
        self.table[row, keep : self.num_blocks[row]] = 0
        self.num_blocks[row] = keep

    def touch(self, rows: Index, *, has_grown: bool = False) -> None:
        """Note that the blocks of rows have changed; or only that there are more behind them."""
        self.version[rows] = np.arange(self.last_version + 1, self.last_version + 1 + rows.size)
        if not has_grown:
            self.replaced[rows] = self.version[rows]
        self.last_version += rows.size

    def reach(self, rows: Any) -> Any:
        """Return how many tokens of rows are written."""
        return np.maximum(self.computed[rows], self.written[rows])

    def end_chunks(self, row: int) -> None:
        """Match the prompt of a row no longer."""
        self.num_chunked -= self.prompt_len[row] > 0
        self.prompt_len[row] = 0

    def blocks(self, row: int, start: int = 0, stop: int | None = None) -> BlockIds:
        """Return blocks of a row; a view."""
        return self.table[row, start : self.num_blocks[row] if stop is None else stop]

    def blocks_for(self, tokens: Any) -> Any:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def slots(self, rows: Index, starts: Index, counts: Index) -> Index:
        """Return the slots of ``counts`` tokens of each row from ``starts`` on, one row behind the other."""
        positions = positions_of(starts, counts)
        return self.slots_at(rows if positions is starts else rows.repeat(counts), positions)

    def slots_at(self, rows: Index, positions: Index) -> Index:
        """Return the slot of one token of each row; a row may be there more than once."""
        blocks = positions // self.block_size
        # block * size + (position - index * size), with one multiplication less.
        slots: Index = (self.table[rows, blocks] - blocks) * self.block_size + positions
        return slots

    def reserve_width(self, blocks: int) -> None:
        """Make rows long enough for so many blocks."""
        if blocks > self.table.shape[1]:
            # Doubled, so that a sequence that grows block by block does not copy the table each time.
            wider = np.zeros((len(self.table), max(blocks, 2 * self.table.shape[1])), dtype=np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider

    def _more_rows(self) -> None:
        count, more = len(self.sequences), max(8, len(self.sequences))
        for name in ("table", *self._INTEGERS):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros((more, *array.shape[1:]), dtype=array.dtype))))
        self.sequences += [None] * more
        # Backwards, since rows are popped from the end: the lowest is used first.
        self._free += range(count + more - 1, count - 1, -1)


def positions_of(starts: Index, counts: Index) -> Index:
    """Return the ``counts`` positions of each row from ``starts`` on, one row behind the other; ``starts`` itself for one of each."""
    if np.count_nonzero(counts == 1) == counts.size:  # a step of decoding: half of the time is saved
        return starts
    return starts.repeat(counts) + steps(counts)


def steps(counts: Index) -> Index:
    """Return 0, 1, ... for each of ``counts``, one behind the other."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if counts.size else 0) - (ends - counts).repeat(counts)
