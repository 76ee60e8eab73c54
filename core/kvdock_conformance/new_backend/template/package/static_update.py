"""`static_update_`: new keys and values go behind what each row of a static cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, TensorMeta, as_bits, check_lengths, quantised_reasons

from .rows import SKIPPED, write_rows

__all__ = ["HostLength", "StaticUpdate", "TensorLengths"]


class HostLength(Descriptor):
    """Writes all rows behind one length that the host knows: a plain copy.

    Args:
        op: name of the op, for errors.
    """

    def __init__(self, op: str) -> None:
        self._op = op

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: int) -> None:
        """Check the length, then write ``k`` and ``v`` at that position of each row."""
        rows, new = k.shape[0], k.shape[2]
        check_lengths(self._op, [cache_lengths], new, k_cache.shape[2])
        for cache, source in ((k_cache, k), (v_cache, v)):
            as_bits(cache)[:rows, :, cache_lengths : cache_lengths + new].copy_(as_bits(source))


class TensorLengths(Descriptor):
    """Writes each row behind its own length, which lies in a tensor; a row that does not fit is skipped whole and counted.

    Args:
        skipped: count of skipped writes on the device, int64 ``[]``.
    """

    def __init__(self, skipped: torch.Tensor) -> None:
        self._skipped = skipped

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: torch.Tensor) -> None:
        """Write ``k`` and ``v``. A static cache is a paged one whose blocks are its rows: position p of row r is slot ``r * S + p``."""
        (rows, _, new, _), length = k.shape, k_cache.shape[2]
        start = cache_lengths.to(torch.int64).reshape(-1).expand(rows)
        valid = ((start >= 0) & (start <= length - new)).repeat_interleave(new, output_size=rows * new)
        self._skipped.add_((~valid).sum())
        if new > length:
            return
        self.workspace_bytes = 4 * max(k.nbytes, v.nbytes)  # what torch takes to index rows
        row = torch.arange(rows, device=start.device)
        slots = ((row * length + start)[:, None] + torch.arange(new, device=start.device)).reshape(-1)
        for cache, source in ((k_cache, k), (v_cache, v)):
            write_rows(cache.transpose(1, 2), source.transpose(1, 2), slots, valid)


class StaticUpdate(Kernel):
    """Prepares `HostLength` for a Python int, `TensorLengths` for a tensor."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Choose by where the lengths are."""
        if isinstance(request.args["cache_lengths"], TensorMeta):
            return TensorLengths(SKIPPED.prepare(request.device))
        return HostLength(request.op)
