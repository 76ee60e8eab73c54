"""What attention kernels read of a batch, in tensors that stay where they are, so that a captured graph can replay them.

::

    block_table     [B, W]    blocks of each row, and block 0 behind them
    seq_lens        [B]       tokens of each row, those of this step included; 0 for padding
    query_lens      [B]       tokens of this step, the last ones of each row; 0 for padding
    cu_query_lens   [B + 1]   where each row's tokens of this step begin in the next two, and where the last one's end
    positions       [T]       their positions; 0 for padding
    slot_mapping    [T]       their slots; -1 for padding, which every op skips

Of several layer groups each has a block table and a slot mapping of its own, in ``block_tables`` and ``slot_mappings``; those above
are the first group's. The block table of a group of states is ``[B, 1]``, and all its slots are -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
from kvdock.scheduler.table_views import HostTables, TableViews
from kvdock.scheduler.tables import GroupTable
from kvdock.spec import device_of

__all__ = ["BatchTables", "HostTables", "TableViews"]


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
        max_blocks: columns of the block table, at least 1; with several layer groups also one number for each.
        max_tokens: most tokens of a step; ``batch_size`` by default, which is a step of decoding.
        device: where the tensors are.

    Attributes:
        block_table: int32 ``[batch_size, max_blocks]``, on the device.
        seq_lens: int32 ``[batch_size]``.
        query_lens: int32 ``[batch_size]``.
        cu_query_lens: int32 ``[batch_size + 1]``.
        positions: int32 ``[max_tokens]``.
        slot_mapping: int32 ``[max_tokens]``.
        block_tables: that of each layer group, ``[batch_size, max_blocks]``; the first is ``block_table``.
        slot_mappings: that of each layer group; the first is ``slot_mapping``.
        host: the same on the host; on a host device they share memory.
        num_sequences: rows of the last step that are no padding.
        num_tokens: tokens of the last step.

    Raises:
        ArgumentTypeError: no manager, or what is no device.
        ArgumentValueError: a device that torch does not know, a size that is not above 0, or more than 2**31 numbers in a table.
    """

    instead_of_copies = "make others with the same manager: sequences may be in several"

    def __init__(
        self,
        manager: CacheManager,
        batch_size: int,
        max_blocks: int | Sequence[int],
        *,
        max_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError("BatchTables: manager", expected="a CacheManager", got=repr(manager)[:80])
        self._groups = manager._pool.tables
        rows, widths = count_of("BatchTables: batch_size", batch_size, 1), self._widths(max_blocks)
        tokens = rows if max_tokens is None else count_of("BatchTables: max_tokens", max_tokens, 1)
        if max(rows * max(widths), 3 * rows + (1 + len(widths)) * tokens) > MAX_SLOTS:
            expected, fix = "tables of at most 2**31 numbers", "as many columns and tokens as the longest batch needs"
            raise ArgumentValueError("BatchTables", expected=expected, got=f"[{rows}, {max(widths)}], and {tokens} tokens", fix=fix)
        to = device_of("BatchTables: device", device)
        self._manager = manager
        self._version = np.zeros(rows, dtype=np.intp)  # of what each row shows; 0 is padding
        self._replaced = np.zeros(rows, dtype=np.intp)  # since when that has only got more blocks
        self._shown = {table.block_size: np.zeros(rows, dtype=np.intp) for table in self._groups}  # blocks of each, by their size
        self._sizes = (rows, rows, rows + 1, tokens, *[tokens] * len(widths))
        self._flat = np.zeros(sum(self._sizes), dtype=np.int32)
        seq_lens, query_lens, sums, positions, slots = self._parts(self._flat)
        tables = tuple(np.zeros((rows, width), dtype=np.int32) for width in widths)
        self.host = HostTables(tables[0], seq_lens, query_lens, sums, positions, slots[0], tables, slots)
        for mapping in slots:
            mapping.fill(-1)
        self.block_tables = tuple(torch.from_numpy(table).to(to) for table in tables)
        self.block_table = self.block_tables[0]
        # One tensor for all but the block tables, and the others are views of it: one transfer for each step.
        self._device_flat = torch.from_numpy(self._flat).to(to)
        self._is_host = self._device_flat.data_ptr() == self._flat.ctypes.data  # then nothing is to be sent
        self._pinned = not self._is_host and _can_pin()
        self.seq_lens, self.query_lens, self.cu_query_lens, self.positions, *views = torch.split(self._device_flat, list(self._sizes))
        self.slot_mappings = tuple(views)
        self.slot_mapping = self.slot_mappings[0]
        self._of_tokens = [(table, slots[at]) for at, table in enumerate(self._groups) if not table.is_state]
        self.num_sequences = self.num_tokens = 0
        self._decoded = 0  # sequences of the last step, if it had one token of each

    def _widths(self, max_blocks: Any) -> tuple[int, ...]:
        """Return the columns of each group's block table."""
        given = list(max_blocks) if isinstance(max_blocks, Sequence) else [max_blocks] * len(self._groups)
        if len(given) != len(self._groups):
            expected = f"one number, or {len(self._groups)}: one for each layer group"
            raise ArgumentValueError("BatchTables: max_blocks", expected=expected, got=len(given))
        found = [count_of("BatchTables: max_blocks", width, 1) for width in given]
        return tuple(1 if table.is_state else width for table, width in zip(self._groups, found, strict=True))

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
        if not (type(query_lens) is int and query_lens == 1 and self._show_next(rows, seq_lens)):
            self._show(rows, query_lens, seq_lens)
        changed = self._write_blocks(rows)
        if not self._is_host:
            self._send(changed)

    def _show_next(self, rows: Index, seq_lens: npt.ArrayLike | None) -> bool:
        """Show one token of each row behind a step of as many; False if that was no such step, or something is to be looked at.

        Queries and padding are as they were, which is half of what `_show` writes.
        """
        host, batch, room = self.host, rows.size, self._manager._rows.num_tokens[rows]
        lengths = room if seq_lens is None else counts_of("BatchTables.update: seq_lens", seq_lens, batch)
        if not batch or batch != self._decoded or not lengths.all() or not self._fit(int(room.max())) or (lengths > room).any():
            return False
        starts = lengths - 1
        host.seq_lens[:batch], host.positions[:batch] = lengths, starts
        for table, slots in self._of_tokens:
            slots[:batch] = table.slots_at(rows, starts)
        return True

    def _fit(self, tokens: int) -> bool:
        """Whether the block tables have columns for so many tokens."""
        return all(-(-tokens // table.block_size) <= shown.shape[1] for table, shown in self._with_host())

    def _with_host(self) -> Iterator[tuple[GroupTable, Int32]]:
        """Return the groups that keep tokens, with their block tables on the host."""
        return ((table, shown) for table, shown in zip(self._groups, self.host.block_tables, strict=True) if not table.is_state)

    def _show(self, rows: Index, query_lens: Any, seq_lens: npt.ArrayLike | None) -> None:
        """Write all but the block table, see `update`."""
        of, host, batch = self._manager._rows, self.host, rows.size
        room = of.num_tokens[rows]
        lengths = room if seq_lens is None else counts_of("BatchTables.update: seq_lens", seq_lens, batch)
        queries = counts_of("BatchTables.update: query_lens", query_lens, batch)
        total = int(queries.sum())
        # All is checked before the first array is written: when this raises, the tables still show the last step.
        self._check(batch, int(room.max()) if batch else 0, total)
        if (queries > lengths).any() or (lengths is not room and (lengths > room).any()):
            expected = "query lengths up to the lengths, and these up to the room"
            raise IndexRangeError("BatchTables.update", expected=expected, got=f"{queries.tolist()}, {lengths.tolist()}, {room.tolist()}")
        starts = lengths - queries
        host.seq_lens[:batch], host.seq_lens[batch:] = lengths, 0
        host.query_lens[:batch], host.query_lens[batch:] = queries, 0
        host.cu_query_lens[1 : batch + 1], host.cu_query_lens[batch + 1 :] = queries.cumsum(), total
        host.positions[:total], host.positions[total:] = positions_of(starts, queries), 0
        for table, slots in self._of_tokens:
            slots[:total], slots[total:] = table.slots(rows, starts, queries), -1
        self.num_sequences, self.num_tokens = batch, total
        self._decoded = batch if (queries == 1).all() else 0

    def first(self, rows: int, tokens: int) -> TableViews:
        """Return views of the first rows and tokens, such as those that a step has, without the padding behind them.

        Raises:
            ArgumentTypeError, ArgumentValueError: a number that is none, below 0, or beyond the tables.
        """
        rows, tokens = count_of("BatchTables.first: rows", rows), count_of("BatchTables.first: tokens", tokens)
        self._check(rows, 0, tokens, "BatchTables.first")
        tables, slots = tuple(table[:rows] for table in self.block_tables), tuple(each[:tokens] for each in self.slot_mappings)
        lengths = self.seq_lens[:rows], self.query_lens[:rows], self.cu_query_lens[: rows + 1]
        return TableViews(tables[0], *lengths, self.positions[:tokens], slots[0], tables, slots)

    def staged(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values on the host that can be sent to the tables' device without waiting, pinned where that helps."""
        # Torch's allocator of pinned memory keeps it until the copy has been made.
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=self._pinned).copy_(values)

    def _write_blocks(self, rows: Index) -> Index:
        """Write the rows of the block tables whose blocks have changed; return which."""
        versions, of = np.zeros_like(self._version), self._manager._rows
        versions[: rows.size] = of.version[rows]
        changed: Index = (versions != self._version).nonzero()[0]
        if changed.size:
            shown = changed[changed < rows.size]
            has_grown = of.replaced[rows[shown]] == self._replaced[shown]
            if not has_grown.all() or shown.size < changed.size:
                self._write_rows(rows, changed[~np.isin(changed, shown[has_grown])])
            self._write_more(rows[shown[has_grown]], shown[has_grown])
            self._version = versions
            self._replaced[shown] = of.replaced[rows[shown]]
            self._replaced[rows.size :] = 0
        return changed

    def _write_rows(self, rows: Index, places: Index) -> None:
        """Write all blocks of rows of the tables, and what pads them."""
        shown = places[places < rows.size]
        of = rows[shown]
        for table, out in zip(self._groups, self.host.block_tables, strict=True):
            widths = table.widths(of)
            out[places] = 0  # the null block, as in the manager's own table behind the blocks of a row
            self._shown[table.block_size][shown] = widths
            found = table.dense(of, min(out.shape[1], int(widths.max())) if of.size else 0)
            out[shown, : found.shape[1]] = found

    def _write_more(self, rows: Index, places: Index) -> None:
        """Write the blocks that rows have got behind those which are shown."""
        spans: dict[int, tuple[Index, Index, Index]] = {}
        for table, out in self._with_host():
            if table.block_size not in spans:  # groups of one size have got as many
                spans[table.block_size] = self._columns_to_write(table, rows, places)
            which, to, columns = spans[table.block_size]
            out[to, columns] = table.at(which, columns)

    def _columns_to_write(self, table: GroupTable, rows: Index, places: Index) -> tuple[Index, Index, Index]:
        """Return of each block to write its row, the row of the tables, and the column; and note that they are shown."""
        shown = self._shown[table.block_size]
        starts = shown[places]
        stops = np.maximum(table.widths(rows), starts)  # fewer after a cut within a unit, whose blocks are shown
        counts = stops - starts
        columns = positions_of(starts, counts)
        shown[places] = stops
        return (rows, places, columns) if columns is starts else (rows.repeat(counts), places.repeat(counts), columns)

    def _send(self, changed: Index) -> None:
        """Copy to the device what `update` has written on the host."""
        self._device_flat.copy_(self._staged(self._flat), non_blocking=True)
        # Rows next to each other are one copy; others need their numbers on the device as well.
        if changed.size and changed.size == changed[-1] - changed[0] + 1:
            rows = slice(int(changed[0]), int(changed[-1]) + 1)
            for on_device, on_host in zip(self.block_tables, self.host.block_tables, strict=True):
                on_device[rows].copy_(self._staged(on_host[rows]), non_blocking=True)
        elif changed.size:
            index = self._staged(changed.astype(np.int64)).to(self.block_table.device, non_blocking=True)
            for on_device, on_host in zip(self.block_tables, self.host.block_tables, strict=True):
                on_device.index_copy_(0, index, self._staged(on_host[changed]).to(on_device.device, non_blocking=True))

    def _staged(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return self.staged(torch.from_numpy(values))

    def _parts(self, flat: Int32) -> tuple[Int32, Int32, Int32, Int32, tuple[Int32, ...]]:
        """Return the parts of the array that has all but the block tables; the last are the slots of each group."""
        ends = np.cumsum(self._sizes).tolist()
        seq_lens, query_lens, sums, positions, *slots = (flat[stop - size : stop] for size, stop in zip(self._sizes, ends, strict=True))
        return seq_lens, query_lens, sums, positions, tuple(slots)

    def _check(self, batch: int, longest: int, tokens: int, where: str = "BatchTables.update") -> None:
        """Raise unless the tables have room for so many sequences, tokens of the longest, and tokens of a step."""
        (rows, width), most = self.host.block_table.shape, self.host.positions.size
        if batch > rows or not self._fit(longest) or tokens > most:
            raise ArgumentValueError(
                where,
                expected=f"at most {rows} sequences, {width} blocks of each and {most} tokens",
                got=f"{batch} sequences, up to {-(-longest // self._groups[0].block_size)} blocks and {tokens} tokens",
                fix="make the tables with a larger batch_size, max_blocks or max_tokens",
            )


def _can_pin() -> bool:
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True
