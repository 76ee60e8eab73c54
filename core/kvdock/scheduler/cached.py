"""What is cached, in blocks of the pool: what files need to know of a `CacheManager`, beside the life of its sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvdock.layers.groups import LayerGroup
from kvdock.prefix.inputs import as_integers
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.scheduler.batches import as_rows
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.publishing import NOTHING_MORE
from kvdock.scheduler.sequence import CacheSequence

__all__ = [
    "block_sizes",
    "cached_blocks",
    "check_open",
    "has_tables_of",
    "holds_needed",
    "is_partly_written",
    "note_only_needed",
    "note_partly_written",
    "num_blocks",
    "unused_size",
    "use_prefix",
]


def block_sizes(manager: CacheManager) -> tuple[int, ...]:
    """Return the tokens in a block of each layer group; 1 for a group of states."""
    return tuple(table.block_size for table in manager._pool.tables)


def has_tables_of(manager: CacheManager, groups: Sequence[LayerGroup]) -> bool:
    """Whether a manager has block tables as these layer groups need them: of as many tokens in a block, or of states."""
    return [(of.block_size, of.retention.is_state) for of in groups] == [(of.block_size, of.is_state) for of in manager._pool.tables]


def num_blocks(manager: CacheManager) -> int:
    """Return the blocks of the manager's pool."""
    return manager._pool.num_blocks


def cached_blocks(manager: CacheManager, tokens: npt.ArrayLike, namespace: Namespace = ()) -> tuple[int, tuple[BlockIds, ...]]:
    """Return behind how many cached tokens of a prefix every layer group can go on, at most, and the blocks of these by group.

    Counts as no use. A block that a group has let go is -1; one that it does not need any more may be there.

    Raises:
        ArgumentTypeError, ArgumentValueError: tokens that are no integers, a namespace that is no tuple.
    """
    manager._enter()
    match = manager._pool.match(as_integers("cached_blocks: tokens", tokens), namespace)
    return match.handle.cached_len, manager._pool.blocks_of(match.blocks)


def check_open(manager: CacheManager, subject: str, seq: CacheSequence) -> None:
    """Raise unless this is an open sequence of a manager.

    Raises:
        ArgumentTypeError, StaleHandleError: it is none, is over, or another manager's.
    """
    manager._enter()
    as_rows(manager._rows, subject, [seq])


def note_only_needed(manager: CacheManager, seq: CacheSequence, written: int) -> None:
    """Note that of the first ``written`` tokens of a sequence only what the next one reads is written: the rest is given back.

    `CacheManager.note_written` and `CacheManager.commit` would let it be found, in case a prompt goes on before the end.
    """
    manager._pool.written(np.array([manager._row(seq, "note_written")]), np.array([written]), spare=False)


def holds_needed(manager: CacheManager, seq: CacheSequence, num_tokens: int) -> bool:
    """Whether a sequence holds what the token behind its first ``num_tokens`` reads: of more tokens it may have let go of that."""
    return not manager.lets_go or num_tokens >= int(manager._rows.reach(manager._row(seq, "fork")))


def is_partly_written(manager: CacheManager, seq: CacheSequence) -> bool:
    """Whether of blocks of a sequence only a part is written, see `note_partly_written`."""
    return bool(manager._rows.least[manager._row(seq, "fork")])


def note_partly_written(manager: CacheManager, seq: CacheSequence, written: int) -> None:
    """Note that of blocks of a sequence only what the token behind the first ``written`` reads is written, and not what one before reads.

    Nobody finds more of it than what was shared before, and it cannot be cut to fewer tokens or forked with them.
    """
    row = manager._row(seq, "note_written")
    manager._rows.published[row], manager._rows.least[row] = NOTHING_MORE, written


def unused_size(manager: CacheManager) -> int:
    """Return how many tokens there is room for without evicting anything or breaking a promise."""
    manager._enter()
    return manager._pool.unused * manager.block_size


def use_prefix(manager: CacheManager, tokens: npt.ArrayLike, namespace: Namespace = ()) -> None:
    """Let a cached prefix be the one that was used last; it counts as no look-up."""
    manager._enter()
    found = manager.prefix.match_prefix(tokens, namespace, record=False)
    ids = as_integers("use_prefix: tokens", tokens)[: found.handle.cached_len]
    manager.prefix.insert_prefix(ids, found.blocks, namespace)
