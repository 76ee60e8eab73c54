"""Arrays that grow: what they take for their elements, whatever the elements' width."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvdock import CacheManager
from kvdock.scheduler.ids import Growing


@pytest.mark.parametrize("first", [np.arange(300, dtype=np.int64), np.arange(300, dtype=np.int32), np.array([2**40])])
def test_ids_of_a_sequence_take_no_more_than_twice_their_room_whatever_their_width(first: npt.NDArray[np.int64]) -> None:
    """A prompt of int64 is followed by generated tokens of int32: room for these is not made again with each part of them."""
    manager = CacheManager(200)
    seq = manager.begin(first)
    manager.commit(seq, [], computed=first.size)
    for size in range(first.size + 1, first.size + 2001):
        manager.extend(seq, 1)
        manager.commit(seq, [7], computed=size)
    assert manager._ids._long[0]._room.size <= 2 * (first.size + 2000)


def test_an_array_keeps_its_elements_where_it_gets_wider_and_where_narrow_ones_come() -> None:
    growing = Growing(np.array([1, 2], dtype=np.int32))
    growing.append(np.array([2**40]))
    growing.append(np.array([3], dtype=np.int32))
    assert growing.view.tolist() == [1, 2, 2**40, 3]
    assert growing.view.dtype == np.int64
