"""Rules of retention, against the definition: what any later query sees of the tokens that are there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock import ArgumentTypeError, ArgumentValueError
from kvdock.layers import KeepAll, KeepChunk, KeepState, KeepWindow, Retention

Sees = Callable[[int, int], bool]


def rules() -> st.SearchStrategy[tuple[Retention, Sees]]:
    """Draw a rule, and what a query at one position sees of a key at another, before it or its own."""
    windows = st.tuples(st.integers(1, 40), st.integers(0, 12)).map(
        lambda of: (KeepWindow(*of), lambda query, key: query - key < of[0] or key < of[1])
    )
    chunks = st.integers(1, 40).map(lambda chunk: (KeepChunk(chunk), lambda query, key: query // chunk == key // chunk))
    return st.one_of(st.just((KeepAll(), lambda query, key: True)), windows, chunks)


@given(rules(), st.integers(0, 90))
def test_what_is_kept_is_what_some_later_query_sees(drawn: tuple[Retention, Sees], length: int) -> None:
    rule, sees = drawn
    expected = [key for key in range(length) if any(sees(query, key) for query in range(length, length + 100))]
    spans = rule.spans(length)
    assert [key for span in spans for key in span] == expected
    assert rule.kept(length) == len(expected)
    assert all(span for span in spans)
    assert all(one.stop < other.start for one, other in pairwise(spans))


@given(rules(), st.integers(0, 90), st.integers(1, 20))
def test_blocks_are_those_that_hold_what_is_kept(drawn: tuple[Retention, Sees], length: int, block_size: int) -> None:
    rule, _ = drawn
    expected = sorted({key // block_size for span in rule.spans(length) for key in span})
    blocks = rule.blocks(length, block_size)
    assert [block for of in blocks for block in of] == expected
    assert all(one.stop < other.start for one, other in pairwise(blocks))


@given(rules(), st.integers(0, 90), st.integers(0, 20))
def test_what_was_let_go_is_never_needed_again(drawn: tuple[Retention, Sees], length: int, more: int) -> None:
    rule, _ = drawn
    now, later = ({key for span in rule.spans(at) for key in span} for at in (length, length + more))
    assert {key for key in later if key < length} <= now


def test_a_state_is_one_block_whatever_the_length() -> None:
    rule = KeepState()
    assert rule.is_state
    assert [rule.blocks(length, 16) for length in (0, 1, 16, 1000)] == [(), *[(range(1),)] * 3]
    assert [rule.kept(length) for length in (0, 1, 1000)] == [0, 1, 1]


def test_equal_rules_are_one_key() -> None:
    assert len({KeepAll(), KeepAll(), KeepWindow(4), KeepWindow(4, 0), KeepWindow(4, 1), KeepChunk(4), KeepState()}) == 5


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: KeepWindow(0), ArgumentValueError, "KeepWindow: window: expected at least 1, got 0"),
        (lambda: KeepWindow(4, -1), ArgumentValueError, "KeepWindow: sinks: expected at least 0, got -1"),
        (lambda: KeepWindow(4.0), ArgumentTypeError, "KeepWindow: window: expected an int"),
        (lambda: KeepChunk(0), ArgumentValueError, "KeepChunk: chunk: expected at least 1, got 0"),
    ],
)
def test_bad_numbers_are_named(make: Callable[[], Retention], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
