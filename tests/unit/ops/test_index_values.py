"""Checks on index values: what raises, which position is named, and what is merely reported."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import kvdock
from kvdock.ops.index_values import check_lengths, check_pairs, check_slots, equal_slots, pairs_on_device, slots_in_range
from opskit import PROPERTY

DTYPES = [torch.int32, torch.int64]


@PROPERTY
@given(st.lists(st.integers(-3, 12), min_size=1, max_size=20), st.sampled_from(DTYPES), st.booleans())
def test_slots_against_a_loop(values: list[int], dtype: torch.dtype, twice: bool) -> None:
    """Few and many slots go different ways; both name the first bad one, in a row or in a batch."""
    slots = torch.tensor([values, values] if twice else values, dtype=dtype)
    bad = [i for i, value in enumerate(values) if value >= 10]
    if not bad:
        assert slots_in_range("op", slots, 10) is all(value >= 0 for value in values)
        return
    place = [0, bad[0]] if twice else [bad[0]]
    with pytest.raises(kvdock.IndexRangeError) as caught:
        slots_in_range("op", slots, 10)
    assert caught.value.subject == f"op: slot_mapping{place}"
    assert caught.value.got == values[bad[0]]


def test_the_text_about_a_slot() -> None:
    with pytest.raises(kvdock.IndexRangeError) as caught:
        slots_in_range("paged_caching_", torch.tensor([[3, 16], [-1, 99]]), 16)
    assert str(caught.value) == (
        "paged_caching_: slot_mapping[0, 1]: expected a slot below 16 (num_blocks * block_size), or a negative one for padding, got 16. "
        "Fix: build slots as block_id * block_size + offset with block ids of this pool and its own block_size"
    )
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize(
    ("slots", "finding"),
    [
        ([], None),
        ([1, 2, 3], None),
        ([-1, -1, -7, -7], None),
        ([5, 5], "1 slots occur more than once, first 5: which token wins is unspecified"),
        ([9, 2, 9, 2, 2, -1], "2 slots occur more than once, first 2: which token wins is unspecified"),
    ],
    ids=str,
)
def test_equal_slots(slots: list[int], finding: str | None) -> None:
    index = torch.tensor(slots, dtype=torch.int64)
    assert equal_slots(index) == ([finding] if finding else [])
    assert check_slots("op", index, 10) == ([finding] if finding else [])


@PROPERTY
@given(st.lists(st.integers(-2, 12), max_size=6), st.integers(0, 12))
def test_lengths_against_a_loop(lengths: list[int], new: int) -> None:
    bad = [row for row, length in enumerate(lengths) if not 0 <= length <= 10 - new]
    if not bad:
        assert check_lengths("op", lengths, new, 10) == []
        return
    with pytest.raises(kvdock.IndexRangeError) as caught:
        check_lengths("op", lengths, new, 10)
    assert caught.value.subject == (f"op: cache_lengths[{bad[0]}]" if len(lengths) > 1 else "op: cache_lengths")
    assert caught.value.got == lengths[bad[0]]


@PROPERTY
@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=6), st.sampled_from(DTYPES))
def test_pairs_against_a_loop(pairs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Out of range comes first; then pairs whose order would matter, padding left out."""
    live = [pair for pair in pairs if min(pair) >= 0]
    beyond = any(max(pair) >= 6 for pair in live)
    sources, targets = [src for src, _ in live], [dst for _, dst in live]
    dependent = len(set(targets)) < len(targets) or bool(set(sources) & set(targets))
    index = torch.tensor(pairs, dtype=dtype).view(-1, 2)
    if beyond or dependent:
        error = kvdock.IndexRangeError if beyond else kvdock.ArgumentValueError
        with pytest.raises(error, match=r"^op: block_pairs\[\d"):
            check_pairs("op", index, 6)
    else:
        assert check_pairs("op", index, 6) == []


def test_the_text_about_a_pair() -> None:
    with pytest.raises(kvdock.IndexRangeError) as caught:
        check_pairs("copy_blocks_", torch.tensor([[0, 1], [-1, 9], [2, 9]]), 6)
    assert str(caught.value) == (
        "copy_blocks_: block_pairs[2, 1]: expected a block id below 6, or a negative one for padding, got 9. "
        "Fix: pass (src, dst) block ids of this pool, not slots"
    )


def test_the_findings_may_be_one() -> None:
    """One slot, or several: the count is that of slots, not of tokens."""
    assert equal_slots(torch.tensor([4, 4, 4, 4])) == ["1 slots occur more than once, first 4: which token wins is unspecified"]


@pytest.mark.parametrize("pinned", [False, True])
def test_pairs_may_change_once_they_are_on_their_way(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """A copy from pinned memory does not wait; so what is copied from there must be nobody else's."""
    pairs, sources = torch.tensor([[0, 1], [2, 3]]), list[torch.Tensor]()
    real = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sources.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned and self is pairs)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert pairs_on_device("op", pairs, 6, torch.device("meta")).shape == (2, 2)
    pairs.zero_()
    assert sources[0].tolist() == ([[0, 1], [2, 3]] if pinned else [[0, 0], [0, 0]])
    with pytest.raises(kvdock.IndexRangeError, match=r"op: block_pairs\[0, 1\]: expected a block id below 1"):
        pairs_on_device("op", torch.tensor([[0, 1]]), 1, torch.device("meta"))
    assert len(sources) == 1, "nothing is copied that was refused"


def test_pairs_that_cannot_be_copied_say_how_to_pass_them() -> None:
    """As while a graph is captured. Here it is a device that this torch was built without."""
    with pytest.raises(RuntimeError) as caught:
        pairs_on_device("copy_blocks_", torch.tensor([[0, 1]]), 6, torch.device("mps"))
    assert caught.value.__notes__ == [
        "copy_blocks_: block_pairs lie in host memory. Fix: to capture this call into a graph, pass them on mps"
    ]


def test_pairs_for_the_host_are_checked_and_not_copied() -> None:
    pairs = torch.tensor([[0, 1]])
    assert pairs_on_device("op", pairs, 6, torch.device("cpu")) is pairs
    with pytest.raises(kvdock.IndexRangeError, match="expected a block id below 1"):
        pairs_on_device("op", pairs, 1, torch.device("cpu"))


def test_where_no_length_would_do_none_is_named() -> None:
    with pytest.raises(kvdock.IndexRangeError, match=r"^op: cache_lengths: expected none: 3 new positions must fit into 1, got 0\. Fix: "):
        check_lengths("op", [0], 3, 1)
