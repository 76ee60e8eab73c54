"""`static_update_` in portable torch."""

from __future__ import annotations

import torch

from kvdock.bits import as_bits
from kvdock.interface import HOST, HOST_INT, Descriptor, Request
from kvdock.ops.index_values import check_lengths
from kvdock.ops.portable.rows import SKIPPED, PortableDescriptor, PortableKernel, write_rows

__all__ = ["HostLength", "StaticUpdate", "TensorLengths"]


class HostLength(PortableDescriptor):
    """Writes all rows behind one length that the host knows: a plain copy, on any device."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: int) -> None:
        """Write ``k`` and ``v`` at position ``cache_lengths`` of each row."""
        rows, new = k.shape[0], k.shape[2]
        check_lengths(self._op, [cache_lengths], new, k_cache.shape[2])
        for cache, source in ((k_cache, k), (v_cache, v)):
            as_bits(cache)[:rows, :, cache_lengths : cache_lengths + new].copy_(as_bits(source))


class TensorLengths(PortableDescriptor):
    """Writes each row behind its own length, which lies in a tensor; a row that does not fit is skipped whole.

    A static cache is a paged one whose blocks are its rows: position p of row r is slot ``r * S + p``.
    """

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: torch.Tensor) -> None:
        """Write ``k`` and ``v`` at the position of each row."""
        (rows, _, new, _), length = k.shape, k_cache.shape[2]
        if self._on_host:
            check_lengths(self._op, cache_lengths.reshape(-1).tolist(), new, length)
        start = cache_lengths.to(torch.int64).reshape(-1).expand(rows)
        valid = ((start >= 0) & (start <= length - new)).repeat_interleave(new, output_size=rows * new)
        self._skipped.add_((~valid).sum())
        if new > length:
            return
        self.workspace_bytes = 4 * max(k.nbytes, v.nbytes)  # what torch takes to index rows
        first = torch.arange(rows, device=start.device) * length + start
        slots = (first[:, None] + torch.arange(new, device=start.device)).reshape(-1)
        for cache, source in ((k_cache, k), (v_cache, v)):
            write_rows(cache.transpose(1, 2), source.transpose(1, 2), slots, valid)


class StaticUpdate(PortableKernel):
    """Prepares `HostLength` for an int, `TensorLengths` for a tensor."""

    def prepare(self, request: Request) -> Descriptor:
        """Choose by where the lengths are."""
        made = HostLength if request.args["cache_lengths"] == HOST_INT else TensorLengths
        return made(request.op, SKIPPED.prepare(request.device), request.device == HOST)
