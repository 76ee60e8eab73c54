"""`paged_caching_` in Triton: the kernel, and the descriptor that launches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvdock.plugin import Descriptor, Request, TensorMeta, quantised_reasons
from kvdock_triton.elements import Element, chunk_for, element_for, index_type
from kvdock_triton.launch import KernelSpec
from kvdock_triton.rows import count_skipped, move_rows
from kvdock_triton.support import TritonKernel, ceil_div, ceil_div_source, row_bytes
from kvdock_triton.tuning import Tile, Tuning
from kvdock_triton.written import Launch

__all__ = ["PagedCaching", "PagedCachingDescriptor", "paged_caching_kernel", "specs_for"]


@triton.jit
def paged_caching_kernel(
    k_cache,
    v_cache,
    k,
    v,
    slots,
    skipped,
    tokens,
    capacity,
    k_token,
    k_head,
    v_token,
    v_head,
    slot_token,
    width,
    k_row,
    v_row,
    slot_row,
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    K_UNIT: tl.constexpr,
    V_UNIT: tl.constexpr,
    K_CHUNK: tl.constexpr,
    V_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BOTH: tl.constexpr,
    TILE: tl.constexpr,
    STORE: tl.constexpr,
):
    """Write a tile of tokens: keys and values if ``BOTH``, else keys where ``program_id(1)`` is 0 and values where it is 1.

    Strides of caches are constants, those of new tokens are arguments; both are in units, of slots in elements.
    """
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if ROWS:
        row = token // width
        column = token % width
        slot_at = row * slot_row + column * slot_token
        k_at = row * k_row + column * k_token
        v_at = row * v_row + column * v_token
    else:
        slot_at = token * slot_token
        k_at = token * k_token
        v_at = token * v_token
    slot = tl.load(slots + slot_at, mask=token < tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < capacity)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    if BOTH or tl.program_id(1) == 0:
        count_skipped(skipped, slot >= capacity)
        k_to = k_cache + (block * K_BLOCK + offset * K_SLOT) * K_UNIT
        move_rows(k + k_at * K_UNIT, k_head, k_to, K_HEAD, live, live, K_HEADS, K_DIM, K_UNIT, K_CHUNK, STORE)
    if BOTH or tl.program_id(1) == 1:
        v_to = v_cache + (block * V_BLOCK + offset * V_SLOT) * V_UNIT
        move_rows(v + v_at * V_UNIT, v_head, v_to, V_HEAD, live, live, V_HEADS, V_DIM, V_UNIT, V_CHUNK, STORE)


_TOKEN_ARGS = (
    "k_cache",
    "v_cache",
    "k",
    "v",
    "slots",
    "skipped",
    "tokens",
    "capacity",
    "k_token",
    "k_head",
    "v_token",
    "v_head",
    "slot_token",
)
_ROW_ARGS = ("width", "k_row", "v_row", "slot_row")


def _pool_constants(name: str, pool: TensorMeta, element: Element) -> dict[str, Any]:
    """Return what is constant about one cache."""
    size = pool.dtype.itemsize
    block, slot, head, _ = pool.strides or (0, 0, 0, 0)
    heads, dim = int(pool.shape[2] or 0), element.count(int(pool.shape[3] or 0), size)
    return {
        f"{name}_BLOCK": element.units(block, size),
        f"{name}_SLOT": element.units(slot, size),
        f"{name}_HEAD": element.units(head, size),
        f"{name}_HEADS": heads,
        f"{name}_DIM": dim,
        f"{name}_UNIT": element.unit,
        f"{name}_CHUNK": chunk_for(heads * dim),
    }


def specs_for(request: Request, tuning: Tuning) -> tuple[KernelSpec, KernelSpec]:
    """Return what to compile for a request: for keys and values out of one projection, and for tensors of their own."""
    metas = {name: request.tensor(name) for name in ("k_cache", "v_cache", "k", "v", "slot_mapping")}
    elements = {name: element_for(metas[f"{name}_cache"], [metas[name]]) for name in ("k", "v")}
    rows = len(metas["slot_mapping"].shape) == 2
    args = _TOKEN_ARGS + (_ROW_ARGS if rows else ())
    pointers = {name: elements[name[0]].pointer for name in ("k_cache", "v_cache", "k", "v")}
    pointers |= {"slots": index_type(metas["slot_mapping"]), "skipped": "*i64"}
    constants: dict[str, Any] = {"BLOCK_SIZE": metas["k_cache"].shape[1], "ROWS": rows} | ({} if rows else dict.fromkeys(_ROW_ARGS, 0))
    for name in ("k", "v"):
        constants |= _pool_constants(name.upper(), metas[f"{name}_cache"], elements[name])
    aligned = tuple(name for name in ("k_cache", "v_cache", "k", "v") if elements[name[0]].is_aligned)

    def spec(tile: Tile, both: bool) -> KernelSpec:
        choice = {"BOTH": both, "TILE": tile.tokens, "STORE": tile.store}
        return KernelSpec.build(
            paged_caching_kernel, {name: pointers.get(name, "i64") for name in args}, constants | choice, aligned, tile.warps
        )

    return spec(tuning.fused.for_rows(row_bytes(request)), True), spec(tuning.separate.for_rows(row_bytes(request)), False)


class PagedCachingDescriptor(Descriptor):
    """Launches one of two kernels, by whether keys are a dense tensor of their own."""

    uses_autograd = False  # memory is moved by address
    notes_capture = True  # a graph needs the compiled kernel alone, which the process keeps

    def __init__(self, request: Request, tiles: tuple[int, int], launches: tuple[Launch, Launch], skipped: int) -> None:
        k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
        k_element = element_for(k_cache, [request.tensor("k")])
        v_element = element_for(v_cache, [request.tensor("v")])
        self._fused, self._separate = launches
        self._fused_tile, self._separate_tile = tiles
        self._skipped = skipped
        self._capacity = int(k_cache.shape[0] or 0) * int(k_cache.shape[1] or 0)
        self._dense = int(k_cache.shape[2] or 0) * int(k_cache.shape[3] or 0)
        # Items in a unit: a stride of a key tensor, in items, over this is the stride in units.
        self._k_items = k_element.size * k_element.unit // k_cache.dtype.itemsize
        self._v_items = v_element.size * v_element.unit // v_cache.dtype.itemsize
        self._rows = len(request.tensor("slot_mapping").shape) == 2
        for launch, tile, columns in ((self._separate, self._separate_tile, 2), (self._fused, self._fused_tile, 1)):
            self._fixed(launch, tile, columns, (0,) * (8 if self._rows else 5))  # so that nothing is left to compile

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *scales: Any
    ) -> None:
        """Launch on the current stream of the tensors' device."""
        launch, tile, columns, steps = self._plan(k, v, slot_mapping)
        tokens = slot_mapping.numel()
        pointers = (k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr(), slot_mapping.data_ptr(), self._skipped)
        width = (slot_mapping.shape[1],) if self._rows else ()
        steps = (*steps[:5], *width, *steps[5:])
        launch.run(ceil_div(tokens, tile), columns, *pointers, tokens, self._capacity, *steps)

    def fix(self, *args: Any) -> Callable[..., None]:
        """Settle the kernel and strides; what is left are the five addresses and how many tokens there are."""
        return self._fixed(*self._plan(*args[2:5]))

    def _fixed(self, launch: Launch, tile: int, columns: int, steps: tuple[int, ...]) -> Callable[..., None]:
        names = [*_TOKEN_ARGS[8:], *_ROW_ARGS[1:]][: len(steps)]
        values = {"skipped": self._skipped, "capacity": self._capacity, **dict(zip(names, steps, strict=True))}
        sizes = ["rows", "width"] if self._rows else ["tokens"]
        tokens = " * ".join(sizes)
        return launch.fix([*_TOKEN_ARGS[:5], *sizes], ceil_div_source(tokens, tile), str(columns), values | {"tokens": tokens})

    def _plan(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[Launch, int, int, tuple[int, ...]]:
        """Return the kernel, the tokens of a program, the grid's second size, and the strides, those of rows last."""
        k_items, v_items = self._k_items, self._v_items
        *k_row, k_token, k_head, _ = k.stride()
        *v_row, v_token, v_head, _ = v.stride()
        *slot_row, slot_token = slot_mapping.stride()
        rows = (k_row[0] // k_items, v_row[0] // v_items, slot_row[0]) if self._rows else ()
        steps = (k_token // k_items, k_head // k_items, v_token // v_items, v_head // v_items, slot_token, *rows)
        if k_token == self._dense:
            return self._separate, self._separate_tile, 2, steps
        return self._fused, self._fused_tile, 1, steps


class PagedCaching(TritonKernel):
    """Prepares `PagedCachingDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Compile both kernels."""
        specs = specs_for(request, self.tuning(request.device))
        fused, separate = (self.launch(spec, request) for spec in specs)
        tiles = (specs[0].constant("TILE"), specs[1].constant("TILE"))
        return PagedCachingDescriptor(request, tiles, (fused, separate), self.skipped(request.device))
