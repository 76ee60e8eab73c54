"""Arithmetic on shapes and strides, against counting every address."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import kvdock
from kvdock.ops.geometry import MAX_ALIGNMENT, alignment_of, extent, has_internal_overlap, normalised, ranges_overlap, share_memory
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


STRIDED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=4)


def bytes_of(tensor: torch.Tensor) -> set[int]:
    return {address + byte for address in addresses(tensor) for byte in range(tensor.element_size())}


@PROPERTY
@given(STRIDED, STRIDED, st.integers(0, 30), st.sampled_from([torch.int8, torch.int16, torch.int64]))
def test_two_tensors_share_memory_when_they_share_a_byte(one: Any, other: Any, at: int, dtype: torch.dtype) -> None:
    memory = torch.zeros(1000, dtype=torch.uint8)
    a = memory.view(torch.int16).as_strided([size for size, _ in one], [stride for _, stride in one], 20)
    b = memory.view(dtype).as_strided([size for size, _ in other], [stride for _, stride in other], at)
    assert share_memory(a, b) is share_memory(b, a) is bool(bytes_of(a) & bytes_of(b))


INTERLEAVED = {
    "K and V of a block": lambda x: (x[:, 0], x[:, 1]),
    "halves of the rows": lambda x: (x[..., :5], x[..., 5:]),
    "heads in turn": lambda x: (x[:, 0, :, ::2], x[:, 0, :, 1::2]),
    "slots in turn": lambda x: (x[:, 1, ::2], x[:, 1, 1::2]),
}


@pytest.mark.parametrize("halves", INTERLEAVED.values(), ids=INTERLEAVED)
@pytest.mark.parametrize("num_blocks", [3, 100_000])
def test_interleaved_pools_share_nothing(num_blocks: int, halves: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """However large they are: nothing is read, so the pool may be as large as it likes."""
    memory = np.empty((num_blocks, 2, 16, 6, 10), dtype=np.int16)  # pages that nobody touches take no memory
    k, v = halves(torch.from_numpy(memory).view(torch.bfloat16))
    assert ranges_overlap(k, v)
    assert not share_memory(k, v)
    assert share_memory(k, k[1:])
    assert share_memory(k[1:], k[:, :, :1])


def test_what_cannot_be_told_in_time_is_an_error() -> None:
    memory = torch.zeros(2_000_000, dtype=torch.int8)
    a = memory.as_strided((7, 16, 8, 128), (49157, 1027, 129, 1))
    b = memory.as_strided((7, 16, 8, 128), (49159, 1026, 131, 1), 65537)
    with pytest.raises(kvdock.ArgumentValueError, match=r"^two tensors in one address range: .* got strides \[49157, .* Fix: give each"):
        share_memory(a, b)


def test_tensors_without_memory_overlap_nothing() -> None:
    meta = torch.zeros(4, device="meta")
    assert not ranges_overlap(meta, meta)
    assert not ranges_overlap(torch.zeros(0), torch.zeros(0))
    assert not share_memory(meta, meta)


@PROPERTY
@given(st.lists(st.integers(0, 2**40), max_size=4))
def test_alignment_is_the_largest_power_of_two_that_divides_all(numbers: list[int]) -> None:
    expected = max(power for power in (1, 2, 4, 8, MAX_ALIGNMENT) if all(number % power == 0 for number in numbers))
    assert alignment_of(numbers) == expected


def test_strides_of_size_1_dims_are_normalised() -> None:
    assert normalised((2, 1, 3, 1), (9, 7, 1, 5)) == (9, 0, 1, 0)
    assert normalised((), ()) == ()
