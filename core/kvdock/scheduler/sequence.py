"""One sequence of a `CacheManager`: what an engine asks it. The manager has its numbers, in `kvdock.scheduler.rows`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import IndexRangeError, StaleHandleError
from kvdock.prefix.inputs import index_of
from kvdock.prefix.interface import BlockIds, Namespace, PrefixHandle
from kvdock.scheduler.ids import TokenIds
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Owner, Rows

__all__ = ["CacheSequence"]

_NO_PAIRS: npt.NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)


class CacheSequence(Owner):
    """A sequence that a `CacheManager` has made room for. Only its manager changes it.

    Once it is finished or aborted its blocks may be another's: then all but ``namespace`` and ``is_open`` raise `StaleHandleError`.
    It cannot be copied or pickled; `CacheManager.fork` shares its blocks.

    Attributes:
        namespace: where its prefix is shared.
        block_pairs: blocks to copy as soon as it has begun, int64 ``[N, 2]`` (source, destination): a later call may hand out a
            source. There are none unless `CacheManager.begin` was asked for a part of a block, or layers keep states.
    """

    instead_of_copies = "share its blocks with CacheManager.fork(), or begin another with its tokens"

    def __init__(self, pool: PoolBlocks, rows: Rows, ids: TokenIds, namespace: Namespace, handle: PrefixHandle, serial: int) -> None:
        super().__init__(rows, namespace, handle, serial)
        self._pool = pool
        self.block_pairs = _NO_PAIRS
        self._ids = ids

    def __repr__(self) -> str:
        if not self.is_open:
            return "CacheSequence(closed)"
        return f"CacheSequence(num_tokens={self.num_tokens}, cached_len={self._cached_len}, computed={self.computed})"

    @property
    def block_size(self) -> int:
        """Tokens in a block; with several layer groups those in which blocks of all end together."""
        return self._rows.block_size

    @property
    def cached_len(self) -> int:
        """Tokens whose keys and values were found; of its tokens, those from here on are computed by whoever began it."""
        self._live("cached_len")
        return self._cached_len

    @property
    def num_tokens(self) -> int:
        """Tokens that there is room for."""
        return int(self._rows.num_tokens[self._live("num_tokens")])

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known. They may run ahead of the room."""
        return int(self._rows.num_known[self._live("num_known")])

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are written, as far as the manager was told; compute from here on."""
        return int(self._rows.computed[self._live("computed")])

    @property
    def table_version(self) -> int:
        """A number that changes whenever `block_table` does; no two sequences of a manager ever have the same.

        That a group lets go of blocks, which no later token reads, does not count.
        """
        return int(self._rows.version[self._live("table_version")])

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The token ids that are known, ``[num_known]``; the caller's own array."""
        row = self._live("tokens")
        return self._ids.get(row, 0, int(self._rows.num_known[row])).copy()

    @property
    def shortest(self) -> int:
        """Tokens from which on `CacheManager.truncate` and `CacheManager.fork` can keep any number, up to what is computed.

        0 where all layers keep all tokens. Before it something that the next token needs was let go, or is in a state.
        """
        return self._pool.shortest(self._live("shortest"))

    def block_table(self, group: int = 0) -> BlockIds:
        """Return block ids, int32 ``[ceil(num_tokens / block size of the group)]``; the caller's own array.

        `CacheManager.commit` and `CacheManager.extend` may change it: see `table_version`.

        Args:
            group: which layer group. What it has let go is 0; of a group of states, the one block of the sequence's.

        Raises:
            IndexRangeError: no such group.
            StaleHandleError: the sequence is over.
        """
        row = self._live("block_table")
        return self._pool.table("CacheSequence.block_table: group", group).blocks(row)

    def slot_mapping(self, start: int, stop: int, group: int = 0) -> npt.NDArray[np.int64]:
        """Return the slots of tokens ``start`` to ``stop - 1``, int64 ``[stop - start]``.

        Args:
            start: the first token.
            stop: the one behind the last.
            group: which layer group. A token whose block is gone has slot -1.

        Raises:
            IndexRangeError: not ``0 <= start <= stop <= num_tokens``; no such group.
            ArgumentValueError: a group of states.
            StaleHandleError: the sequence is over.
        """
        row = self._live("slot_mapping")
        start, stop = (index_of(f"CacheSequence.slot_mapping: {name}", value) for name, value in (("start", start), ("stop", stop)))
        if not 0 <= start <= stop <= self.num_tokens:
            expected, fix = f"0 <= start <= stop <= {self.num_tokens}", "make room by CacheManager.extend first"
            raise IndexRangeError("CacheSequence.slot_mapping", expected=expected, got=f"start={start}, stop={stop}", fix=fix)
        table = self._pool.table("CacheSequence.slot_mapping: group", group)
        return table.slots(np.array([row]), np.array([start]), np.array([stop - start]))

    def _live(self, what: str) -> int:
        """Return its row, or raise if it is over."""
        if self._row < 0:
            raise StaleHandleError(
                f"CacheSequence.{what}",
                expected="an open sequence",
                got="one that is finished or aborted, whose blocks may be another's by now",
                fix="ask for it before finish() or abort()",
            )
        return self._row
