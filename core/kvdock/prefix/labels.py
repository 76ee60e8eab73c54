"""Token ids as bytes: what a radix tree stores and compares."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["common_blocks", "first_wide", "token_data", "tokens_of", "widened"]

_FIRST_STEP = 8192
"""Bytes of two runs that are compared first; then four times as many, and so on."""

_INT32 = np.iinfo(np.int32)
_DTYPES: dict[int, np.dtype[np.signedinteger[Any]]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}


def token_data(ids: npt.NDArray[Any], width: int) -> memoryview | None:
    """Return the bytes of token ids in ``width`` bytes each, or None when one does not fit. They may be the caller's memory."""
    dtype = _DTYPES[width]
    if not ids.size:
        return memoryview(b"")
    if ids.dtype != dtype:
        if width == 4 and not np.can_cast(ids.dtype, dtype) and (ids.max() > _INT32.max or ids.min() < _INT32.min):
            return None
        ids = ids.astype(dtype)
    return (ids if ids.flags.c_contiguous else ids.copy()).data.cast("B")


def first_wide(ids: npt.NDArray[Any]) -> int:
    """Return the place of the first token id that does not fit 4 bytes, of which there is one."""
    return int(((ids > _INT32.max) | (ids < _INT32.min)).argmax())


def tokens_of(label: bytes | bytearray, width: int) -> npt.NDArray[np.int64]:
    """Return the token ids of a label, an array of its own."""
    return np.frombuffer(label, dtype=_DTYPES[width]).astype(np.int64)


def widened(label: bytes | bytearray) -> bytes:
    """Return a label of 4 bytes per token in 8."""
    return tokens_of(label, 4).tobytes()


def common_blocks(label: bytearray, start: int, data: memoryview, position: int, block_bytes: int) -> int:
    """Return how many whole blocks of ``label`` from ``start`` on are those of ``data`` from ``position`` on.

    Reads little more than those. No view of the label is left when it returns, since that would keep it from growing.
    """
    size, done, step = min(len(label) - start, len(data) - position), 0, _FIRST_STEP
    while done < size:
        count = min(step, size - done) // 4
        ours = np.frombuffer(label, dtype=np.int32, count=count, offset=start + done)
        theirs = np.frombuffer(data, dtype=np.int32, count=count, offset=position + done)
        differ = ours != theirs
        at = int(differ.argmax())
        if differ[at]:
            return (done + 4 * at) // block_bytes
        done, step = done + 4 * count, 4 * step
    return size // block_bytes
