"""`gather_paged` in Triton: the kernel, and the descriptor that launches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvdock.plugin import Descriptor, Request, quantised_reasons
from kvdock_triton.elements import chunk_for, element_for, index_type
from kvdock_triton.launch import KernelSpec
from kvdock_triton.rows import move_rows
from kvdock_triton.support import TritonKernel, ceil_div, ceil_div_source, row_bytes
from kvdock_triton.tuning import Tile
from kvdock_triton.written import Launch

__all__ = ["GatherPaged", "GatherPagedDescriptor", "gather_paged_kernel", "gather_rows", "spec_for"]


@triton.jit
def gather_rows(
    cache,
    slots,
    out,
    tokens,
    capacity,
    slot_token,
    token_step,
    head_step,
    width,
    slot_row,
    row_step,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STORE: tl.constexpr,
):
    """Read a tile of tokens from one cache; zeros for a slot out of range."""
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = token < tokens
    if ROWS:
        row = token // width
        column = token % width
        slot_at = row * slot_row + column * slot_token
        out_at = row * row_step + column * token_step
    else:
        slot_at = token * slot_token
        out_at = token * token_step
    slot = tl.load(slots + slot_at, mask=inside, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < capacity)
    source = cache + (slot // BLOCK_SIZE * BLOCK + slot % BLOCK_SIZE * SLOT) * UNIT
    move_rows(source, HEAD, out + out_at * UNIT, head_step, live, inside, HEADS, DIM, UNIT, CHUNK, STORE)


@triton.jit
def gather_paged_kernel(
    k_cache,
    v_cache,
    slots,
    k_out,
    v_out,
    tokens,
    capacity,
    slot_token,
    k_token,
    k_head,
    v_token,
    v_head,
    width,
    slot_row,
    k_row,
    v_row,
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
    TILE: tl.constexpr,
    STORE: tl.constexpr,
):
    """Read a tile of tokens, keys where ``program_id(1)`` is 0 and values where it is 1.

    Each reads the slots by itself: masks that both branches share, of rows of unlike sizes, are more than Triton 3.6 can lay out.
    """
    if tl.program_id(1) == 0:
        gather_rows(
            k_cache,
            slots,
            k_out,
            tokens,
            capacity,
            slot_token,
            k_token,
            k_head,
            width,
            slot_row,
            k_row,
            BLOCK_SIZE,
            K_BLOCK,
            K_SLOT,
            K_HEAD,
            K_HEADS,
            K_DIM,
            K_UNIT,
            K_CHUNK,
            ROWS,
            TILE,
            STORE,
        )
    else:
        gather_rows(
            v_cache,
            slots,
            v_out,
            tokens,
            capacity,
            slot_token,
            v_token,
            v_head,
            width,
            slot_row,
            v_row,
            BLOCK_SIZE,
            V_BLOCK,
            V_SLOT,
            V_HEAD,
            V_HEADS,
            V_DIM,
            V_UNIT,
            V_CHUNK,
            ROWS,
            TILE,
            STORE,
        )


_TOKEN_ARGS = (
    "k_cache",
    "v_cache",
    "slots",
    "k_out",
    "v_out",
    "tokens",
    "capacity",
    "slot_token",
    "k_token",
    "k_head",
    "v_token",
    "v_head",
)
_ROW_ARGS = ("width", "slot_row", "k_row", "v_row")


def spec_for(request: Request, tile: Tile) -> KernelSpec:
    """Return what to compile for a request."""
    slots = request.tensor("slot_mapping")
    rows = len(slots.shape) == 2
    types = dict.fromkeys(_TOKEN_ARGS + (_ROW_ARGS if rows else ()), "i64") | {"slots": index_type(slots)}
    constants: dict[str, Any] = {"ROWS": rows, "TILE": tile.tokens, "STORE": tile.store} | ({} if rows else dict.fromkeys(_ROW_ARGS, 0))
    aligned: tuple[str, ...] = ()
    for name in ("k", "v"):
        pool, out = request.tensor(f"{name}_cache"), request.tensor(f"{name}_out")
        element, size = element_for(pool, [out]), pool.dtype.itemsize
        block, slot, head, _ = (element.units(stride, size) for stride in pool.strides or (0, 0, 0, 0))
        heads, dim = int(pool.shape[2] or 0), element.count(int(pool.shape[3] or 0), size)
        types |= {f"{name}_cache": element.pointer, f"{name}_out": element.pointer}
        aligned += (f"{name}_cache", f"{name}_out") if element.is_aligned else ()
        values = {
            "BLOCK": block,
            "SLOT": slot,
            "HEAD": head,
            "HEADS": heads,
            "DIM": dim,
            "UNIT": element.unit,
            "CHUNK": chunk_for(heads * dim),
        }
        constants |= {f"{name.upper()}_{key}": value for key, value in values.items()}
    constants["BLOCK_SIZE"] = request.tensor("k_cache").shape[1]
    return KernelSpec.build(gather_paged_kernel, types, constants, aligned, tile.warps)


class GatherPagedDescriptor(Descriptor):
    """Launches the kernel."""

    uses_autograd = False  # memory is moved by address
    notes_capture = True  # a graph needs the compiled kernel alone, which the process keeps

    def __init__(self, request: Request, tile: Tile, launch: Launch) -> None:
        k_cache = request.tensor("k_cache")
        self._launch, self._tile = launch, tile.tokens
        self._capacity = int(k_cache.shape[0] or 0) * int(k_cache.shape[1] or 0)
        self._rows = len(request.tensor("slot_mapping").shape) == 2
        self._items = []
        for name in ("k", "v"):
            pool = request.tensor(f"{name}_cache")
            element = element_for(pool, [request.tensor(f"{name}_out")])
            self._items.append(element.size * element.unit // pool.dtype.itemsize)
        self._fixed((0,) * (8 if self._rows else 5))  # so that nothing is left to compile

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *rest: torch.Tensor) -> None:
        """Fill the outputs, which are the last two arguments, on the current stream of the tensors' device."""
        k_out, v_out = rest[-2:]
        tokens, steps = slot_mapping.numel(), self._steps(slot_mapping, k_out, v_out)
        pointers = (k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(), k_out.data_ptr(), v_out.data_ptr())
        width = (slot_mapping.shape[1],) if self._rows else ()
        self._launch.run(ceil_div(tokens, self._tile), 2, *pointers, tokens, self._capacity, *steps[:5], *width, *steps[5:])

    def fix(self, *args: Any) -> Callable[..., None]:
        """Settle the strides; what is left are the five addresses and how many tokens there are."""
        return self._fixed(self._steps(args[2], *args[-2:]))

    def _fixed(self, steps: tuple[int, ...]) -> Callable[..., None]:
        names = [*_TOKEN_ARGS[7:], *_ROW_ARGS[1:]][: len(steps)]
        values = {"capacity": self._capacity, **dict(zip(names, steps, strict=True))}
        sizes = ["rows", "width"] if self._rows else ["tokens"]
        tokens = " * ".join(sizes)
        return self._launch.fix([*_TOKEN_ARGS[:5], *sizes], ceil_div_source(tokens, self._tile), "2", values | {"tokens": tokens})

    def _steps(self, slot_mapping: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor) -> tuple[int, ...]:
        """Return the strides, those of rows last."""
        k_items, v_items = self._items
        *k_row, k_token, k_head, _ = k_out.stride()
        *v_row, v_token, v_head, _ = v_out.stride()
        *slot_row, slot_token = slot_mapping.stride()
        rows = (slot_row[0], k_row[0] // k_items, v_row[0] // v_items) if self._rows else ()
        return (slot_token, k_token // k_items, k_head // k_items, v_token // v_items, v_head // v_items, *rows)


class GatherPaged(TritonKernel):
    """Prepares `GatherPagedDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Compile the kernel."""
        tile = self.tuning(request.device).gather.for_rows(row_bytes(request))
        return GatherPagedDescriptor(request, tile, self.launch(spec_for(request, tile), request))
