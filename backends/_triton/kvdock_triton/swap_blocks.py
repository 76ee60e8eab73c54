"""`swap_blocks_` in Triton: one kernel that reads or writes page-locked host memory itself, and the descriptor that launches it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvdock.plugin import Descriptor, Request, TensorMeta, pairs_on_device, quantised_reasons, swap_staged
from kvdock_triton.elements import chunk_for, element_between, index_type
from kvdock_triton.launch import KernelSpec
from kvdock_triton.support import TritonKernel, ceil_div
from kvdock_triton.tuning import SwapTile
from kvdock_triton.written import Launch

__all__ = ["SwapBlocks", "SwapBlocksDescriptor", "spec_for", "swap_blocks_kernel"]

_LEAST_PER_WARP = 1024
"""Bytes that a warp moves at a time at least, unless the block has fewer: 64 lanes of 16."""


@triton.jit
def swap_blocks_kernel(
    src_cache,
    dst_cache,
    pairs,
    skipped,
    src_blocks,
    dst_blocks,
    pair_step,
    total,
    OUTER: tl.constexpr,
    MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
    SRC_BLOCK: tl.constexpr,
    SRC_OUTER: tl.constexpr,
    SRC_MIDDLE: tl.constexpr,
    DST_BLOCK: tl.constexpr,
    DST_OUTER: tl.constexpr,
    DST_MIDDLE: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Copy pieces of blocks, ``PIECES`` of each pair and ``total`` in all: each program every so many-th."""
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        at = pairs + work // PIECES * pair_step
        piece = work % PIECES
        source = tl.load(at).to(tl.int64)
        to = tl.load(at + 1).to(tl.int64)
        meant = (source >= 0) & (to >= 0)
        beyond = (source >= src_blocks) | (to >= dst_blocks)
        if piece == 0:
            if meant & beyond:
                tl.atomic_add(skipped, 1, sem="relaxed")
        if meant & (not beyond):  # a branch, and no mask of the accesses: one value for the whole program
            element = piece * CHUNK + tl.arange(0, CHUNK)
            inner = element % INNER
            middle = ((element // INNER) % MIDDLE).to(tl.int64)
            outer = (element // (INNER * MIDDLE)).to(tl.int64)
            mask = element < OUTER * MIDDLE * INNER
            src = source * SRC_BLOCK * UNIT + (outer * SRC_OUTER + middle * SRC_MIDDLE) * UNIT + inner
            dst = to * DST_BLOCK * UNIT + (outer * DST_OUTER + middle * DST_MIDDLE) * UNIT + inner
            tl.store(dst_cache + dst, tl.load(src_cache + src, mask=mask), mask=mask)


_Step = tuple[int, int, int]
"""A size, and the step from one to the next in each pool."""


def _collapsed(src: TensorMeta, dst: TensorMeta) -> tuple[_Step, _Step, int]:
    """Merge what lies together in a block of both pools: outer and middle dims, and the inner run. Host memory is gone through in order."""
    strides = [pool.strides or (0, 0, 0, 0) for pool in (src, dst)]
    dims = [(int(size or 0), a, b) for size, a, b in zip(dst.shape[1:], strides[0][1:], strides[1][1:], strict=True) if size != 1]
    run, steps = 1, list[_Step]()
    for size, a, b in sorted(dims, key=lambda dim: dim[1:] if src.is_on_host else dim[:0:-1]):
        if not steps and a == b == run:
            run *= size
        elif steps and (a, b) == (steps[-1][0] * steps[-1][1], steps[-1][0] * steps[-1][2]):
            steps[-1] = (steps[-1][0] * size, *steps[-1][1:])
        else:
            steps.append((size, a, b))
    middle, outer = [*steps, (1, 0, 0), (1, 0, 0)][:2]
    return outer, middle, run


def spec_for(request: Request, tile: SwapTile) -> KernelSpec:
    """Return what to compile for a request."""
    src, dst = request.tensor("src_cache"), request.tensor("dst_cache")
    element, size = element_between(src, dst), src.dtype.itemsize
    outer, middle, run = _collapsed(src, dst)
    elements = outer[0] * middle[0] * element.count(run, size)
    chunk = chunk_for(elements, tile.piece)
    constants = {"OUTER": outer[0], "MIDDLE": middle[0], "INNER": element.count(run, size), "UNIT": element.unit}
    constants |= {"CHUNK": chunk, "PIECES": ceil_div(elements, chunk)}
    for number, (name, pool) in enumerate((("SRC", src), ("DST", dst)), 1):
        steps = {"BLOCK": (pool.strides or (0,))[0], "OUTER": outer[number], "MIDDLE": middle[number]}
        constants |= {f"{name}_{what}": element.units(step, size) for what, step in steps.items()}
    types = dict.fromkeys(("src_cache", "dst_cache"), element.pointer) | {"pairs": index_type(request.tensor("block_pairs"))}
    types |= {"skipped": "*i64"} | dict.fromkeys(("src_blocks", "dst_blocks", "pair_step"), "i64") | {"total": "i32"}
    warps = max(min(tile.warps, chunk * element.size // _LEAST_PER_WARP), 1)
    return KernelSpec.build(swap_blocks_kernel, types, constants, ("src_cache", "dst_cache") if element.is_aligned else (), warps)


class SwapBlocksDescriptor(Descriptor):
    """Launches the kernel; pairs that the host can read are checked before, and brought to the device.

    Args:
        request: what it was prepared for.
        launch: the compiled kernel.
        pieces: pieces of a block.
        programs: programs at most.
        skipped: the device's count of skipped writes.
    """

    uses_autograd = False  # memory is moved by address, or by torch operations on integers that view it
    notes_capture = True  # a graph needs the compiled kernel alone, which the process keeps

    def __init__(self, request: Request, launch: Launch, pieces: int, programs: int, skipped: torch.Tensor) -> None:
        self._op, self._device, self._launch, self._skipped = request.op, request.device, launch, skipped
        self._pieces, self._programs = pieces, programs
        self._on_host = [place for place, name in enumerate(("src_cache", "dst_cache")) if request.tensor(name).is_on_host]

    def __call__(self, src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Launch on the device's current stream. Host memory that the device cannot reach is staged, which waits."""
        for place in self._on_host:
            if not (src_cache, dst_cache)[place].is_pinned():  # asked each time: other memory may be at the address by now
                self.workspace_bytes = swap_staged(self._op, src_cache, dst_cache, block_pairs, self._skipped)
                return
        sizes = src_cache.shape[0], dst_cache.shape[0]
        if block_pairs.is_cpu:
            block_pairs = pairs_on_device(self._op, block_pairs, sizes[1], self._device, num_sources=sizes[0])
        total = len(block_pairs) * self._pieces
        pointers = (src_cache.data_ptr(), dst_cache.data_ptr(), block_pairs.data_ptr(), self._skipped.data_ptr())
        self._launch.run(min(total, self._programs), 1, *pointers, *sizes, block_pairs.stride(0), total)


class SwapBlocks(TritonKernel):
    """Prepares `SwapBlocksDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve every cache that stores bits as they come."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Compile the kernel."""
        tile = self.tuning(request.device).swap
        spec = spec_for(request, tile)
        to_host = any(request.tensor(name).is_on_host for name in ("src_cache", "dst_cache"))
        programs = tile.programs if to_host else tile.per_processor * self.processors(request.device)
        skipped = self.skip_counter(request.device)
        return SwapBlocksDescriptor(request, self.launch(spec, request), spec.constant("PIECES"), programs, skipped)
