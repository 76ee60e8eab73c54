"""Which bytes of one pool go where in another: heads, blocks and memory orders of both sides, cut into the longest runs.

::

    source, 8 heads on 1 rank, NHD, blocks of 4      target, heads 4-7 on rank 1 of 2, HND, blocks of 8
    token 0 | h0 h1 h2 h3 h4 h5 h6 h7 |              head 4 | t0 t1 t2 t3 t4 t5 t6 t7 |
    token 1 | h0 h1 h2 h3 h4 h5 h6 h7 |              head 5 | t0 t1 t2 t3 t4 t5 t6 t7 |

A part of a buffer is what both ranks have of the heads, of the tokens that are wanted. It is taken run by run: dimensions in which
both sides go on without a gap are one run, the others are counted out, and runs that touch on both sides are joined. Where several
ranks of a side hold the same heads, one of them sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import IndexRangeError
from kvdock.transfer.layout import GroupLayout, PlaceLayout, PoolLayout

__all__ = ["Spans", "Table", "Wanted", "sends", "spans"]

Ints = npt.NDArray[np.int64]

Table = Sequence[int] | npt.NDArray[np.integer]
"""Block ids of a sequence in one layer group, in its order."""

Wanted = Sequence[tuple[int, int]]
"""Tokens of a sequence, as pairs of the first and the one behind the last; of a group of states ``(0, 1)`` for the state."""

_EMPTY: Ints = np.empty(0, dtype=np.int64)


@attrs.frozen(eq=False)
class Spans:
    """Runs of bytes, int64 ``[N]`` each, in the order of the target's regions and bytes; no two touch on both sides.

    Args:
        source_region: number of the source's region.
        source: first byte in it.
        target_region: number of the target's region.
        target: first byte in it.
        nbytes: bytes of the run.
    """

    source_region: Ints
    source: Ints
    target_region: Ints
    target: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return self.nbytes.size

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())


def spans(
    source: PoolLayout, target: PoolLayout, source_tables: Sequence[Table], target_tables: Sequence[Table], wanted: Sequence[Wanted]
) -> Spans:
    """Return what a source's rank sends to a target's rank of a sequence.

    Which bytes of the target are written does not depend on where the source has them: the target finds them with tables of its own.

    Args:
        source: the pool that has the blocks.
        target: the pool that gets them; `check_compatible` has passed both.
        source_tables: of each layer group of the source the blocks of the sequence.
        target_tables: of each layer group of the target.
        wanted: of each layer group of the target, which tokens.

    Raises:
        IndexRangeError: a table is too short for what is wanted, or has a block that there is not; a table too few.
    """
    for what, layout, each in (
        ("source_tables", source, source_tables),
        ("target_tables", target, target_tables),
        ("wanted", target, wanted),
    ):
        if len(each) != len(layout.groups):
            expected, fix = f"{len(layout.groups)}, one for each group", "pass one for each of `groups` of the layout"
            raise IndexRangeError(f"spans: {what}", expected=expected, got=len(each), fix=fix)
    by_buffer = {(place.layer, place.name): place for place in source.places}
    both: list[list[Ints]] = [[np.asarray(table, dtype=np.int64) for table in side] for side in (source_tables, target_tables)]
    pieces: dict[tuple[int, int], _Pieces] = {}  # of a pair of groups: all layers share them
    found = []
    for place in target.places:
        of = by_buffer[place.layer, place.name]
        parts = _common(source, of, target, place)
        if parts is None:
            continue
        key = of.group, place.group
        if key not in pieces:
            first, second = _Side.of("source", source, of.group, both[0]), _Side.of("target", target, place.group, both[1])
            pieces[key] = _Pieces.of(first, second, wanted[place.group])
        found.append(_runs(of, place, parts, pieces[key]))
    return _joined(found)


def sends(source: PoolLayout, target: PoolLayout) -> bool:
    """Whether a source's rank has anything for a target's rank; of ranks that hold the same, one has."""
    by_buffer = {(place.layer, place.name): place for place in source.places}
    return any(_common(source, by_buffer[place.layer, place.name], target, place) for place in target.places)


def _common(source: PoolLayout, of: PlaceLayout, target: PoolLayout, to: PlaceLayout) -> tuple[int, int, int] | None:
    """Return where the common part of two places begins in each, and its length, in the dimension of heads; None if nothing is sent."""
    copies = of.copies(source.tp_size)
    mine = source.tp_rank % copies == target.tp_rank % copies  # of ranks that hold the same, the one whose turn it is
    if not mine:
        return None
    if of.split < 0:
        return 0, 0, 0
    begin, end = max(of.start, to.start), min(of.start + of.shape[of.split], to.start + to.shape[to.split])
    return (begin - of.start, begin - to.start, end - begin) if begin < end else None


@attrs.frozen(eq=False)
class _Side:
    """The blocks of a sequence in a layer group of one side, checked."""

    what: str
    group: GroupLayout
    table: Ints
    num_blocks: int

    @classmethod
    def of(cls, what: str, layout: PoolLayout, group: int, tables: Sequence[Ints]) -> _Side:
        return cls(f"spans: {what}_tables[{group}]", layout.groups[group], tables[group], layout.num_blocks)

    def check_room(self, tokens: int) -> None:
        """Refuse a table that is too short."""
        if tokens > self.table.size * self.group.block_size:
            expected = f"at least {-(-tokens // self.group.block_size)} blocks of {self.group.block_size} for {tokens} tokens"
            raise IndexRangeError(self.what, expected=expected, got=self.table.size, fix="make room for all tokens first")

    def blocks(self, places: Ints) -> Ints:
        """Return the blocks at some places of the table."""
        found = self.table[places]
        if found.size and not 0 <= int(found.min()) <= int(found.max()) < self.num_blocks:
            bad = found[(found < 0) | (found >= self.num_blocks)][0]
            fix = "pass the sequence's block table of that pool's manager"
            raise IndexRangeError(self.what, expected=f"blocks from 0 to {self.num_blocks - 1}", got=int(bad), fix=fix)
        return found


@attrs.frozen(eq=False)
class _Pieces:
    """Stretches of tokens that lie in one block on both sides: where, and how many tokens. Of a state there is one, of one token."""

    source_block: Ints
    source_place: Ints
    target_block: Ints
    target_place: Ints
    tokens: Ints

    @classmethod
    def of(cls, source: _Side, target: _Side, wanted: Wanted) -> _Pieces:
        for side in (source, target):
            side.check_room(max((stop for _, stop in wanted), default=0))  # before arrays as long as what is wanted are made
        sizes = source.group.block_size, target.group.block_size
        cuts = [np.unique(np.concatenate([[start, stop], *(_multiples(start, stop, size) for size in sizes)])) for start, stop in wanted]
        starts = np.concatenate([_EMPTY, *(cut[:-1] for cut in cuts)])
        stops = np.concatenate([_EMPTY, *(cut[1:] for cut in cuts)])
        blocks = [side.blocks(starts // side.group.block_size) for side in (source, target)]
        return cls(blocks[0], starts % sizes[0], blocks[1], starts % sizes[1], stops - starts)

    def one_by_one(self) -> _Pieces:
        """Return pieces of one token each."""
        which = np.repeat(np.arange(self.tokens.size), self.tokens)
        step = np.arange(which.size) - np.repeat(np.cumsum(self.tokens) - self.tokens, self.tokens)
        blocks = self.source_block[which], self.target_block[which]
        return _Pieces(blocks[0], self.source_place[which] + step, blocks[1], self.target_place[which] + step, np.ones_like(which))


def _multiples(start: int, stop: int, size: int) -> Ints:
    return np.arange(-(-start // size) * size, stop, size, dtype=np.int64)


def _runs(of: PlaceLayout, to: PlaceLayout, common: tuple[int, int, int], pieces: _Pieces) -> Spans:
    """Return the runs of one buffer."""
    is_state = len(of.strides) == len(of.shape)
    step = (0, 0) if is_state else (of.strides[0], to.strides[0])
    sizes, bases = list(of.shape), [of.offset, to.offset]
    first, second = (layout.strides if is_state else layout.strides[1:] for layout in (of, to))
    if of.split >= 0:
        sizes[of.split] = common[2]
        bases = [of.offset + common[0] * first[of.split], to.offset + common[1] * second[of.split]]
    run, dims = _innermost(sizes, first, second, of.itemsize)
    is_long = is_state or step == (run, run)  # whole stretches of tokens are one run each
    pieces = pieces if is_long else pieces.one_by_one()
    begins = [
        bases[0] + pieces.source_block * of.block_stride + pieces.source_place * step[0],
        bases[1] + pieces.target_block * to.block_stride + pieces.target_place * step[1],
    ]
    for size, *both in dims:
        begins = [(begin[:, None] + np.arange(size) * stride).ravel() for begin, stride in zip(begins, both, strict=True)]
    nbytes = np.repeat(pieces.tokens * run, begins[0].size // max(pieces.tokens.size, 1))
    return Spans(np.full_like(nbytes, of.region), begins[0], np.full_like(nbytes, to.region), begins[1], nbytes)


def _innermost(sizes: Sequence[int], first: Sequence[int], second: Sequence[int], itemsize: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the bytes of a run that both sides have without a gap, and the dimensions that are left: size and both strides."""
    run, left = itemsize, [dim for dim in zip(sizes, first, second, strict=True) if dim[0] > 1]
    while nxt := next((dim for dim in left if dim[1:] == (run, run)), None):
        run *= nxt[0]
        left.remove(nxt)
    return run, left


def _joined(found: Sequence[Spans]) -> Spans:
    """Return all runs in the target's order, those that touch on both sides as one."""
    columns = [np.concatenate([_EMPTY, *(getattr(each, field.name) for each in found)]) for field in attrs.fields(Spans)]
    order = np.lexsort((columns[3], columns[2]))
    source_region, source, target_region, target, nbytes = (column[order] for column in columns)
    touches = (source_region[1:] == source_region[:-1]) & (target_region[1:] == target_region[:-1])
    touches &= (source[1:] == source[:-1] + nbytes[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(nbytes.size, 1), bool), ~touches]))
    sums = np.add.reduceat(nbytes, first) if first.size else _EMPTY
    return Spans(source_region[first], source[first], target_region[first], target[first], sums)
