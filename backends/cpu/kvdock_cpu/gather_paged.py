"""`gather_paged` on the CPU: one indexed read per cache, straight into the output.

* Rows in one piece, in the cache and in the output: `index_select`, which copies each as such.
* All else: an indexed read in elements of up to 16 bytes.

Neither makes a copy of keys or values; what is allocated are indices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, TensorMeta, as_bits, quantised_reasons, slots_in_range
from kvdock_cpu.rows import wide_dtype, widen

__all__ = ["GatherPaged", "GatherPagedDescriptor", "RowReader"]


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
