"""`paged_attention` in Triton: what is compiled for a request, and the descriptor that launches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvdock.plugin import Descriptor, Request, TensorMeta, common_alignment, quantised_reasons
from kvdock_triton.attention_kernels import attend_kernel, join_kernel
from kvdock_triton.elements import index_type
from kvdock_triton.launch import KernelSpec, is_interpreting
from kvdock_triton.support import TritonKernel, ceil_div
from kvdock_triton.tuning import AttentionTile
from kvdock_triton.written import Launch

__all__ = ["MOST_DIM", "PagedAttention", "PagedAttentionDescriptor", "attend_spec", "join_spec"]

MOST_DIM = 256
"""Length of a head at most: a tile of longer ones has no room in some GPU's shared memory."""

MOST_SPLITS = 64
"""Splits of a sequence at most: `join_kernel` looks at all of them at once."""

_FLOATS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
MOST_SHARED = 64
"""Query heads that read one head of the cache at most, in a program that serves few queries."""

WARP_ELEMENTS = 2048
"""Elements of what a tile finds that a warp holds at most, up to `MOST_WARPS`: more would leave no registers for all else."""

MOST_WARPS = 8

_MOST_KEYS = (1 << 31) - (1 << 16)
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


def _unit(meta: TensorMeta) -> int:
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
    values = {"BLOCK": block, "SLOT": slot, "HEAD": head, "DIM": dim, "WIDE": _wide(dim)}
    return {f"{name}_{key}": value for key, value in values.items()}


def _common_constants(request: Request) -> dict[str, Any]:
    """Return the constants that both kernels have."""
    return {
        "SINKS": request.args["sinks"] is not None,
        "LSE": request.args["lse"] is not None,
        "V_DIM": int(request.tensor("v_cache").shape[3] or 0),
        "V_WIDE": _wide(int(request.tensor("v_cache").shape[3] or 0)),
        "OUT_UNIT": _unit(request.tensor("out")),
    }


def _types(request: Request) -> dict[str, str]:
    """Return the types of all pointers by parameter."""
    arguments = {"q": "q", "k_cache": "k_cache", "v_cache": "v_cache", "table": "block_table", "lens": "seq_lens", "out": "out"}
    arguments |= {name: arg for name, (arg, *_) in _OPTIONAL.items() if request.args[arg] is not None}
    metas = {name: request.tensor(arg) for name, arg in arguments.items()}
    found = {name: _FLOATS.get(meta.dtype) or index_type(meta) for name, meta in metas.items()}
    return found | {"parts": "*fp32", "sums": "*fp32", "skipped": "*i64"}


def tile_for(request: Request, tile: AttentionTile) -> AttentionTile:
    """Return the tile for the heads of a request."""
    pools = [request.tensor(name) for name in ("k_cache", "v_cache")]
    fitted = tile.for_keys(sum(_wide(int(pool.shape[3] or 0)) * pool.dtype.itemsize for pool in pools))
    return fitted.without_matrix_units() if pools[0].dtype == torch.float32 else fitted


