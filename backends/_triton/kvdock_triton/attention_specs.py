"""What is compiled for a request of `paged_attention`."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.plugin import Request, TensorMeta, common_alignment
from kvdock_triton.attention_few import attend_few_kernel
from kvdock_triton.attention_join import join_few_kernel, join_kernel
from kvdock_triton.attention_many import attend_many_kernel
from kvdock_triton.elements import index_type
from kvdock_triton.launch import KernelSpec, is_interpreting
from kvdock_triton.tensor_maps import MAP_ALIGNMENT, map_type
from kvdock_triton.tuning import LEAST_ROWS, TUNED_KEY_BYTES, AttentionTile

__all__ = [
    "LONG",
    "MAPPED_POOLS",
    "MOST_KEYS",
    "MOST_SPLITS",
    "attend_spec",
    "is_mapped",
    "join_few_spec",
    "join_spec",
    "long_chunk",
    "map_layout",
    "may_be_within",
    "unit_of",
]

MOST_SPLITS = 64
"""Splits of a sequence at most: `join_kernel` looks at all of them at once."""

_FLOATS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
MOST_SHARED = 64
"""Query heads that read one head of the cache at most, in a program that serves few queries."""

LONG = 256
"""Elements of a key that are padded to a power of two at most: of 576 that would be nearly twice as many."""

WARP_ELEMENTS = 2048
"""Elements of what a tile finds that a warp holds at most, up to `MOST_WARPS`: more would leave no registers for all else."""

MOST_WARPS = 8

JOINED, MOST_JOINED = 4096, 32
"""Elements of the parts of a row that are joined at once, and parts at most."""

MAPPED_POOLS = {"k_map": "k_cache", "v_map": "v_cache"}
"""The cache that each parameter is a map of."""

MOST_KEYS = (1 << 31) - (1 << 16)
"""Keys are counted in 32 bits."""

_STRIDES = (
    *("q_token", "q_head", "table_row", "table_column", "lens_step", "cu_step", "starts_step"),
    *("out_token", "out_head", "lse_token", "lse_head"),
)
_OPTIONAL = {
    "cu": ("cu_query_lens", "cu_step"),
    "starts": ("starts", "starts_step"),
    "sinks": ("sinks",),
    "lse": ("lse", "lse_token", "lse_head"),
}
"""Pointers to what may be absent: name of the argument, and what else is absent with it."""


def _wide(size: int) -> int:
    """Return the power of two that a head of a cache is padded to: at least what matrix units take."""
    return max(16, 1 << (size - 1).bit_length())


def _parts(size: int) -> tuple[int, int]:
    """Return in which powers of two the elements of a key are read: of a long one, what is behind its greatest by itself."""
    most = 1 << (size.bit_length() - 1)
    return (_wide(size), 0) if size <= LONG or size == most else (most, _wide(size - most))


def unit_of(meta: TensorMeta) -> int:
    """Return in how many elements strides of a tensor of rows are counted, so that the compiler sees their alignment."""
    return max(min(meta.alignment, 16) // meta.dtype.itemsize, 1)


def _absent(request: Request) -> dict[str, int]:
    """Return a value for each parameter that a request has no argument for."""
    names = [name for pointer, (arg, *more) in _OPTIONAL.items() if request.args[arg] is None for name in (pointer, *more)]
    return dict.fromkeys(names, 0)


def _pool_constants(name: str, pool: TensorMeta) -> dict[str, int]:
    """Return what is constant about one cache; strides in elements."""
    block, slot, head, _ = pool.strides or (0, 0, 0, 0)
    dim = int(pool.shape[3] or 0)
    values = {"BLOCK": block, "SLOT": slot, "HEAD": head, "DIM": dim}
    return {f"{name}_{key}": value for key, value in values.items()}


def _common_constants(request: Request) -> dict[str, Any]:
    """Return the constants that both kernels have."""
    return {
        "SINKS": request.args["sinks"] is not None,
        "LSE": request.args["lse"] is not None,
        "V_DIM": int(request.tensor("v_cache").shape[3] or 0),
        "V_WIDE": _wide(int(request.tensor("v_cache").shape[3] or 0)),
        "OUT_UNIT": unit_of(request.tensor("out")),
    }


def _types(request: Request) -> dict[str, str]:
    """Return the types of all pointers by parameter."""
    arguments = {"q": "q", "k_cache": "k_cache", "v_cache": "v_cache", "table": "block_table", "lens": "seq_lens", "out": "out"}
    arguments |= {name: arg for name, (arg, *_) in _OPTIONAL.items() if request.args[arg] is not None}
    metas = {name: request.tensor(arg) for name, arg in arguments.items()}
    found = {name: _FLOATS.get(meta.dtype) or index_type(meta) for name, meta in metas.items()}
    return found | {"parts": "*fp32", "sums": "*fp32", "openers": "*i32", "skipped": "*i64"}


def _key_bytes(request: Request) -> int:
    """Return the bytes of a key and its value, as they are padded."""
    k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
    return (sum(_parts(int(k_cache.shape[3] or 0))) + _wide(int(v_cache.shape[3] or 0))) * k_cache.dtype.itemsize


def is_mapped(request: Request) -> bool:
    """Whether tiles of keys and values, each of one block, may be read by maps of the caches."""
    pools = [request.tensor(name) for name in ("k_cache", "v_cache")]
    block = int(pools[0].shape[1] or 1)
    return (
        block % LEAST_ROWS == 0
        and not _is_long(request)
        and all(pool.dtype.itemsize == 2 and common_alignment(pool) == MAP_ALIGNMENT for pool in pools)
        and all(stride > 0 or size == 1 for pool in pools for size, stride in zip(pool.shape, pool.strides or (), strict=True))
    )


def map_layout(pool: TensorMeta) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a cache as its map has them: by block, head, slot and element. Where a size is 1, any stride does."""
    places = (0, 2, 1, 3)
    sizes = tuple(int(pool.shape[place] or 0) for place in places)
    strides = tuple((pool.strides or ())[place] or _wide(sizes[3]) for place in places[:3])
    return sizes, (*strides, 1)


