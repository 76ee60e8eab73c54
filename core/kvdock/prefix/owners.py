"""Which blocks a prefix cache holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError
from kvdock.prefix.inputs import MAX_SLOTS, out_of_range, twice

__all__ = ["StoredBlocks"]

_BlockIds = npt.NDArray[np.int32]


class StoredBlocks:
    """A table by block id: 0 for a block that is not stored.

    What is taken over gets a number of its own for each block, which is read back then: of a block that is there twice, one
    number is gone. That costs a fifth of sorting the ids.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._most = MAX_SLOTS // block_size
        self._block_size = block_size
        self._table = np.zeros(0, dtype=np.int32)
        self._numbers = np.arange(1, 1025, dtype=np.int32)

    def ids(self) -> _BlockIds:
        """Return the ids of all stored blocks, sorted."""
        return np.flatnonzero(self._table).astype(np.int32)

    def clear(self) -> None:
        """Forget all."""
        self._table = np.zeros(0, dtype=np.int32)

    def release(self, blocks: _BlockIds) -> None:
        """Note that blocks are no longer stored."""
        self._table[blocks.astype(np.intp)] = 0  # indices of the machine's own width take half the time

    def claim(self, subject: str, blocks: _BlockIds, known: _BlockIds) -> bool:
        """Take over blocks, those behind ``known``.

        Args:
            subject: what to call the blocks in an error.
            blocks: int32 ``[n]``, for as many blocks of tokens.
            known: the stored blocks of the first of these tokens.

        Returns:
            whether the first blocks are the known ones. Otherwise they are not taken over.

        Raises:
            ArgumentValueError: a block is negative, there twice, or stored for other tokens. Nothing has changed.
        """
        if not known.size:
            self._take(subject, blocks)
            return True
        first, fresh = blocks[: known.size], blocks[known.size :]
        if first.tobytes() == known.tobytes():
            self._take(subject, fresh)
            return True
        others = first[first != known]
        self._take(subject, np.concatenate((others, fresh)))
        self.release(others)
        return False

    def _take(self, subject: str, blocks: _BlockIds) -> None:
        """Take over blocks that are not stored, each once."""
        if blocks.size == 1 and 0 <= (block := int(blocks[0])) < self._table.size and not self._table[block]:
            self._table[block] = 1  # a sequence that generates publishes one at a time: half the time of what follows
            return
        places = blocks.view(np.uint32).astype(np.intp)  # without a sign, negative ids are beyond any table
        try:
            taken = self._table.take(places)
        except IndexError:
            self._reach(subject, int(places.max()))
            taken = self._table.take(places)
        if taken.tobytes() != bytes(taken.nbytes):
            raise self._stored(subject, int(blocks[taken != 0][0]))
        numbers = self._numbers_for(blocks.size)
        self._table[places] = numbers
        if self._table.take(places).tobytes() != numbers.tobytes():
            self._table[places] = 0
            raise twice(subject, blocks)

    def _reach(self, subject: str, highest: int) -> None:
        """Make the table larger."""
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
