"""Writes into quantised caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvdock_conformance.checking.memory import BITS, Arenas, compare
from kvdock_conformance.checking.target import Target

__all__ = ["check_quantised", "per_element", "quantised"]


def quantised(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits that a quantised cache holds for values: ``x / scale`` in float32, clamped, rounded to nearest even.

    Args:
        values: ``[T, H, D]``.
        scale: one for all, for each head ``[H]``, or for each token and head ``[T, H]``.
        dtype: the cache's.
    """
    limits = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    quotient = (values.float() / per_element(scale)).clamp(limits.min, limits.max)
    rounded = quotient.round() if dtype == torch.int8 else quotient
    return rounded.to(dtype).view(BITS[dtype.itemsize])


def per_element(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale so that it goes with the elements of ``[T, H, D]``."""
    return scale.unsqueeze(-1) if scale.dim() else scale


def check_quantised(target: Target, data: Mapping[str, Any]) -> None:
    """Check writes of distinct slots, or padding, one after the other.

    Raises:
        NonconformanceError: a byte differs.
    """
    memory = Arenas(data["arenas"], target.device)
    for call in data["calls"]:
        _check_write(target, memory, call)


def _check_write(target: Target, memory: Arenas, call: Mapping[str, Any]) -> None:
    expected = memory.copy()
    twins = {name: expected.tensor(spec) for name, spec in call["args"].items()}
    for cache, source, scale in (("k_cache", "k", "k_scale"), ("v_cache", "v", "v_scale")):
        pool = twins[cache].view(BITS[twins[cache].element_size()])
        rows = quantised(twins[source], twins[scale], twins[cache].dtype)
        for row, slot in zip(rows, twins["slot_mapping"].tolist(), strict=True):
            if slot >= 0:
                pool[slot // pool.shape[1], slot % pool.shape[1]] = row
    target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
    compare(memory, expected, call["args"], call["op"])
