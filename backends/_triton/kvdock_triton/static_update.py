"""`static_update_` in Triton: the kernel, and the descriptor that launches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvdock.plugin import HOST_INT, Descriptor, Request, TensorMeta, check_lengths, quantised_reasons
from kvdock_triton.elements import chunk_for, element_for, index_type
from kvdock_triton.launch import KernelSpec
from kvdock_triton.rows import count_skipped, move_rows
from kvdock_triton.support import TritonKernel, ceil_div, ceil_div_source, row_bytes
from kvdock_triton.tuning import Tile
from kvdock_triton.written import Launch

__all__ = ["StaticUpdate", "StaticUpdateDescriptor", "spec_for", "static_update_kernel"]


@triton.jit
def static_update_kernel(
    k_cache,
    v_cache,
    k,
    v,
    skipped,
    rows,
    new,
    capacity,
    k_row,
    k_head,
    k_position,
    v_row,
    v_head,
    v_position,
    length,
    lengths,
    length_row,
    FROM_TENSOR: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_POSITION: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_POSITION: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    K_UNIT: tl.constexpr,
    V_UNIT: tl.constexpr,
    K_CHUNK: tl.constexpr,
    V_CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    STORE: tl.constexpr,
):
    """Write a tile of new positions, keys and values. A row whose length is out of range is skipped whole, and counted."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = number < rows * new
    row = number // new
    position = number % new
    if FROM_TENSOR:
        start = tl.load(lengths + row * length_row, mask=inside, other=-1).to(tl.int64)
    else:
        start = length + row * 0
    live = inside & (start >= 0) & (start <= capacity - new)
    count_skipped(skipped, inside & ((start < 0) | (start > capacity - new)))
    place = start + position
    k_from = k + (row * k_row + position * k_position) * K_UNIT
    k_to = k_cache + (row * K_ROW + place * K_POSITION) * K_UNIT
    move_rows(k_from, k_head, k_to, K_HEAD, live, live, K_HEADS, K_DIM, K_UNIT, K_CHUNK, STORE)
    v_from = v + (row * v_row + position * v_position) * V_UNIT
    v_to = v_cache + (row * V_ROW + place * V_POSITION) * V_UNIT
    move_rows(v_from, v_head, v_to, V_HEAD, live, live, V_HEADS, V_DIM, V_UNIT, V_CHUNK, STORE)


_INTEGERS = ("rows", "new", "capacity", "k_row", "k_head", "k_position", "v_row", "v_head", "v_position")


def spec_for(request: Request, tile: Tile) -> KernelSpec:
    """Return what to compile for a request."""
    lengths: Any = request.args["cache_lengths"]
    from_tensor = isinstance(lengths, TensorMeta)
    types = dict.fromkeys(_INTEGERS, "i64") | {"skipped": "*i64"}
    types |= {"lengths": index_type(lengths), "length_row": "i64"} if from_tensor else {"length": "i64"}
    absent = ("length",) if from_tensor else ("lengths", "length_row")
    constants: dict[str, Any] = {"FROM_TENSOR": from_tensor, "TILE": tile.tokens, "STORE": tile.store} | dict.fromkeys(absent, 0)
    aligned: tuple[str, ...] = ()
    for name in ("k", "v"):
        pool, source = request.tensor(f"{name}_cache"), request.tensor(name)
        element, size = element_for(pool, [source]), pool.dtype.itemsize
        row, head, position, _ = (element.units(stride, size) for stride in pool.strides or (0, 0, 0, 0))
        heads, dim = int(pool.shape[1] or 0), element.count(int(pool.shape[3] or 0), size)
        types |= {name: element.pointer, f"{name}_cache": element.pointer}
        aligned += (name, f"{name}_cache") if element.is_aligned else ()
        values = {
            "ROW": row,
            "HEAD": head,
            "POSITION": position,
            "HEADS": heads,
            "DIM": dim,
            "UNIT": element.unit,
            "CHUNK": chunk_for(heads * dim),
        }
        constants |= {f"{name.upper()}_{key}": value for key, value in values.items()}
    return KernelSpec.build(static_update_kernel, types, constants, aligned, tile.warps)


