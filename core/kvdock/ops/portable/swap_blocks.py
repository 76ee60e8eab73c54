"""`swap_blocks_` in portable torch."""

from __future__ import annotations

import torch

from kvdock.bits import as_bits
from kvdock.interface import HOST
from kvdock.ops.index_values import live_pairs, pairs_on_device
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel, redirect

__all__ = ["SwapBlocks", "swap_staged"]

STAGED = 2**26
"""Bytes that are staged at a time, at most, unless a block has more."""


class SwapBlocks(PortableKernel):
    """Copies whole blocks from one cache to another: on one device without waiting for it, to or from host memory staged."""

    def run(self, plan: PortableDescriptor, src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Copy block ``src`` to block ``dst`` of the other cache for each pair."""
        sizes = src_cache.shape[0], dst_cache.shape[0]
        if src_cache.device != dst_cache.device:
            plan.workspace_bytes = swap_staged(plan.op, src_cache, dst_cache, block_pairs, plan.skipped)
            return
        if block_pairs.device == HOST:
            block_pairs = pairs_on_device(plan.op, block_pairs, sizes[1], dst_cache.device, num_sources=sizes[0])
        valid, beyond = _judged(block_pairs, sizes)
        plan.skipped.add_(beyond.sum())
        if 0 in sizes:
            return
        source, dst = redirect(block_pairs[:, 1].to(torch.int64), valid)
        src = block_pairs[:, 0].to(torch.int64).index_select(0, source)
        src, dst = (torch.where(valid.any(), ids, 0) for ids in (src, dst))
        # With nothing valid, block 0 is written with what it holds.
        rows = torch.where(valid.any(), as_bits(src_cache).index_select(0, src), as_bits(dst_cache)[:1])
        plan.workspace_bytes = 3 * len(src) * dst_cache[:1].nbytes  # what torch takes to index blocks
        as_bits(dst_cache).index_put_((dst,), rows)


def swap_staged(op: str, src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor, skipped: torch.Tensor) -> int:
    """Copy blocks between a device and any host memory: gathered where they are, brought over, and put into place.

    It waits for the device, and for whatever its current stream was given before: host memory is as it is to be when this returns.

    Args:
        op: name of the op, for errors.
        src_cache: see `kvdock.ops.swap_blocks_`.
        dst_cache: the same.
        block_pairs: ``[N, 2]``, anywhere. In host memory all are checked; on a device those out of range are skipped.
        skipped: count of such pairs, int64 ``[]``, which is added to.

    Returns:
        Bytes of scratch memory that were taken on the device.

    Raises:
        IndexRangeError, ArgumentValueError: as `kvdock.plugin.live_pairs`; nothing was written.
    """
    sizes, pairs = (src_cache.shape[0], dst_cache.shape[0]), block_pairs.cpu()
    if block_pairs.device != HOST:
        valid, beyond = _judged(pairs, sizes)
        skipped.add_(int(beyond.sum()))
        pairs = pairs[valid]
    live = torch.tensor(live_pairs(op, pairs, sizes[1], num_sources=sizes[0]), dtype=torch.int64, device="cpu")
    count = max(STAGED // max(dst_cache[:1].nbytes, 1), 1)
    for begin in range(0, len(live), count):
        part = live[begin : begin + count]
        rows = as_bits(src_cache).index_select(0, part[:, 0].to(src_cache.device)).to(dst_cache.device)
        as_bits(dst_cache).index_copy_(0, part[:, 1].to(dst_cache.device), rows)
    return 2 * min(count, len(live)) * dst_cache[:1].nbytes


def _judged(pairs: torch.Tensor, sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which pairs are good, and which are neither that nor padding."""
    src, dst = pairs.unbind(1)
    padding, beyond = (pairs < 0).any(1), (src >= sizes[0]) | (dst >= sizes[1])
    return ~(padding | beyond), beyond & ~padding
