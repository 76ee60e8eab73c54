"""Acme's copy engine: what would be the vendor's runtime library, simulated in host memory.

It moves pieces of bytes: each begins at a multiple of 4 bytes, is as many bytes long, and lies any number of such steps from
the next. Firmware 2 takes the slots that it writes to for unsigned numbers, so that negative ones, which mean padding, land in
the pool. The variable ACME_FIRMWARE says which firmware to simulate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "Engine", "Numbers", "Pieces"]

ALIGNMENT = 4
"""Addresses, lengths, and steps from piece to piece must be multiples of so many bytes."""

Pieces = npt.NDArray[np.void]
"""Memory seen as pieces that are moved as such, at any steps."""

Numbers = npt.NDArray[np.integer[Any]]

_AT_ONCE = 1 << 20
"""Bytes that are moved in one step. Numpy stages them, in memory that is none of torch's, so they are few."""


def _parts(rows: Pieces, slots: Numbers) -> Iterator[slice]:
    """Yield parts of the first dimension of rows and slots: what moves in one step."""
    step = max(1, _AT_ONCE // max(1, rows[:1].nbytes))
    yield from (slice(begin, begin + step) for begin in range(0, len(slots), step))


class Engine:
    """The engine of one device. It is done when a call returns.

    Args:
        firmware: version of its firmware.
    """

    def __init__(self, firmware: int) -> None:
        self.firmware = firmware

    @classmethod
    def find(cls) -> Engine:
        """Return the engine that is there: with the newest firmware unless ACME_FIRMWARE says otherwise."""
        return cls(int(os.environ.get("ACME_FIRMWARE", "3")))

    def write(self, pool: Pieces, rows: Pieces, slots: Numbers) -> None:
        """Write each row to its slot; a negative slot is skipped.

        Args:
            pool: ``[blocks, block_size, heads]``.
            rows: ``[..., heads]``.
            slots: ``[...]``, below ``blocks * block_size``.
        """
        if self.firmware < 3:
            slots = slots % (pool.shape[0] * pool.shape[1])
        for part in _parts(rows, slots):
            kept = slots[part] >= 0
            pool[np.divmod(slots[part][kept], pool.shape[1])] = rows[part][kept]

    def read(self, pool: Pieces, rows: Pieces, slots: Numbers) -> None:
        """Read each row from its slot; a negative slot reads as zeros. Arguments are those of `write`."""
        for part in _parts(rows, slots):
            kept, to = slots[part] >= 0, rows[part]
            to[kept] = pool[np.divmod(slots[part][kept], pool.shape[1])]
            to[~kept] = np.zeros((), rows.dtype)

    def append(self, cache: Pieces, rows: Pieces, starts: Numbers) -> None:
        """Write new positions behind those that a row of a cache holds.

        Args:
            cache: ``[batch, heads, positions]``; the first rows of the batch are written.
            rows: ``[rows, heads, new]``.
            starts: ``[rows]``, the position of the first new one in each row.
        """
        for row, start in enumerate(starts):
            cache[row, :, start : start + rows.shape[2]] = rows[row]

    def move(self, pool: Pieces, pairs: Numbers) -> None:
        """Copy blocks inside a pool.

        Args:
            pool: ``[blocks, block_size, heads]``.
            pairs: ``[pairs, 2]`` (from, to), in any order: no block is both.
        """
        pool[pairs[:, 1]] = pool[pairs[:, 0]]