class StaticUpdateDescriptor(Descriptor):
    """Launches the kernel; lengths that the host knows are checked before."""

    uses_autograd = False  # memory is moved by address
    notes_capture = True  # a graph needs the compiled kernel alone, which the process keeps

    def __init__(self, request: Request, tile: Tile, launch: Launch, skipped: int) -> None:
        self._op, self._launch, self._skipped, self._tile = request.op, launch, skipped, tile.tokens
        self._capacity = int(request.tensor("k_cache").shape[2] or 0)
        self._items = []
        for name in ("k", "v"):
            pool = request.tensor(f"{name}_cache")
            element = element_for(pool, [request.tensor(name)])
            self._items.append(element.size * element.unit // pool.dtype.itemsize)
        lengths = request.args["cache_lengths"]
        kind = "host" if lengths == HOST_INT else "each" if lengths.shape else "one"
        self._fixed(kind, [0] * 6, 0)  # so that nothing is left to compile

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: int | torch.Tensor
    ) -> None:
        """Launch on the current stream of the tensors' device."""
        rows, _, new, _ = k.shape
        if isinstance(cache_lengths, int):
            check_lengths(self._op, [cache_lengths], new, self._capacity)
            tail: tuple[int, ...] = (cache_lengths,)
        else:
            tail = (cache_lengths.data_ptr(), cache_lengths.stride(0) if cache_lengths.numel() > 1 else 0)
        pointers = (k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr(), self._skipped)
        steps = [stride // items for tensor, items in zip((k, v), self._items, strict=True) for stride in tensor.stride()[:3]]
        self._launch.run(ceil_div(rows * new, self._tile), 1, *pointers, rows, new, self._capacity, *steps, *tail)

    def fix(self, *args: Any) -> Callable[..., None]:
        """Settle the strides; what is left are the addresses, the sizes, and a length that the host knows."""
        _, _, k, v, lengths = args
        steps = [stride // items for tensor, items in zip((k, v), self._items, strict=True) for stride in tensor.stride()[:3]]
        if not isinstance(lengths, torch.Tensor):
            return self._checking(self._fixed("host", steps, 0))
        return self._fixed("each", steps, lengths.stride(0)) if lengths.dim() else self._fixed("one", steps, 0)

    def _fixed(self, lengths: str, steps: Sequence[int], step: int) -> Callable[..., None]:
        """Settle strides, given what the lengths are: known to the host, one for all rows, or one for each, ``step`` apart."""
        values: dict[str, int | str] = {"skipped": self._skipped, "capacity": self._capacity}
        values |= dict(zip(_INTEGERS[3:], steps, strict=True))
        parameters = ["k_cache", "v_cache", "k", "v", *([] if lengths == "host" else ["lengths"]), "rows", "new"]
        if lengths == "host":
            parameters.append("length")
        elif lengths == "each":
            parameters.append("number")
            values |= {"step": step, "length_row": "step if number > 1 else 0"}
        else:
            values["length_row"] = 0
        return self._launch.fix(parameters, ceil_div_source("rows * new", self._tile), "1", values)

    def _checking(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Check a length that the host knows before a launch."""
        op, capacity = self._op, self._capacity

        def checked(k_cache: int, v_cache: int, k: int, v: int, rows: int, new: int, length: int) -> None:
            if length < 0 or length + new > capacity:
                check_lengths(op, [length], new, capacity)
            launch(k_cache, v_cache, k, v, rows, new, length)

        return checked


class StaticUpdate(TritonKernel):
    """Prepares `StaticUpdateDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Compile the kernel."""
        tile = self.tuning(request.device).static.for_rows(row_bytes(request, heads_at=1))
        launch = self.launch(spec_for(request, tile), request)
        return StaticUpdateDescriptor(request, tile, launch, self.skipped(request.device))
