"""Calls of the paged ops as cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.requirement import Case, Level

__all__ = ["Write", "shuffled", "slots_view"]


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
        index_order: how slots lie in memory, see `slots_view`.
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
    index_order: str = "rows"
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
        values: Values = shuffled(self.geometry.capacity) if self.slots is None else self.slots
        slots = slots_view(drawing, self.index, self.leading, values, gap=self.index_gap, order=self.index_order)
        return call("paged_caching_", k_cache=pools[0], v_cache=pools[1], k=k, v=v, slot_mapping=slots)

    def case(self) -> Case:
        """Return it as a case."""
        drawing = Drawing(self.seed)
        pools = POOLS[self.pool](drawing, self.geometry)
        return Case(self.name, drawing.case(self.call(drawing, pools)), self.level)


def slots_view(drawing: Drawing, dtype: str, lead: tuple[int, ...], values: Values, *, gap: int = 0, order: str = "rows") -> View:
    """Return a slot mapping.

    Args:
        drawing: where it is drawn.
        dtype: torch's name of its dtype.
        lead: its shape.
        values: the slots; one of them where there is one for all.
        gap: free elements behind each slot in memory, in rows.
        order: ``"rows"``, one after the other; ``"columns"``, as of a transposed batch; ``"longer rows"``, cut out of rows with
            others before and behind; ``"one"`` for all.
    """
    if order == "columns":
        return drawing.tensor(dtype, lead[::-1], values=values).transpose(0, 1)
    if order == "longer rows":
        longer = drawing.tensor(dtype, (*lead[:-1], lead[-1] + 3)).slice(len(lead) - 1, 1, 1 + lead[-1])
        return attrs.evolve(longer, values=values)
    if order == "one":
        return attrs.evolve(drawing.tensor(dtype, (1,) * len(lead)).expand(lead), values=values)
    return drawing.tensor(dtype, (*lead, gap + 1), values=values).select(len(lead), 0)
