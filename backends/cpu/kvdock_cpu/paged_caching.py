"""`paged_caching_` on the CPU: bytes are moved, in the largest pieces that lie together on both sides.

* Few tokens, as in decoding: one `memmove` per row. A single torch call costs as much as such a row.
* Up to a few thousand dense rows: one `memmove` per run of consecutive slots, such as a block.
* All else: one indexed copy per cache, in elements of up to 16 bytes.

None makes a copy of keys or values; what is allocated are indices. Where each way takes over was measured with
`benchmarks/cpu_ops.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kvdock.plugin import HOST, Descriptor, Kernel, Request, TensorMeta, as_bits, quantised_reasons, slots_in_range
from kvdock_cpu.rows import memmove, runs_of, spans, wide_dtype, widen

__all__ = ["PagedCaching", "PagedCachingDescriptor", "RowWriter"]

FEW = 4
MANY = 2048
LONG_RUN = 4

_INDICES = {torch.int32: ctypes.c_int32, torch.int64: ctypes.c_int64}


class RowWriter:
    """Writes rows of keys, or of values, into one pool geometry.

    Args:
        pool: the pool, ``[num_blocks, block_size, heads, dim]``.
        rows: what is written, ``[..., heads, dim]``.

    Attributes:
        row_bytes: bytes of a row.
        slot_bytes: step in bytes from slot to slot, where rows are dense and the step is always the same; else None.
    """

    def __init__(self, pool: TensorMeta, rows: TensorMeta) -> None:
        num_blocks, self._block_size, self._heads, self._dim = (int(size or 0) for size in pool.shape)
        block_step, slot_step, head_step, _ = pool.strides or (0, 0, 0, 0)
        size = pool.dtype.itemsize
        self.row_bytes = self._heads * self._dim * size
        self._block_bytes, self._slot_bytes = block_step * size, slot_step * size
        self._capacity = num_blocks * self._block_size
        self._is_dense = self._heads == 1 or head_step == self._dim
        # Flat: a slot's address is a multiple of one step. Strides of size-1 dims are 0 here.
        self._is_flat = num_blocks == 1 or self._block_size == 1 or block_step == self._block_size * slot_step
        self._step = self._block_bytes if self._block_size == 1 else self._slot_bytes
        self.slot_bytes = self._step or self.row_bytes if self._is_dense and self._is_flat else None
        self._is_packed = self.slot_bytes == self.row_bytes
        self._dtype = wide_dtype(pool, rows)

    def is_dense(self, rows: torch.Tensor) -> bool:
        """Whether each row lies in one piece, here and in ``rows``."""
        return self._is_dense and (self._heads == 1 or rows.stride(-2) == self._dim)

    def is_packed(self, rows: torch.Tensor) -> bool:
        """Whether consecutive slots, and consecutive rows, lie in one piece."""
        return self._is_packed and rows.is_contiguous()

    def write_one(self, pool: torch.Tensor, row: torch.Tensor, slot: int) -> None:
        """Write one dense row to a slot that is in range."""
        if self._is_flat:
            memmove(pool.data_ptr() + slot * self._step, row.data_ptr(), self.row_bytes)
        else:
            block, offset = divmod(slot, self._block_size)
            memmove(pool.data_ptr() + block * self._block_bytes + offset * self._slot_bytes, row.data_ptr(), self.row_bytes)

    def write_runs(self, pool: torch.Tensor, rows: torch.Tensor, runs: Iterable[tuple[int, int, int]]) -> None:
        """Write runs ``(first row, first slot, length)`` of packed rows to packed slots that are in range."""
        size, to, start = self.row_bytes, pool.data_ptr(), rows.data_ptr()
        for row, slot, length in runs:
            memmove(to + slot * size, start + row * size, length * size)

    def write_indexed(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, without_padding: bool) -> None:
        """Write rows in one indexed copy for each stretch without padding; slots are in range."""
        if without_padding:
            self._put(pool, rows, slots)
        elif slots.dim() == 2:
            for row, row_slots in zip(rows, slots, strict=True):
                self.write_indexed(pool, row, row_slots, False)
        else:
            for start, stop in spans(slots >= 0):
                self._put(pool, rows[start:stop], slots[start:stop])

    def _put(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows to slots, all of them valid."""
        to, source = widen(pool, self._dtype), widen(rows.detach(), self._dtype)
        if to.dtype != source.dtype:  # an odd offset in one storage: see `widen`
            to, source = as_bits(pool), as_bits(rows)
        slots = slots.to(torch.int64)
        if self._is_flat:
            to.view(self._capacity, self._heads, -1).index_put_((slots,), source)
        else:
            to.index_put_((slots // self._block_size, slots % self._block_size), source)


class PagedCachingDescriptor(Descriptor):
    """Writes keys and values of one geometry.

    Args:
        op: name of the op, for errors.
        capacity: slots of the pool.
        k: writes keys.
        v: writes values.
    """

    uses_autograd = False  # `memmove` is not recorded, and `RowWriter` detaches what an indexed copy reads

    def __init__(self, op: str, capacity: int, k: RowWriter, v: RowWriter) -> None:
        self._op = op
        self._capacity = capacity
        self._k = k
        self._v = v
        self._k_step, self._v_step = k.slot_bytes or 0, v.slot_bytes or 0
        self._is_plain = bool(k.slot_bytes and v.slot_bytes)

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any
    ) -> None:
        """Check all slots, then write."""
        count = slot_mapping.numel()
        if count == 1 and self._is_plain and k.is_contiguous() and v.is_contiguous():  # decoding one sequence: no call more than needed
            slot = slot_mapping.item()
            if 0 <= slot < self._capacity:
                memmove(k_cache.data_ptr() + slot * self._k_step, k.data_ptr(), self._k.row_bytes)
                memmove(v_cache.data_ptr() + slot * self._v_step, v.data_ptr(), self._v.row_bytes)
            elif slot >= 0:
                slots_in_range(self._op, slot_mapping, self._capacity)
            return None
        if count <= FEW and self._k.is_dense(k) and self._v.is_dense(v):
            return self._write_few(k_cache, v_cache, k, v, slot_mapping)
        if count < MANY and self._k.is_packed(k) and self._v.is_packed(v):
            runs = runs_of(slot_mapping, self._capacity)
            # Many short runs take more time in calls of memmove than one indexed copy does.
            if runs is not None and len(runs) * LONG_RUN <= count:
                self._k.write_runs(k_cache, k, runs)
                return self._v.write_runs(v_cache, v, runs)
        # All slots are checked before a byte is written: an error leaves the pool as it was.
        without_padding = slots_in_range(self._op, slot_mapping, self._capacity)
        self._k.write_indexed(k_cache, k, slot_mapping, without_padding)
        self._v.write_indexed(v_cache, v, slot_mapping, without_padding)
        return None

    def _write_few(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write up to `FEW` dense rows."""
        slots_in_range(self._op, slot_mapping, self._capacity)
        for index, slot in enumerate(slot_mapping.flatten().tolist()):
            if slot >= 0:
                place = divmod(index, k.shape[1]) if k.ndim == 4 else (index,)
                self._k.write_one(k_cache, k[place], slot)
                self._v.write_one(v_cache, v[place], slot)

    def fix(self, *args: Any) -> Callable[..., None] | None:
        """Settle decoding of one sequence: its one slot is read where it lies, which costs half of asking the tensor."""
        _, _, k, v, slot_mapping, *_ = args
        if slot_mapping.numel() != 1 or not (self._is_plain and k.is_contiguous() and v.is_contiguous()):
            return None
        shape, capacity, k_step, v_step = slot_mapping.shape, self._capacity, self._k_step, self._v_step
        k_bytes, v_bytes, read = self._k.row_bytes, self._v.row_bytes, _INDICES[slot_mapping.dtype].from_address

        def write_one(k_cache: int, v_cache: int, k: int, v: int, at: int, *sizes: int) -> None:
            slot = read(at).value
            if 0 <= slot < capacity:
                memmove(k_cache + slot * k_step, k, k_bytes)
                memmove(v_cache + slot * v_step, v, v_bytes)
            elif slot >= 0:
                slots_in_range(self._op, torch.full(shape, slot, device=HOST), capacity)

        return write_one


class PagedCaching(Kernel):
    """Prepares `PagedCachingDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Work out what is static of the two pools."""
        k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
        capacity = int(k_cache.shape[0] or 0) * int(k_cache.shape[1] or 0)
        return PagedCachingDescriptor(
            request.op, capacity, RowWriter(k_cache, request.tensor("k")), RowWriter(v_cache, request.tensor("v"))
        )
