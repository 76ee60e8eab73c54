"""Layer groups: layers with one rule of retention share a block table, and all groups share one pool of equally large blocks.

::

    block 7    | k v of layer 3 | k v of layer 7 | k v of layer 11 | ...      16 tokens, if the group of full attention has it
    the same   | k v of layer 0 | k v of layer 1 | ... | unused |             112 tokens, if that of windows has it
    the same   | state of layer 5 | unused |                                  one state

A block belongs to one group at a time. Since all are of one size, no pool needs to guess how many of each kind there will be. What
is chosen here is how many groups each rule's layers are spread over, and how many tokens a block of each holds, so that little of a
block is unused and there are few groups: each is another table to keep.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import attrs

from kvdock.errors import ArgumentValueError
from kvdock.layers.interface import Part
from kvdock.layers.retention import Retention

__all__ = ["GroupPlan", "LayerGroup", "plan_groups"]

_REGION = 16
"""Bytes that each buffer's place in a block is a multiple of: kernels move 16 bytes at a time where they can."""

_MOST_GROUPS = 64
"""Groups that the layers of one rule are spread over at most."""

_MOST_TOKENS = 512
"""Tokens of a block at most, unless the least are more: prefixes are shared in whole blocks of the group with the largest."""

_PER_GROUP = 0.01
"""What a group more may save of the bytes for it to be worth its table."""

_LENGTHS = (512, 4096, 32_768)
"""Tokens of the sequences that a plan is made for, all of the same weight, as far as a model goes."""

Member = tuple[int, int]
"""A layer, and which part of it."""


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@attrs.frozen
class LayerGroup:
    """Layers, or parts of layers, that have one block table.

    Args:
        members: (layer, part of it) pairs, in the order of the layers.
        parts: what each keeps.
        retention: the rule of all.
        block_size: tokens in a block; 1 where a block holds a state.
    """

    members: tuple[Member, ...]
    parts: tuple[Part, ...]
    retention: Retention
    block_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of a token, or of a state, in all members."""
        return sum(part.nbytes for part in self.parts)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens needs to go on."""
        return sum(map(len, self.retention.blocks(num_tokens, self.block_size)))

    def width(self, unit: int) -> int:
        """Return how many blocks a unit of so many tokens has: of a state one, the checkpoint behind it."""
        return 1 if self.retention.is_state else unit // self.block_size


