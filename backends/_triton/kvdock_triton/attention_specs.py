"""What is compiled for a request of `paged_attention`."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.plugin import Request, TensorMeta, common_alignment
from kvdock_triton.attention_caches import FLOATS, MAPPED_POOLS, is_long, is_mapped, key_bytes, parts, pool_map_type, wide
from kvdock_triton.attention_few import attend_few_kernel
from kvdock_triton.attention_join import join_few_kernel, join_kernel
from kvdock_triton.attention_many import attend_many_kernel
from kvdock_triton.direct import is_known_release
from kvdock_triton.elements import index_type
from kvdock_triton.launch import KernelSpec, is_interpreting
from kvdock_triton.tuning import AttentionTile, Tuning

__all__ = ["MOST_KEYS", "MOST_SPLITS", "attend_spec", "join_few_spec", "join_spec", "prefill_tile", "unit_of"]

MOST_SPLITS = 64
"""Splits of a sequence at most: `join_kernel` looks at all of them at once."""

MOST_SHARED = 64
"""Query heads that read one head of the cache at most, in a program that serves few queries."""

WARP_ELEMENTS = 2048
"""Elements of what a tile finds that a warp holds at most, up to `MOST_WARPS`: more would leave no registers for all else."""

MOST_WARPS = 8

JOINED, MOST_JOINED = 4096, 32
"""Elements of the parts of a row that are joined at once, and parts at most."""

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
        "V_WIDE": wide(int(request.tensor("v_cache").shape[3] or 0)),
        "OUT_UNIT": unit_of(request.tensor("out")),
    }


def _types(request: Request) -> dict[str, str]:
    """Return the types of all pointers by parameter."""
    arguments = {"q": "q", "k_cache": "k_cache", "v_cache": "v_cache", "table": "block_table", "lens": "seq_lens", "out": "out"}
    arguments |= {name: arg for name, (arg, *_) in _OPTIONAL.items() if request.args[arg] is not None}
    metas = {name: request.tensor(arg) for name, arg in arguments.items()}
    found = {name: FLOATS.get(meta.dtype) or index_type(meta) for name, meta in metas.items()}
    return found | {"parts": "*fp32", "sums": "*fp32", "openers": "*i32", "skipped": "*i64"}


def prefill_tile(request: Request, tuning: Tuning) -> AttentionTile:
    """Return the tile for any number of queries: whose warps have work of their own, where the GPU and the request allow it."""
    if tuning.specialised is None or not is_mapped(request) or not is_known_release() or is_interpreting():
        return tuning.prefill
    return tuning.specialised


def attend_spec(request: Request, tile: AttentionTile, many: bool, within: bool = False, early: bool = False) -> KernelSpec:
    """Return what to compile for a request.

    Args:
        request: what is prepared.
        tile: for tuned heads; of any number of queries, what `prefill_tile` returned.
        many: whether rows of the batch have more queries than a tile.
        within: whether values are the first elements of keys: see `may_be_within`.
        early: whether what joins the parts of few queries is launched before they have ended.
    """
    if tile.specialised:
        return _specialised_spec(request, tile)
    k_cache = request.tensor("k_cache")
    mapped = not many and not within and tile.mapped is not None and is_mapped(request)
    tile = tile.for_keys(key_bytes(request))
    tile = tile.by_maps(key_bytes(request)) if mapped else tile.without_matrix_units() if k_cache.dtype == torch.float32 else tile
    k_wide, k_rest = parts(int(k_cache.shape[3] or 0))
    constants = _attend_constants(request, tile, _shape(request, tile, many))
    constants |= _few_constants(request, tile, mapped) | {"EARLY": early} if not many else {}
    constants |= {"K_WIDE": k_wide, "K_REST": k_rest, "WITHIN": within}
    constants["WIDEN"] = is_interpreting()  # which multiplies the bits of bfloat16 as integers
    maps = {name: pool_map_type(request.tensor(pool), tile.keys) for name, pool in MAPPED_POOLS.items() if mapped}
    is_narrow = any(common_alignment(request.tensor(name)) < 16 for name in ("k_cache", "v_cache"))
    least = 4 if is_narrow else constants["ROWS"] * constants["V_WIDE"] // WARP_ELEMENTS  # narrow accesses need an address each
    warps = min(max(tile.warps, least), MOST_WARPS)
    constants |= {} if many else {"LANES": 32 * warps}
    resident = tile.programs if not many and tile.pieces > 1 else None
    kernel = attend_many_kernel if many else attend_few_kernel
    return _build(kernel, request, constants, maps, warps, tile.stages, resident)


def _specialised_spec(request: Request, tile: AttentionTile) -> KernelSpec:
    """Return what to compile where warps have work of their own: what loads loads boxes, whatever the block or the head."""
    from kvdock_triton.attention_boxes import PANEL, box_type  # where Gluon is known alone
    from kvdock_triton.attention_specialised import attend_specialised_kernel

    tile = tile.in_shared(key_bytes(request))
    constants = _attend_constants(request, tile, _shape(request, tile, True))
    for name in ("K", "V"):
        constants[f"{name}_WIDE"] = max(wide(constants[f"{name}_DIM"]), PANEL.value)
    maps = {name: box_type(FLOATS[request.tensor(pool).dtype].removeprefix("*")) for name, pool in MAPPED_POOLS.items()}
    return _build(attend_specialised_kernel, request, constants | {"STAGES": tile.stages}, maps, tile.warps)


def _attend_constants(request: Request, tile: AttentionTile, shape: dict[str, int]) -> dict[str, Any]:
    """Return the constants that all kernels have which attend."""
    q, k_cache, v_cache = (request.tensor(name) for name in ("q", "k_cache", "v_cache"))
    constants = _common_constants(request) | shape | _pool_constants("K", k_cache) | _pool_constants("V", v_cache)
    return constants | {
        "SCALE": int(q.shape[2] or 1) ** -0.5 if request.args["scale"] is None else float(request.args["scale"]),
        "SOFTCAP": float(request.args["softcap"] or 0),
        "CAUSAL": request.args["causal"],
        "WINDOW": min(request.args["window"] or 0, MOST_KEYS),  # 0 where there is none
        "STARTS": request.args["starts"] is not None,
        "BLOCK_SIZE": k_cache.shape[1],
        "Q_UNIT": unit_of(q),
        "KEYS": tile.keys,
        "LEAST": tile.least,
    }


def _build(
    kernel: Any,
    request: Request,
    constants: dict[str, Any],
    maps: dict[str, str],
    warps: int,
    stages: int | None = None,
    resident: int | None = None,
) -> KernelSpec:
    """Return a spec of what attends."""
    absent = _absent(request)
    types = _types(request) | maps | dict.fromkeys(("queries", "batch", "room", "num_blocks", "splits", "each", *_STRIDES), "i64")
    types = {name: found for name, found in types.items() if name in kernel.arg_names and name not in absent}
    wide_pools = [name for name in ("k_cache", "v_cache") if common_alignment(request.tensor(name)) == 16]
    aligned = (*wide_pools, *(name for name in ("q", "out") if request.tensor(name).alignment >= 16), "parts", "sums")
    return KernelSpec.build(kernel, types, constants | absent, aligned, warps, stages, resident=resident)


def _shape(request: Request, tile: AttentionTile, many: bool) -> dict[str, int]:
    """Return the constants of what a program serves: heads of the cache, query heads of each, queries, and rows of both."""
    q, heads, is_one = request.tensor("q"), int(request.tensor("k_cache").shape[2] or 1), request.args["cu_query_lens"] is None
    group = int(q.shape[1] or 1) // heads
    most = tile.rows if q.dtype == torch.float32 else tile.long_rows if is_long(request) else MOST_SHARED
    rows = tile.rows if many else max(tile.rows, min(wide(group), most))
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
