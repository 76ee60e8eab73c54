"""Kernels that treat quantised pools in a way of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.faults.fault import Args
from kvdock_conformance.faults.tensors import bits, in_range

__all__ = ["QuantisedKernel", "Quantises", "Reads", "per_row"]


class QuantisedKernel(kvdock.plugin.Kernel):
    """A kernel that treats quantised pools in a way of its own, and all others as the backend does.

    Args:
        inner: the backend's kernel.
    """

    about = kvdock.plugin.QUANTISED_DTYPES
    """Cache dtypes that it treats so."""

    about_quantised: Sequence[str] = ()
    """What it says against quantised pools; empty to serve them."""

    descriptor: type[kvdock.plugin.Descriptor]
    """What serves them."""

    def __init__(self, inner: kvdock.plugin.Kernel) -> None:
        self._inner = inner

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        """Ask the backend about other pools."""
        return self.about_quantised if _is_quantised(request) else self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Return a descriptor of its own for quantised pools."""
        return self.descriptor() if _is_quantised(request) else self._inner.prepare(request)


def _is_quantised(request: kvdock.plugin.Request) -> bool:
    """Whether the key pool is quantised."""
    return request.tensor("k_cache").dtype in kvdock.plugin.QUANTISED_DTYPES


class Quantises(kvdock.plugin.Descriptor):
    """Writes tokens into a quantised pool as it must be done, in plain torch. Faults are made of it."""

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *scales: Any
    ) -> None:
        """Write."""
        args: Args = {"k_cache": k_cache, "slot_mapping": slots}
        valid = in_range(args)
        for cache, rows, scale in zip((k_cache, v_cache), (k, v), self.scales(*scales), strict=True):
            made = bits(self.stored(self.divided(rows.float(), per_row(scale, rows)), cache.dtype))
            block = cache.shape[1]
            bits(cache)[slots[valid] // block, slots[valid] % block] = made[valid]

    def scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of keys and of values."""
        return k_scale, v_scale

    def divided(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``x / scale``."""
        return rows / scale

    def stored(self, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what is stored for ``x / scale``."""
        if dtype == torch.int8:
            return quotient.round().clamp(-128, 127).to(dtype)
        most = torch.finfo(dtype).max
        return quotient.clamp(-most, most).to(dtype)


class Reads(kvdock.plugin.Descriptor):
    """Reads tokens from a quantised pool as it must be done, in plain torch. Faults are made of it."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        """Read."""
        for cache, scale, out in zip((k_cache, v_cache), self.scales(k_scale, v_scale), (k_out, v_out), strict=True):
            at = slots.clamp(min=0).long()
            rows = cache.float()[at // cache.shape[1], at % cache.shape[1]] * per_row(scale, out)
            out.copy_(torch.where(slots[..., None, None] < 0, 0.0, rows))

    def scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of keys and of values."""
        return k_scale, v_scale


def per_row(scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a scale, wherever it lies, so that it goes with the elements of ``[..., heads, dim]``."""
    return (scale[..., None] if scale.dim() else scale).to(rows.device)
