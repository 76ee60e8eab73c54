"""`paged_caching_` on Acme's copy engine: each row is moved in one piece, or in one piece per head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock.ops.hostcheck import slots_in_range

from .engine import ALIGNMENT, Engine, Pieces

__all__ = ["PagedCaching", "PagedCachingDescriptor"]

BITS = {2: torch.int16, 4: torch.int32}


def pool_reasons(name: str, pool: kvdock.TensorMeta) -> Iterator[str]:
    """Yield what speaks against a pool: the engine goes from slot to slot in equal steps."""
    (num_blocks, block_size, heads, dim), steps = (int(size or 0) for size in pool.shape), pool.strides or ()
    packed = (block_size * heads * dim, heads * dim, dim, 1)
    sizes = (num_blocks, block_size, heads, dim)
    if any(size > 1 and step != wanted for size, step, wanted in zip(sizes, steps, packed, strict=True)):
        yield f"{name}: the copy engine needs a contiguous pool, strides {packed}, not {steps}"


class PagedCachingDescriptor(kvdock.Descriptor):
    """Writes keys and values into pools of one geometry.

    Args:
        op: name of the op, for errors.
        engine: moves the rows.
    """

    uses_autograd = False  # numpy moves the bytes: there is nothing that autograd could record

    def __init__(self, op: str, engine: Engine) -> None:
        self._op = op
        self._engine = engine

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any
    ) -> None:
        """Check all slots, then write."""
        slots_in_range(self._op, slot_mapping, k_cache.shape[0] * k_cache.shape[1])
        if slot_mapping.dim() == 2 and 1 not in slot_mapping.shape:  # [batch, tokens]: each sequence may lie anywhere
            calls = list(zip(k, v, slot_mapping, strict=True))
        else:
            calls = [(k.flatten(0, -3), v.flatten(0, -3), slot_mapping.flatten())]
        for keys, values, slots in calls:
            for pool, rows in ((k_cache, keys), (v_cache, values)):
                whole = rows.shape[1] == 1 or rows.stride(1) == rows.shape[2]
                self._engine.write(_pieces(pool.flatten(0, 1), whole), _pieces(rows, whole), slots.numpy())


def _pieces(rows: torch.Tensor, whole: bool) -> Pieces:
    """See ``[n, heads, dim]`` as ``[n, 1]`` whole rows, or as ``[n, heads]`` pieces; nothing is copied."""
    if whole:
        rows = rows.view(rows.shape[0], 1, rows.shape[1] * rows.shape[2])
    memory = rows.detach().view(BITS[rows.element_size()]).numpy()
    pieces: Pieces = memory.view(np.dtype((np.void, rows.shape[2] * rows.element_size())))[..., 0]
    return pieces


class PagedCaching(kvdock.Kernel):
    """Prepares `PagedCachingDescriptor`.

    Args:
        engine: the device's copy engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        """Serve contiguous pools and tensors that begin and go on at multiples of 4 bytes."""
        reasons = [reason for name in ("k_cache", "v_cache") for reason in pool_reasons(name, request.tensor(name))]
        for name in ("k_cache", "v_cache", "k", "v"):
            if request.tensor(name).alignment < ALIGNMENT:
                got = request.tensor(name).alignment
                reasons.append(f"{name}: the copy engine needs addresses that are multiples of {ALIGNMENT} bytes, not of {got}")
        return reasons

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        """Nothing to compile: the engine takes any geometry that `supports` lets through."""
        return PagedCachingDescriptor(request.op, self._engine)
