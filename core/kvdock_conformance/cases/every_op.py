"""Calls of any op as cases: for what holds of all of them alike, such as plans and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from kvdock_conformance.cases.computing import COMPUTING, Like
from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry, Pair
from kvdock_conformance.cases.paged import shuffled
from kvdock_conformance.checking.memory import expanded

__all__ = ["EVERY", "INDEX", "OPS", "Arguments", "OpCall", "few", "roomy", "ways"]

Arguments = dict[str, View | int]
"""Arguments of a call by name, in the schema's order."""

_GEOMETRY = Geometry(num_blocks=16, block=16)


@attrs.frozen
class OpCall:
    """A good call of an op.

    Args:
        op: name of the op, one of `EVERY`.
        tokens: how many tokens, new positions of each row, or pairs of blocks: at most half of the blocks.
        pool: name of one of `POOLS`; seen with heads and positions swapped in static caches.
        source: name of one of `SOURCES`, for the rows that are read, or that a gather writes.
        geometry: sizes of the pool, or for an op that computes sizes like them.
        seed: of slots, lengths and pairs.
        index: torch's name of the dtype of slots, lengths and pairs.
        is_padded: whether every third slot or pair is padding; lengths, which have none, are an int for all rows then.
        is_run: whether slots follow one another.
        lead: leading sizes of the tokens; None for ``(tokens,)``.
        more: what else an op that computes is told.
    """

    op: str
    tokens: int = 5
    pool: str = "nhd"
    source: str = "contiguous"
    geometry: Geometry = _GEOMETRY
    seed: int = 1
    index: str = "int64"
    is_padded: bool = False
    is_run: bool = False
    lead: tuple[int, ...] | None = None
    more: Mapping[str, Any] = MappingProxyType({})

    def caches(self, drawing: Drawing) -> Pair:
        """Return new caches."""
        k_cache, v_cache = POOLS[self.pool](drawing, self.sizes)
        return (k_cache.transpose(1, 2), v_cache.transpose(1, 2)) if self.op == "static_update_" else (k_cache, v_cache)

    def arguments(self, drawing: Drawing, caches: Pair | None = None) -> Arguments:
        """Return the arguments, with new caches unless some are given."""
        k_cache, v_cache = self.caches(drawing) if caches is None else caches
        if self.op in COMPUTING:
            like = Like(math.prod(self.leading), self.source, self.sizes, self.seed, self.index, self.is_padded, self.more)
            others = COMPUTING[self.op].arguments(like, drawing, (k_cache, v_cache))
            return {"k_cache": k_cache, "v_cache": v_cache, **{name: value for name, value in others.items() if value is not None}}
        return {"k_cache": k_cache, "v_cache": v_cache, **_OTHERS[self.op](self, drawing)}

    def call(self, drawing: Drawing, caches: Pair | None = None) -> dict[str, Any]:
        """Return the call as data."""
        return call(self.op, **self.arguments(drawing, caches))

    def beyond(self, drawing: Drawing, caches: Pair | None = None) -> dict[str, Any]:
        """Return the call as data, but with all its indices out of range."""
        args: Any = self.arguments(drawing, caches)
        return call(self.op, **(args | {INDEX[self.op]: attrs.evolve(args[INDEX[self.op]], values=[2**20])}))

    @property
    def sizes(self) -> Geometry:
        """Sizes of the pool that the op can have."""
        return COMPUTING[self.op].fits(self.geometry) if self.op in COMPUTING else self.geometry

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading sizes of the tokens."""
        return (self.tokens,) if self.lead is None else self.lead


def few(op: str, tokens: int) -> int:
    """Return as many tokens, or for an op that computes, to which each is a context, a sixteenth of them."""
    return 1 + tokens // 16 if op in COMPUTING else tokens


def roomy(op: str, tokens: int) -> Geometry:
    """Return sizes of pools with room for a call of an op: pairs are of half of the blocks, and a row of a static cache has a block."""
    if op == "copy_blocks_":
        return Geometry(num_blocks=2 * max(tokens, 8), block=2)
    return Geometry(num_blocks=2, block=max(tokens, 16)) if op == "static_update_" else Geometry(num_blocks=tokens // 16 + 16, block=16)


def ways(op: str) -> Sequence[Mapping[str, Any]]:
    """Return what calls of an op are told that go all ways through it, for `OpCall.more`; plain ones nothing."""
    return ({}, *(COMPUTING[op].ways if op in COMPUTING else ()))


def _write(this: OpCall, drawing: Drawing) -> Arguments:
    k, v = SOURCES[this.source](drawing, this.geometry, this.leading)
    return {"k": k, "v": v, "slot_mapping": _slots(this, drawing)}


def _read(this: OpCall, drawing: Drawing) -> Arguments:
    slots = _slots(this, drawing)
    k_out, v_out = SOURCES[this.source](drawing, this.geometry, this.leading)
    return {"slot_mapping": slots, "k_out": k_out, "v_out": v_out}


def _slots(this: OpCall, drawing: Drawing) -> View:
    values: Values = range(this.seed, this.seed + math.prod(this.leading)) if this.is_run else shuffled(this.geometry.capacity, this.seed)
    if this.is_padded:
        values = [-1 if at % 3 == 1 else slot for at, slot in enumerate(expanded(values, math.prod(this.leading)).tolist())]
    return drawing.tensor(this.index, this.leading, values=values)


def _update(this: OpCall, drawing: Drawing) -> Arguments:
    rows, room = this.geometry.num_blocks, this.geometry.block - this.tokens + 1
    k, v = SOURCES[this.source](drawing, this.geometry, (rows, this.tokens))
    taken = [(row * 7 + this.seed) % room for row in range(rows)]
    lengths = taken[0] if this.is_padded else drawing.tensor(this.index, (rows,), values=taken)
    return {"k": k.transpose(1, 2), "v": v.transpose(1, 2), "cache_lengths": lengths}


def _copy(this: OpCall, drawing: Drawing) -> Arguments:
    turn = this.seed % 2  # even blocks to odd ones, or the other way round
    pairs = [-1 if this.is_padded and i % 3 == 1 else 2 * i + (turn ^ side) for i in range(this.tokens) for side in (0, 1)]
    return {"block_pairs": drawing.tensor(this.index, (this.tokens, 2), values=pairs)}


_OTHERS: Mapping[str, Callable[[OpCall, Drawing], Arguments]] = MappingProxyType(
    {"paged_caching_": _write, "static_update_": _update, "gather_paged": _read, "copy_blocks_": _copy}
)

OPS = tuple(_OTHERS)
"""The ops of `kvdock.ops` that move bytes."""

EVERY = (*OPS, *COMPUTING)
"""All ops of `kvdock.ops`. One that computes is asked besides what any op is asked: see `kvdock_conformance.requirements.ops`."""

INDEX: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("paged_caching_", "gather_paged"), "slot_mapping"),
        "static_update_": "cache_lengths",
        "copy_blocks_": "block_pairs",
        **{op: own.indices[0] for op, own in COMPUTING.items()},
    }
)
"""By op: the argument that says which places, and that an error for one out of range names."""
