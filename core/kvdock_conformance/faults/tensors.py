"""What faults do to tensors: other views of their memory, and rows moved in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock_conformance.checking.memory import BITS
from kvdock_conformance.faults.fault import Args

__all__ = ["at_or_before", "bits", "capacity", "dense", "flip_byte", "in_range", "restrided", "store"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements as integers of their size."""
    return tensor.detach().view(BITS[tensor.element_size()])


def dense(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return list(torch.empty(tuple(shape), device="meta").stride())


def restrided(tensor: torch.Tensor, strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Return a tensor's memory seen with other strides; it may show less of it than the shape asks for, never more."""
    return tensor.as_strided(tensor.shape, tuple(strides), tensor.storage_offset() + offset)


def at_or_before(tensor: torch.Tensor, *, by_place: bool = False) -> torch.Tensor:
    """Return a tensor as it is where it begins at a multiple of 16 bytes, else what begins at the one before it.

    Args:
        tensor: the tensor.
        by_place: only where its place in its storage is such a multiple, so that nothing but its address tells.
    """
    size = tensor.element_size()
    past = tensor.data_ptr() % 16 // size
    is_moved = 0 < past <= tensor.storage_offset() and not (by_place and tensor.storage_offset() * size % 16)
    return restrided(tensor, tensor.stride(), -past) if is_moved else tensor


def capacity(args: Args) -> int:
    """Return how many slots the pool of a call has."""
    return int(args["k_cache"].shape[0] * args["k_cache"].shape[1])


def in_range(args: Args) -> torch.Tensor:
    """Return which slots of a call are slots of its pool."""
    slots = args["slot_mapping"]
    valid: torch.Tensor = (slots >= 0) & (slots < capacity(args))
    return valid


def flip_byte(tensor: torch.Tensor, element: int) -> None:
    """Invert the first byte of the element that lies so many elements behind the first one of a tensor's storage."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    memory[element * tensor.element_size()] ^= 0xFF


def store(cache: torch.Tensor, rows: torch.Tensor, args: Args) -> None:
    """Write rows to the slots of a call that are in range, in plain torch: ``[..., heads, dim]`` or a part of them."""
    valid, block = in_range(args), cache.shape[1]
    slots = args["slot_mapping"][valid].long()
    bits(cache)[slots // block, slots % block] = bits(rows)[valid]
