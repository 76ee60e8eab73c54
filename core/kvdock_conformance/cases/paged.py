"""Calls of the ops that go by slots as cases: one class describes writes into a pool and reads from it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import READ_POOLS, SOURCES, Geometry, Pair
from kvdock_conformance.requirement import Case, Level

__all__ = ["FORETOLD", "Gather", "SlotCall", "Write", "foretold", "in_turn", "shuffled", "slots_view"]

_SMALL = Geometry()


def shuffled(capacity: int, seed: int = 1) -> Values:
    """Return distinct slots of a pool in an order that looks random: as many as are asked for."""
    return {"shuffled": capacity, "seed": seed}


@attrs.frozen
class SlotCall:
    """A call of an op that goes by slots, with something that is special about it.

    The outputs of a read are always part of the case. A check of calls without ``out=`` leaves them out, and takes from them
    what must come back: shape, dtype and device.

    Args:
        op: name of the op: one that gathers reads, any other writes.
        name: what is special.
        slots: the slots, see `kvdock_conformance.cases.drawing.Values`; None for all distinct in random order.
        lead: leading sizes of the tokens: ``(T,)`` or ``(B, S)``; None for as many tokens in a row as slots are listed, or 13.
        geometry: sizes of the pool.
        pool: name of one of `READ_POOLS`: one in which no place shares memory with another, if it is written.
        rows: name of one of `SOURCES`, for the tokens: likewise.
        index: torch's name of the slots' dtype.
        index_gap: free elements behind each slot in memory.
        index_order: how slots lie in memory, see `slots_view`.
        values: what is read holds, see `Values`; None for random bits.
        seed: of the random bytes.
        level: at which level it runs.
    """

    op: str
    name: str
    slots: Values | None = None
    lead: tuple[int, ...] | None = None
    geometry: Geometry = _SMALL
    pool: str = "nhd"
    rows: str = "contiguous"
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

    @property
    def _reads(self) -> bool:
        return "gather" in self.op

    def pools(self, drawing: Drawing) -> Pair:
        """Return its pools."""
        pools = READ_POOLS[self.pool](drawing, self.geometry)
        return self._holding(pools) if self._reads else pools

    def args(self, drawing: Drawing, pools: Pair) -> dict[str, View]:
        """Return the arguments of the call on pools that are there already."""
        caches = {"k_cache": pools[0], "v_cache": pools[1]}
        if self._reads:
            slots, (k_out, v_out) = self._slots(drawing), self._tokens(drawing)
            return {**caches, "slot_mapping": slots, "k_out": k_out, "v_out": v_out}
        k, v = self._holding(self._tokens(drawing))
        return {**caches, "k": k, "v": v, "slot_mapping": self._slots(drawing)}

    def _tokens(self, drawing: Drawing) -> Pair:
        return SOURCES[self.rows](drawing, self.geometry, self.leading)

    def _holding(self, pair: Pair) -> Pair:
        """Return what is read, with its values."""
        k, v = pair
        return (k, v) if self.values is None else (attrs.evolve(k, values=self.values), attrs.evolve(v, values=self.values))

    def _slots(self, drawing: Drawing) -> View:
        values: Values = shuffled(self.geometry.capacity) if self.slots is None else self.slots
        return slots_view(drawing, self.index, self.leading, values, gap=self.index_gap, order=self.index_order)

    def call(self, drawing: Drawing, pools: Pair) -> dict[str, Any]:
        """Return the call on pools that are there already."""
        return call(self.op, **self.args(drawing, pools))

    def case(self) -> Case:
        """Return it as a case."""
        drawing = Drawing(self.seed)
        return Case(self.name, drawing.case(self.call(drawing, self.pools(drawing))), self.level)


Write = functools.partial(SlotCall, "paged_caching_")
Gather = functools.partial(SlotCall, "gather_paged")


def in_turn(name: str, calls: Sequence[Any], *, own_pools: bool = False) -> Case:
    """Return calls one after the other as one case, on the pools of the first or each on its own."""
    drawing = Drawing()
    shared = None if own_pools else calls[0].pools(drawing)
    return Case(name, drawing.case(*[one.call(drawing, one.pools(drawing) if shared is None else shared) for one in calls]))


FORETOLD = (0, 1, 2, 3, 1, 2, 3, 4, 0)
"""Places that follow one another as if the next could be foretold, and then do not: as when tokens that were guessed are taken back."""


def foretold(calls: Sequence[Any], index: str) -> Case:
    """Return calls one after the other on one set of pools, whose places are written anew into one tensor each time."""
    made = in_turn("places in one tensor that seem to go on", calls)
    first = made.data["calls"][0]["args"][index]
    for each in made.data["calls"]:
        each["args"][index] = {**first, "values": each["args"][index]["values"]}
    return made


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
