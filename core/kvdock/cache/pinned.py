"""Host memory that a device reads and writes itself: of exact size, and page-locked in the background.

torch's own allocator of such memory rounds sizes up to powers of two, and locks all of it before it returns: gigabytes take seconds.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdock.cache.interface import OpSource, active_name
from kvdock.cache.memory import aligned
from kvdock.errors import ArgumentValueError, CapacityError, KVDockError
from kvdock.guarded import ask_pin
from kvdock.interface import HOST
from kvdock.ops.selection import Choice

__all__ = ["CHUNK", "HostPages", "host_pages"]

CHUNK = 2**28
"""Bytes that are locked at a time."""


class _Pages(mmap.mmap):
    """Pages of one memory. Those that are locked are unlocked before they are given back, which is when the last tensor goes."""

    locked: list[Callable[[], None]]
    process: int = 0  # until there are pages: `__del__` is called too where the system gives none

    def __del__(self) -> None:
        if sys.is_finalizing() or self.process != os.getpid():
            return  # the system unlocks them; in a forked child they are the parent's
        while self.locked:  # the chunk locked last is the first in memory: see `HostPages`
            self.locked.pop()()


class HostPages:
    """Takes memory for the pools of a cache, and has it locked for a device while the cache is in use already.

    Chunks are locked from the end of each memory to its beginning. So what begins in a locked chunk is locked to its end, and to ask
    about the first byte of a pool is enough. What is not locked yet is swapped by staging it, as pageable memory is.

    Args:
        choice: the backend of the device.
        device: the device.
    """

    def __init__(self, choice: Choice, device: torch.device) -> None:
        self._choice, self._device = choice, device
        self._pages: list[_Pages] = []
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self.nbytes, self.locked_bytes = 0, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, alignment: int = 1) -> torch.Tensor:
        """Return zeroed host memory, dense, whose address is a multiple of ``alignment``: see `kvdock.cache.memory.fresh`."""
        nbytes, more = math.prod(shape) * dtype.itemsize, alignment if alignment > mmap.PAGESIZE else 0
        try:
            pages = _Pages(-1, aligned(nbytes + more, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(str(error)) from error
        pages.locked, pages.process = [], os.getpid()
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._pages.append(pages)
        self.nbytes += len(pages)
        with torch.inference_mode(False):
            whole = torch.frombuffer(pages, dtype=torch.uint8)
            begin = -whole.data_ptr() % alignment
            return whole[begin : begin + nbytes].view(dtype).view(tuple(shape))

    def lock(self, owner: object) -> None:
        """Begin to lock what was taken, for as long as the owner is there."""
        weakref.finalize(owner, self._is_over.set)
        pages, self._pages = self._pages, []
        self._thread = threading.Thread(target=self._run, args=(pages,), name="kvdock-page-locks", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._is_over, self._thread)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is locked, for so many seconds at most, and return whether it is.

        It is not where the backend has no way to, and then blocks are staged for good.

        Raises:
            CapacityError: the system does not lock so much memory.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        if self._error is not None:
            expected, got = f"{self.nbytes} bytes of host memory locked for {self._device}", f"{self.locked_bytes}: {self._error}"
            fix = "ask for fewer blocks, or raise the limit (ulimit -l); blocks are staged meanwhile"
            raise CapacityError("page-locked host memory", expected=expected, got=got, fix=fix) from self._error
        return self.locked_bytes == self.nbytes

    def _run(self, pages: Sequence[_Pages]) -> None:
        try:
            for each in pages:
                self._lock(each)
        except (KVDockError, MemoryError, RuntimeError) as error:
            self._error = error

    def _lock(self, pages: _Pages) -> None:
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        for begin in reversed(range(0, len(pages), CHUNK)):
            if self._is_over.is_set():
                return
            chunk = memory[begin : begin + CHUNK]
            undo = ask_pin(self._choice.backend, chunk, self._device)
            if undo is None:
                return
            pages.locked.append(undo)
            self.locked_bytes += chunk.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a deep copy of a cache has memory that is not locked."""


def _end(is_over: threading.Event, thread: threading.Thread) -> None:
    """Let a thread end behind its chunk. At exit: one that is still in torch's code when Python goes aborts the process."""
    is_over.set()
    if thread is not threading.current_thread():  # it may have had the last reference
        thread.join()


def host_pages(ops: OpSource, pinned_for: torch.device | None, device: torch.device, *, is_given: bool) -> HostPages | None:
    """Return what takes memory on a device for a cache that is to be locked for another; None for one that is not.

    Raises:
        ArgumentValueError: the cache does not lie in host memory, or in memory that it was given.
        BackendError: no backend can be chosen for the other device.
    """
    if pinned_for is None:
        return None
    if device != HOST:
        fix = 'make it with RankInfo("cpu"), or leave pinned_for out'
        raise ArgumentValueError("PagedKVCacheConfig: pinned_for", expected="a cache in host memory", got=f"one on {device}", fix=fix)
    if is_given:
        fix = "lock the pages of these tensors yourself, as Tensor.pin_memory does, and leave pinned_for out"
        raise ArgumentValueError("PagedKVCacheConfig: pinned_for", expected="memory of the cache's own", got="given tensors", fix=fix)
    return HostPages(ops.choose("swap_blocks_", pinned_for, active_name()), pinned_for)
