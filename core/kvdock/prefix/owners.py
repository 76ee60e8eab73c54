"""Which blocks a prefix cache holds."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError
from kvdock.prefix.inputs import MAX_SLOTS, out_of_range, twice

__all__ = ["StoredBlocks"]

_BlockIds = npt.NDArray[np.int32]

_MOST_RELEASED = 1000
"""Runs that are kept in mind: a few 100 KiB."""


class StoredBlocks:
    """A table by block id: 0 for a block that is not stored, and has not been released lately.

    What is taken over gets a number of its own for each block, which is read back then: of a block that is there twice, one
    number is gone. That costs a fifth of sorting the ids.

    Blocks that an eviction releases mostly come back for other tokens, in the same order. So they stay in the table for the
    time being, and what comes back so is compared as a whole, which costs a tenth of looking up and writing each.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._most = MAX_SLOTS // block_size
        self._block_size = block_size
        self._table = np.zeros(0, dtype=np.int32)
        self._numbers = np.arange(1, 1025, dtype=np.int32)
        self._released: dict[int, bytes] = {}  # ids by the first of each; they are in the table still, and in one of these at most

    def ids(self) -> _BlockIds:
        """Return the ids of all stored blocks, sorted."""
        is_stored = self._table != 0
        is_stored[np.frombuffer(b"".join(self._released.values()), dtype=np.int32)] = False
        return np.flatnonzero(is_stored).astype(np.int32)

    def clear(self) -> None:
        """Forget all."""
        self._table = np.zeros(0, dtype=np.int32)
        self._released.clear()

    def release(self, blocks: _BlockIds) -> None:
        """Note that blocks are no longer stored; there is one at least."""
        if blocks.size == 1:
            self._table[int(blocks[0])] = 0
            return
        if len(self._released) == _MOST_RELEASED:
            self._settle()
        self._released[int(blocks[0])] = blocks.tobytes()

    def _settle(self) -> None:
        """Take out of the table what was released."""
        self._erase(b"".join(self._released.values()))
        self._released.clear()

    def _erase(self, ids: bytes) -> None:
        self._table[np.frombuffer(ids, dtype=np.int32).astype(np.intp)] = 0  # indices of another width take twice the time

    def claim(self, subject: str, blocks: _BlockIds, known: _BlockIds) -> _BlockIds:
        """Take over blocks, those behind ``known``.

        Args:
            subject: what to call the blocks in an error.
            blocks: int32 ``[n]``, for as many blocks of tokens.
            known: the stored blocks of the first of these tokens.

        Returns:
            the blocks of all these tokens, an array of its own: with ``known`` in the place of the first, which are not taken over
            unless they are those.

        Raises:
            ArgumentValueError: a block is negative, there twice, or stored for other tokens. Nothing has changed.
        """
        if not known.size:
            self._take(subject, blocks)
            return blocks.copy()
        first, fresh = blocks[: known.size], blocks[known.size :]
        others = first[first != known]
        if not others.size:
            self._take(subject, fresh)
            return blocks.copy()
        self._take(subject, np.concatenate((others, fresh)))
        self.release(others)
        return np.concatenate((known, fresh))

    def _take(self, subject: str, blocks: _BlockIds) -> None:
        """Take over blocks that are not stored, each once."""
        if not blocks.size:
            return
        first = int(blocks[0])
        if blocks.size == 1 and 0 <= first < self._table.size and not self._table[first]:
            self._table[first] = 1  # a sequence that generates publishes one at a time: a tenth of the time of what follows
            return
        # Mostly they are back from an eviction in the same order: the table has them still, and one comparison of bytes is enough.
        ids = blocks.tobytes()
        if self._released.get(first) == ids:
            del self._released[first]
            return
        back, runs, left = self._coming_back(ids)
        if back < blocks.size:
            places = self._places(subject, blocks[back:])
            if not self._are_free(places):
                self._settle()
                # What is in the table now is stored: those that were only kept in mind are out of it.
                runs, left, places = {}, b"", self._places(subject, blocks)
                if not self._are_free(places):
                    raise self._stored(subject, int(blocks[self._table[places] != 0][0]))
            self._write(subject, blocks, places)
        for each in runs:
            del self._released[each]
        if left:  # the next to be handed out begins there
            self._released[_first(left)] = left

    def _coming_back(self, ids: bytes) -> tuple[int, dict[int, bytes], bytes]:
        """Return how many first ids are runs that were released, one behind the other; these runs, and what the last has behind that."""
        runs: dict[int, bytes] = {}
        rest, left = ids, b""
        while rest and not left:
            run = self._released.get(first := _first(rest), b"")
            if not run or first in runs or not (rest.startswith(run) or run.startswith(rest)):
                break
            runs[first], rest, left = run, rest[len(run) :], run[len(rest) :]
        return (len(ids) - len(rest)) // 4, runs, left

    def _places(self, subject: str, blocks: _BlockIds) -> npt.NDArray[np.intp]:
        """Return the places of blocks in the table, which is made larger for them."""
        places = blocks.view(np.uint32).astype(np.intp)  # without a sign, negative ids are beyond any table
        if (highest := int(places.max())) >= self._table.size:
            self._reach(subject, highest)
        return places

    def _are_free(self, places: npt.NDArray[np.intp]) -> bool:
        """Whether the table has none of some blocks. Comparing bytes takes a third of the time of `any`."""
        return self._table.take(places).tobytes() == bytes(self._table.itemsize * places.size)

    def _write(self, subject: str, blocks: _BlockIds, places: npt.NDArray[np.intp]) -> None:
        """Write blocks into the table, where none of them is."""
        numbers = self._numbers_for(places.size)
        self._table[places] = numbers
        if self._table.take(places).tobytes() != numbers.tobytes():
            self._table[places] = 0
            raise twice(subject, blocks)

    def _reach(self, subject: str, highest: int) -> None:
        if highest >= self._most:
            raise out_of_range(subject, int(np.uint32(highest).astype(np.int32)), self._block_size)
        grown = np.zeros(min(max(highest + 1, 2 * self._table.size), self._most), dtype=np.int32)
        grown[: self._table.size] = self._table
        self._table = grown

    def _numbers_for(self, count: int) -> _BlockIds:
        """Return the numbers from 1 to ``count``."""
        if count > self._numbers.size:
            self._numbers = np.arange(1, 2 * count, dtype=np.int32)
        return self._numbers[:count]

    def _stored(self, subject: str, block: int) -> ArgumentValueError:
        """Describe a block that is stored for other tokens."""
        return ArgumentValueError(
            subject,
            expected="blocks that are not stored, or each for its own tokens",
            got=f"block {block}, which is stored for other tokens",
            fix="allocate a block for each block of new tokens, and free it only when evict() returned it",
        )


def _first(ids: bytes) -> int:
    return int.from_bytes(ids[:4], sys.byteorder)
