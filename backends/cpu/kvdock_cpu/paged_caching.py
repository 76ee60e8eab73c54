"""`paged_caching_` on the CPU.

A few tokens, as in decoding, are moved row by row with `memmove`: one torch call costs as much as a whole row there. Many
tokens go through one vectorised indexed copy per cache, in wide elements. Neither makes a copy of keys or values: what is
allocated are indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Any

import kvdock
import torch
from kvdock.ops.hostcheck import slots_in_range

from kvdock_cpu.rows import as_bits, quantised_reasons, spans, wide_dtype, widen

__all__ = ["PagedCaching", "PagedCachingDescriptor", "RowWriter"]

FEW = 4
"""Up to so many tokens `memmove` is quicker than an indexed copy (measured on 2 KB rows)."""


class RowWriter:
    """Writes rows of keys, or of values, into one pool geometry.

    Args:
        pool: the pool, ``[num_blocks, block_size, heads, dim]``.
        rows: what is written, ``[..., heads, dim]``.
    """

    def __init__(self, pool: kvdock.TensorMeta, rows: kvdock.TensorMeta) -> None:
        num_blocks, self._block_size, self._heads, self._dim = (int(size or 0) for size in pool.shape)
        block_step, slot_step, head_step, _ = pool.strides or (0, 0, 0, 0)
        self._size = pool.dtype.itemsize
        self._block_bytes, self._slot_bytes = block_step * self._size, slot_step * self._size
        self._row_bytes = self._heads * self._dim * self._size
        self._is_dense = self._heads == 1 or head_step == self._dim
        self._is_flat = num_blocks == 1 or self._block_size == 1 or block_step == self._block_size * slot_step
        self._capacity = num_blocks * self._block_size
        self._dtype = wide_dtype(pool, rows)

    def write_few(self, pool: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> None:
        """Write one row per slot with `memmove`; slots are in range, negative ones are skipped."""
        steps = rows.stride()
        if not self._is_dense or (steps[-2] != self._dim and self._heads != 1):
            return self.write_many(pool, rows, torch.tensor(slots).view(rows.shape[:-2]), min(slots) >= 0)
        size, width = self._size, rows.shape[-3]
        outer = steps[0] if len(steps) == 4 else 0
        to, start = pool.data_ptr(), rows.data_ptr()
        for index, slot in enumerate(slots):
            if slot >= 0:
                block, offset = divmod(slot, self._block_size)
                row, column = divmod(index, width)
                memmove(
                    to + block * self._block_bytes + offset * self._slot_bytes,
                    start + (row * outer + column * steps[-3]) * size,
                    self._row_bytes,
                )
        return None

    def write_many(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, without_padding: bool) -> None:
        """Write rows through one indexed copy for each run of slots that are no padding; slots are in range."""
        if without_padding:
            return self._put(pool, rows, slots)
        if slots.dim() == 2:
            for row, row_slots in zip(rows, slots, strict=True):
                self.write_many(pool, row, row_slots, False)
            return None
        for start, stop in spans(slots >= 0):
            self._put(pool, rows[start:stop], slots[start:stop])
        return None

    def _put(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows to slots, all of them valid."""
        to, source = widen(pool, self._dtype), widen(rows, self._dtype)
        if to.dtype != source.dtype:  # an odd offset in one storage: see `widen`
            to, source = as_bits(pool), as_bits(rows)
        slots = slots.to(torch.int64)
        if self._is_flat:
            to.view(self._capacity, self._heads, -1).index_put_((slots,), source)
        else:
            to.index_put_((slots // self._block_size, slots % self._block_size), source)


class PagedCachingDescriptor(kvdock.Descriptor):
    """Writes keys and values of one geometry.

    Args:
        op: name of the op, for errors.
        capacity: slots of the pool.
        k: writes keys.
        v: writes values.
    """

    def __init__(self, op: str, capacity: int, k: RowWriter, v: RowWriter) -> None:
        self._op = op
        self._capacity = capacity
        self._k = k
        self._v = v

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any) -> None:
        """Check all slots, then write."""
        if slot_mapping.numel() > FEW:
            without_padding = slots_in_range(self._op, slot_mapping, self._capacity)
            self._k.write_many(k_cache, k, slot_mapping, without_padding)
            self._v.write_many(v_cache, v, slot_mapping, without_padding)
            return
        slots = slot_mapping.tolist() if slot_mapping.ndim == 1 else slot_mapping.flatten().tolist()
        if max(slots) >= self._capacity:
            slots_in_range(self._op, slot_mapping, self._capacity)
        self._k.write_few(k_cache, k, slots)
        self._v.write_few(v_cache, v, slots)


class PagedCaching(kvdock.Kernel):
    """Prepares `PagedCachingDescriptor`."""

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        """Work out what is static of the two pools."""
        k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
        capacity = int(k_cache.shape[0] or 0) * int(k_cache.shape[1] or 0)
        return PagedCachingDescriptor(
            request.op, capacity, RowWriter(k_cache, request.tensor("k")), RowWriter(v_cache, request.tensor("v"))
        )
