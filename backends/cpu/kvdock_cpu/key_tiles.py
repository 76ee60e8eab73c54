"""Keys and values for attention on the CPU, tile by tile: read where they lie if they are in one piece, copied near if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdock.plugin import HOST, TensorMeta
from kvdock_cpu.gather_paged import RowReader
from kvdock_cpu.rows import ranges

__all__ = ["KeyTiles", "Read", "SequenceKeys"]

_SHORT = 256
"""Bytes of a head's row up to which a tile is run through before it is read head by head."""

_MANY = 128
"""Rows from which on it is: fewer are soon read in any order."""

_Room = Callable[[], tuple[torch.Tensor, torch.Tensor]]

Read = Callable[[int], torch.Tensor]
"""Reads a tile of keys (0) or of values (1), ``[heads, keys, dim]``."""


class KeyTiles:
    """Reads tiles of keys, or of values, from one pool geometry, for one call at a time.

    A tile is in the order of its pool, which is read quickest: token by token, or head by head where heads lie further apart.

    Args:
        pool: the pool, ``[num_blocks, block_size, heads, dim]``.
        size: most tokens in a tile. No tile reaches over a multiple of it, so that where blocks divide it, whole ones fit into a room.
    """

    def __init__(self, pool: TensorMeta, size: int) -> None:
        num_blocks, self._block, self._heads, self._dim = (int(length or 0) for length in pool.shape)
        self._width, self._dtype = self._heads * self._dim, pool.dtype
        self._size, self._elements, self._is_whole = size, size * self._width, self._block > 0 and not size % self._block
        self._compute = torch.promote_types(pool.dtype, torch.float32)
        self._steps = block_step, slot_step, head_step = (pool.strides or (0, 0, 0))[:3]
        # Steps of dims of size 1 are 0, and say nothing.
        is_dense = (self._heads == 1 or head_step == self._dim) and (self._block == 1 or slot_step == self._width)
        self._by_head = head_step > slot_step and not is_dense
        self._reader = RowReader(pool, TensorMeta(pool.dtype, (None, self._heads, self._dim), None, 16))
        self._offsets = torch.arange(self._block, device=HOST)
        # What is together in a block, all of it or what a head has, as one row of all that there are.
        self._piece = self._block * (self._dim if self._by_head else self._width)
        step, parts = (head_step, self._heads) if self._by_head else (0, 1)
        is_piece = self._block == 1 or slot_step == self._dim if self._by_head else is_dense
        self._is_pieces = self._is_whole and self._piece > 0 and is_piece and not (block_step % self._piece or step % self._piece)
        self._rows = (max(num_blocks - 1, 0) * block_step + (parts - 1) * step) // max(self._piece, 1) + 1
        self._block_rows = block_step // max(self._piece, 1)
        self._part_rows = torch.arange(parts, device=HOST)[:, None] * (step // max(self._piece, 1))
        # A run of blocks is one piece of memory then, which need not be copied.
        is_run = is_dense and (num_blocks == 1 or block_step == self._block * self._width)
        self._is_in_place = is_run and self._compute == pool.dtype
        # Short rows of one head lie far apart, and a product of one head after another waits for each. A sum of all comes first, which
        # runs through memory in order: it takes less time than it saves.
        self._is_touched = self._heads > 1 and self._dim * pool.dtype.itemsize <= _SHORT
        self.workspace_bytes = self._elements * (pool.dtype.itemsize + (self._compute != pool.dtype) * self._compute.itemsize)

    def room(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for a tile as it is read, and for one to compute with: the same where the dtype is.

        Args:
            longest: most tokens of a sequence, in whole blocks.
        """
        raw = torch.empty(min(self._elements, longest * self._width), dtype=self._dtype, device=HOST)
        return raw, raw if self._compute == self._dtype else torch.empty_like(raw, dtype=self._compute)

    def walk(
        self, pool: torch.Tensor, room: _Room, ids: list[int], skipped: int, count: int, size: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what `read` returns, tile by tile: how many rows come before, and the tile, which is there until the next.

        ``size`` is the most tokens to copy at once, whole blocks where one fits. What need not be copied comes in larger tiles.
        """
        block = self._block
        step = self._size if self._is_in_place and _is_run(ids) else size
        if self._is_pieces:  # what all tiles need is made once: a tile may take less time than the calls that it takes to make this
            rows = pool.as_strided((self._rows, self._piece), (self._piece, 1))
            places = torch.tensor(ids, device=HOST) * self._block_rows + self._part_rows
            rooms: dict[int, tuple[torch.Tensor, ...]] = {}
        for begin, end in ranges(skipped, skipped + count, step):
            first, stop = begin // block, (end - 1) // block + 1
            if not self._is_pieces or _is_run(ids[first:stop]):
                yield begin - skipped, self.read(pool, room, ids[first:stop], begin - first * block, end - begin)
                continue
            if stop - first not in rooms:
                raw, tile = (part[: (stop - first) * block * self._width] for part in room())
                rooms[stop - first] = raw, tile, raw.view(-1, self._piece), self._shaped(tile, (stop - first) * block)
            raw, tile, pieces, shaped = rooms[stop - first]
            torch.index_select(rows, 0, places[:, first:stop].flatten(), out=pieces)
            if tile.dtype != raw.dtype:
                tile.copy_(raw)
            yield begin - skipped, shaped[:, begin - first * block : end - first * block]

    def read(self, pool: torch.Tensor, room: _Room, ids: list[int], skipped: int, count: int) -> torch.Tensor:
        """Return ``count`` rows behind the first ``skipped`` of some blocks, ``[heads, count, dim]``: in a room, or where they lie."""
        if (self._is_whole or self._is_in_place) and _is_run(ids):
            return self._read_run(pool, room, ids[0], len(ids), skipped, count)
        blocks = torch.tensor(ids, device=HOST)
        if not self._is_pieces:
            slots = (blocks[:, None] * self._block + self._offsets).flatten()[skipped : skipped + count]
            raw, tile = (part[: count * self._width] for part in room())
            self._reader.read(pool, self._shaped(raw, count).transpose(0, 1), slots)
            return self._shaped(tile.copy_(raw) if tile.dtype != raw.dtype else tile, count)
        raw, tile = (part[: len(ids) * self._block * self._width] for part in room())
        rows = pool.as_strided((self._rows, self._piece), (self._piece, 1))
        torch.index_select(rows, 0, (blocks * self._block_rows + self._part_rows).flatten(), out=raw.view(-1, self._piece))
        tile = tile.copy_(raw) if tile.dtype != raw.dtype else tile
        return self._shaped(tile, len(ids) * self._block)[:, skipped : skipped + count]

    def _read_run(self, pool: torch.Tensor, room: _Room, first: int, blocks: int, skipped: int, count: int) -> torch.Tensor:
        """Read from blocks that follow one another."""
        block_step, slot_step, head_step = self._steps
        offset = pool.storage_offset() + first * block_step
        if self._is_in_place:
            offset += skipped * self._width
            if self._is_touched and count >= _MANY:
                pool.as_strided((count * self._width,), (1,), offset).sum()
            return pool.as_strided((self._heads, count, self._dim), (self._dim, self._width, 1), offset)
        shape, steps = (blocks, self._block, self._heads, self._dim), (block_step, slot_step, head_step, 1)
        tile = self._shaped(room()[1][: blocks * self._block * self._width], blocks * self._block)
        tile.view(self._heads, *shape[:2], self._dim).copy_(pool.as_strided(shape, steps, offset).permute(2, 0, 1, 3))
        return tile[:, skipped : skipped + count]

    def _shaped(self, tile: torch.Tensor, slots: int) -> torch.Tensor:
        """View a tile as ``[heads, slots, dim]``."""
        return tile.view(self._heads, slots, self._dim) if self._by_head else tile.view(slots, self._heads, self._dim).transpose(0, 1)


class SequenceKeys:
    """Keys (0) and values (1) of the sequences of one call.

    Args:
        pools: the caches.
        tiles: what reads each of them.
        table: blocks of each sequence, ``[B, W]``.
        block: tokens in a block.
        near: most tokens to copy at once in `walk`.
        wider: whose room is enough for both.
    """

    def __init__(
        self,
        pools: tuple[torch.Tensor, torch.Tensor],
        tiles: tuple[KeyTiles, KeyTiles],
        table: npt.NDArray[np.int32],
        block: int,
        near: int,
        wider: int,
    ) -> None:
        self._pools, self._tiles, self._table, self._block, self._near, self._wider = pools, tiles, table, block, near, wider
        self._rooms: list[Any] = [None, None]
        self.longest = table.shape[1] * block

    def walk(self, which: int, row: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield keys or values of a sequence, tile by tile: see `KeyTiles.walk`. Both take one room, which is near then."""
        ids, skipped = self._ids(row, begin, end), begin % self._block
        return self._tiles[which].walk(self._pools[which], lambda: self._room(self._wider), ids, skipped, end - begin, self._near)

    def reader(self, row: int, begin: int, end: int) -> Read:
        """Return what reads a tile of a sequence, from its key ``begin`` to the one before ``end``."""
        tiles, pools, skipped, ids = self._tiles, self._pools, begin % self._block, self._ids(row, begin, end)
        return lambda which: tiles[which].read(pools[which], lambda: self._room(which), ids, skipped, end - begin)

    def _ids(self, row: int, begin: int, end: int) -> list[int]:
        found: list[int] = self._table[row, begin // self._block : (end - 1) // self._block + 1].tolist()
        return found

    def _room(self, which: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room, the same in all tiles of a call."""
        if self._rooms[which] is None:
            self._rooms[which] = self._tiles[which].room(self.longest)
        found: tuple[torch.Tensor, torch.Tensor] = self._rooms[which]
        return found


def _is_run(ids: list[int]) -> bool:
    """Return whether blocks, at least one, follow one another."""
    return ids == list(range(ids[0], ids[0] + len(ids)))
