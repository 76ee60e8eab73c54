"""`gather_paged` on the CPU: one indexed read per cache, in wide elements, straight into the output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import kvdock
from kvdock.ops.hostcheck import slots_in_range
from kvdock_cpu.rows import as_bits, quantised_reasons, wide_dtype, widen

__all__ = ["GatherPaged", "GatherPagedDescriptor"]


class GatherPagedDescriptor(kvdock.Descriptor):
    """Reads keys and values of one geometry.

    Args:
        op: name of the op, for errors.
        k_dtype: element in which keys move.
        v_dtype: element in which values move.
    """

    def __init__(self, op: str, k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
        self._op = op
        self._dtypes = (k_dtype, v_dtype)

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor) -> None:
        """Check all slots, then fill the outputs, which are the last two arguments."""
        num_blocks, block_size = k_cache.shape[:2]
        without_padding = slots_in_range(self._op, slot_mapping, num_blocks * block_size)
        slots = slot_mapping.to(torch.int64)
        padding = None if without_padding else slots < 0
        for cache, out, dtype in zip((k_cache, v_cache), rest[-2:], self._dtypes, strict=True):
            if num_blocks:
                _read(cache, out, dtype, slots if padding is None else slots.clamp(min=0))
            if padding is not None:
                out[padding] = 0


def _read(cache: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, slots: torch.Tensor) -> None:
    """Fill ``out`` with the rows at ``slots``, all of them valid."""
    source, to = widen(cache, dtype), widen(out, dtype)
    if to.dtype != source.dtype:  # an odd offset in one storage: see `widen`
        source, to = as_bits(cache), as_bits(out)
    block_size = cache.shape[1]
    torch.ops.aten.index.Tensor_out(source, [slots // block_size, slots % block_size], out=to)


class GatherPaged(kvdock.Kernel):
    """Prepares `GatherPagedDescriptor`."""

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        """Choose the elements in which keys and values move."""
        dtypes = [wide_dtype(request.tensor(f"{name}_cache"), request.tensor(f"{name}_out")) for name in ("k", "v")]
        return GatherPagedDescriptor(request.op, *dtypes)
