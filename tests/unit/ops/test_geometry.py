"""Arithmetic on shapes and strides, against counting every address."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvdock.ops.geometry import MAX_ALIGNMENT, alignment_of, extent, has_internal_overlap, normalised, ranges_overlap
from opskit import PROPERTY
from opskit.memory import strides_of

SHAPES = st.lists(st.integers(0, 3), max_size=4)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Return the address of every element, one by one."""
    places = itertools.product(*map(range, tensor.shape))
    size = tensor.element_size()
    return [tensor.data_ptr() + size * sum(i * s for i, s in zip(place, tensor.stride(), strict=True)) for place in places]


def strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype = torch.int16, at: int = 0) -> torch.Tensor:
    return torch.zeros(500, dtype=dtype).as_strided(tuple(shape), tuple(strides), at)


@PROPERTY
@given(SHAPES, st.data())
def test_extent_reaches_from_the_first_byte_to_the_last(shape: list[int], data: st.DataObject) -> None:
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    tensor = strided(shape, strides, torch.float32)
    places = addresses(tensor)
    assert extent(tensor) == (max(places) + 4 - min(places) if places else 0)
    if places:
        assert min(places) == tensor.data_ptr()


@PROPERTY
@given(SHAPES, st.data())
def test_what_is_said_not_to_overlap_does_not(shape: list[int], data: st.DataObject) -> None:
    """The other way round is not promised: a layout that is interleaved in an odd way may be taken for one that overlaps."""
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    tensor = strided(shape, strides)
    places = addresses(tensor)
    if not has_internal_overlap(tensor):
        assert len(set(places)) == len(places)


@PROPERTY
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_dims_in_any_order_with_any_gaps_do_not_overlap(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
    assert not has_internal_overlap(strided(shape, strides_of(shape, order, gaps)))


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 2), (0, 1), True),
        ((3, 2), (1, 1), True),
        ((2, 3), (2, 1), True),
        ((1, 2), (0, 1), False),
        ((3, 1), (1, 0), False),
        ((0, 2), (0, 0), False),
        ((2, 3), (3, 1), False),
        ((), (), False),
    ],
)
def test_internal_overlap(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert has_internal_overlap(strided(shape, strides)) is overlaps


@PROPERTY
@given(st.tuples(st.integers(0, 20), st.integers(0, 4)), st.tuples(st.integers(0, 20), st.integers(0, 4)), st.integers(1, 3))
def test_ranges_overlap_when_they_share_a_byte(one: tuple[int, int], other: tuple[int, int], step: int) -> None:
    storage = torch.zeros(64, dtype=torch.int16)
    a, b = (storage.as_strided((count,), (step,), at) for at, count in (one, other))
    spans = [set(range(min(p), max(p) + 2)) if (p := addresses(t)) else set() for t in (a, b)]
    assert ranges_overlap(a, b) is bool(spans[0] & spans[1])
    assert ranges_overlap(a, b) is ranges_overlap(b, a)


def test_tensors_without_memory_overlap_nothing() -> None:
    meta = torch.zeros(4, device="meta")
    assert not ranges_overlap(meta, meta)
    assert not ranges_overlap(torch.zeros(0), torch.zeros(0))


@PROPERTY
@given(st.lists(st.integers(0, 2**40), max_size=4))
def test_alignment_is_the_largest_power_of_two_that_divides_all(numbers: list[int]) -> None:
    expected = max(power for power in (1, 2, 4, 8, MAX_ALIGNMENT) if all(number % power == 0 for number in numbers))
    assert alignment_of(numbers) == expected


def test_strides_of_size_1_dims_are_normalised() -> None:
    assert normalised((2, 1, 3, 1), (9, 7, 1, 5)) == (9, 0, 1, 0)
    assert normalised((), ()) == ()