def attend_spec(request: Request, tile: AttentionTile, search: bool) -> KernelSpec:
    """Return what to compile for a request.

    Args:
        request: what is prepared.
        tile: for tuned heads.
        search: whether sequences have more queries than a tile.
    """
    q, k_cache = request.tensor("q"), request.tensor("k_cache")
    tile, heads, absent = tile_for(request, tile), int(k_cache.shape[2] or 1), _absent(request)
    group = int(q.shape[1] or 1) // heads
    rows = tile.rows if search else max(tile.rows, min(_wide(group), MOST_SHARED if q.dtype != torch.float32 else tile.rows))
    share, scale = min(group, rows), request.args["scale"]
    constants = _common_constants(request) | absent | _pool_constants("K", k_cache) | _pool_constants("V", request.tensor("v_cache"))
    constants |= {
        "SCALE": int(q.shape[2] or 1) ** -0.5 if scale is None else float(scale),
        "SOFTCAP": float(request.args["softcap"] or 0),
        "CAUSAL": request.args["causal"],
        "WINDOW": min(request.args["window"] or 0, _MOST_KEYS),
        "RAGGED": "cu" not in absent,
        "STARTS": "starts" not in absent,
        "BLOCK_SIZE": k_cache.shape[1],
        "Q_UNIT": _unit(q),
        "HEADS": heads,
        "GROUP": group,
        "SHARE": share,
        "TILE": 1 if "cu" in absent else rows // share,
        "SEARCH": search,
        "ROWS": rows,
        "KEYS": tile.keys,
        "LEAST": tile.least,
        "WIDEN": is_interpreting(),  # which multiplies the bits of bfloat16 as integers
    }
    types = _types(request) | dict.fromkeys(("queries", "batch", "room", "num_blocks", "splits", *_STRIDES), "i64")
    pools = [name for name in ("k_cache", "v_cache") if common_alignment(request.tensor(name)) == 16]
    aligned = (*pools, *(name for name in ("q", "out") if request.tensor(name).alignment >= 16), "parts", "sums")
    types = {name: found for name, found in types.items() if name not in absent}
    warps = min(max(tile.warps, rows * constants["V_WIDE"] // WARP_ELEMENTS), MOST_WARPS)
    return KernelSpec.build(attend_kernel, types, constants, aligned, warps, tile.stages)


def join_spec(request: Request) -> KernelSpec:
    """Return what joins splits."""
    absent = {name: value for name, value in _absent(request).items() if name in join_kernel.arg_names}
    query_heads = int(request.tensor("q").shape[1] or 1)
    constants = _common_constants(request) | absent | {"QUERY_HEADS": query_heads, "MOST": MOST_SPLITS, "STEP": 8}
    types = _types(request) | dict.fromkeys(("splits", *_STRIDES), "i64")
    types = {name: found for name, found in types.items() if name in join_kernel.arg_names and name not in absent}
    aligned = ("parts", "sums", *(["out"] if request.tensor("out").alignment >= 16 else []))
    return KernelSpec.build(join_kernel, types, constants, aligned, 1)


@attrs.frozen
class Attend:
    """One way to attend: a kernel, and how its grid is laid out.

    Args:
        launch: the kernel.
        queries: of a tile.
        programs: of a tile, one for each head of the cache and each share of its group.
        rows: of a program.
        wanted: programs that the keys are split for.
        least: keys of a split at least.
    """

    launch: Launch
    queries: int
    programs: int
    rows: int
    wanted: int
    least: int

    @classmethod
    def of(cls, spec: KernelSpec, launch: Launch, wanted: int) -> Attend:
        """Read the layout off what was compiled."""
        names = ("TILE", "HEADS", "GROUP", "SHARE", "ROWS", "LEAST")
        tile, heads, group, share, rows, least = (spec.constant(name) for name in names)
        return cls(launch, tile, heads * ceil_div(group, share), rows, wanted, least)

    def splits(self, tiles: int, queries: int, room: int) -> int:
        """Return in how many splits the keys of ``tiles`` tiles are looked at."""
        programs = max(tiles, ceil_div(queries, self.queries)) * self.programs
        return max(1, min(self.wanted // programs, ceil_div(room, self.least), MOST_SPLITS))


class PagedAttentionDescriptor(Descriptor):
    """Launches one of two kernels, by whether the queries of a sequence fit into a tile, and where keys were split, what joins them.

    What splits found lies in memory that each call takes from torch's allocator, so that calls on several streams, and replays of
    graphs, share none of it.
    """

    uses_autograd = False  # kernels read and write by address
    notes_capture = True  # a graph needs the compiled kernels alone, which the process keeps

    def __init__(self, request: Request, few: Attend, many: Attend, join: Launch, skipped: int) -> None:
        self._few, self._many, self._join, self._skipped = few, many, join, skipped
        k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
        self._num_blocks, self._block = int(k_cache.shape[0] or 0), int(k_cache.shape[1] or 1)
        self._width = int(v_cache.shape[3] or 0) + 1  # of one part with its sum
        self._q_unit, self._out_unit = _unit(request.tensor("q")), _unit(request.tensor("out"))
        self.workspace_bytes = max(way.wanted * way.rows for way in (few, many)) * self._width * 4

    def __call__(self, *args: Any) -> None:
        """Attend, on the current stream of the tensors' device."""
        q, k_cache, v_cache, table, lens, cu, starts, sinks, *_ = args
        most, out, lse = args[10], *args[15:]
        queries, batch, room = q.shape[0], table.shape[0], min(table.shape[1] * self._block, _MOST_KEYS)
        way = self._few if cu is None or most <= self._few.queries else self._many
        tiles = batch if way is self._few else queries // way.queries + batch
        splits = way.splits(tiles, queries, room)
        parts, sums = self._workspace(queries * q.shape[1] * splits, q.device) if splits > 1 else (out, out)
        pointers = [tensor.data_ptr() for tensor in (q, k_cache, v_cache, table, lens, cu, starts, sinks) if tensor is not None]
        ends = [out.data_ptr()] if lse is None else [out.data_ptr(), lse.data_ptr()]
        found = [parts.data_ptr(), sums.data_ptr()]
        read, written = self._strides(q, table, lens, cu, starts), self._output_strides(out, lse)
        sizes = (queries, batch, room, self._num_blocks, splits)
        way.launch.run(tiles * way.programs, splits, *pointers, *ends, *found, self._skipped, *sizes, *read, *written)
        if splits > 1:
            sink = [] if sinks is None else [sinks.data_ptr()]
            self._join.run(queries * q.shape[1], 1, *found, *sink, *ends, splits, *written)

    def _workspace(self, parts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for so many parts, and for their sums."""
        room = torch.empty(parts * self._width, dtype=torch.float32, device=device)
        return room, room[parts * (self._width - 1) :]

    def _strides(self, q: torch.Tensor, table: torch.Tensor, *index: torch.Tensor | None) -> tuple[int, ...]:
        """Return the strides of what is read, in the kernel's order."""
        q_token, q_head, _ = q.stride()
        steps = (tensor.stride(0) for tensor in index if tensor is not None)
        return (q_token // self._q_unit, q_head // self._q_unit, *table.stride(), *steps)

    def _output_strides(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[int, ...]:
        """Return the strides of what is written, in the kernels' order."""
        out_token, out_head, _ = out.stride()
        return (out_token // self._out_unit, out_head // self._out_unit, *(() if lse is None else lse.stride()))


class PagedAttention(TritonKernel):
    """Prepares `PagedAttentionDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve 16 and 32-bit floats, and heads that a tile has room for."""
        reasons = quantised_reasons(request)
        if request.tensor("q").dtype == torch.float64:
            reasons.append("matrix units compute no float64")
        dims = {name: int(request.tensor(name).shape[3] or 0) for name in ("k_cache", "v_cache")}
        return reasons + [f"heads of {name} have {dim} elements, more than {MOST_DIM}" for name, dim in dims.items() if dim > MOST_DIM]

    def prepare(self, request: Request) -> Descriptor:
        """Compile the kernels."""
        tuning, processors = self.tuning(request.device), self.processors(request.device)
        tiles = {False: tuning.decode} | ({} if request.args["cu_query_lens"] is None else {True: tuning.prefill})
        ways = []
        for search, tile in tiles.items():
            spec = attend_spec(request, tile, search)
            ways.append(Attend.of(spec, self.launch(spec, request), tile.programs * processors))
        join = self.launch(join_spec(request), request)
        return PagedAttentionDescriptor(request, ways[0], ways[-1], join, self.skipped(request.device))
