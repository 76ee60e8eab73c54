"""Tensors as faults need them: as bits, and as memory seen with other strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock_conformance.checking.memory import BITS

__all__ = ["bits", "dense", "flip_byte_behind", "restrided"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements as integers of their size."""
    return tensor.detach().view(BITS[tensor.element_size()])


def restrided(tensor: torch.Tensor, strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Return a tensor's memory seen with other strides; it may show less of it than the shape asks for, never more."""
    return tensor.as_strided(tensor.shape, tuple(strides), tensor.storage_offset() + offset)


def dense(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return list(torch.empty(tuple(shape), device="meta").stride())


def flip_byte_behind(row: torch.Tensor) -> None:
    """Change the byte behind the last element of a row ``[D]``."""
    memory = torch.empty(0, dtype=torch.uint8, device=row.device).set_(row.untyped_storage())
    memory[(row.storage_offset() + row.shape[-1]) * row.element_size()] ^= 0xFF
