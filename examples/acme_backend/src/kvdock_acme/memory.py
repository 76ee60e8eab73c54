"""torch's tensors as the copy engine sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvdock.plugin import Request, TensorMeta, as_bits

from .engine import ALIGNMENT, Pieces

__all__ = ["pieces", "pool_reasons", "reasons"]


def pieces(tensor: torch.Tensor) -> Pieces:
    """See ``[..., dim]`` as ``[...]`` pieces of one vector each; nothing is copied, and bits are not taken for numbers."""
    memory = as_bits(tensor.detach()).numpy()
    seen: Pieces = memory.view(np.dtype((np.void, tensor.shape[-1] * tensor.element_size())))[..., 0]
    return seen


def pool_reasons(name: str, pool: TensorMeta) -> Iterator[str]:
    """Yield what speaks against a pool. Its steps are static: they are no part of its alignment, but they can be looked at."""
    size = pool.dtype.itemsize
    odd = [step * size for step in (pool.strides or ())[:-1] if step * size % ALIGNMENT]
    if int(pool.shape[-1] or 0) * size % ALIGNMENT or odd:
        yield (
            f"{name}: the copy engine moves whole multiples of {ALIGNMENT} bytes at steps of as many, "
            f"not vectors of {pool.shape[-1]} elements of {size} bytes at steps of {pool.strides} elements"
        )


def reasons(request: Request, pools: Sequence[str], rows: Sequence[str] = ()) -> list[str]:
    """Return what speaks against a request: what the copy engine cannot reach.

    Args:
        request: the request.
        pools: names of the arguments whose memory order is static.
        rows: names of those whose steps come with each call, and are covered by their alignment.
    """
    found = [reason for name in pools for reason in pool_reasons(name, request.tensor(name))]
    for name in (*pools, *rows):
        got = request.tensor(name).alignment
        if got < ALIGNMENT:
            found.append(f"{name}: the copy engine needs addresses that are multiples of {ALIGNMENT} bytes, not of {got}")
    return found
