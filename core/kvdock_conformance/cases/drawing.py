"""Tensors described as data: which memory they lie in, with which shape, strides and offset.

A `Drawing` lists arenas: stretches of memory full of random bytes, with a margin on both sides. A `View` is a tensor in one
of them. `kvdock_conformance.checking.memory` makes both real, from what `Drawing.case` returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

__all__ = ["ITEMSIZE", "Drawing", "Values", "View", "call", "each_elsewhere", "strides_of"]

Values = Sequence[int] | Mapping[str, int]
"""Bits of the elements in order, as signed integers: a list that is repeated as often as needed, or a recipe of
`kvdock_conformance.checking.memory.expanded`: ``{"first": 0, "step": 1}``, ``{"shuffled": 96, "seed": 1}``."""

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "bfloat16": 2,
        "bool": 1,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of an element, by torch's name of the dtype."""


@attrs.frozen
class View:
    """A tensor in an arena.

    Args:
        arena: number of the arena.
        dtype: torch's name of the dtype.
        shape: sizes.
        strides: strides in elements.
        offset: bytes from the arena's first byte behind its margin to the first element.
        values: what the elements hold; None leaves the arena's random bytes.
    """

    arena: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    values: Values | None = None

    def _with(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> View:
        """Return another view of the same memory that starts ``elements`` further on."""
        offset = self.offset + elements * ITEMSIZE[self.dtype]
        return View(self.arena, self.dtype, tuple(shape), tuple(strides), offset, self.values)

    def select(self, dim: int, index: int) -> View:
        """Return ``self[..., index, ...]`` at a dim."""
        shape, strides = list(self.shape), list(self.strides)
        step = strides.pop(dim)
        shape.pop(dim)
        return self._with(shape, strides, index * step)

    def slice(self, dim: int, start: int, stop: int, step: int = 1) -> View:
        """Return ``self[..., start:stop:step, ...]`` at a dim."""
        shape, strides = list(self.shape), list(self.strides)
        elements = start * strides[dim]
        shape[dim], strides[dim] = len(range(start, stop, step)), strides[dim] * step
        return self._with(shape, strides, elements)

    def transpose(self, a: int, b: int) -> View:
        """Return the view with two dims swapped."""
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        return self._with(shape, strides)

    def split(self, dim: int, sizes: Sequence[int]) -> View:
        """Return the view with one dim seen as several, whose sizes multiply to its own."""
        inner = [math.prod(sizes[i + 1 :]) * self.strides[dim] for i in range(len(sizes))]
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        return self._with(shape, (*self.strides[:dim], *inner, *self.strides[dim + 1 :]))

    def expand(self, shape: Sequence[int]) -> View:
        """Return the view with sizes of 1 repeated."""
        strides = [0 if own == 1 != size else step for own, size, step in zip(self.shape, shape, self.strides, strict=True)]
        return self._with(shape, strides)

    def shaped(self, shape: Sequence[int]) -> View:
        """Return a dense view with another shape of as many elements."""
        return self._with(shape, strides_of(shape, range(len(shape)), [0] * len(shape)))

    def spec(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        spec = {
            "arena": self.arena,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "offset": self.offset,
        }
        if self.values is not None:
            spec["values"] = dict(self.values) if isinstance(self.values, Mapping) else list(self.values)
        return spec


def strides_of(shape: Sequence[int], order: Sequence[int], gaps: Sequence[int]) -> tuple[int, ...]:
    """Return strides for dims laid out from ``order[0]``, outermost, to ``order[-1]``, with free elements behind each dim."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim] + gaps[dim]
    return tuple(strides)


class Drawing:
    """The arenas of one case.

    Args:
        seed: of the random bytes.
    """

    def __init__(self, seed: int = 0) -> None:
        self.arenas: list[dict[str, Any]] = []
        self._seed = seed

    def tensor(
        self,
        dtype: str,
        shape: Sequence[int],
        *,
        order: Sequence[int] | None = None,
        gaps: Sequence[int] | None = None,
        offset: int = 0,
        shift: int = 0,
        values: Values | None = None,
        fill: str = "random",
        host: bool = False,
    ) -> View:
        """Return a tensor in an arena of its own.

        Args:
            dtype: torch's name of its dtype.
            shape: its sizes.
            order: its dims from the outermost to the innermost in memory.
            gaps: free elements behind each dim.
            offset: bytes between a 64-byte boundary and its first element, besides ``shift``.
            shift: bytes between a 64-byte boundary and the start of its storage (in host memory only).
            values: what it holds, see `Values`; by default random bits.
            fill: ``"random"`` bytes; ``"numbers"``, finite ones of the dtype; or ``"zeros"``: memory that takes up no room until it
                is written.
            host: whether it lies in host memory, whatever the target's device.
        """
        strides = strides_of(shape, order or range(len(shape)), gaps or [0] * len(shape))
        elements = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
        arena: dict[str, Any] = {"bytes": elements * ITEMSIZE[dtype] + offset, "seed": self._seed + len(self.arenas)}
        if shift:
            arena["shift"] = shift
        if fill != "random":
            arena["fill"] = fill
        if fill == "numbers":
            arena["dtype"] = dtype
        if host:
            arena["host"] = True
        self.arenas.append(arena)
        return View(len(self.arenas) - 1, dtype, tuple(shape), strides, offset, values)

    def take(self, view: View, other: Drawing) -> View:
        """Return a view of another drawing, whose arena becomes one of this."""
        self.arenas.append({**other.arenas[view.arena], "seed": self._seed + len(self.arenas)})
        return attrs.evolve(view, arena=len(self.arenas) - 1)

    def case(self, *calls: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Return the data of a case: these calls one after the other, on this memory; ``more`` is for its check."""
        return {"arenas": self.arenas, "calls": list(calls), **more}


def call(op: str, **args: View | int | None) -> dict[str, Any]:
    """Return one call of an op as data: its arguments in the schema's order, by name. Those that are absent are left out."""
    present = {name: value for name, value in args.items() if value is not None}
    return {"op": op, "args": {name: value.spec() if isinstance(value, View) else value for name, value in present.items()}}


def each_elsewhere(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments: the first ones until they are known, then with each tensor of floats in turn from the others, the first in between.

    What holds no floats goes by each other, such as lengths and sums, and comes from the others together.
    """
    alone = [[name] for name, value in first.items() if isinstance(value, View) and "float" in value.dtype]
    together = [name for name in first if [name] not in alone]
    yield from (dict(first) for _ in range(3))
    for names in (*alone, together):
        yield {**first, **{name: other[name] for name in names}}
        yield dict(first)
    yield dict(other)
