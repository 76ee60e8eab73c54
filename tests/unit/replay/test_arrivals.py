from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from kvdock.replay import Rates, Trace, read_trace
from kvdock.replay.arrivals import AtTheirTimes, OneByOne, Waits
from kvdock.replay.pool import Begun, ReplayPool
from kvdock.replay.tokens import TokenIds, TokenMaker
from kvdock.replay.trace import TraceRequest
from kvdock.scheduler import CacheManager
from support_replay import AZURE, CONVERSATION, row, trace_of

SLOW = Rates(prefill=512, decode=10)  # a block of the trace in a second, ten tokens of output in another


def timed(trace: Trace, blocks: int, rates: Rates = SLOW, block_size: int = 512) -> tuple[list[Begun], Waits, ReplayPool]:
    """Replay a trace at its times; the pool is proved to be whole and emptied behind it."""
    manager, arrivals = CacheManager(blocks, block_size), AtTheirTimes(rates)
    pool = ReplayPool(manager, holds_output=True)
    begun = list(arrivals.replay(trace.requests, pool, TokenMaker()))
    assert manager.num_sequences == 0
    assert manager.prefix.size_info.protected_size == 0
    assert manager.allocator.num_used * block_size == manager.prefix.size_info.total_size, "only what is cached is left"
    pool.close()
    assert manager.allocator.num_used == 0
    return begun, arrivals.waits, pool


def found(begun: list[Begun]) -> list[tuple[int, int]]:
    """Return line and cached tokens of each request, in the order in which they began."""
    return [(one.request.line, one.cached_len) for one in begun]


# One block of input and one of output each. The first computes its prompt until 1 s and ends at 2 s; the second, until 1.5 and 2.5.
THREE = trace_of(row([1], output=10), row([1], at_ms=500, output=10), row([1], at_ms=1200, output=10))


def test_a_prompt_can_be_shared_once_it_is_computed() -> None:
    begun, waits, _ = timed(THREE, 5)
    assert found(begun) == [(1, 0), (2, 0), (3, 512)], "the second came while the first was computing"
    assert waits == Waits(waited=0, longest_s=0.0, most_running=3)


def test_one_waits_until_blocks_come_back() -> None:
    begun, waits, _ = timed(THREE, 4)
    assert found(begun) == [(1, 0), (2, 0), (3, 512)]
    assert waits.waited == 1
    assert waits.longest_s == pytest.approx(0.3), "from 1.2 s until the second frees its copy of the prompt, at 1.5 s"
    assert waits.most_running == 3


def test_they_wait_for_the_end_of_others() -> None:
    begun, waits, _ = timed(THREE, 2)
    assert found(begun) == [(1, 0), (2, 512), (3, 512)]
    # the second begins at 2 and ends at 3, since its prompt is there; the third begins at 3
    assert waits == Waits(waited=2, longest_s=pytest.approx(1.8), most_running=1)


def test_the_line_is_not_jumped() -> None:
    # 1 takes four of five blocks until 5 s; 2 needs three and waits; 3 needs one, which is free, and waits behind it
    trace = trace_of(row([1, 2, 3], output=20), row([4, 5, 6], at_ms=100), row([7], at_ms=200))
    begun, waits, _ = timed(trace, 5)
    assert [line for line, _ in found(begun)] == [1, 2, 3]
    assert waits.waited == 2


def test_who_came_long_after_the_end_of_all_does_not_wait() -> None:
    begun, waits, pool = timed(trace_of(row([1, 2]), row([3, 4], at_ms=60_000), row([1, 2], at_ms=120_000)), 2)
    assert waits == Waits(0, 0.0, 1)
    assert [hit for _, hit in found(begun)] == [0, 0, 0]
    assert pool.manager.prefix.stats.evicted_tokens == 2048


