"""Which masks are known: by the functions that Transformers asks for them with, and by what they hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import masking_utils as made

from kvdock.integrations.transformers.masks import ODD, Markers, Mask, left_pads, window_of
from kvdock.integrations.transformers.tables import sent

ONES = torch.ones(1, 4, dtype=torch.long)

FUNCTIONS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (made.causal_mask_function, None),
    "a window": (made.sliding_window_causal_mask_function(5), 5),
    "a window of one": (made.sliding_window_causal_mask_function(1), 1),
    "a window of nothing": (made.sliding_window_causal_mask_function(0), ODD),
    "a window alone": (made.sliding_window_overlay(5), ODD),
    "bidirectional": (made.bidirectional_mask_function, ODD),
    "chunks": (made.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)), ODD),
    "packed": (made.and_masks(made.causal_mask_function, made.packed_sequence_mask_function(ONES)), ODD),
    "a window, packed": (made.and_masks(made.sliding_window_causal_mask_function(5), made.packed_sequence_mask_function(ONES)), ODD),
    "a window and more": (made.and_masks(made.sliding_window_overlay(5), made.causal_mask_function, made.causal_mask_function), ODD),
    "the other way round": (made.and_masks(made.causal_mask_function, made.sliding_window_overlay(5)), ODD),
    "more than causal": (made.or_masks(made.causal_mask_function, made.packed_sequence_mask_function(ONES)), ODD),
    "padding": (made.padding_mask_function(ONES), ODD),
    "shifted": (made.add_offsets_to_mask_function(made.causal_mask_function, 1, 0), ODD),
    "somebody's own": (lambda batch, head, query, key: key <= query, ODD),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_told_by_their_code(name: str) -> None:
    function, window = FUNCTIONS[name]
    assert window_of(function) == window


@pytest.mark.parametrize(
    ("rows", "pads"),
    [
        ([[1, 1, 1], [1, 1, 1]], [0, 0]),
        ([[0, 1, 1], [0, 0, 1]], [1, 2]),
        ([[1, 0, 1], [1, 1, 1]], None),
        ([[1, 1, 0], [1, 1, 1]], None),
        ([[0, 1, 0], [1, 1, 1]], None),
        ([[0, 0, 0], [1, 1, 1]], None),
        ([[1, 1], [1, 1]], None),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], None),
        ([[1, 1, 1]], None),
    ],
)
def test_padding_is_counted_on_the_left_and_nowhere_else(rows: list[list[int]], pads: list[int] | None) -> None:
    found = left_pads(torch.tensor(rows).bool(), 2, 3)
    assert (None if found is None else found.tolist()) == pads


def test_no_mask_is_no_padding() -> None:
    found = left_pads(None, 2, 3)
    assert found is not None
    assert found.tolist() == [0, 0]


def hiding(*pads: int, length: int = 4) -> torch.Tensor:
    """A mask that hides so many tokens on the left of each row."""
    return torch.arange(length) >= torch.tensor(pads)[:, None]


def test_what_stands_for_a_mask_is_kept_as_long_as_it_is_the_same() -> None:
    markers = Markers(torch.device("cpu"))
    first = markers.for_mask(None, hiding(1, 2), 2, 4)
    assert first is not None
    assert first.tensor.dtype == torch.int32
    assert first.tensor.flatten().tolist() == first.pads.tolist() == [1, 2]
    assert first.tensor.shape == (2, 1, 1, 1)
    assert markers.for_mask(None, hiding(1, 2, length=5), 2, 5) is first
    other = markers.for_mask(8, hiding(1, 2), 2, 4)
    assert other is not None
    assert other.tensor.data_ptr() != first.tensor.data_ptr(), "masks are told by their address"
    assert markers.for_mask(None, hiding(1, 3), 2, 4) is not first


MASKS = st.tuples(st.integers(1, 2), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
)


@given(st.lists(st.one_of(st.none(), MASKS, st.just([[True] * 3] * 2), st.just([[False, True, True]] * 2)), max_size=6))
def test_what_stands_for_a_mask_does_not_depend_on_those_before(masks: list[list[list[bool]] | None]) -> None:
    markers = Markers(torch.device("cpu"))
    for rows in masks:
        mask = None if rows is None else torch.tensor(rows)
        expected = left_pads(mask, 2, 3)
        found = markers.for_mask(None, mask, 2, 3)
        assert (None if found is None else found.pads.tolist()) == (None if expected is None else expected.tolist())
        assert found is None or found.tensor.flatten().tolist() == found.pads.tolist()


@pytest.mark.parametrize(
    ("pads", "hidden", "starts"), [([0, 0], [0, 0], None), ([2, 1], [0, 0], [2, 1]), ([2, 1], [2, 1], None), ([4, 1], [1, 1], [3, 0])]
)
def test_padding_without_blocks_is_not_counted_twice(pads: list[int], hidden: list[int], starts: list[int] | None) -> None:
    mask = Mask(None, np.array(pads), {}, sent(np.array(pads, dtype=np.int32).reshape(2, 1, 1, 1), torch.device("cpu")))
    mask.settle(np.array(hidden))
    assert (None if mask.starts is None else mask.starts.tolist()) == starts
    assert (mask.window, mask.is_settled) == (None, True)


def test_places_without_keys_are_never_taken_for_seen() -> None:
    mask = Mask(None, np.array([0]), {}, torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    mask.settle(np.array([3]))
    assert mask.window == ODD
