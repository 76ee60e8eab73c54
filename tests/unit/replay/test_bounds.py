from __future__ import annotations

from collections import OrderedDict

import pytest

from kvdock.replay import Trace, read_trace
from kvdock.replay.bounds import block_lru, ceiling
from support_replay import AZURE, CONVERSATION, row, trace_of


def test_ceiling_by_hand() -> None:
    # 1 2 | 1 2 3, the last of 100 tokens | 1 9 3: 3 was there, but not behind 9
    trace = trace_of(row([1, 2]), row([1, 2, 3], length=1124), row([1, 9, 3]))
    found = ceiling(trace)
    assert found.tokens == (1024 + 512) / (1024 + 1124 + 1536)
    assert found.blocks == 3 / 8


def test_the_last_block_counts_as_many_tokens_as_it_has() -> None:
    trace = trace_of(row([1, 2], length=600), row([1, 2], length=600))
    assert ceiling(trace).tokens == 600 / 1200
    assert ceiling(trace).blocks == 2 / 4


def test_lru_by_hand() -> None:
    # room for two: 1 2 stay; 3 drives out what was used first of 1 2, which is the end, 2; so 1 hits and 2 does not
    trace = trace_of(row([1, 2]), row([3]), row([1, 2]))
    assert block_lru(trace, 2 * 512).blocks == 1 / 5
    assert block_lru(trace, 2 * 512 + 511).blocks == 1 / 5, "rounded down to whole blocks"
    assert block_lru(trace, 3 * 512).blocks == 2 / 5
    assert block_lru(trace, 511).blocks == 0


def test_a_request_longer_than_the_pool_keeps_its_beginning() -> None:
    trace = trace_of(row([1, 2, 3, 4]), row([1, 2, 3, 4]))
    assert block_lru(trace, 2 * 512).blocks == 2 / 8


def test_traces_without_ids_have_nothing_to_hit() -> None:
    trace = read_trace(AZURE)
    for found in (ceiling(trace), block_lru(trace, 10**9)):
        assert (found.tokens, found.blocks) == (0.0, 0.0)


def slow_ceiling(trace: Trace) -> float:
    """Blocks whose whole prefix of ids is in a set of all prefixes so far."""
    seen, hits, total = set[tuple[int, ...]](), 0, 0
    for request in trace.requests:
        prefixes = [request.block_ids[: end + 1] for end in range(len(request.block_ids))] if request.block_ids else []
        hits += sum(prefix in seen for prefix in prefixes)
        total += len(prefixes)
        seen.update(prefixes)
    return hits / total


def slow_lru(trace: Trace, room: int) -> float:
    """The same cache as a list of ids, least recent first."""
    kept: list[int] = []
    hits = total = 0
    for request in trace.requests:
        ids = list(request.block_ids or ())
        for number in ids:
            if number not in kept:
                break
            hits += 1
        total += len(ids)
        kept = ([number for number in kept if number not in set(ids)] + ids[::-1])[-room:]
    return hits / total


def test_ceiling_of_the_excerpt() -> None:
    trace = read_trace(CONVERSATION)
    assert ceiling(trace).blocks == slow_ceiling(trace)


@pytest.mark.parametrize("room", [1, 7, 100, 1000])
def test_lru_of_the_excerpt(room: int) -> None:
    trace = read_trace(CONVERSATION, limit=150)
    assert block_lru(trace, room * 512).blocks == slow_lru(trace, room)


def test_more_room_never_hits_less_and_the_ceiling_is_the_end() -> None:
    trace = read_trace(CONVERSATION)
    rates = [block_lru(trace, size).tokens for size in (0, 50_000, 500_000, 1_000_000, 2_000_000, 5_000_000)]
    assert rates == sorted(rates)
    assert rates[0] == 0
    assert rates[-1] == ceiling(trace).tokens


def test_the_order_within_a_request_matters_as_the_docstring_says() -> None:
    """With the beginning driven out first, nothing behind it could be hit."""
    kept: OrderedDict[int, None] = OrderedDict.fromkeys([1, 2])
    kept[3] = None
    kept.popitem(last=False)
    assert 1 not in kept, "this is the order that block_lru must not take"
    assert block_lru(trace_of(row([1, 2]), row([3]), row([1])), 1024).blocks == 1 / 4
