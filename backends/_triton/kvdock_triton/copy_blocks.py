"""`copy_blocks_` in Triton: the kernel, and the descriptor that launches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@triton.jit
def copy_few_blocks_kernel(
    k_cache,
    v_cache,
    pair0,
    pair1,
    pair2,
    pair3,
    pair4,
    pair5,
    pair6,
    pair7,
    pair8,
    pair9,
    pair10,
    pair11,
    pair12,
    pair13,
    pair14,
    pair15,
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
    """Copy one piece of one pair, as `copy_blocks_kernel` does: each ``pair`` is ``source << 32 | destination``, checked before."""
    number = tl.program_id(0) // (K_PIECES + V_PIECES)
    piece = tl.program_id(0) % (K_PIECES + V_PIECES)
    pair = tl.where(number == 1, pair1, pair0)
    pair = tl.where(number == 2, pair2, pair)
    pair = tl.where(number == 3, pair3, pair)
    pair = tl.where(number == 4, pair4, pair)
    pair = tl.where(number == 5, pair5, pair)
    pair = tl.where(number == 6, pair6, pair)
    pair = tl.where(number == 7, pair7, pair)
    pair = tl.where(number == 8, pair8, pair)
    pair = tl.where(number == 9, pair9, pair)
    pair = tl.where(number == 10, pair10, pair)
    pair = tl.where(number == 11, pair11, pair)
    pair = tl.where(number == 12, pair12, pair)
    pair = tl.where(number == 13, pair13, pair)
    pair = tl.where(number == 14, pair14, pair)
    pair = tl.where(number == 15, pair15, pair)
    source = pair >> 32
    to = pair & 0xFFFFFFFF
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
    few = pointers | {f"pair{number}": "i64" for number in range(FEW)}
    return (
        KernelSpec.build(copy_blocks_kernel, types, constants, aligned, warps),
        KernelSpec.build(copy_few_blocks_kernel, few, constants, aligned, warps),
    )


class CopyBlocksDescriptor(Descriptor):
    """Launches the kernel; pairs that the host can read are checked before, and brought to the device."""

    uses_autograd = False  # memory is moved by address
    notes_capture = True  # a graph needs the compiled kernel alone, which the process keeps

    def __init__(self, request: Request, pieces: int, launches: tuple[Launch, Launch], skipped: int) -> None:
        self._op, self._pieces, self._skipped = request.op, pieces, skipped
        self._launch, self._few = launches
        self._num_blocks = int(request.tensor("k_cache").shape[0] or 0)
        self._fixed(0)  # so that nothing is left to compile

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Launch on the current stream of the caches' device."""
        if not block_pairs.is_cpu:
            self.run(k_cache, v_cache, block_pairs)
        elif block_pairs.shape[0] <= FEW and self._num_blocks < 1 << 31:
            pairs = live_pairs(self._op, block_pairs, self._num_blocks)
            packed = [source << 32 | to for source, to in pairs]
            if packed:
                packed += [0] * (FEW - len(packed))
                self._few.run(len(pairs) * self._pieces, 1, k_cache.data_ptr(), v_cache.data_ptr(), *packed)
        else:
            self.run(k_cache, v_cache, pairs_on_device(self._op, block_pairs, self._num_blocks, k_cache.device))

    def run(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Launch with pairs that the kernel can read, and checks by itself."""
        pointers = (k_cache.data_ptr(), v_cache.data_ptr(), block_pairs.data_ptr(), self._skipped)
        self._launch.run(block_pairs.shape[0] * self._pieces, 1, *pointers, self._num_blocks, block_pairs.stride(0))

    def fix(self, *args: Any) -> Callable[..., None] | None:
        """Settle the strides; what is left are the three addresses and how many pairs there are. Pairs on the host are read each time."""
        pairs = args[2]
        return None if pairs.is_cpu else self._fixed(pairs.stride(0))

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
