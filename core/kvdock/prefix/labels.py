"""Token ids as a radix tree stores them: as bytes, compared with those of a prompt."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["NARROW", "WIDE", "TokenIds", "as_narrow", "common_ids", "common_tokens", "widened"]

TokenIds: TypeAlias = npt.NDArray[Any]
"""Token ids in one of these widths."""

NARROW: np.dtype[Any] = np.dtype(np.int32)
WIDE: np.dtype[Any] = np.dtype(np.int64)

_FIRST_STEP = 2048
"""Token ids of two runs that are compared first; then four times as many, and so on."""


def as_narrow(ids: TokenIds) -> TokenIds:
    """Return token ids as int32, up to the first that does not fit."""
    if np.can_cast(ids.dtype, NARROW) or not ids.size:
        return ids.astype(NARROW)
    least, most = np.iinfo(NARROW).min, np.iinfo(NARROW).max
    if ids.max() > most or ids.min() < least:
        ids = ids[: int(((ids > most) | (ids < least)).argmax())]
    return ids.astype(NARROW)


def widened(label: bytes | bytearray) -> bytes:
    """Return a label of 4 bytes per token in 8."""
    return np.frombuffer(label, dtype=NARROW).astype(WIDE).tobytes()


def common_tokens(label: bytearray, start: int, ids: TokenIds) -> int:
    """Return how many of a label's token ids from the ``start``-th on are the first of ``ids``, which are as wide.

    No view of the label is left when it returns, since that would keep it from growing.
    """
    return common_ids(np.frombuffer(label, dtype=ids.dtype)[start:], ids)


def common_ids(these: TokenIds, those: TokenIds) -> int:
    """Return how many first token ids are the same. Reads little more than those."""
    size, done, step = min(these.size, those.size), 0, _FIRST_STEP
    while done < size:
        stop = min(done + step, size)
        differ = these[done:stop] != those[done:stop]
        at = int(differ.argmax())
        if differ[at]:
            return done + at
        done, step = stop, 4 * step
    return size
