"""Blocks that are swapped aside, while the device goes on computing; and caches in host memory to swap them to.

Order and visibility, wherever blocks lie:

* A swap waits for all that the device's current stream was given before `Swapper.swap` was called, such as what wrote the blocks.
* Swaps of one `Swapper` on one device follow each other in the order of their calls.
* Nothing waits for a swap until it is told to. Until then its sources may not be written, and its destinations neither read nor written:
  a block that was swapped out is given to somebody else only behind the ticket.
* `Ticket.wait` makes the device's current stream wait, and returns at once: what is launched there from then on sees the blocks.
* `Ticket.synchronize` waits on the host: what the host reads from then on sees them, and so does any other device.

On devices without streams, and between two pools in host memory, it is the same code: a swap is done when the call returns.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import attrs
import torch

from kvdock.cache.interface import OpSource
from kvdock.cache.paged import PagedKVCache
from kvdock.errors import ArgumentTypeError
from kvdock.guarded import ask_side_stream
from kvdock.interface import HOST, Mark, Stream
from kvdock.layout import KVCacheLayout
from kvdock.ops.api import BlockPairs
from kvdock.ops.dispatcher import active_dispatcher

__all__ = ["Swapper", "Ticket", "host_cache"]


class Ticket:
    """A swap that is on its way, or done.

    Args:
        mark: where it ends in its stream; None where it is done.
        held: what must stay until then.
    """

    __slots__ = ("_held", "_mark")

    def __init__(self, mark: Mark | None, held: tuple[Any, ...] = ()) -> None:
        self._mark, self._held = mark, held

    def ready(self) -> bool:
        """Whether the swap is done. Does not wait."""
        if self._mark is not None and self._mark.reached():
            self._mark, self._held = None, ()
        return self._mark is None

    def wait(self) -> None:
        """Let the device's current stream wait for the swap; the host goes on."""
        if self._mark is not None:
            self._mark.wait()

    def synchronize(self) -> None:
        """Wait on the host until the swap is done."""
        if self._mark is not None:
            self._mark.synchronize()
            self._mark, self._held = None, ()


class Swapper:
    """Swaps blocks between caches on a stream of its own for each device. The module says what is ordered, and what is not.

    It belongs to one thread at a time. It holds caches whose swaps are on their way; other references to them are not needed.

    Args:
        ops: where backends are asked for; default is the process's runtime.
    """

    def __init__(self, ops: OpSource | None = None) -> None:
        self._ops = ops if ops is not None else active_dispatcher()
        self._streams: dict[tuple[torch.device, str | None], Stream | None] = {}
        self._pending: deque[Ticket] = deque()

    def swap(self, src: PagedKVCache, dst: PagedKVCache, block_pairs: BlockPairs, *, group: int = 0) -> Ticket:
        """Copy whole blocks from one cache to another, as `kvdock.PagedKVCache.swap_blocks` does, aside.

        Args:
            src: the cache to copy from.
            dst: the cache to copy to.
            block_pairs: ``[N, 2]`` (src, dst). What is in host memory has been read when this returns.
            group: number of the group of layers that the blocks belong to.

        Returns:
            What to wait for.

        Raises:
            KVDockError: as `kvdock.PagedKVCache.swap_blocks`; nothing was written.
        """
        for name, value in (("src", src), ("dst", dst)):
            if not isinstance(value, PagedKVCache):
                raise ArgumentTypeError(f"Swapper.swap: {name}", expected="a cache in blocks", got=repr(value)[:80], fix="pass the cache")
        while self._pending and self._pending[0].ready():
            self._pending.popleft()
        end = dst if src.device == HOST else src
        stream = self._stream(end)
        if stream is None:
            src.swap_blocks(dst, block_pairs, group=group)
            return Ticket(None)
        stream.follow()
        with stream.current():
            src.swap_blocks(dst, block_pairs, group=group)
            ticket = Ticket(stream.mark(), (src, dst, block_pairs))
        self._pending.append(ticket)
        return ticket

    def synchronize(self) -> None:
        """Wait on the host until all swaps are done."""
        while self._pending:
            self._pending[0].synchronize()
            self._pending.popleft()

    def _stream(self, end: PagedKVCache) -> Stream | None:
        """Return the stream for a cache's device, made at the first swap."""
        key = end.device, end.backend_name
        if key not in self._streams:
            self._streams[key] = ask_side_stream(self._ops.choose("swap_blocks_", *key).backend, end.device)
        return self._streams[key]


def host_cache(
    cache: PagedKVCache,
    *,
    num_blocks: int | None = None,
    max_kv_memory_bytes: int | None = None,
    layout: KVCacheLayout | None = KVCacheLayout.PAGE_FIRST,
    ops: OpSource | None = None,
) -> PagedKVCache:
    """Make a cache of the same layers in host memory, to swap blocks to.

    Its memory has the size of its blocks, and is page-locked for the cache's device in the background, if the device's backend can:
    `kvdock.PagedKVCache.host_pages` says how far that is, and waits for it. The device reads and writes it by itself then. Until then,
    and elsewhere, blocks are staged, which is slower and waits for the device.

    Args:
        cache: the cache on a device.
        num_blocks: blocks of the new one. Give these, a budget, or both.
        max_kv_memory_bytes: bound on its bytes.
        layout: all layers of a block together by default, so that a block is one run of memory.
        ops: where its ops come from; default is the process's runtime.

    Raises:
        KVDockError: no cache in blocks; as `kvdock.create_cache`.
    """
    if not isinstance(cache, PagedKVCache):
        raise ArgumentTypeError("host_cache: cache", expected="a cache in blocks", got=repr(cache)[:80], fix="pass the cache on the device")
    config = attrs.evolve(
        cache.config, num_blocks=num_blocks, max_kv_memory_bytes=max_kv_memory_bytes, layout=layout, pinned_for=cache.device
    )
    made = config.build(cache.spec, attrs.evolve(cache.rank, device=HOST), ops if ops is not None else active_dispatcher())
    return cast(PagedKVCache, made)