def test_no_output_and_equal_times() -> None:
    begun, waits, _ = timed(trace_of(*(row([number]) for number in range(6))), 3)
    assert [line for line, _ in found(begun)] == [1, 2, 3, 4, 5, 6]
    assert waits == Waits(waited=3, longest_s=1.0, most_running=3)


def test_quick_enough_it_is_one_by_one() -> None:
    trace = read_trace(CONVERSATION)
    spread = Trace(
        "mooncake", tuple(one.__class__(one.line, number, one.input_length, 0, one.block_ids) for number, one in enumerate(trace.requests))
    )
    at_times, waits, _ = timed(spread, 40_000, Rates(1e9, 1e9), block_size=16)
    pool = ReplayPool(CacheManager(40_000, 16))
    one_by_one = list(OneByOne().replay(trace.requests, pool, TokenMaker()))
    assert found(at_times) == found(one_by_one)
    assert waits == Waits(0, 0.0, 1)
    assert OneByOne().waits is None


@pytest.mark.parametrize("blocks", [9_000, 20_000, 200_000])
def test_the_excerpt_at_its_times_loses_nothing(blocks: int) -> None:
    trace = read_trace(CONVERSATION)
    begun, waits, _ = timed(trace, blocks, Rates(), block_size=16)
    assert [one.request.line for one in begun] == [one.line for one in trace.requests], "first come, first served"
    assert (waits.waited > 0) == (blocks < 200_000)
    assert 1 < waits.most_running < 300


def test_more_blocks_never_make_them_wait_longer() -> None:
    trace = read_trace(AZURE)
    longest = [timed(trace, blocks, Rates(), block_size=16)[1].longest_s for blocks in (500, 1000, 2000, 20_000)]
    assert longest == sorted(longest, reverse=True)
    assert longest[0] > longest[-1] == 0


class Watched(ReplayPool):
    """A pool whose manager proves after each step that every block has one owner."""

    steps = 0

    def begin(self, request: TraceRequest, tokens: TokenIds) -> Begun | None:
        begun = super().begin(request, tokens)
        self.prove()
        return begun

    def store(self, begun: Begun) -> None:
        super().store(begun)
        self.prove()

    def finish(self, begun: Begun) -> None:
        super().finish(begun)
        self.prove()

    def prove(self) -> None:
        self.manager.check_integrity()
        self.steps += 1


@pytest.mark.parametrize("seed", range(5))
def test_every_block_has_one_owner_at_each_step(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = []
    for at in np.sort(random.integers(0, 8_000, 60)):
        ids = [100 * depth + int(random.integers(0, 2)) for depth in range(int(random.integers(1, 5)))]
        length = 512 * len(ids) - int(random.integers(0, 512))
        rows.append(row(ids, length=length, at_ms=float(at), output=int(random.integers(0, 900))))
    pool, arrivals = Watched(CacheManager(60, 128), holds_output=True), AtTheirTimes(Rates(2000, 500))
    begun = list(arrivals.replay(trace_of(*rows).requests, pool, TokenMaker()))
    assert len(begun) == 60
    assert arrivals.waits.waited > 0
    assert pool.steps >= 180
    pool.close()


def test_a_prefix_cache_that_keeps_all_is_named() -> None:
    class Greedy(ReplayPool):
        def begin(self, request: Any, tokens: Any) -> Begun | None:
            return None

    for arrivals in (OneByOne(), AtTheirTimes(SLOW)):
        pool = Greedy(CacheManager(8, 512))
        with pytest.raises(OutOfBlocksError, match="line 1: expected room for a request that fits in the pool, when no other runs"):
            list(arrivals.replay(THREE.requests, pool, TokenMaker()))


@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ArgumentValueError),
        (-1.5, ArgumentValueError),
        (float("inf"), ArgumentValueError),
        (float("nan"), ArgumentValueError),
        ("fast", ArgumentTypeError),
        (True, ArgumentTypeError),
    ],
)  # fmt: skip - one line, one table
def test_speeds_that_are_none(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^Rates: {name}: expected tokens per second"):
        Rates(**{name: value})
