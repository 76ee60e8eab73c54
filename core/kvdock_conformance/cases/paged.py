"""Calls of the paged ops as cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.requirement import Case, Level

__all__ = ["Write", "shuffled"]


_SMALL = Geometry()


def shuffled(capacity: int, seed: int = 1) -> Values:
    """Return distinct slots of a pool in an order that looks random: as many as are asked for."""
    return {"shuffled": capacity, "seed": seed}


@attrs.frozen
class Write:
    """A call of ``paged_caching_``, with something that is special about it.

    Args:
        name: what is special.
        slots: the slots, see `kvdock_conformance.cases.drawing.Values`; None for all distinct in random order.
        lead: leading sizes of the tokens: ``(T,)`` or ``(B, S)``; None for as many tokens in a row as slots are listed, or 13.
        geometry: sizes of the pool.
        pool: name of one of `POOLS`.
        source: name of one of `SOURCES`.
        index: torch's name of the slots' dtype.
        index_gap: free elements behind each slot in memory.
        values: what k and v hold, see `Values`; None for random bits.
        seed: of the random bytes.
        level: at which level it runs.
    """

    name: str
    slots: Values | None = None
    lead: tuple[int, ...] | None = None
    geometry: Geometry = _SMALL
    pool: str = "nhd"
    source: str = "contiguous"
    index: str = "int64"
    index_gap: int = 0
    values: Values | None = None
    seed: int = 0
    level: Level = Level.CORE

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading sizes of the tokens."""
        if self.lead is not None:
            return self.lead
        return (13,) if self.slots is None or isinstance(self.slots, Mapping) else (len(self.slots),)

    def call(self, drawing: Drawing, pools: tuple[View, View]) -> dict[str, Any]:
        """Return the call into pools that are there already."""
        k, v = SOURCES[self.source](drawing, self.geometry, self.leading)
        if self.values is not None:
            k, v = attrs.evolve(k, values=self.values), attrs.evolve(v, values=self.values)
        slots = _slots(drawing, self)
        return call("paged_caching_", k_cache=pools[0], v_cache=pools[1], k=k, v=v, slot_mapping=slots)

    def case(self) -> Case:
        """Return it as a case."""
        drawing = Drawing(self.seed)
        pools = POOLS[self.pool](drawing, self.geometry)
        return Case(self.name, drawing.case(self.call(drawing, pools)), self.level)


def _slots(drawing: Drawing, write: Write) -> View:
    """Return the slot mapping of a call."""
    values: Values = shuffled(write.geometry.capacity) if write.slots is None else write.slots
    return drawing.tensor(write.index, (*write.leading, write.index_gap + 1), values=values).select(len(write.leading), 0)
