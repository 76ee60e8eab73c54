"""Block tables in the forms that attention kernels read: dense, CSR, or one entry per token. On the host; see `BatchTables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.prefix.inputs import MAX_SLOTS, count_of, index_of
from kvdock.scheduler.batches import as_rows
from kvdock.scheduler.rows import Index, Rows, steps
from kvdock.scheduler.sequence import CacheSequence
from kvdock.scheduler.tables import GroupTable, OnlyTable

__all__ = ["CSRTable", "csr_table", "dense_table", "sequence_lengths", "token_table"]

Int32 = npt.NDArray[np.int32]
"""An array of int32."""


@attrs.frozen(eq=False)
class CSRTable:
    """Blocks of a batch, one sequence behind the other; the form that FlashInfer reads.

    Args:
        indptr: where each sequence's blocks begin, and where the last one's end, int32 ``[batch + 1]``.
        indices: block ids, int32 ``[indptr[-1]]``; longer where the caller brought the array, and of its own behind that.
        last_block_len: tokens in each sequence's last block, 1 to ``block_size``, 0 without any; int32 ``[batch]``.
    """

    indptr: Int32
    indices: Int32
    last_block_len: Int32


def sequence_lengths(sequences: Sequence[CacheSequence], *, out: Int32 | None = None) -> Int32:
    """Return how many tokens each has room for, int32 ``[batch]``.

    All exporters take open sequences of one manager, each as often as it is wanted, and an ``out`` to write into.

    Raises:
        StaleHandleError: a sequence is over, or another manager's than the first.
        ArgumentTypeError: something that is no sequence.
        ArgumentValueError: ``out`` of another shape or dtype.
    """
    rows, tokens, _ = _batch("sequence_lengths", sequences, 0)
    lengths = _out("sequence_lengths: out", out, (rows.size,))
    lengths[:] = tokens
    return lengths


def dense_table(
    sequences: Sequence[CacheSequence], *, fill: int = 0, width: int | None = None, out: Int32 | None = None, group: int = 0
) -> Int32:
    """Return block ids, int32 ``[batch, most blocks]``; the form of flash-attn, torch's ``varlen_attn`` and vLLM.

    Args:
        sequences: the batch; see `sequence_lengths`.
        fill: what stands behind the blocks of shorter ones. 0 is a block that exists, so that it can be read.
        width: columns, at least as many as the longest has blocks; captured graphs need one width for all steps.
        out: int32 ``[batch, width]`` to write into; its width counts where none is named.
        group: of which layer group; of what it has let go, anything is shown.

    Raises:
        ArgumentValueError: ``width`` is too small; or as for `sequence_lengths`.
    """
    rows, _, of = _batch("dense_table", sequences, group)
    sizes = of.widths(rows)
    table = _table("dense_table", sizes, fill, width, out)
    found = of.dense(rows, table.shape[1])
    np.copyto(table[:, : found.shape[1]], found, where=np.arange(found.shape[1]) < sizes[:, None])
    return table


def token_table(
    sequences: Sequence[CacheSequence], *, fill: int = 0, width: int | None = None, out: Int32 | None = None, group: int = 0
) -> Int32:
    """Return the slot of every token, int32 ``[batch, most tokens]``; the form of SGLang. Arguments as for `dense_table`."""
    rows, sizes, of = _batch("token_table", sequences, group)
    table = _table("token_table", sizes, fill, width, out)
    table[np.arange(rows.size).repeat(sizes), steps(sizes)] = of.slots(rows, np.zeros_like(sizes), sizes)
    return table


def csr_table(sequences: Sequence[CacheSequence], *, out: CSRTable | None = None, group: int = 0) -> CSRTable:
    """Return block ids one sequence behind the other, with the length of each last block.

    Args:
        sequences: the batch; see `sequence_lengths`.
        out: a table to write into: ``indptr`` of ``[batch + 1]``, ``last_block_len`` of ``[batch]``, ``indices`` long enough.
        group: as for `dense_table`.

    Raises:
        ArgumentValueError: ``out`` is too short; or as for `sequence_lengths`.
    """
    rows, tokens, of = _batch("csr_table", sequences, group)
    sizes = of.widths(rows)
    total = int(sizes.sum())
    if out is not None and not isinstance(out, CSRTable):
        raise ArgumentTypeError("csr_table: out", expected="a CSRTable", got=repr(out)[:80])
    indptr = _out("csr_table: out.indptr", out and out.indptr, (rows.size + 1,))
    last = _out("csr_table: out.last_block_len", out and out.last_block_len, (rows.size,))
    room = max(total, out.indices.size) if out is not None and isinstance(out.indices, np.ndarray) else total
    indices = _out("csr_table: out.indices", out and out.indices, (room,))
    indptr[0] = 0
    sizes.cumsum(out=indptr[1:], dtype=np.int32)
    found = of.dense(rows, int(sizes.max()) if rows.size else 0)
    indices[:total] = found[np.arange(found.shape[1]) < sizes[:, None]]
    last[:] = tokens - np.maximum(sizes - 1, 0) * of.block_size
    return CSRTable(indptr, indices, last)


def _batch(subject: str, sequences: Sequence[CacheSequence], group: int) -> tuple[Index, Index, GroupTable]:
    """Return the rows of open sequences of one manager, how many tokens each has room for, and the table of a group."""
    if not isinstance(sequences, Sequence) or not all(isinstance(seq, CacheSequence) for seq in sequences):
        raise ArgumentTypeError(f"{subject}: sequences", expected="a list of sequences of a CacheManager", got=repr(sequences)[:80])
    if not sequences:
        none: Index = np.empty(0, dtype=np.intp)
        return none, none, OnlyTable(Rows(1))
    of = sequences[0]._rows
    distinct = {id(seq): seq for seq in sequences}
    as_rows(of, f"{subject}: sequences", list(distinct.values()))
    rows: Index = np.array([seq._row for seq in sequences], dtype=np.intp)
    return rows, of.num_tokens[rows], sequences[0]._pool.table(f"{subject}: group", group)


def _table(subject: str, sizes: Index, fill: int, width: int | None, out: Int32 | None) -> Int32:
    """Return a table full of ``fill`` that is as wide as asked, and wide enough."""
    longest = int(sizes.max()) if sizes.size else 0
    columns = longest if width is None else count_of(f"{subject}: width", width)
    if width is None and out is not None and getattr(out, "ndim", 0) == 2:
        columns = out.shape[1]
    if columns < longest:
        raise ArgumentValueError(
            f"{subject}: width", expected=f"at least {longest}, as long as the longest row", got=columns, fix="pass a larger width or out"
        )
    if sizes.size * columns > MAX_SLOTS:
        got, fix = f"[{sizes.size}, {columns}]", "pass the columns of the longest row"
        raise ArgumentValueError(f"{subject}: width", expected="a table of at most 2**31 numbers", got=got, fix=fix)
    table = _out(f"{subject}: out", out, (sizes.size, columns))
    table.fill(_int32(f"{subject}: fill", fill))
    return table


def _int32(subject: str, value: object) -> int:
    index = index_of(subject, value)
    if not -(2**31) <= index < 2**31:
        raise ArgumentValueError(subject, expected="an int32", got=index)
    return index


def _out(subject: str, out: Any, shape: tuple[int, ...]) -> Int32:
    """Return the caller's array, or a new one."""
    if out is None:
        return np.empty(shape, dtype=np.int32)
    if not isinstance(out, np.ndarray) or out.dtype != np.int32 or out.shape != shape or not out.flags.writeable:
        got = f"{out.dtype} {list(out.shape)}" if isinstance(out, np.ndarray) else repr(out)[:80]
        expected = f"a numpy array of int32 {list(shape)} that can be written"
        raise ArgumentValueError(subject, expected=expected, got=got, fix="pass none, and get a new one")
    return out
