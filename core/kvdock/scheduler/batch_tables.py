"""What attention kernels read of a batch, in tensors that stay where they are, so that a captured graph can replay them.

::

    block_table     [B, W]    blocks of each row, and block 0 behind them
    seq_lens        [B]       tokens of each row, those of this step included; 0 for padding
    query_lens      [B]       tokens of this step, the last ones of each row; 0 for padding
    cu_query_lens   [B + 1]   where each row's tokens of this step begin in the next two, and where the last one's end
    positions       [T]       their positions; 0 for padding
    slot_mapping    [T]       their slots; -1 for padding, which every op skips
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError
from kvdock.prefix.inputs import MAX_SLOTS, count_of
from kvdock.prefix.ownership import NotCopied
from kvdock.scheduler.batches import as_rows, counts_of
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.exporters import Int32
from kvdock.scheduler.rows import Index, positions_of
from kvdock.scheduler.sequence import CacheSequence
from kvdock.spec import device_of

__all__ = ["BatchTables", "HostTables", "TableViews"]


@attrs.frozen(eq=False)
class HostTables:
    """The same on the host, as numpy arrays of int32 that `BatchTables.update` writes; see `kvdock.scheduler.batch_tables`."""

    block_table: Int32
    seq_lens: Int32
    query_lens: Int32
    cu_query_lens: Int32
    positions: Int32
    slot_mapping: Int32


@attrs.frozen(eq=False)
class TableViews:
    """The first ``b`` rows and ``t`` tokens of `BatchTables`, as views: what stands in them is that of the last update, whenever it was.

    All int32: block_table ``[b, max_blocks]``, seq_lens and query_lens ``[b]``, cu_query_lens ``[b + 1]``, positions and
    slot_mapping ``[t]``.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class BatchTables(NotCopied):
    """Tables for batches of up to ``batch_size`` rows, int32 on a device; each step is one call of `update`.

    A step writes rows of the block table whose blocks have changed, and copies to the device without waiting for it: in one
    transfer, and where rows have changed those in another. What lies on the host is written anew for each, so that no copy
    on its way is overtaken. It belongs to the thread of its manager, and the copies to the device's current stream. It
    cannot be copied or pickled.

    Args:
        manager: whose sequences come. Without a null block block 0, which padding names, is a sequence's: kvdock's ops never look at
            what is behind ``seq_lens`` or has slot -1, and other kernels may.
        batch_size: rows, at least 1.
        max_blocks: columns of the block table, at least 1.
        max_tokens: most tokens of a step; ``batch_size`` by default, which is a step of decoding.
        device: where the tensors are.

    Attributes:
        block_table: int32 ``[batch_size, max_blocks]``, on the device.
        seq_lens: int32 ``[batch_size]``.
        query_lens: int32 ``[batch_size]``.
        cu_query_lens: int32 ``[batch_size + 1]``.
        positions: int32 ``[max_tokens]``.
        slot_mapping: int32 ``[max_tokens]``.
        host: the same on the host; on a host device they share memory.
        num_sequences: rows of the last step that are no padding.
        num_tokens: tokens of the last step.

    Raises:
        ArgumentTypeError: no manager, or what is no device.
        ArgumentValueError: a device that torch does not know, a size that is not above 0, or more than 2**31 numbers in a table.
    """

    instead_of_copies = "make others with the same manager: sequences may be in several"

    def __init__(
        self, manager: CacheManager, batch_size: int, max_blocks: int, *, max_tokens: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError("BatchTables: manager", expected="a CacheManager", got=repr(manager)[:80])
        rows, width = count_of("BatchTables: batch_size", batch_size, 1), count_of("BatchTables: max_blocks", max_blocks, 1)
        tokens = rows if max_tokens is None else count_of("BatchTables: max_tokens", max_tokens, 1)
        if max(rows * width, 3 * rows + 2 * tokens) > MAX_SLOTS:
            expected, fix = "tables of at most 2**31 numbers", "as many columns and tokens as the longest batch needs"
            raise ArgumentValueError("BatchTables", expected=expected, got=f"[{rows}, {width}], and {tokens} tokens", fix=fix)
        to = device_of("BatchTables: device", device)
        self._manager = manager
        self._version = np.zeros(rows, dtype=np.intp)  # of what each row shows; 0 is padding
        self._sizes = (rows, rows, rows + 1, tokens, tokens)
        self._flat = np.zeros(sum(self._sizes), dtype=np.int32)
        self.host = HostTables(np.zeros((rows, width), dtype=np.int32), *self._parts(self._flat))
        self.host.slot_mapping.fill(-1)
        self.block_table = torch.from_numpy(self.host.block_table).to(to)
        # One tensor for all but the block table, and the others are views of it: one transfer for each step.
        self._device_flat = torch.from_numpy(self._flat).to(to)
        self._is_host = self._device_flat.data_ptr() == self._flat.ctypes.data  # then nothing is to be sent
        self._pinned = not self._is_host and _can_pin()
        parts = torch.split(self._device_flat, list(self._sizes))
        self.seq_lens, self.query_lens, self.cu_query_lens, self.positions, self.slot_mapping = parts
        self.num_sequences = self.num_tokens = 0
        self._ones = np.ones(rows, dtype=np.intp)
        self._decoded = 0  # sequences of the last step, if it had one token of each

    def __repr__(self) -> str:
        rows, width = self.host.block_table.shape
        return f"BatchTables(batch_size={rows}, max_blocks={width}, max_tokens={self.positions.numel()}, device={self.block_table.device})"

    def update(self, sequences: Sequence[CacheSequence], query_lens: Any = 1, *, seq_lens: npt.ArrayLike | None = None) -> None:
        """Show a batch: sequence i in row i, and padding behind the last.

        Args:
            sequences: open sequences of the manager, at most ``batch_size``.
            query_lens: how many tokens of each are computed in this step, its last ones: an int, or integers ``[batch]``.
            seq_lens: tokens of each, where there is room beyond what is used; by default all that there is room for.

        Raises:
            StaleHandleError: a sequence is over, or another manager's.
            ArgumentValueError: more sequences, blocks or tokens than the tables have room for. Nothing was changed.
            IndexRangeError: more tokens in this step than a sequence has, or lengths beyond its room. Nothing was changed.
        """
        rows = as_rows(self._manager._rows, "BatchTables.update: sequences", sequences)
        if not (seq_lens is None and type(query_lens) is int and query_lens == 1 and self._show_next(rows)):
            self._show(rows, query_lens, seq_lens)
        changed = self._write_blocks(rows)
        if not self._is_host:
            self._send(changed)

    def _show_next(self, rows: Index) -> bool:
        """Show one token of each row behind a step of as many; False if that was no such step, or something is to be looked at.

        Queries and padding are as they were, which is half of what `_show` writes.
        """
        of, host, batch = self._manager._rows, self.host, rows.size
        lengths = of.num_tokens[rows]
        if not batch or batch != self._decoded or not lengths.all() or of.num_blocks[rows].max() > host.block_table.shape[1]:
            return False
        starts = lengths - 1
        host.seq_lens[:batch], host.positions[:batch] = lengths, starts
        host.slot_mapping[:batch] = of.slots(rows, starts, self._ones[:batch])
        return True

    def _show(self, rows: Index, query_lens: Any, seq_lens: npt.ArrayLike | None) -> None:
        """Write all but the block table, see `update`."""
        of, host, batch = self._manager._rows, self.host, rows.size
        room = of.num_tokens[rows]
        lengths = room if seq_lens is None else counts_of("BatchTables.update: seq_lens", seq_lens, batch)
        queries = counts_of("BatchTables.update: query_lens", query_lens, batch)
        total = int(queries.sum())
        # All is checked before the first array is written: when this raises, the tables still show the last step.
        self._check(batch, int(of.num_blocks[rows].max()) if batch else 0, total)
        if (queries > lengths).any() or (lengths is not room and (lengths > room).any()):
            expected = "query lengths up to the lengths, and these up to the room"
            raise IndexRangeError("BatchTables.update", expected=expected, got=f"{queries.tolist()}, {lengths.tolist()}, {room.tolist()}")
        starts = lengths - queries
        host.seq_lens[:batch], host.seq_lens[batch:] = lengths, 0
        host.query_lens[:batch], host.query_lens[batch:] = queries, 0
        host.cu_query_lens[1 : batch + 1], host.cu_query_lens[batch + 1 :] = queries.cumsum(), total
        host.positions[:total], host.positions[total:] = positions_of(starts, queries), 0
        host.slot_mapping[:total], host.slot_mapping[total:] = of.slots(rows, starts, queries), -1
        self.num_sequences, self.num_tokens = batch, total
        self._decoded = batch if (queries == 1).all() else 0

    def first(self, rows: int, tokens: int) -> TableViews:
        """Return views of the first rows and tokens, such as those that a step has, without the padding behind them.

        Raises:
            ArgumentTypeError, ArgumentValueError: a number that is none, below 0, or beyond the tables.
        """
        rows, tokens = count_of("BatchTables.first: rows", rows), count_of("BatchTables.first: tokens", tokens)
        self._check(rows, 0, tokens, "BatchTables.first")
        of_rows, of_tokens = (self.seq_lens[:rows], self.query_lens[:rows]), (self.positions[:tokens], self.slot_mapping[:tokens])
        return TableViews(self.block_table[:rows], *of_rows, self.cu_query_lens[: rows + 1], *of_tokens)

    def staged(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values on the host that can be sent to the tables' device without waiting, pinned where that helps."""
        # Torch's allocator of pinned memory keeps it until the copy has been made.
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=self._pinned).copy_(values)

    def _write_blocks(self, rows: Index) -> Index:
        """Write the rows of the block table whose blocks have changed; return which."""
        of, table = self._manager._rows, self.host.block_table
        versions = np.zeros_like(self._version)
        versions[: rows.size] = of.version[rows]
        changed = np.flatnonzero(versions != self._version)
        if changed.size:
            table[changed] = 0  # the null block, as in the manager's own table behind the blocks of a row
            shown, width = changed[changed < rows.size], min(table.shape[1], of.table.shape[1])
            table[shown, :width] = of.table[rows[shown], :width]
            self._version = versions
        return changed

    def _send(self, changed: Index) -> None:
        """Copy to the device what `update` has written on the host."""
        self._device_flat.copy_(self._staged(self._flat), non_blocking=True)
        # Rows next to each other are one copy; others need their numbers on the device as well.
        if changed.size and changed.size == changed[-1] - changed[0] + 1:
            rows = slice(int(changed[0]), int(changed[-1]) + 1)
            self.block_table[rows].copy_(self._staged(self.host.block_table[rows]), non_blocking=True)
        elif changed.size:
            device = self.block_table.device
            index, rows_of = self._staged(changed.astype(np.int64)), self._staged(self.host.block_table[changed])
            self.block_table.index_copy_(0, index.to(device, non_blocking=True), rows_of.to(device, non_blocking=True))

    def _staged(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return self.staged(torch.from_numpy(values))

    def _parts(self, flat: Int32) -> list[Int32]:
        """Return the parts of the array that has all but the block table."""
        ends = np.cumsum(self._sizes).tolist()
        return [flat[stop - size : stop] for size, stop in zip(self._sizes, ends, strict=True)]

    def _check(self, batch: int, blocks: int, tokens: int, where: str = "BatchTables.update") -> None:
        (rows, width), most = self.host.block_table.shape, self.host.positions.size
        if batch > rows or blocks > width or tokens > most:
            raise ArgumentValueError(
                where,
                expected=f"at most {rows} sequences, {width} blocks of each and {most} tokens",
                got=f"{batch} sequences, up to {blocks} blocks and {tokens} tokens",
                fix="make the tables with a larger batch_size, max_blocks or max_tokens",
            )


def _can_pin() -> bool:
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True
