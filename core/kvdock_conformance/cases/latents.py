"""Calls of `mla_caching_` and `mla_gather` as cases: those of any op that goes by slots, on rows of two parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from kvdock.ops.catalog import MLA_CACHING, MLA_GATHER
from kvdock.plugin import QUANTISED_DTYPES, OpSchema
from kvdock_conformance.cases.attention import Drawn
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.cases.layouts import READ_POOLS, SOURCES, Geometry, Pair
from kvdock_conformance.cases.paged import SlotCall
from kvdock_conformance.requirement import Case, Level

__all__ = ["DRAWN", "LatentCall", "drawn", "far"]

_BEYOND_31 = 2**31 + 64
"""A step in elements that 32 bits cannot say."""


@attrs.frozen
class LatentCall(SlotCall):
    """A call whose latents have as many elements as the keys of its geometry have in all heads, and rotary parts as the values."""

    @property
    def dims(self) -> tuple[int, int]:
        """Elements of a latent, and of its rotary part."""
        return self.geometry.hk * self.geometry.dk, self.geometry.hv * self.geometry.dv

    def pools(self, drawing: Drawing) -> Pair:
        """Return its pool, twice. What the builders of two pools make beside it is left."""
        wide = attrs.evolve(self.geometry, hk=1, dk=sum(self.dims), hv=1, dv=sum(self.dims))
        pool = drawing.take(READ_POOLS[self.pool](aside := Drawing(), wide)[0], aside)
        pool = attrs.evolve(pool, values=self.values) if self._reads and self.values is not None else pool
        return pool, pool

    def args(self, drawing: Drawing, pools: Pair) -> dict[str, View]:
        """Return the arguments of the call on a pool that is there already."""
        sizes = attrs.evolve(self.geometry, hk=1, dk=self.dims[0], hv=1, dv=self.dims[1])
        rows = [view.select(len(self.leading), 0) for view in SOURCES[self.rows](drawing, sizes, self.leading)]
        if self._reads:
            return {"kv_cache": pools[0], "slot_mapping": self._slots(drawing), **dict(zip(("kv_c_out", "k_pe_out"), rows, strict=True))}
        kv_c, k_pe = self._holding((rows[0], rows[1]))
        return {"kv_cache": pools[0], "kv_c": kv_c, "k_pe": k_pe, "slot_mapping": self._slots(drawing)}


def far(op: str) -> Iterator[Case]:
    """Yield calls of two tokens, of which the latents, the rotary parts or the blocks are so many elements apart."""
    for name in ("kv_cache", *(("kv_c_out", "k_pe_out") if "gather" in op else ("kv_c", "k_pe"))):
        drawing, one = Drawing(), LatentCall(op, "", [7, 2], geometry=Geometry(num_blocks=2))
        args = one.args(drawing, one.pools(drawing))
        shape = args[name].shape
        gaps = (0, _BEYOND_31 - math.prod(shape[1:]), *[0] * (len(shape) - 2))
        apart = drawing.tensor(args[name].dtype, shape, gaps=gaps, fill="zeros")
        if (name == "kv_cache") == ("gather" in op):  # all that is read but this is zero
            apart = attrs.evolve(apart, values={"first": 1, "step": 1})
        yield Case(f"{name} in steps of {_BEYOND_31} elements", drawing.case(call(op, **{**args, name: apart})), Level.EXTENDED)


def _values(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Any]:
    """Return distinct slots for some sizes, and padding."""
    slots, count = range(sizes["NB"] * sizes["block"]), sizes["..."]
    some = choose.sample(slots, min(count, len(slots)))
    return {"slot_mapping": choose.sample([*some, *[-1] * count], count) if count > 2 else [*some, -1, -1][:count]}


def drawn(schema: OpSchema, values: Callable[[Mapping[str, int], random.Random], dict[str, Any]]) -> Drawn:
    """Return an op without quantised caches, with what draws the values of its indices."""
    args = tuple(attrs.evolve(arg, dtypes=tuple(d for d in arg.dtypes if d not in QUANTISED_DTYPES)) for arg in schema.args)
    return Drawn(attrs.evolve(schema, args=args), values)


DRAWN: Mapping[str, Drawn] = {schema.name: drawn(schema, _values) for schema in (MLA_CACHING, MLA_GATHER)}
"""Both ops, as what their schemas make cases of."""
