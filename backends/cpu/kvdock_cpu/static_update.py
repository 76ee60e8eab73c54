"""`static_update_` on the CPU: plain strided copies; one indexed copy where many rows have lengths of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.plugin import Descriptor, Kernel, Request, as_bits, check_lengths, quantised_reasons
from kvdock_cpu.rows import wide_dtype, widen

__all__ = ["StaticUpdate", "StaticUpdateDescriptor"]

FEW = 4
"""Up to so many rows one strided copy each is quicker than an indexed copy of all."""


class StaticUpdateDescriptor(Descriptor):
    """Writes new positions behind the length of each row.

    Args:
        op: name of the op, for errors.
        k_dtype: element in which keys move.
        v_dtype: element in which values move.
    """

    def __init__(self, op: str, k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
        self._op = op
        self._dtypes = (k_dtype, v_dtype)

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: int | torch.Tensor
    ) -> None:
        """Check all lengths, then write."""
        lengths = [cache_lengths] if isinstance(cache_lengths, int) else cache_lengths.flatten().tolist()
        check_lengths(self._op, lengths, k.shape[2], k_cache.shape[2])
        for cache, source, dtype in ((k_cache, k, self._dtypes[0]), (v_cache, v, self._dtypes[1])):
            if len(lengths) == 1:
                _write(as_bits(cache)[: source.shape[0]], as_bits(source), lengths[0])
            elif len(lengths) <= FEW:
                for row, length in enumerate(lengths):
                    _write(as_bits(cache)[row], as_bits(source)[row], length)
            else:
                _write_rows(cache, source, dtype, lengths)


def _write(cache: torch.Tensor, source: torch.Tensor, length: int) -> None:
    """Copy ``[..., s, D]`` behind ``length`` positions of ``[..., S, D]``."""
    cache[..., length : length + source.shape[-2], :].copy_(source)


def _write_rows(cache: torch.Tensor, source: torch.Tensor, dtype: torch.dtype, lengths: Sequence[int]) -> None:
    """Copy ``[b, H, s, D]`` behind a length of its own for each row, in one indexed copy."""
    to, rows = widen(cache, dtype), widen(source, dtype)
    if to.dtype != rows.dtype:  # an odd offset in one storage: see `widen`
        to, rows = as_bits(cache), as_bits(source)
    host = cache.device  # named, since torch's default device may be another
    row = torch.arange(len(lengths), device=host)[:, None]
    position = torch.tensor(lengths, device=host)[:, None] + torch.arange(source.shape[2], device=host)
    to.transpose(1, 2).index_put_((row, position), rows.transpose(1, 2))


class StaticUpdate(Kernel):
    """Prepares `StaticUpdateDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Choose the elements in which keys and values move."""
        dtypes = [wide_dtype(request.tensor(f"{name}_cache"), request.tensor(name)) for name in ("k", "v")]
        return StaticUpdateDescriptor(request.op, *dtypes)
