"""Token ids as bytes: what a radix tree stores and compares."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["common_blocks", "first_wide", "token_bytes", "tokens_of", "widened"]

_INT32 = np.iinfo(np.int32)
_DTYPES: dict[int, np.dtype[np.signedinteger[Any]]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}


def token_bytes(ids: npt.NDArray[Any], width: int) -> bytes | None:
    """Return token ids in ``width`` bytes each, or None when one does not fit."""
    dtype = _DTYPES[width]
    if ids.dtype == dtype:
        return ids.tobytes()
    if width == 4 and not np.can_cast(ids.dtype, dtype) and ids.size and (ids.max() > _INT32.max or ids.min() < _INT32.min):
        return None
    return ids.astype(dtype).tobytes()


def first_wide(ids: npt.NDArray[Any]) -> int:
    """Return the place of the first token id that does not fit 4 bytes, of which there is one."""
    return int(((ids > _INT32.max) | (ids < _INT32.min)).argmax())


def tokens_of(label: bytes, width: int) -> npt.NDArray[np.int64]:
    """Return the token ids of a label, an array of its own."""
    return np.frombuffer(label, dtype=_DTYPES[width]).astype(np.int64)


def widened(label: bytes) -> bytes:
    """Return a label of 4 bytes per token in 8."""
    return tokens_of(label, 4).tobytes()


def common_blocks(label: bytes, labels: bytes, position: int, block_bytes: int, width: int) -> int:
    """Return how many whole blocks of ``label`` are those of ``labels`` from ``position`` on; less than all of them."""
    length = min(len(label), len(labels) - position)
    ours = np.frombuffer(label, dtype=_DTYPES[width], count=length // width)
    theirs = np.frombuffer(labels, dtype=_DTYPES[width], count=length // width, offset=position)
    differ = ours != theirs
    same = int(differ.argmax()) if differ.any() else len(ours)
    return same * width // block_bytes
