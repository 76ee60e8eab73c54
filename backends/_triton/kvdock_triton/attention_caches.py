"""What the kernels of `paged_attention` ask about the caches of a request."""

from __future__ import annotations

import torch

from kvdock.plugin import Request, TensorMeta, common_alignment
from kvdock_triton.tensor_maps import MAP_ALIGNMENT, map_type
from kvdock_triton.tuning import LEAST_ROWS, TUNED_KEY_BYTES, AttentionTile

__all__ = [
    "FLOATS",
    "LONG",
    "MAPPED_POOLS",
    "is_long",
    "is_mapped",
    "key_bytes",
    "long_chunk",
    "map_layout",
    "may_be_within",
    "parts",
    "pool_map_type",
    "wide",
]

FLOATS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}

LONG = 256
"""Elements of a key that are padded to a power of two at most: of 576 that would be nearly twice as many."""

MAPPED_POOLS = {"k_map": "k_cache", "v_map": "v_cache"}
"""The cache that each parameter is a map of."""


def wide(size: int) -> int:
    """Return the power of two that a head of a cache is padded to: at least what matrix units take."""
    return max(16, 1 << (size - 1).bit_length())


def parts(size: int) -> tuple[int, int]:
    """Return in which powers of two the elements of a key are read: of a long one, what is behind its greatest by itself."""
    most = 1 << (size.bit_length() - 1)
    return (wide(size), 0) if size <= LONG or size == most else (most, wide(size - most))


def key_bytes(request: Request) -> int:
    """Return the bytes of a key and its value, as they are padded."""
    k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
    return (sum(parts(int(k_cache.shape[3] or 0))) + wide(int(v_cache.shape[3] or 0))) * k_cache.dtype.itemsize


def is_mapped(request: Request) -> bool:
    """Whether tiles of keys and values, each of one block, may be read by maps of the caches."""
    pools = [request.tensor(name) for name in ("k_cache", "v_cache")]
    block = int(pools[0].shape[1] or 1)
    return (
        block % LEAST_ROWS == 0
        and not is_long(request)
        and all(pool.dtype.itemsize == 2 and common_alignment(pool) == MAP_ALIGNMENT for pool in pools)
        and all(stride > 0 or size == 1 for pool in pools for size, stride in zip(pool.shape, pool.strides or (), strict=True))
    )


def map_layout(pool: TensorMeta) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a cache as its map has them: by block, head, slot and element. Where a size is 1, any stride does."""
    places = (0, 2, 1, 3)
    sizes = tuple(int(pool.shape[place] or 0) for place in places)
    strides = tuple((pool.strides or ())[place] or wide(sizes[3]) for place in places[:3])
    return sizes, (*strides, 1)


def pool_map_type(pool: TensorMeta, keys: int) -> str:
    """Return the type of a cache's map."""
    return map_type(FLOATS[pool.dtype].removeprefix("*"), (1, 1, keys, wide(int(pool.shape[3] or 0))))


def long_chunk(request: Request, tile: AttentionTile) -> int:
    """Return how many keys of a request are cut into pieces at least."""
    return tile.long * TUNED_KEY_BYTES // key_bytes(request)


def is_long(request: Request) -> bool:
    """Whether a tile of keys and values takes more room than one of usual heads."""
    return any(int(request.tensor(name).shape[3] or 0) > LONG for name in ("k_cache", "v_cache"))


def may_be_within(request: Request) -> bool:
    """Whether values can be the first elements of keys, as those of latents are, so that both are read at once."""
    k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
    return k_cache.strides == v_cache.strides and v_cache.shape[3] == parts(int(k_cache.shape[3] or 0))[0] < int(k_cache.shape[3] or 0)
