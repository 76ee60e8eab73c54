"""What torch's `varlen_attn` on blocks cannot serve, said so that people can act on it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kvdock.plugin import Request, quantised_reasons

from .implementation import PAGED

__all__ = ["reasons"]

_DTYPES = (torch.float16, torch.bfloat16)
_MOST_DIM, _MOST_TOKENS = 256, 63
"""Elements of a head, and tokens of a block. Longer blocks may be a whole tile of keys, which is read with what lies behind a
sequence's end: 0 times that is not 0 where it is NaN."""
_ALIGNED = 16
"""Bytes that its kernels read and write at a time."""


def reasons(request: Request, capability: tuple[int, int], active: str | None) -> list[str]:
    """Return what speaks against a request.

    Args:
        request: the request.
        capability: compute capability of its device.
        active: name of the flash attention that torch runs.
    """
    found = quantised_reasons(request)
    major = PAGED.get(active or "")
    if major != capability[0]:
        needs = "no GPU" if major is None else f"GPUs of compute capability {major}.x"
        found.append(f"{active or 'FA2'} reads blocks on {needs}, not on {capability[0]}.{capability[1]}")
    return found + [*_unknown_options(request), *_wrong_heads(request), *_wrong_memory(request)]


def _unknown_options(request: Request) -> Iterator[str]:
    for name in ("sinks", "starts", "softcap"):
        if request.args[name] is not None:
            yield f"{name}: varlen_attn takes none"


def _wrong_heads(request: Request) -> Iterator[str]:
    dtype = request.tensor("q").dtype
    if dtype not in _DTYPES:
        yield f"q: varlen_attn computes {' and '.join(map(str, _DTYPES))}, not {dtype}"
    k_dim, v_dim = (int(request.tensor(name).shape[3] or 0) for name in ("k_cache", "v_cache"))
    if k_dim != v_dim or k_dim % 8 or k_dim > _MOST_DIM:
        yield f"heads: varlen_attn takes a multiple of 8 elements up to {_MOST_DIM} of keys and as many of values, not {k_dim} and {v_dim}"


def _wrong_memory(request: Request) -> Iterator[str]:
    block = int(request.tensor("k_cache").shape[1] or 0)
    if block > _MOST_TOKENS:
        yield f"k_cache: of blocks of more than {_MOST_TOKENS} tokens, here {block}, NaN behind a sequence's end may count"
    for name in ("q", "k_cache", "v_cache", "out"):
        meta = request.tensor(name)
        step = math.gcd(*(stride * meta.dtype.itemsize for stride in (meta.strides or ())[:-1]), _ALIGNED)
        if min(meta.alignment, step) < _ALIGNED:
            yield f"{name}: its kernels take {_ALIGNED} bytes at a time, and rows begin at multiples of {min(meta.alignment, step)}"
