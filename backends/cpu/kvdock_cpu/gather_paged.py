"""`gather_paged` on the CPU: one indexed read per cache, straight into the output.

* Rows in one piece, in the cache and in the output: `index_select`, which copies each as such.
* All else: an indexed read in elements of up to 16 bytes.

Neither makes a copy of keys or values; what is allocated are indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kvdock.plugin import HOST, Descriptor, Kernel, Request, TensorMeta, as_bits, quantised_reasons, slots_in_range
from kvdock_cpu.rows import ranges, wide_dtype, widen

__all__ = ["GatherPaged", "GatherPagedDescriptor", "KeyTiles", "RowReader"]

_SHORT = 256
"""Bytes of a head's row up to which a tile is run through before it is read head by head."""

_MANY = 128
"""Rows from which on it is: fewer are soon read in any order."""

_Room = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class RowReader:
    """Reads rows of keys, or of values, from one pool geometry.

    Args:
        pool: the pool, ``[num_blocks, block_size, heads, dim]``.
        out: where rows go, ``[..., heads, dim]``.
    """

    def __init__(self, pool: TensorMeta, out: TensorMeta) -> None:
        num_blocks, self._block_size, self._heads, self._dim = (int(size or 0) for size in pool.shape)
        block_step, slot_step, self._head_step, _ = pool.strides or (0, 0, 0, 0)  # those of size-1 dims are 0
        self._dtype = wide_dtype(pool, out)
        self._is_dense = self._heads == 1 or self._head_step == self._dim
        # The pool as rows that lie one step apart, where block starts do: ``per_block`` is how many steps they are apart. A pool
        # is only read here, so it may be expanded: blocks that are all one are 0 steps apart, slots that are one are no rows.
        self._step = (slot_step if self._block_size > 1 else block_step) or 1
        self._is_flat = block_step % self._step == 0 and (slot_step > 0 or self._block_size == 1)
        self._per_block = block_step // self._step if num_blocks > 1 else self._block_size
        self._rows = max(num_blocks - 1, 0) * self._per_block + self._block_size

    def read(self, pool: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill ``out`` with the rows at ``slots``, int64 and all of them valid."""
        if self._is_flat and self._is_dense and self._is_dense_in(out):
            places, rows = self._places(slots), as_bits(out)
            if out.dim() == 4:
                places, rows = places.reshape(-1), rows.view(-1, self._heads, self._dim)
            torch.index_select(self._flat(as_bits(pool), 1), 0, places, out=rows)
            return
        source, to = widen(pool, self._dtype), widen(out, self._dtype)
        if to.dtype != source.dtype:  # an odd offset in one storage: see `widen`
            source, to = as_bits(pool), as_bits(out)
        if self._is_flat:
            source, index = self._flat(source, source.element_size() // pool.element_size()), [self._places(slots)]
        else:
            index = [slots // self._block_size, slots % self._block_size]
        torch.ops.aten.index.Tensor_out(source, index, out=to)

    def _is_dense_in(self, out: torch.Tensor) -> bool:
        """Whether each row of an output lies in one piece, and all rows are the same step apart."""
        if self._heads > 1 and out.stride(-2) != self._dim:
            return False
        return out.dim() == 3 or 1 in out.shape[:2] or out.stride(0) == out.shape[1] * out.stride(1)

    def _places(self, slots: torch.Tensor) -> torch.Tensor:
        """Return where slots are among the rows of `_flat`."""
        more = self._per_block - self._block_size
        return slots if more == 0 else (slots // self._block_size).mul_(more).add_(slots)

    def _flat(self, pool: torch.Tensor, width: int) -> torch.Tensor:
        """View a flat pool as ``[rows, heads, dim]``, given how many elements are one of the view: no byte outside is reached."""
        return pool.as_strided((self._rows, self._heads, self._dim // width), (self._step // width, self._head_step // width, 1))


class GatherPagedDescriptor(Descriptor):
    """Reads keys and values of one geometry.

    Args:
        op: name of the op, for errors.
        k: reads keys.
        v: reads values.
    """

    def __init__(self, op: str, k: RowReader, v: RowReader) -> None:
        self._op = op
        self._k = k
        self._v = v

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor) -> None:
        """Check all slots, then fill the outputs, which are the last two arguments."""
        num_blocks, block_size = k_cache.shape[:2]
        without_padding = slots_in_range(self._op, slot_mapping, num_blocks * block_size)
        slots = slot_mapping.to(torch.int64)
        padding = None if without_padding else slots < 0
        if padding is not None:
            slots = slots.clamp(min=0)
        for reader, cache, out in zip((self._k, self._v), (k_cache, v_cache), rest[-2:], strict=True):
            if num_blocks:
                reader.read(cache, out, slots)
            if padding is not None:
                out[padding] = 0


class GatherPaged(Kernel):
    """Prepares `GatherPagedDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Work out what is static of the two pools."""
        readers = [RowReader(request.tensor(f"{name}_cache"), request.tensor(f"{name}_out")) for name in ("k", "v")]
        return GatherPagedDescriptor(request.op, *readers)


def _is_run(ids: list[int]) -> bool:
    """Return whether blocks, at least one, follow one another."""
    return ids == list(range(ids[0], ids[0] + len(ids)))


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
