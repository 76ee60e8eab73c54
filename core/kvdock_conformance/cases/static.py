"""Calls of ``static_update_`` as cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.requirement import Case, Level

__all__ = ["DENSE", "STATIC", "Update"]

STATIC = Geometry(num_blocks=3, block=16)
"""A small static cache: a paged one whose blocks are its rows, so ``num_blocks`` is B and ``block`` is S."""

DENSE = "hnd"
"""The pool of `POOLS` that is dense when it is seen as ``[B, H, S, D]``."""


@attrs.frozen
class Update:
    """A call of ``static_update_``, with something that is special about it.

    Args:
        name: what is special.
        lengths: positions already taken: an int as it is, else the values of the tensor, repeated as often as needed.
        shape: shape of the tensor of lengths: ``()``, ``(1,)`` or ``(b,)``; None for as many as are listed.
        rows: rows of k and v; None for all of the cache.
        new: new positions of each row.
        geometry: sizes of the cache, ``num_blocks`` its rows and ``block`` their positions.
        pool: name of one of `POOLS`, seen with heads and positions swapped: "hnd" is dense.
        source: name of one of `SOURCES`, seen likewise: "[B, H, q, D]" is dense.
        index: torch's name of the lengths' dtype.
        index_gap: free elements behind each length in memory.
        values: what k and v hold, see `Values`; None for random bits.
        level: at which level it runs.
    """

    name: str
    lengths: int | Sequence[int] = 3
    shape: tuple[int, ...] | None = None
    rows: int | None = None
    new: int = 5
    geometry: Geometry = STATIC
    pool: str = DENSE
    source: str = "[B, H, q, D]"
    index: str = "int64"
    index_gap: int = 0
    values: Values | None = None
    level: Level = Level.CORE

    def pools(self, drawing: Drawing) -> tuple[View, View]:
        """Return the caches, ``[B, H, S, D]``."""
        k_cache, v_cache = POOLS[self.pool](drawing, self.geometry)
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)

    def call(self, drawing: Drawing, caches: tuple[View, View]) -> dict[str, Any]:
        """Return the call into caches that are there already."""
        lead = (self.geometry.num_blocks if self.rows is None else self.rows, self.new)
        k, v = (attrs.evolve(x, values=self.values).transpose(1, 2) for x in SOURCES[self.source](drawing, self.geometry, lead))
        return call("static_update_", k_cache=caches[0], v_cache=caches[1], k=k, v=v, cache_lengths=self._lengths(drawing))

    def _lengths(self, drawing: Drawing) -> View | int:
        if isinstance(self.lengths, int):
            return self.lengths
        shape = (len(self.lengths),) if self.shape is None else self.shape
        return drawing.tensor(self.index, (*shape, self.index_gap + 1), values=self.lengths).select(len(shape), 0)

    def case(self) -> Case:
        """Return it as a case."""
        drawing = Drawing()
        return Case(self.name, drawing.case(self.call(drawing, self.pools(drawing))), self.level)
