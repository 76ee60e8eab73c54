"""Acme's copy engine: what would be the vendor's runtime library, simulated in host memory.

It moves pieces of bytes from and to addresses that are multiples of 4. Firmware 2 takes slots for unsigned numbers, so that
negative ones, which mean padding, land in the pool. The variable ACME_FIRMWARE says which firmware to simulate.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "Engine", "Pieces", "Slots"]

ALIGNMENT = 4
"""Addresses, and steps between rows, must be multiples of so many bytes."""

Pieces = npt.NDArray[np.void]
"""Memory seen as pieces that are moved as such."""

Slots = npt.NDArray[np.integer[Any]]


class Engine:
    """The engine of one device.

    Args:
        firmware: version of its firmware.
    """

    def __init__(self, firmware: int) -> None:
        self.firmware = firmware

    @classmethod
    def find(cls) -> Engine:
        """Return the engine that is there: with the newest firmware unless ACME_FIRMWARE says otherwise."""
        return cls(int(os.environ.get("ACME_FIRMWARE", "3")))

    def write(self, pool: Pieces, rows: Pieces, slots: Slots) -> None:
        """Write rows to slots: ``pool[slots[i]] = rows[i]``; a negative slot is skipped.

        Args:
            pool: ``[slots, pieces]``.
            rows: ``[tokens, pieces]``.
            slots: ``[tokens]``, below the pool's end.
        """
        if self.firmware < 3:
            slots = slots % len(pool)
        edges = np.flatnonzero(np.diff(slots >= 0, prepend=False, append=False))
        for start, stop in edges.reshape(-1, 2):
            pool[slots[start:stop]] = rows[start:stop]
