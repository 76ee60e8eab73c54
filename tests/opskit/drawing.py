"""Drawing the arguments of a call: tensors cut out of one arena, right ones and such with each thing wrong at times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import hypothesis.strategies as st
import torch

from opskit.memory import Memory, strides_of

__all__ = ["ROOM", "ROOMS", "Cut", "Drawer"]

F32 = torch.float32
ROOM, ROOMS = 4096, 12
"""Bytes of the part of an arena that a right tensor has to itself, and how many there are."""


@attrs.frozen
class Cut:
    """A tensor as numbers: where in the arena it starts, in bytes, and what it is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int

    def of(self, memory: Memory) -> torch.Tensor:
        size = self.dtype.itemsize
        return memory.arenas[0].cut(self.dtype, self.shape, self.strides, memory.arenas[0].at + self.at // size * size)


class Drawer:
    """Draws the arguments of one call: all of them right, or each thing wrong at times."""

    def __init__(self, draw: st.DrawFn, *, plain: bool = False) -> None:
        self.draw = draw
        self.spoilt = not plain and draw(st.booleans())
        self.aligned = plain or draw(st.booleans())  # all of it: else few calls would be fast ones
        self._rooms = iter(range(ROOMS))

    def mostly(self, usual: Any, *others: Any) -> Any:
        """Draw the usual value, or at times, in a call that may be wrong, another."""
        return self.draw(st.sampled_from([usual] * 12 + list(others))) if self.spoilt else usual

    def cut(self, dtype: torch.dtype, shape: Sequence[int], wrong_dtypes: Sequence[torch.dtype] = (torch.float16, F32)) -> Cut:
        """Draw a tensor in any memory order that keeps its rows dense, in a room of its own; wrong ones may share rooms."""
        draw, room = self.draw, next(self._rooms) * ROOM
        dtype = self.mostly(dtype, *wrong_dtypes)
        sizes = [self.mostly(size, size + 1, max(size - 1, 0)) for size in shape]
        sizes = self.mostly(sizes, sizes[1:], [1, *sizes], sizes[:-1])
        dims = range(len(sizes))
        order = [*draw(st.permutations(dims[:-1])), *dims[-1:]] if draw(st.booleans()) else list(dims)
        gaps = draw(st.sampled_from([[0] * len(dims), [*[3] * (len(dims) - 1), 0], [*[0] * (len(dims) - 1), 8]]))
        strides = list(strides_of(sizes, order, gaps))
        if sizes and self.mostly(False, True):
            strides[draw(st.sampled_from(dims))] = draw(st.sampled_from([0, 1, 2, 5]))
        at = self.mostly(room, room - room % (2 * ROOM), draw(st.integers(0, 8 * ROOM)))
        at += 0 if self.aligned else draw(st.sampled_from([0, 0, 8, 4, 2]))
        return Cut(dtype, tuple(sizes), tuple(strides), at)

    def distinct(self, count: int, below: int) -> list[int]:
        """Draw different numbers, some of them replaced by padding, and at times one by a number that is not below."""
        draw = self.draw
        numbers = (draw(st.permutations(range(below))) + [-1] * count)[:count]
        for place in draw(st.sets(st.integers(0, count - 1), max_size=2)) if count else ():
            numbers[place] = draw(st.sampled_from([-1, -1, -1, below]))
        return numbers
