"""`swap_blocks_` in portable torch."""

from __future__ import annotations

import torch

from kvdock.bits import as_bits
from kvdock.interface import HOST
from kvdock.ops.index_values import live_pairs, pairs_on_device
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel, redirect

__all__ = ["SwapBlocks", "SwapBlocksDescriptor", "swap_staged"]

STAGED = 2**26
"""Bytes that are staged at a time, at most, unless a block has more."""


class SwapBlocksDescriptor(PortableDescriptor):
    """Copies whole blocks from one cache to another: on one device without waiting for it, to or from host memory staged."""

    def __call__(self, src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        """Copy block ``src`` to block ``dst`` of the other cache for each pair."""
        sizes = src_cache.shape[0], dst_cache.shape[0]
        if src_cache.device != dst_cache.device:
            self._swap_staged(src_cache, dst_cache, block_pairs)
            return
        if block_pairs.device == HOST:
            block_pairs = pairs_on_device(self._op, block_pairs, sizes[1], dst_cache.device, num_sources=sizes[0])
        valid, beyond = _judged(block_pairs, sizes)
        self._skipped.add_(beyond.sum())
        if 0 in sizes:
            return
        source, dst = redirect(block_pairs[:, 1].to(torch.int64), valid)
        src = block_pairs[:, 0].to(torch.int64).index_select(0, source)
        # With nothing valid, block 0 is written with what it holds.
        src, dst = (torch.where(valid.any(), ids, 0) for ids in (src, dst))
        rows = torch.where(valid.any(), as_bits(src_cache).index_select(0, src), as_bits(dst_cache)[:1])
        self.workspace_bytes = 3 * len(src) * dst_cache[:1].nbytes  # what torch takes to index blocks
        as_bits(dst_cache).index_put_((dst,), rows)

    def _swap_staged(self, src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        sizes = src_cache.shape[0], dst_cache.shape[0]
        pairs = block_pairs.to(HOST)
        if block_pairs.device != HOST:  # where what is out of range is skipped and counted
            valid, beyond = _judged(pairs, sizes)
            self._skipped.add_(int(beyond.sum()))
            pairs = pairs[valid]
        self.workspace_bytes = swap_staged(self._op, src_cache, dst_cache, pairs)


def swap_staged(op: str, src_cache: torch.Tensor, dst_cache: torch.Tensor, pairs: torch.Tensor) -> int:
    """Copy blocks between a device and any host memory: gathered on their side, brought over, and put into place. Waits for the device.

    Args:
        op: name of the op, for errors.
        src_cache: see `kvdock.ops.swap_blocks_`.
        dst_cache: the same.
        pairs: ``[N, 2]`` in host memory.

    Returns:
        Bytes of scratch memory that were taken on the device.

    Raises:
        IndexRangeError, ArgumentValueError: as `kvdock.plugin.live_pairs`; nothing was written.
    """
    live = torch.tensor(live_pairs(op, pairs, dst_cache.shape[0], num_sources=src_cache.shape[0]), dtype=torch.int64, device=HOST)
    if not len(live):
        return 0
    count = max(STAGED // max(dst_cache[:1].nbytes, 1), 1)
    for begin in range(0, len(live), count):
        part = live[begin : begin + count]
        src, dst = part[:, 0].to(src_cache.device), part[:, 1].to(dst_cache.device)
        rows = as_bits(src_cache).index_select(0, src).to(dst_cache.device)
        as_bits(dst_cache).index_copy_(0, dst, rows)
    return 2 * min(count, len(live)) * dst_cache[:1].nbytes


def _judged(pairs: torch.Tensor, sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which pairs are good, and which are neither that nor padding."""
    src, dst = pairs.unbind(1)
    padding, beyond = (pairs < 0).any(1), (src >= sizes[0]) | (dst >= sizes[1])
    return ~(padding | beyond), beyond & ~padding


class SwapBlocks(PortableKernel):
    """Prepares `SwapBlocksDescriptor`."""

    descriptor = SwapBlocksDescriptor