def _map_type(pool: TensorMeta, keys: int) -> str:
    """Return the type of a cache's map."""
    return map_type(_FLOATS[pool.dtype].removeprefix("*"), (1, 1, keys, _wide(int(pool.shape[3] or 0))))


def long_chunk(request: Request, tile: AttentionTile) -> int:
    """Return how many keys of a request are cut into pieces at least."""
    return tile.long * TUNED_KEY_BYTES // _key_bytes(request)


def _is_long(request: Request) -> bool:
    """Whether a tile of keys and values takes more room than one of usual heads."""
    return any(int(request.tensor(name).shape[3] or 0) > LONG for name in ("k_cache", "v_cache"))


def may_be_within(request: Request) -> bool:
    """Whether values can be the first elements of keys, as those of latents are, so that both are read at once."""
    k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
    return k_cache.strides == v_cache.strides and v_cache.shape[3] == _parts(int(k_cache.shape[3] or 0))[0] < int(k_cache.shape[3] or 0)


def attend_spec(request: Request, tile: AttentionTile, many: bool, within: bool = False, early: bool = False) -> KernelSpec:
    """Return what to compile for a request.

    Args:
        request: what is prepared.
        tile: for tuned heads.
        many: whether rows of the batch have more queries than a tile.
        within: whether values are the first elements of keys: see `may_be_within`.
        early: whether what joins the parts of few queries is launched before they have ended.
    """
    q, k_cache, v_cache = (request.tensor(name) for name in ("q", "k_cache", "v_cache"))
    mapped = not many and not within and tile.mapped is not None and is_mapped(request)
    tile = tile.for_keys(_key_bytes(request))
    tile = tile.by_maps(_key_bytes(request)) if mapped else tile.without_matrix_units() if k_cache.dtype == torch.float32 else tile
    absent, shape = _absent(request), _shape(request, tile, many)
    k_wide, k_rest = _parts(int(k_cache.shape[3] or 0))
    constants = _common_constants(request) | absent | shape | _pool_constants("K", k_cache) | _pool_constants("V", v_cache)
    constants |= _few_constants(request, tile, mapped) | {"EARLY": early} if not many else {}
    constants |= {
        "SCALE": int(q.shape[2] or 1) ** -0.5 if request.args["scale"] is None else float(request.args["scale"]),
        "SOFTCAP": float(request.args["softcap"] or 0),
        "CAUSAL": request.args["causal"],
        "WINDOW": min(request.args["window"] or 0, MOST_KEYS),  # 0 where there is none
        "STARTS": "starts" not in absent,
        "BLOCK_SIZE": k_cache.shape[1],
        "Q_UNIT": unit_of(q),
        "KEYS": tile.keys,
        "LEAST": tile.least,
        "K_WIDE": k_wide,
        "K_REST": k_rest,
        "WITHIN": within,
        "WIDEN": is_interpreting(),  # which multiplies the bits of bfloat16 as integers
    }
    maps = {name: _map_type(request.tensor(pool), tile.keys) for name, pool in MAPPED_POOLS.items() if mapped}
    numbers = ("queries", "batch", "room", "num_blocks", *(["splits"] if many else ["each"]), *_STRIDES)
    types = _types(request) | maps | dict.fromkeys(numbers, "i64")
    pools = [name for name in ("k_cache", "v_cache") if common_alignment(request.tensor(name)) == 16]
    aligned = (*pools, *(name for name in ("q", "out") if request.tensor(name).alignment >= 16), "parts", "sums")
    kernel = attend_many_kernel if many else attend_few_kernel
    types = {name: found for name, found in types.items() if name in kernel.arg_names and name not in absent}
    least = 4 if len(pools) < 2 else shape["ROWS"] * constants["V_WIDE"] // WARP_ELEMENTS  # narrow accesses need an address each
    warps = min(max(tile.warps, least), MOST_WARPS)
    constants |= {} if many else {"LANES": 32 * warps}
    resident = tile.programs if not many and tile.pieces > 1 else None
    return KernelSpec.build(kernel, types, constants, aligned, warps, tile.stages, resident=resident)


