"""Block tables in the forms that attention kernels read: dense, CSR, or one entry per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError
from kvdock.scheduler.sequence import CacheSequence

__all__ = ["CSRTable", "csr_table", "dense_table", "sequence_lengths", "token_table"]


@attrs.frozen(eq=False)
class CSRTable:
    """Blocks of a batch, one sequence behind the other; the form that FlashInfer reads.

    Args:
        indptr: where each sequence's blocks begin, and where the last one's end, int32 ``[batch + 1]``.
        indices: block ids, int32 ``[indptr[-1]]``.
        last_block_len: tokens in each sequence's last block, 1 to ``block_size``, 0 without any; int32 ``[batch]``.
    """

    indptr: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    last_block_len: npt.NDArray[np.int32]


def sequence_lengths(sequences: Sequence[CacheSequence]) -> npt.NDArray[np.int32]:
    """Return how many tokens each has room for, int32 ``[batch]``."""
    return np.array([seq.num_tokens for seq in sequences], dtype=np.int32)


def dense_table(sequences: Sequence[CacheSequence], *, fill: int = 0, width: int | None = None) -> npt.NDArray[np.int32]:
    """Return block ids, int32 ``[batch, most blocks]``; the form of flash-attn, torch's ``varlen_attn`` and vLLM.

    Args:
        sequences: the batch.
        fill: what stands behind the blocks of shorter ones. 0 is a block that exists, so that it can be read.
        width: columns, at least as many as the longest has blocks; captured graphs need one width for all steps.

    Raises:
        ArgumentValueError: ``width`` is too small.
    """
    return _dense([seq.block_table for seq in sequences], fill, width)


def token_table(sequences: Sequence[CacheSequence], *, fill: int = 0, width: int | None = None) -> npt.NDArray[np.int32]:
    """Return the slot of every token, int32 ``[batch, most tokens]``; the form of SGLang. Arguments as for `dense_table`."""
    return _dense([seq.slot_mapping(0, seq.num_tokens) for seq in sequences], fill, width)


def csr_table(sequences: Sequence[CacheSequence]) -> CSRTable:
    """Return block ids one sequence behind the other, with the length of each last block."""
    tables = [seq.block_table for seq in sequences]
    indptr = np.zeros(len(tables) + 1, dtype=np.int32)
    np.cumsum([table.size for table in tables], out=indptr[1:])
    last = [seq.num_tokens - max(table.size - 1, 0) * seq.block_size for seq, table in zip(sequences, tables, strict=True)]
    return CSRTable(indptr, np.concatenate([np.empty(0, dtype=np.int32), *tables]), np.array(last, dtype=np.int32))


def _dense(rows: Sequence[npt.NDArray[Any]], fill: int, width: int | None) -> npt.NDArray[np.int32]:
    """Put rows of different lengths below one another."""
    longest = max((row.size for row in rows), default=0)
    columns = longest if width is None else width
    if columns < longest:
        raise ArgumentValueError("width", expected=f"at least {longest}, as long as the longest row", got=width)
    table = np.full((len(rows), columns), fill, dtype=np.int32)
    for row, values in zip(table, rows, strict=True):
        row[: values.size] = values
    return table
