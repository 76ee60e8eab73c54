"""Calls of ``gather_paged`` as cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry, Pair
from kvdock_conformance.cases.paged import shuffled, slots_view
from kvdock_conformance.requirement import Case, Level

__all__ = ["READ_POOLS", "Gather"]

_SMALL = Geometry()


def _expanded(*dims: int, room: int = 0) -> Callable[[Drawing, Geometry], Pair]:
    """Return a builder of pools that are one in memory along some dims, with ``room`` more blocks' memory behind them."""

    def pool(drawing: Drawing, shape: tuple[int, ...], dtype: str) -> View:
        own = [1 if dim in dims else size for dim, size in enumerate(shape)]
        more = drawing.tensor(dtype, (own[0] + room, *own[1:]))
        return more.slice(0, 0, own[0]).expand(shape)

    def build(drawing: Drawing, g: Geometry) -> Pair:
        return pool(drawing, g.k_shape, g.dtype), pool(drawing, g.v_shape, g.dtype)

    return build


def _keys_expanded(drawing: Drawing, g: Geometry) -> Pair:
    return _expanded(1)(drawing, g)[0], POOLS["nhd"](drawing, g)[1]


READ_POOLS: Mapping[str, Callable[[Drawing, Geometry], Pair]] = MappingProxyType(
    {
        **POOLS,
        "one block for all": _expanded(0),
        "one slot for all": _expanded(1),
        "one head for all": _expanded(2),
        "one block of one slot": _expanded(0, 1),
        "one row": _expanded(0, 1, 2),
        "one slot for all, memory behind": _expanded(1, room=3),
        "one block for all, memory behind": _expanded(0, room=3),
        "keys expanded": _keys_expanded,
    }
)
"""Builders of pools that are only read: those that are written, and those in which places share memory."""


@attrs.frozen
class Gather:
    """A call of ``gather_paged``, with something that is special about it.

    Its outputs are always part of the case. A check of calls without ``out=`` leaves them out, and takes from them what must
    come back: shape, dtype and device.

    Args:
        name: what is special.
        slots: the slots, see `kvdock_conformance.cases.drawing.Values`; None for all distinct in random order.
        lead: their shape: ``(T,)`` or ``(B, S)``; None for as many in a row as are listed, or 13.
        geometry: sizes of the pool.
        pool: name of one of `READ_POOLS`.
        out: name of one of `SOURCES` in which no place shares memory with another.
        index: torch's name of the slots' dtype.
        index_gap: free elements behind each slot in memory.
        index_order: how slots lie in memory, see `slots_view`.
        values: what the pools hold, see `Values`; None for random bits.
        seed: of the random bytes.
        level: at which level it runs.
    """

    name: str
    slots: Values | None = None
    lead: tuple[int, ...] | None = None
    geometry: Geometry = _SMALL
    pool: str = "nhd"
    out: str = "contiguous"
    index: str = "int64"
    index_gap: int = 0
    index_order: str = "rows"
    values: Values | None = None
    seed: int = 0
    level: Level = Level.CORE

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the slots."""
        if self.lead is not None:
            return self.lead
        return (13,) if self.slots is None or isinstance(self.slots, Mapping) else (len(self.slots),)

    def pools(self, drawing: Drawing) -> Pair:
        """Return its pools."""
        k_cache, v_cache = READ_POOLS[self.pool](drawing, self.geometry)
        if self.values is None:
            return k_cache, v_cache
        return attrs.evolve(k_cache, values=self.values), attrs.evolve(v_cache, values=self.values)

    def args(self, drawing: Drawing, pools: Pair) -> dict[str, View]:
        """Return the arguments of the call that reads pools which are there already."""
        lead, values = self.leading, shuffled(self.geometry.capacity) if self.slots is None else self.slots
        slots = slots_view(drawing, self.index, lead, values, gap=self.index_gap, order=self.index_order)
        k_out, v_out = SOURCES[self.out](drawing, self.geometry, lead)
        return {"k_cache": pools[0], "v_cache": pools[1], "slot_mapping": slots, "k_out": k_out, "v_out": v_out}

    def call(self, drawing: Drawing, pools: Pair) -> dict[str, Any]:
        """Return the call that reads pools which are there already."""
        return call("gather_paged", **self.args(drawing, pools))

    def case(self) -> Case:
        """Return it as a case."""
        drawing = Drawing(self.seed)
        return Case(self.name, drawing.case(self.call(drawing, self.pools(drawing))), self.level)
