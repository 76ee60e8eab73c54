"""What a prefix cache costs: depth, time and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import check_growth
from kvdock_conformance.checking.prefix_calls import same_number
from kvdock_conformance.checking.prefix_target import PrefixTarget

__all__ = ["check_costs", "check_deep", "check_leaves_nothing"]


def check_deep(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Store one long prefix, let another branch off it at every block, walk down, lock its end, and evict all block by block.

    Raises:
        NonconformanceError: an answer is wrong.
    """
    depth, size = data["depth"], data["block_size"]
    cache, tokens = target.make(size), list(range(depth * size))
    cache.insert_prefix(tokens, range(depth))
    for count in range(depth - 1, 0, -1):
        place = cache.match_prefix(tokens[: count * size], record=False).handle
        cache.insert_prefix([-1] * size, [depth + count], behind=place)
    handle = cache.match_prefix(tokens).handle
    cache.lock_handle(handle)
    cache.check_integrity()
    same_number(f"protected tokens of a chain of {depth} blocks", depth * size, cache.size_info.protected_size)
    same_number("blocks that go while the chain is locked, the least", depth + 1, min(cache.evict(depth - 1).tolist()))
    cache.lock_handle(handle, unlock=True)
    for left in range(depth - 1, depth // 2, -1):
        same_number("block of an eviction", left, int(cache.evict(1)[0]))
    same_number("blocks that reset forgets", len(cache.match_prefix(tokens).blocks), len(cache.reset()))


def check_costs(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Take the time of insertions of one block behind a short prefix, and behind a long one.

    Raises:
        NonconformanceError: what is before the handle counts.
    """
    size, seconds = data["block_size"], list[float]()
    for blocks in data["blocks"]:
        cache, times = target.make(size), list[float]()
        handle = cache.insert_prefix(range(blocks * size), range(blocks)).handle
        for number in range(blocks, blocks + data["times"]):
            start = time.perf_counter()
            handle = cache.insert_prefix([number] * size, [number], behind=handle).handle
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    if seconds[1] > data["most"] * seconds[0]:
        blocks = " and ".join(map(str, data["blocks"]))
        raise NonconformanceError(f"seconds of an insertion behind {blocks} blocks", expected=f"at most {data['most']} times", got=seconds)


def check_leaves_nothing(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Match, lock, store and evict again and again, and let the handles go.

    Raises:
        NonconformanceError: memory grows with each time.
    """
    size, times = data["block_size"], data["times"]
    cache, tokens = target.make(size), list(range(9 * size))
    cache.insert_prefix(tokens[: 8 * size], range(8))

    def work(number: int) -> None:
        for _ in range(times):
            handle = cache.match_prefix(tokens).handle
            cache.lock_handle(handle)
            cache.insert_prefix(tokens[handle.cached_len :], range(handle.cached_len // size, 9), behind=handle)
            cache.match_prefix(tokens[::-1])
            cache.lock_handle(handle, unlock=True)
            cache.evict(min(1, cache.size_info.evictable_size // size))  # the block that was stored behind the handle

    check_growth("matches, locks, insertions and evictions whose handles are gone", torch.device("cpu"), times, work)
