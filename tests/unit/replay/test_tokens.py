from __future__ import annotations

import numpy as np
import pytest

from kvdock.replay import TraceRequest, read_trace
from kvdock.replay.tokens import VOCABULARY, TokenMaker
from support_replay import AZURE, CONVERSATION


def request(length: int, *ids: int, line: int = 1) -> TraceRequest:
    return TraceRequest(line, 0.0, length, 0, ids or None)


def test_a_block_id_stands_for_the_ids_that_it_seeds() -> None:
    first, second = (np.random.default_rng(seed).integers(0, 150_000, 512, dtype=np.int32) for seed in (3, 9))
    tokens = TokenMaker().tokens(request(700, 3, 9))
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, np.concatenate((first, second))[:700])


def test_equal_prefixes_of_ids_are_equal_prefixes_of_tokens() -> None:
    maker = TokenMaker()
    one, other = maker.tokens(request(1536, 1, 2, 3)), maker.tokens(request(1536, 1, 2, 4))
    np.testing.assert_array_equal(one[:1024], other[:1024])
    assert one[1024] != other[1024]


def test_what_is_returned_is_the_callers_own() -> None:
    maker = TokenMaker()
    for one in (request(512, 5), request(512)):
        before = maker.tokens(one).copy()
        maker.tokens(one)[:] = 0
        np.testing.assert_array_equal(maker.tokens(one), before)


@pytest.mark.parametrize("remembered", [0, 1, 3])
def test_how_many_blocks_are_remembered_changes_nothing(remembered: int) -> None:
    maker, other = TokenMaker(remembered), TokenMaker()
    for one in read_trace(CONVERSATION, limit=5).requests:
        np.testing.assert_array_equal(maker.tokens(one), other.tokens(one))
    assert maker._block.cache_info().currsize <= remembered


def test_requests_without_ids_differ_from_their_first_token_on() -> None:
    maker, trace = TokenMaker(), read_trace(AZURE)
    made = [maker.tokens(one) for one in trace.requests]
    assert [tokens.size for tokens in made] == [one.input_length for one in trace.requests]
    assert len({int(tokens[0]) for tokens in made}) == 300
    assert min(int(tokens[0]) for tokens in made) >= VOCABULARY
    assert all(tokens[1:].size == 0 or tokens[1:].max() < VOCABULARY for tokens in made)
    np.testing.assert_array_equal(made[0], TokenMaker().tokens(trace.requests[0]))
