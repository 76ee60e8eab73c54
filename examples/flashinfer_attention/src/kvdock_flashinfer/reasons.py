"""What FlashInfer's kernels for pages cannot serve, said so that people can act on it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kvdock.plugin import Request, TensorMeta, quantised_reasons

__all__ = ["reasons"]

_DTYPES = (torch.float16, torch.bfloat16)
_DIMS = (64, 128, 256)
_ALIGNED = 16
"""Bytes that its kernels read and write at a time."""


def reasons(request: Request, capability: tuple[int, int]) -> list[str]:
    """Return what speaks against a request on a GPU of a compute capability."""
    found = quantised_reasons(request)
    if capability < (8, 0):
        found.append(f"FlashInfer's tensor-core kernels need compute capability 8.0, not {capability[0]}.{capability[1]}")
    return found + [*_unknown_options(request), *_inexact_sums(request, capability), *_wrong_heads(request), *_wrong_memory(request)]


def _unknown_options(request: Request) -> Iterator[str]:
    for name in ("sinks", "starts"):
        if request.args[name] is not None:
            yield f"{name}: FlashInfer's wrappers take none"
    if request.args["window"] is not None and not request.args["causal"] and request.args["cu_query_lens"] is not None:
        yield "window: FlashInfer's windows end at the query's own key, and without causal there are keys behind it"


def _inexact_sums(request: Request, capability: tuple[int, int]) -> Iterator[str]:
    """Yield what speaks against returning sums, which kvdock's contract wants as exact as float32 allows."""
    if request.args["lse"] is None:
        return
    if capability[0] != 9:
        yield "lse: FlashInfer's kernels for GPUs other than Hopper's sum weights that were rounded to 16 bits"
    if request.args["softcap"] is not None:
        yield "lse: FlashInfer approximates the tanh of a soft cap, to three digits"


def _wrong_heads(request: Request) -> Iterator[str]:
    dtype = request.tensor("q").dtype
    if dtype not in _DTYPES:
        yield f"q: FlashInfer computes {' and '.join(map(str, _DTYPES))}, not {dtype}"
    k_dim, v_dim = (request.tensor(name).shape[3] for name in ("k_cache", "v_cache"))
    if k_dim != v_dim or k_dim not in _DIMS:
        yield f"heads: FlashInfer is compiled for {', '.join(map(str, _DIMS))} elements of keys and of values, not {k_dim} and {v_dim}"


def _wrong_memory(request: Request) -> Iterator[str]:
    k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
    if k_cache.strides != v_cache.strides:
        yield f"v_cache: FlashInfer reads keys and values at the same steps, not {k_cache.strides} and {v_cache.strides}"
    for name in ("q", "k_cache", "v_cache"):
        meta = request.tensor(name)
        step = math.gcd(*(stride * meta.dtype.itemsize for stride in (meta.strides or ())[:-1]), _ALIGNED)
        if min(meta.alignment, step) < _ALIGNED:
            yield f"{name}: FlashInfer reads {_ALIGNED} bytes at a time, and rows begin at multiples of {min(meta.alignment, step)}"
    yield from _far_blocks(k_cache)


def _far_blocks(cache: TensorMeta) -> Iterator[str]:
    """Yield what speaks against the places of blocks: a kernel for Hopper counts them in tokens, in 32 bits."""
    block, token = (cache.strides or (0, 0))[:2]
    if cache.shape[1] == 1 or token == 0 or block % token:
        yield f"k_cache: FlashInfer reads blocks of several tokens, whole tokens apart, not {cache.shape[1]} at steps of {cache.strides}"
    elif int(cache.shape[0] or 0) * (block // token) >= 2**31:
        yield f"k_cache: FlashInfer counts tokens in 32 bits, not {cache.shape[0]} blocks that lie {block // token} tokens apart"
