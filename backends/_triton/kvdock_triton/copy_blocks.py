"""`copy_blocks_` in Triton: the kernel, and the descriptor that launches it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl

from kvdock.plugin import Descriptor, Request, TensorMeta, live_pairs, pairs_on_device, quantised_reasons
from kvdock_triton.elements import Element, chunk_for, element_for, index_type
from kvdock_triton.launch import KernelSpec
from kvdock_triton.support import TritonKernel, ceil_div
from kvdock_triton.tuning import Tile
from kvdock_triton.written import Launch

__all__ = ["CopyBlocks", "CopyBlocksDescriptor", "copy_blocks_kernel", "copy_few_blocks_kernel", "copy_piece", "specs_for"]

PIECE = 4096
"""Elements of a block that one program copies."""

_LEAST_PER_WARP = 1024
"""Bytes that a warp copies at least, unless the block has fewer: 64 lanes of 16."""


@triton.jit
def copy_piece(
    cache,
    source,
    to,
    piece,
    BLOCK: tl.constexpr,
    OUTER: tl.constexpr,
    MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
    OUTER_STEP: tl.constexpr,
    MIDDLE_STEP: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy ``CHUNK`` of the ``OUTER x MIDDLE x INNER`` elements of one block to another."""
    element = piece * CHUNK + tl.arange(0, CHUNK)
    inner = element % INNER
    middle = (element // INNER) % MIDDLE
    outer = element // (INNER * MIDDLE)
    at = (outer.to(tl.int64) * OUTER_STEP + middle.to(tl.int64) * MIDDLE_STEP) * UNIT + inner
    mask = element < OUTER * MIDDLE * INNER
    bits = tl.load(cache + source * BLOCK * UNIT + at, mask=mask)
    tl.store(cache + to * BLOCK * UNIT + at, bits, mask=mask)


@triton.jit
def copy_blocks_kernel(
    k_cache,
    v_cache,
    pairs,
    skipped,
    num_blocks,
    pair_step,
    K_BLOCK: tl.constexpr,
    K_OUTER: tl.constexpr,
    K_MIDDLE: tl.constexpr,
    K_INNER: tl.constexpr,
    K_OUTER_STEP: tl.constexpr,
    K_MIDDLE_STEP: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_PIECES: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_OUTER: tl.constexpr,
    V_MIDDLE: tl.constexpr,
    V_INNER: tl.constexpr,
    V_OUTER_STEP: tl.constexpr,
    V_MIDDLE_STEP: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_PIECES: tl.constexpr,
):
    """Copy one piece of one pair: ``program_id(0)`` runs over pairs and, within each, over pieces of keys, then of values."""
    pair = tl.program_id(0) // (K_PIECES + V_PIECES)
    piece = tl.program_id(0) % (K_PIECES + V_PIECES)
    at = pairs + pair.to(tl.int64) * pair_step
    source = tl.load(at).to(tl.int64)
    to = tl.load(at + 1).to(tl.int64)
    meant = (source >= 0) & (to >= 0)
    live = meant & (source < num_blocks) & (to < num_blocks)
    if piece == 0:
        if meant & ((source >= num_blocks) | (to >= num_blocks)):
            tl.atomic_add(skipped, 1, sem="relaxed")
    if live:  # a branch, and no mask of the accesses: one value for the whole program
        if piece < K_PIECES:
            copy_piece(k_cache, source, to, piece, K_BLOCK, K_OUTER, K_MIDDLE, K_INNER, K_OUTER_STEP, K_MIDDLE_STEP, K_UNIT, K_CHUNK)
        else:
            piece -= K_PIECES
            copy_piece(v_cache, source, to, piece, V_BLOCK, V_OUTER, V_MIDDLE, V_INNER, V_OUTER_STEP, V_MIDDLE_STEP, V_UNIT, V_CHUNK)


FEW = 16
"""Pairs that are passed by value: bringing a list to the device costs more than the launch."""

_NO_IDS = [0] * (2 * FEW)


@triton.jit
def copy_few_blocks_kernel(
    k_cache,
    v_cache,
    source0,
    to0,
    source1,
    to1,
    source2,
    to2,
    source3,
    to3,
    source4,
    to4,
    source5,
    to5,
    source6,
    to6,
    source7,
    to7,
    source8,
    to8,
    source9,
    to9,
    source10,
    to10,
    source11,
    to11,
    source12,
    to12,
    source13,
    to13,
    source14,
    to14,
    source15,
    to15,
    K_BLOCK: tl.constexpr,
    K_OUTER: tl.constexpr,
    K_MIDDLE: tl.constexpr,
    K_INNER: tl.constexpr,
    K_OUTER_STEP: tl.constexpr,
    K_MIDDLE_STEP: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_PIECES: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_OUTER: tl.constexpr,
    V_MIDDLE: tl.constexpr,
    V_INNER: tl.constexpr,
    V_OUTER_STEP: tl.constexpr,
    V_MIDDLE_STEP: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_PIECES: tl.constexpr,
):
    """Copy one piece of one pair, as `copy_blocks_kernel` does; the host has checked the pairs."""
    number = tl.program_id(0) // (K_PIECES + V_PIECES)
    piece = tl.program_id(0) % (K_PIECES + V_PIECES)
    source = tl.where(number == 1, source1, source0)
    to = tl.where(number == 1, to1, to0)
    source = tl.where(number == 2, source2, source)
    to = tl.where(number == 2, to2, to)
    source = tl.where(number == 3, source3, source)
    to = tl.where(number == 3, to3, to)
    source = tl.where(number == 4, source4, source)
    to = tl.where(number == 4, to4, to)
    source = tl.where(number == 5, source5, source)
    to = tl.where(number == 5, to5, to)
    source = tl.where(number == 6, source6, source)
    to = tl.where(number == 6, to6, to)
    source = tl.where(number == 7, source7, source)
    to = tl.where(number == 7, to7, to)
    source = tl.where(number == 8, source8, source)
    to = tl.where(number == 8, to8, to)
    source = tl.where(number == 9, source9, source)
    to = tl.where(number == 9, to9, to)
    source = tl.where(number == 10, source10, source)
    to = tl.where(number == 10, to10, to)
    source = tl.where(number == 11, source11, source)
    to = tl.where(number == 11, to11, to)
    source = tl.where(number == 12, source12, source)
    to = tl.where(number == 12, to12, to)
    source = tl.where(number == 13, source13, source)
    to = tl.where(number == 13, to13, to)
    source = tl.where(number == 14, source14, source)
    to = tl.where(number == 14, to14, to)
    source = tl.where(number == 15, source15, source)
    to = tl.where(number == 15, to15, to)
    if piece < K_PIECES:
        copy_piece(k_cache, source, to, piece, K_BLOCK, K_OUTER, K_MIDDLE, K_INNER, K_OUTER_STEP, K_MIDDLE_STEP, K_UNIT, K_CHUNK)
    else:
        piece -= K_PIECES
        copy_piece(v_cache, source, to, piece, V_BLOCK, V_OUTER, V_MIDDLE, V_INNER, V_OUTER_STEP, V_MIDDLE_STEP, V_UNIT, V_CHUNK)


def _collapsed(pool: TensorMeta) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Merge what lies together in a block, whatever order its dims are in: outer and middle ``(size, stride)``, and the inner run.

    Both blocks have one geometry, so that the order in which a block is copied is free: from the smallest stride to the largest.
    """
    (_, *sizes), (_, *strides) = pool.shape, pool.strides or (0, 0, 0, 0)
    dims = [(stride, int(size or 0)) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    inner, steps = 1, list[tuple[int, int]]()
    for stride, size in sorted(dims):
        if not steps and stride == inner:
            inner *= size
        elif steps and stride == steps[-1][0] * steps[-1][1]:
            steps[-1] = (steps[-1][0] * size, steps[-1][1])
        else:
            steps.append((size, stride))
    middle, outer = [*steps, (1, 0), (1, 0)][:2]
    return outer, middle, inner


def _pool_constants(pool: TensorMeta, element: Element) -> dict[str, int]:
    """Return what is constant about one cache."""
    size = pool.dtype.itemsize
    (outer, outer_step), (middle, middle_step), run = _collapsed(pool)
    inner = element.count(run, size)
    chunk = chunk_for(outer * middle * inner, PIECE)
    return {
        "BLOCK": element.units((pool.strides or (0,))[0], size),
        "OUTER": outer,
        "MIDDLE": middle,
        "INNER": inner,
        "OUTER_STEP": element.units(outer_step, size),
        "MIDDLE_STEP": element.units(middle_step, size),
        "UNIT": element.unit,
        "CHUNK": chunk,
        "PIECES": ceil_div(outer * middle * inner, chunk),
    }


def specs_for(request: Request, tile: Tile) -> tuple[KernelSpec, KernelSpec]:
    """Return what to compile for a request: for pairs in a tensor, and for a few that are passed by value."""
    pointers: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: tuple[str, ...] = ()
    smallest = _LEAST_PER_WARP * tile.warps
    for name in ("k", "v"):
        pool = request.tensor(f"{name}_cache")
        element = element_for(pool)
        pointers[f"{name}_cache"] = element.pointer
        aligned += (f"{name}_cache",) if element.is_aligned else ()
        values = _pool_constants(pool, element)
        constants |= {f"{name.upper()}_{key}": value for key, value in values.items()}
        smallest = min(smallest, values["CHUNK"] * element.size)
    warps = max(smallest // _LEAST_PER_WARP, 1)
    types = pointers | {"pairs": index_type(request.tensor("block_pairs")), "skipped": "*i64", "num_blocks": "i64", "pair_step": "i64"}
    few = pointers | {f"{end}{number}": "i64" for number in range(FEW) for end in ("source", "to")}
    return (
        KernelSpec.build(copy_blocks_kernel, types, constants, aligned, warps),
        KernelSpec.build(copy_few_blocks_kernel, few, constants, aligned, warps),
    )


class CopyBlocksDescriptor(Descriptor):
    """Launches the kernel; pairs that the host can read are checked before, and brought to the device."""

    uses_autograd = False  # memory is moved by address
    notes_capture = True  # a graph needs the compiled kernel alone, which the process keeps

    def __init__(self, request: Request, pieces: int, launches: tuple[Launch, Launch], skipped: int) -> None:
        self._op, self._pieces, self._skipped, self._device = request.op, pieces, skipped, request.device
        self._launch = launches[0]
        places = [f"{end}{number}" for number in range(FEW) for end in ("source", "to")]
        self._few = launches[1].fix(
            ["k_cache", "v_cache", "programs", "ids"], "programs", "1", {**dict.fromkeys(places, ""), places[0]: "*ids"}
        )
        self._num_blocks = int(request.tensor("k_cache").shape[0] or 0)
        self._fixed(0)  # so that nothing is left to compile

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Launch on the current stream of the caches' device."""
        if not block_pairs.is_cpu:
            self.run(k_cache, v_cache, block_pairs)
        elif block_pairs.shape[0] <= FEW:
            self._copy_few(
                k_cache.data_ptr(), v_cache.data_ptr(), [*chain.from_iterable(live_pairs(self._op, block_pairs, self._num_blocks))]
            )
        else:
            self.run(k_cache, v_cache, pairs_on_device(self._op, block_pairs, self._num_blocks, k_cache.device))

    def _copy_few(self, k_cache: int, v_cache: int, ids: Sequence[int]) -> None:
        """Launch with a few pairs that were checked, one id after the other."""
        if ids:
            self._few(k_cache, v_cache, len(ids) // 2 * self._pieces, [*ids, *_NO_IDS[len(ids) :]])

    def run(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Launch with pairs that the kernel can read, and checks by itself."""
        pointers = (k_cache.data_ptr(), v_cache.data_ptr(), block_pairs.data_ptr(), self._skipped)
        self._launch.run(block_pairs.shape[0] * self._pieces, 1, *pointers, self._num_blocks, block_pairs.stride(0))

    def fix(self, *args: Any) -> Callable[..., None] | None:
        """Settle the strides; what is left are the three addresses and how many pairs there are."""
        pairs = args[2]
        if not pairs.is_cpu:
            return self._fixed(pairs.stride(0))
        return self._fixed_on_host(pairs) if pairs.is_contiguous() else None

    def _fixed_on_host(self, pairs: torch.Tensor) -> Callable[..., None]:
        """Return a launch that reads pairs by their address: a tensor's own `tolist` makes a list of each pair first."""
        number_type, dtype, device = ctypes.c_int32 if pairs.dtype == torch.int32 else ctypes.c_int64, pairs.dtype, self._device
        op, num_blocks, copy_few, launch = self._op, self._num_blocks, self._copy_few, self._fixed(2)

        def copy(k_cache: int, v_cache: int, address: int, number: int) -> None:
            memory = (number_type * (2 * number)).from_address(address)
            ids: Sequence[int] = memory[:] if number <= FEW else ()
            known = sorted(set(ids))
            if ids and len(known) == len(ids) and known[0] >= 0 and known[-1] < num_blocks:  # nothing that `live_pairs` would say
                copy_few(k_cache, v_cache, ids)
                return
            rows = torch.frombuffer(memory, dtype=dtype).view(-1, 2)
            if ids:
                copy_few(k_cache, v_cache, [*chain.from_iterable(live_pairs(op, rows, num_blocks))])
            else:
                launch(k_cache, v_cache, pairs_on_device(op, rows, num_blocks, device).data_ptr(), number)

        return copy

    def _fixed(self, pair_step: int) -> Callable[..., None]:
        values = {"skipped": self._skipped, "num_blocks": self._num_blocks, "pair_step": pair_step, "pieces": self._pieces}
        return self._launch.fix(["k_cache", "v_cache", "pairs", "number"], "number * pieces", "1", values)


class CopyBlocks(TritonKernel):
    """Prepares `CopyBlocksDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Compile both kernels."""
        specs = specs_for(request, self.tuning(request.device).copy)
        launches = self.launch(specs[0], request), self.launch(specs[1], request)
        pieces = specs[0].constant("K_PIECES") + specs[0].constant("V_PIECES")
        return CopyBlocksDescriptor(request, pieces, launches, self.skipped(request.device))
