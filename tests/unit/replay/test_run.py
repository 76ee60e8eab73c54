from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError
from kvdock.replay import Rates, ReplayRun, ReplaySettings, Trace, read_trace, replay
from kvdock.replay.bounds import ceiling
from kvdock.replay.memory import peak_memory_bytes
from kvdock.replay.pool import OPERATIONS
from support_replay import AZURE, CONVERSATION, endless_hits, row, trace_of
from support_slow import first_of


def numbers(run: ReplayRun) -> dict[str, Any]:
    """Return what is not a time or memory."""
    found = run.as_dict()
    for name in ("operations", "seconds", "tokens_per_s", "peak_memory_bytes"):
        del found[name]
    return found | {"calls": {name: times.calls for name, times in run.operations.items()}}


def test_by_hand() -> None:
    # a pool of three blocks of 512: 1 2 | 1 2: both hit | 3 4: 2 goes | 1 2: 1 hits, and of 3 4 the end goes
    trace = trace_of(row([1, 2]), row([1, 2]), row([3, 4]), row([1, 2]))
    run = replay(trace, 3 * 512 + 100, ReplaySettings(block_size=512))
    assert (run.requests, run.input_tokens, run.hit_tokens) == (4, 4096, 1024 + 512)
    assert (run.pool_tokens, run.evicted_tokens, run.cached_tokens) == (1536, 1024, 1536)
    assert run.hit_rate == 1536 / 4096
    assert run.waits is None


def test_a_remainder_is_never_hit() -> None:
    trace = trace_of(row([1], length=100), row([1], length=100))
    assert replay(trace, 1000, ReplaySettings(block_size=16)).hit_tokens == 96
    assert replay(trace, 1000, ReplaySettings(block_size=1)).hit_tokens == 100
    assert replay(trace, 1000, ReplaySettings(block_size=101)).hit_tokens == 0


@pytest.mark.parametrize("block_size", [16, 100, 512])
def test_with_room_for_all_it_hits_what_was_there_before(block_size: int) -> None:
    trace = read_trace(CONVERSATION, limit=30)
    run = replay(trace, 10**6, ReplaySettings(block_size=block_size))
    assert run.hit_tokens == endless_hits(trace, block_size)
    assert run.evicted_tokens == 0
    assert run.hit_rate <= ceiling(trace).tokens


def test_the_whole_excerpt_comes_near_the_ceiling_in_blocks_of_one() -> None:
    trace = read_trace(CONVERSATION)
    top = ceiling(trace).tokens
    run = replay(trace, 5 * 10**6, ReplaySettings(block_size=16))
    assert top - 0.001 < run.hit_rate <= top


def one_block_prompts(seed: int) -> Trace:
    random = np.random.default_rng(seed)
    return trace_of(*(row([int(number)]) for number in random.zipf(1.3, 400) % 60))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [1, 5, 20])
def test_of_prompts_of_one_block_it_is_a_plain_lru(seed: int, room: int) -> None:
    trace, kept, hits = one_block_prompts(seed), OrderedDict[Any, None](), 0
    for request in trace.requests:
        hits += request.block_ids in kept
        kept[request.block_ids] = None
        kept.move_to_end(request.block_ids)
        if len(kept) > room:
            kept.popitem(last=False)
    for policy in (None, "lru"):
        assert replay(trace, room * 512, ReplaySettings(block_size=512, policy=policy)).hit_tokens == 512 * hits


@pytest.mark.parametrize("seed", range(4))
def test_and_with_fifo_a_plain_fifo(seed: int) -> None:
    trace, kept, hits = one_block_prompts(seed), list[Any](), 0
    for request in trace.requests:
        if request.block_ids in kept:
            hits += 1
        else:
            kept = [*kept, request.block_ids][-10:]
    assert replay(trace, 10 * 512, ReplaySettings(block_size=512, policy="fifo")).hit_tokens == 512 * hits


def test_without_reuse_nothing_is_hit_and_nothing_is_kept() -> None:
    run = replay(read_trace(CONVERSATION, limit=50), 200_000, ReplaySettings(prefix="naive"))
    assert (run.hit_tokens, run.evicted_tokens, run.cached_tokens) == (0, 0, 0)