@attrs.frozen
class GroupPlan:
    """How the layers of a model share a pool.

    Args:
        groups: the groups, those with the most tokens in memory first.
        block_bytes: bytes of a block, the same for all.
    """

    groups: tuple[LayerGroup, ...]
    block_bytes: int

    def nbytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that a sequence of so many tokens has, as `kvdock.CacheManager` hands them out.

        Up to the end of the largest block each group has all of its blocks.
        """
        end, tokens = _aligned(num_tokens, self.unit), [group for group in self.groups if not group.retention.is_state]
        ahead = sum(end // group.block_size - -(-num_tokens // group.block_size) for group in tokens)
        return self.block_bytes * (ahead + sum(group.num_blocks(num_tokens) for group in self.groups))

    @property
    def unit(self) -> int:
        """Tokens in which blocks of all groups end together; 1 where all keep states."""
        return math.lcm(*(group.block_size for group in self.groups))

    def waste(self, num_tokens: int) -> float:
        """Return which part of these bytes a sequence of so many tokens does not need: rest of blocks, and of the last block."""
        nbytes, needed = self.nbytes(num_tokens), sum(group.nbytes * group.retention.kept(num_tokens) for group in self.groups)
        return 1 - needed / nbytes if nbytes else 0.0


def plan_groups(layers: Sequence[Sequence[Part]], block_size: int, max_positions: int, alignment: int = 1) -> GroupPlan:
    """Choose groups for layers.

    With one rule there is one group, whose blocks have ``block_size`` tokens and nothing unused. With several, blocks have multiples
    of that, such that blocks of all groups end together every 512 tokens at least. Among all ways the cheapest is taken; it
    follows from the arguments alone, so that ranks agree.

    Args:
        layers: what each layer keeps; some may keep nothing.
        block_size: least tokens in a block.
        max_positions: longest sequence, in tokens.
        alignment: bytes that the size of a block is a multiple of.

    Raises:
        ArgumentValueError: no layer keeps anything; or blocks of one size would be more than half unused.
    """
    rules: dict[Retention, list[tuple[Member, Part]]] = {}
    for index, parts in enumerate(layers):
        for place, part in enumerate(parts):
            rules.setdefault(part.retention, []).append(((index, place), part))
    if not rules:
        raise ArgumentValueError("KVSpec: layers", expected="a layer that keeps something", got="none")
    if len(rules) == 1:
        ((rule, found),) = rules.items()
        group = _Chunk.of(rule, found).group(1 if rule.is_state else block_size)
        return GroupPlan((group,), _aligned(group.nbytes * group.block_size, alignment))
    lengths = [min(length, max_positions) for length in _LENGTHS]
    best = _planned(rules, block_size, lengths, alignment, doubled=False)
    if best.unit > _MOST_TOKENS:
        best = _planned(rules, block_size, lengths, alignment, doubled=True)
    if (waste := best.waste(lengths[-1])) > 0.5:
        per = ", ".join(f"{group.nbytes} bytes of {group.retention}" for group in best.groups)
        raise ArgumentValueError(
            "KVSpec: layers",
            expected="groups of layers whose bytes can agree, so that one size of block fits all",
            got=f"{waste:.0%} of {lengths[-1]} tokens' blocks unused at best: {per}",
            fix="keep these layers in caches of their own",
        )
    return best


def _planned(
    rules: Mapping[Retention, Sequence[tuple[Member, Part]]], block_size: int, lengths: Sequence[int], alignment: int, *, doubled: bool
) -> GroupPlan:
    """Return the cheapest of all ways; ``doubled``: of those in which tokens of blocks are the least times powers of two."""
    ways = [list(_ways(rule, found)) for rule, found in rules.items()]
    sizes = {_aligned(max(chunk.used(chunk.least(block_size)) for chunk in way), max(alignment, _REGION)) for of in ways for way in of}
    needed = [sum(_Chunk.of(rule, found).nbytes * rule.kept(length) for rule, found in rules.items()) for length in lengths]

    def blocks_of(nbytes: int) -> Callable[[_Chunk], int]:
        return lambda chunk: chunk.tokens(nbytes, block_size, doubled=doubled)

    options = [option for nbytes in sorted(sizes) if (option := _cheapest(ways, nbytes, blocks_of(nbytes), lengths, needed)) is not None]
    _, nbytes, chosen = min(options, key=lambda option: option[:2])
    groups = [chunk.group(blocks_of(nbytes)(chunk)) for way in chosen for chunk in way]
    return GroupPlan(tuple(sorted(groups, key=lambda group: (-group.retention.kept(lengths[-1]), group.members))), nbytes)


@attrs.frozen(eq=False)
class _Chunk:
    """Layers that may become a group.

    Args:
        rule: of all.
        found: which they are.
        buffers: how many of their buffers have how many bytes.
        nbytes: of a token, or of a state.
    """

    rule: Retention
    found: Sequence[tuple[Member, Part]]
    buffers: tuple[tuple[int, int], ...]
    nbytes: int

    @classmethod
    def of(cls, rule: Retention, found: Sequence[tuple[Member, Part]]) -> _Chunk:
        buffers = Counter(buffer.nbytes for _, part in found for buffer in part.buffers)
        return cls(rule, found, tuple(sorted(buffers.items())), sum(size * count for size, count in buffers.items()))

    def used(self, tokens: int) -> int:
        """Return the bytes of a block of so many tokens that hold something, and what is before places of buffers."""
        return sum(_aligned(size * tokens, _REGION) * count for size, count in self.buffers)

    def least(self, block_size: int) -> int:
        return 1 if self.rule.is_state else block_size

    def tokens(self, nbytes: int, block_size: int, *, doubled: bool) -> int:
        """Return how many tokens a block of so many bytes has; 0 if not even the least. ``doubled``: that times a power of two."""
        step = self.least(block_size)
        if self.used(step) > nbytes or self.rule.is_state:
            return step if self.used(step) <= nbytes else 0
        tokens = min(nbytes // (self.nbytes * step) * step, max(_MOST_TOKENS // step, 1) * step)
        if self.used(tokens) > nbytes:  # places are rounded up, so that it may be one step less than the bytes alone would say
            tokens -= step
        return step << ((tokens // step).bit_length() - 1) if doubled else tokens

    def blocks(self, num_tokens: int, block_size: int) -> float:
        """Return how many blocks a sequence needs; what grows has half a block to come on average."""
        found = sum(map(len, self.rule.blocks(num_tokens, block_size)))
        return found if self.rule.is_state else found + 0.5

    def group(self, block_size: int) -> LayerGroup:
        return LayerGroup(tuple(member for member, _ in self.found), tuple(part for _, part in self.found), self.rule, block_size)


def _ways(rule: Retention, found: Sequence[tuple[Member, Part]]) -> Iterator[list[_Chunk]]:
    """Spread layers over 1, 2, ... groups of as equal numbers as can be."""
    count = len(found)
    for number in range(1, min(count, _MOST_GROUPS) + 1):
        bounds = [place * count // number for place in range(number + 1)]
        yield [_Chunk.of(rule, found[start:stop]) for start, stop in pairwise(bounds)]


def _cheapest(
    ways: Sequence[Sequence[list[_Chunk]]], nbytes: int, tokens_of: Callable[[_Chunk], int], lengths: Sequence[int], needed: Sequence[int]
) -> tuple[float, int, list[list[_Chunk]]] | None:
    """Choose a way for each rule, with blocks of so many bytes; return cost, bytes and ways, or None where one fits in no way."""
    total, chosen = 0.0, []
    for of in ways:
        costs = [(cost, place) for place, way in enumerate(of) if (cost := _cost(way, nbytes, tokens_of, lengths, needed)) is not None]
        if not costs:
            return None
        cost, place = min(costs)
        total += cost
        chosen.append(of[place])
    return total, nbytes, chosen


def _cost(
    way: Sequence[_Chunk], nbytes: int, tokens_of: Callable[[_Chunk], int], lengths: Sequence[int], needed: Sequence[int]
) -> float | None:
    """Return what a way's blocks take of what all layers need, on average, and what its tables are worth; None if it does not fit."""
    kinds = Counter((chunk.buffers, tokens) for chunk in way if (tokens := tokens_of(chunk)))
    if sum(kinds.values()) < len(way):
        return None
    blocks = [sum(way[0].blocks(length, tokens) * count for (_, tokens), count in kinds.items()) for length in lengths]
    return sum(nbytes * of / by for of, by in zip(blocks, needed, strict=True)) / len(lengths) + _PER_GROUP * len(way)
