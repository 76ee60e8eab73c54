"""What a layer group lets go, in blocks."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvdock.layers.retention import Retention
from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.rows import Index

__all__ = ["Passing"]


@attrs.frozen(eq=False)
class Passing:
    """A group whose blocks are let go: where its columns are, how many tokens each block has, and the rule."""

    start: int
    width: int
    block_size: int
    retention: Retention

    @property
    def leading(self) -> int:
        """First blocks that are never let go."""
        return -(-self.retention.leading // self.block_size)

    def needed(self, first: int, stop: int) -> Index:
        """Return which of the first ``stop`` blocks of a sequence are needed where all from ``first`` on are."""
        first = min(first, stop)
        return np.concatenate((np.arange(min(self.leading, first)), np.arange(first, stop)))

    def places_of(self, units: BlockIds, blocks: Index, columns: int) -> Index:
        """Return the places of blocks of sequences, each of the unit that has it, in a table of so many columns."""
        found: Index = units.astype(np.intp) * columns + (self.start + blocks % self.width)
        return found

    def first(self, num_tokens: Any) -> Index:
        """Return the first block that is kept behind so many tokens, each."""
        return self.retention.first_kept(num_tokens) // self.block_size
