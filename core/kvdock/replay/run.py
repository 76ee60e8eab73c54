"""A whole replay: one trace, one size of pool, one prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvdock.errors import ArgumentValueError
from kvdock.prefix.inputs import check_block_size
from kvdock.replay.arrivals import Arrivals, AtTheirTimes, OneByOne, Rates, Waits
from kvdock.replay.memory import peak_memory_bytes
from kvdock.replay.pool import ReplayPool
from kvdock.replay.times import Times
from kvdock.replay.tokens import TokenMaker
from kvdock.replay.trace import Trace
from kvdock.scheduler import CacheManager, NumberTier
from kvdock.spec import check_int

__all__ = ["ReplayRun", "ReplaySettings", "checked_pool", "replay"]

_MOST_TOKENS = 2**31
"""More tokens than slots of 32 bits can name."""


@attrs.frozen
class ReplaySettings:
    """How to replay.

    Args:
        block_size: tokens in a block of the pool, 1 to 512.
        prefix: name of the prefix cache, as `create_prefix_cache` takes it.
        policy: what it evicts first; None leaves that to the prefix cache.
        rates: replay at the times of the trace, with requests that get on at this speed; None: one after the other.
        host_tokens: size of a tier behind the pool, in tokens; 0 for none. It is only counted: nothing is copied.
    """

    block_size: int = 16
    prefix: str = "radix"
    policy: str | None = None
    rates: Rates | None = None
    host_tokens: int = 0

    def make_pool(self, pool_tokens: int) -> ReplayPool:
        """Make an empty pool of ``pool_tokens // block_size`` blocks.

        Raises:
            ArgumentValueError: no such prefix cache or policy, a block size out of range, a pool of less than a block
                or of 2**31 tokens.
            ArgumentTypeError: the prefix cache knows no policies.
        """
        size = check_block_size("replay", self.block_size)
        options: dict[str, Any] = {} if self.policy is None else {"policy": self.policy}
        check_int("replay: pool", pool_tokens, 1)
        if not size <= pool_tokens < _MOST_TOKENS:
            expected = f"at least a block of {size} tokens, and fewer than 2**31"
            raise ArgumentValueError("replay: pool", expected=expected, got=pool_tokens)
        check_int("replay: host_tokens", self.host_tokens, 0)
        tiers = [NumberTier(self.host_tokens // size)] if self.host_tokens else []
        manager = CacheManager(pool_tokens // size, size, self.prefix, tiers=tiers, **options)
        return ReplayPool(manager, holds_output=self.rates is not None)

    def arrivals(self) -> Arrivals:
        """Return in which order requests begin and finish."""
        return OneByOne() if self.rates is None else AtTheirTimes(self.rates)


@attrs.frozen
class ReplayRun:
    """What a replay found. Sizes are tokens, times are seconds.

    Args:
        pool_tokens: size of the pool: whole blocks.
        requests: how many were replayed; all of them.
        input_tokens: tokens of their prompts.
        hit_tokens: tokens of those that were there.
        loaded_tokens: tokens that came back from a tier, which were there then.
        evicted_tokens: tokens that were evicted.
        cached_tokens: tokens that were stored in the end.
        operations: what each call of the manager took; see `kvdock.replay.pool.OPERATIONS`.
        seconds: all of them together.
        waits: who had to wait; None without times.
        peak_memory_bytes: see `kvdock.replay.memory.PEAK_METHOD`.
    """

    pool_tokens: int
    requests: int
    input_tokens: int
    hit_tokens: int
    loaded_tokens: int
    evicted_tokens: int
    cached_tokens: int
    operations: dict[str, Times]
    seconds: float
    waits: Waits | None
    peak_memory_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens per token of input."""
        return self.hit_tokens / self.input_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens of input per second in the calls of the manager."""
        return self.input_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold, with the rates."""
        return {**attrs.asdict(self), "hit_rate": self.hit_rate, "tokens_per_s": self.tokens_per_s}


def checked_pool(trace: Trace, pool_tokens: int, settings: ReplaySettings) -> ReplayPool:
    """Make an empty pool that each request of a trace fits into; raises as `replay` does."""
    pool = settings.make_pool(pool_tokens)
    for request in trace.requests:
        pool.check_fits(request)
    return pool


def replay(trace: Trace, pool_tokens: int, settings: ReplaySettings, progress: Callable[[], None] = lambda: None) -> ReplayRun:
    """Let all requests of a trace go through a pool and a prefix cache, and prove in the end that nothing was lost.

    Args:
        trace: the trace.
        pool_tokens: size of the pool in tokens, rounded down to whole blocks.
        settings: how to replay.
        progress: called each time that a request has begun.

    Raises:
        ArgumentValueError: a request is larger than the pool, and nothing was replayed; or see `ReplaySettings.make_pool`.
        IntegrityError: the prefix cache has lost count.
    """
    pool, arrivals, maker = checked_pool(trace, pool_tokens, settings), settings.arrivals(), TokenMaker()
    hit_tokens = 0
    for begun in arrivals.replay(trace.requests, pool, maker):
        hit_tokens += begun.cached_len
        progress()
    prefix = pool.manager.prefix
    loaded = sum(usage.loaded for usage in pool.manager.tier_usage) * settings.block_size
    cached, evicted = prefix.size_info.total_size, prefix.stats.evicted_tokens
    pool.close()
    return ReplayRun(
        pool_tokens=pool.manager.allocator.num_blocks * settings.block_size,
        requests=len(trace.requests),
        input_tokens=trace.input_tokens,
        hit_tokens=hit_tokens,
        loaded_tokens=loaded,
        evicted_tokens=evicted,
        cached_tokens=cached,
        operations=pool.times.summary(),
        seconds=pool.times.total_s(),
        waits=arrivals.waits,
        peak_memory_bytes=peak_memory_bytes(),
    )
