"""Calls of ``copy_blocks_`` as cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, Geometry, Pair
from kvdock_conformance.requirement import Case, Level

__all__ = ["PRODUCTS", "Copy", "every_other", "fanned", "last_of_many"]

_SMALL = Geometry()


def fanned(num_blocks: int, count: int) -> list[tuple[int, int]]:
    """Return so many pairs in no order, from one half of a pool to the other, each destination once: of an odd number, the first half."""
    half = num_blocks // 2
    if count % 2 and count <= half:  # so that block 0, which padding may be taken for, is written
        return [(half + (7 * i + 3) % (num_blocks - half), i) for i in range(count)]
    return [((7 * i + 3) % half, half + i % (num_blocks - half)) for i in range(count)]


def last_of_many(count: int) -> tuple[int, Sequence[Sequence[tuple[int, int]]]]:
    """Return a number of blocks, and pairs of which the last has a source, or a destination, that is beyond so many."""
    blocks, good = 2 * count, [(at, count + at) for at in range(count - 1)]
    return blocks, ([*good, (blocks, blocks - 1)], [*good, (count - 1, blocks)])


PRODUCTS = ((257, 256, 1), (1100, 1, 60), (3, 22_000, 1), (3, 1, 22_000), (2, 190, 190), (1, 65_537, 1), (1, 1, 65_537))
"""Pairs, slots of a block, and heads, of which there are more together than a launch grid has rows."""


def every_other(count: int) -> list[tuple[int, int]]:
    """Return so many pairs from one half of twice as many blocks to the other, and padding behind each."""
    return [each for block in range(count) for each in ((block, count + block), (-1, -1))]


@attrs.frozen
class Copy:
    """A call of ``copy_blocks_``, or of another op with the same arguments, with something that is special about it.

    Args:
        name: what is special.
        pairs: the pairs (src, dst).
        neighbours: in place of ``pairs``: block 0 to 1, 2 to 3 and so on, so many pairs; 0 for ``pairs``.
        geometry: sizes of the key pool, and of the value pool unless that has its own.
        values_geometry: sizes of the value pool: of as many blocks, with a block size of its own.
        pool: name of one of `POOLS`.
        index: torch's name of the pairs' dtype.
        pair_gap: free elements behind each pair in memory.
        host: whether the pairs lie in host memory, whatever the device.
        values: what the pools hold, see `Values`; None for random bits.
        seed: of the random bytes.
        level: at which level it runs.
        op: name of the op.
    """

    name: str
    pairs: Sequence[tuple[int, int]] = ((0, 5), (3, 2))
    neighbours: int = 0
    geometry: Geometry = _SMALL
    values_geometry: Geometry | None = None
    pool: str = "nhd"
    index: str = "int64"
    pair_gap: int = 0
    host: bool = False
    values: Values | None = None
    seed: int = 0
    level: Level = Level.CORE
    op: str = "copy_blocks_"

    def pools(self, drawing: Drawing) -> Pair:
        """Return its pools."""
        k_cache, v_cache = POOLS[self.pool](drawing, self.geometry)
        if self.values_geometry is not None:
            v_cache = POOLS[self.pool](drawing, self.values_geometry)[1]
        if self.values is None:
            return k_cache, v_cache
        return attrs.evolve(k_cache, values=self.values), attrs.evolve(v_cache, values=self.values)

    def args(self, drawing: Drawing, pools: Pair) -> dict[str, View]:
        """Return the arguments of the call on pools that are there already."""
        values: Values = {"first": 0, "step": 1} if self.neighbours else [*itertools.chain.from_iterable(self.pairs)] or [0]
        count = self.neighbours or len(self.pairs)
        pairs = drawing.tensor(self.index, (count, 2), gaps=(0, self.pair_gap), values=values, host=self.host)
        return {"k_cache": pools[0], "v_cache": pools[1], "block_pairs": pairs}

    def call(self, drawing: Drawing, pools: Pair) -> dict[str, Any]:
        """Return the call on pools that are there already."""
        return call(self.op, **self.args(drawing, pools))

    def case(self, **more: Any) -> Case:
        """Return it as a case; ``more`` is for its check."""
        drawing = Drawing(self.seed)
        return Case(self.name, drawing.case(self.call(drawing, self.pools(drawing)), **more), self.level)