def _shape(request: Request, tile: AttentionTile, many: bool) -> dict[str, int]:
    """Return the constants of what a program serves: heads of the cache, query heads of each, queries, and rows of both."""
    q, heads, is_one = request.tensor("q"), int(request.tensor("k_cache").shape[2] or 1), request.args["cu_query_lens"] is None
    group = int(q.shape[1] or 1) // heads
    most = tile.rows if q.dtype == torch.float32 else tile.long_rows if _is_long(request) else MOST_SHARED
    rows = tile.rows if many else max(tile.rows, min(_wide(group), most))
    share = min(group, rows)
    return {"HEADS": heads, "GROUP": group, "SHARE": share, "TILE": 1 if is_one else rows // share, "ROWS": rows}


def _few_constants(request: Request, tile: AttentionTile, mapped: bool) -> dict[str, Any]:
    """Return the constants of `attend_few_kernel` alone. A unit is what a step of its loop looks at."""
    return {"RAGGED": request.args["cu_query_lens"] is not None, "UNIT": tile.tiles * tile.keys, "MAPPED": mapped} | (
        {} if mapped else dict.fromkeys(MAPPED_POOLS, 0)
    )


def join_spec(request: Request) -> KernelSpec:
    """Return what joins splits of many queries."""
    query_heads = int(request.tensor("q").shape[1] or 1)
    constants = {"QUERY_HEADS": query_heads, "MOST": MOST_SPLITS, "STEP": 8}
    return _join_spec(request, join_kernel, constants, ("splits",))


def join_few_spec(request: Request, attend: KernelSpec, early: bool = False) -> KernelSpec:
    """Return what joins the parts of an `attend_few_kernel`; ``early`` as in `attend_spec`."""
    constants = {name: attend.constant(name) for name in ("GROUP", "SHARE", "TILE", "ROWS")}
    constants |= {"STEP": JOINED // max(attend.constant("V_WIDE"), JOINED // MOST_JOINED), "EARLY": early}
    return _join_spec(request, join_few_kernel, constants, (), early)


def _join_spec(request: Request, kernel: Any, constants: dict[str, Any], numbers: tuple[str, ...], early: bool = False) -> KernelSpec:
    absent = {name: value for name, value in _absent(request).items() if name in kernel.arg_names}
    types = _types(request) | dict.fromkeys((*numbers, *_STRIDES), "i64")
    types = {name: found for name, found in types.items() if name in kernel.arg_names and name not in absent}
    aligned = ("parts", "sums", *(["out"] if request.tensor("out").alignment >= 16 else []))
    return KernelSpec.build(kernel, types, _common_constants(request) | absent | constants, aligned, 1, early=early)
