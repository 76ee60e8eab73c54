"""Where blocks go that the pool must give up: the contract of a tier, and one of numbers only.

::

    pool  --store-->  tiers[0]  --store-->  tiers[1]  ...        what one must give up goes to the next; behind the last it is gone
    pool  <--load---  whichever has it                           a prompt that goes on with it gets it back

A manager decides what is where, by numbers; a tier moves the bytes. A block is copied whole, and stays where it was copied from
until somebody else needs that place: of a block that came back the tier still has the copy, so that it goes back for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from weakref import ReferenceType

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.prefix.inputs import MAX_SLOTS, count_of
from kvdock.prefix.interface import BlockIds

__all__ = ["BlockPairs", "NumberTier", "Tier", "checked_tiers", "distinct_tiers"]

BlockPairs = npt.NDArray[np.int64]
"""Blocks to copy, ``[N, 2]`` (source, destination)."""


class Tier(ABC):
    """Memory for blocks beside the pool: as large as the pool's, of all layer groups alike.

    It is one manager's. All calls come from the manager's thread, in the middle of a call of the manager, which it must not call.
    They come in the order in which copies must take effect: a block that was stored may be overwritten in the pool as soon as
    `store` returns, one that was loaded may be read as soon as `load` returns. On a device with streams that is the order of the
    stream that the caller works on; a copy on another stream waits for it first, and it for the copy.

    A tier that raises loses what it should have copied, and nothing else: the manager warns once, and what was to be found there is
    computed again. Of ranks that must decide alike, all must fail then, or none.
    """

    _manager: ReferenceType[object] | None = None  # whose it is, as long as that one is there

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks that it holds, at least one; always the same. The manager numbers them from 0."""

    @abstractmethod
    def store(self, pairs: BlockPairs, source: Tier | None) -> None:
        """Copy blocks into it.

        Args:
            pairs: (block of the source, block of this tier).
            source: the tier before it, or None for the pool.
        """

    @abstractmethod
    def load(self, pairs: BlockPairs) -> None:
        """Copy blocks into the pool: (block of this tier, block of the pool)."""

    def prefetch(self, blocks: BlockIds) -> None:  # noqa: B027 - a hint, which most tiers have no use for
        """Learn that blocks will be loaded soon, since a prompt was planned that goes on with them. A hint: a file may be read ahead."""


class NumberTier(Tier):
    """A tier without memory, for what is only counted: traces, tests, and what another process copies.

    Args:
        num_blocks: blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = count_of("NumberTier: num_blocks", num_blocks, 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_blocks={self._num_blocks})"

    @property
    def num_blocks(self) -> int:
        """Blocks that it would hold."""
        return self._num_blocks

    def store(self, pairs: BlockPairs, source: Tier | None) -> None:
        """Copy nothing."""

    def load(self, pairs: BlockPairs) -> None:
        """Copy nothing."""


def distinct_tiers(subject: str, tiers: object) -> tuple[Tier, ...]:
    """Return tiers, each once, or raise."""
    found = tuple(tiers) if isinstance(tiers, Sequence) else ()
    if (isinstance(tiers, str | bytes) or not isinstance(tiers, Sequence)) or not all(isinstance(tier, Tier) for tier in found):
        fix = "pass a list, such as [kvdock.HostTier(8 << 30).bind(cache)]"
        raise ArgumentTypeError(f"{subject}: tiers", expected="Tiers", got=repr(tiers)[:80], fix=fix)
    if len(set(map(id, found))) < len(found):
        raise ArgumentValueError(f"{subject}: tiers", expected="each tier once", got=repr(tiers)[:80], fix="make a tier for each place")
    return found


def checked_tiers(subject: str, tiers: object) -> tuple[Tier, ...]:
    """Return tiers, each once, nobody's and ready to be used, or raise."""
    found = distinct_tiers(subject, tiers)
    for tier in found:
        where = f"{subject}: tiers: num_blocks of {tier!r}"
        if (count := count_of(where, tier.num_blocks, 1)) > MAX_SLOTS:
            raise ArgumentValueError(where, expected=f"at most {MAX_SLOTS}", got=count, fix="make it smaller, or several tiers of it")
        if tier._manager is not None and tier._manager() is not None:  # each would write over what the other has there
            fix = "make a tier for each manager, or let go of the other manager first"
            raise ArgumentValueError(f"{subject}: tiers", expected="tiers that no other manager has", got=repr(tier)[:80], fix=fix)
    return found
