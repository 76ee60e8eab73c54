"""Calls of ``swap_blocks_`` as cases."""

from __future__ import annotations

from typing import Any

import attrs

from kvdock.ops.catalog import SWAP_BLOCKS
from kvdock_conformance.cases.copies import Copy
from kvdock_conformance.cases.drawing import Drawing, View
from kvdock_conformance.cases.latents import drawn
from kvdock_conformance.cases.layouts import POOLS, READ_POOLS, Pair

__all__ = ["DRAWN", "Swap"]

DRAWN = drawn(SWAP_BLOCKS, lambda sizes, _: {"block_pairs": _distinct(sizes["NBs"], sizes["NBd"], sizes["N"])})


def _distinct(sources: int, blocks: int, count: int) -> list[int]:
    """Return pairs with a destination each, as far as there are blocks, and padding behind them."""
    return [block for at in range(count) for block in ((at % sources, at) if at < blocks else (-1, 0))]


@attrs.frozen
class Swap(Copy):
    """A call from the pool that the keys of a geometry would be in to the one of its values, each in an arena of its own, or in one.

    Args:
        blocks: blocks of the destination; None for as many as the source has.
        sides: which of ``"src"`` and ``"dst"`` lie in host memory, whatever the device.
        are_parts: whether they are parts of one tensor.
    """

    blocks: int | None = None
    sides: tuple[str, ...] = ()
    are_parts: bool = False
    op: str = "swap_blocks_"

    def pools(self, drawing: Drawing) -> Pair:
        """Return its pools."""
        if self.are_parts:
            return POOLS[self.pool](drawing, self.geometry)
        sizes = attrs.evolve(self.geometry, num_blocks=self.geometry.num_blocks if self.blocks is None else self.blocks)
        first, _, second = self.pool.partition(" / ")
        source = drawing.take(READ_POOLS[first](aside := Drawing(), self.geometry)[0], aside)
        to = drawing.take(POOLS[second or first](aside := Drawing(), sizes)[1], aside)
        for side, view in (("src", source), ("dst", to)):
            drawing.arenas[view.arena] |= {"host": True} if side in self.sides else {}
        return (source if self.values is None else attrs.evolve(source, values=self.values)), to

    def args(self, drawing: Drawing, pools: Pair) -> dict[str, View]:
        """Return the arguments of the call on pools that are there already."""
        made: dict[str, Any] = super().args(drawing, pools)
        return {"src_cache": pools[0], "dst_cache": pools[1], "block_pairs": made["block_pairs"]}