@pytest.mark.parametrize("block_size", [1, 16])
def test_azure_presses_on_the_pool_and_hits_nothing(block_size: int) -> None:
    trace = read_trace(AZURE, limit=100)
    run = replay(trace, 20_000, ReplaySettings(block_size=block_size))
    assert run.hit_tokens == 0
    whole = sum(one.input_length // block_size * block_size for one in trace.requests)
    assert run.evicted_tokens + run.cached_tokens == whole, "all that was stored is there, or went"


@pytest.mark.parametrize("rates", [None, Rates(20_000, 100)], ids=["one by one", "timed"])
@pytest.mark.parametrize("policy", first_of(["lru", "lfu", "fifo", "priority"]))
def test_the_same_run_twice_finds_the_same(rates: Rates | None, policy: str) -> None:
    trace, settings = read_trace(CONVERSATION), ReplaySettings(policy=policy, rates=rates)
    assert numbers(replay(trace, 400_000, settings)) == numbers(replay(trace, 400_000, settings))


def test_times_and_memory() -> None:
    before = peak_memory_bytes()
    run = replay(read_trace(CONVERSATION, limit=80), 300_000, ReplaySettings(rates=Rates()))
    assert tuple(run.operations) == OPERATIONS
    for times in run.operations.values():
        assert 0 < times.p50_s <= times.p99_s <= times.max_s <= times.total_s
        assert times.mean_s == pytest.approx(times.total_s / times.calls)
    assert run.seconds == pytest.approx(sum(times.total_s for times in run.operations.values()))
    assert run.tokens_per_s == run.input_tokens / run.seconds
    assert 2**20 < before <= run.peak_memory_bytes <= peak_memory_bytes()


def test_it_can_be_written_as_json() -> None:
    run = replay(read_trace(CONVERSATION, limit=5), 300_000, ReplaySettings(rates=Rates()))
    found = json.loads(json.dumps(run.as_dict()))
    fields = {field.name for field in attrs.fields(ReplayRun)}
    assert set(found) == fields | {"hit_rate", "tokens_per_s"}
    assert set(found["operations"]["begin"]) == {"calls", "total_s", "mean_s", "p50_s", "p99_s", "max_s"}
    assert set(found["waits"]) == {"waited", "longest_s", "most_running"}


def test_progress_is_told_of_each_request() -> None:
    for rates in (None, Rates()):
        told = list[None]()
        replay(read_trace(CONVERSATION, limit=20), 300_000, ReplaySettings(rates=rates), lambda told=told: told.append(None))  # type: ignore[misc]
        assert len(told) == 20


def test_a_request_larger_than_the_pool_stops_before_the_first() -> None:
    told = list[None]()
    trace = trace_of(row([1]), row([2, 3]))
    with pytest.raises(ArgumentValueError, match="line 2: expected a request of at most the pool's 512 tokens"):
        replay(trace, 600, ReplaySettings(block_size=512), lambda: told.append(None))
    assert not told


@pytest.mark.parametrize(
    ("pool", "settings", "error", "text"),
    [
        (1000, {"prefix": "nobodys"}, ArgumentValueError, "expected one of naive, radix"),
        (1000, {"policy": "mru"}, ArgumentValueError, "expected one of 'lru', 'lfu', 'fifo', 'priority'"),
        (1000, {"policy": "lru", "prefix": "naive"}, ArgumentTypeError, "options that its class takes"),
        (1000, {"block_size": 513}, ArgumentValueError, "expected 1 to 512 tokens, got 513"),
        (15, {}, ArgumentValueError, "replay: pool: expected at least a block of 16 tokens, and fewer than 2\\*\\*31, got 15"),
        (2**31, {}, ArgumentValueError, "replay: pool: .* got 2147483648"),
        (0, {}, ArgumentValueError, "replay: pool"),
        (1.5, {}, ArgumentTypeError, "replay: pool"),
    ],
)
def test_settings_that_make_no_sense(pool: Any, settings: dict[str, Any], error: type[KVDockError], text: str) -> None:
    with pytest.raises(error, match=text):
        replay(trace_of(row([1], length=3)), pool, ReplaySettings(**settings))
