"""Proving that every block of a pool has exactly one kind of owner."""

from __future__ import annotations

import numpy as np

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.ids import TokenIds
from kvdock.scheduler.pins import Pins
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Owner, Rows

__all__ = ["check_partition"]


def check_partition(pool: PoolBlocks, rows: Rows, ids: TokenIds, pins: Pins) -> None:
    """Compare the holders that the allocator counts with who holds what, and the locks and promises with those of sequences.

    The prefix cache holds each of its blocks once, and so does each sequence its own.

    Raises:
        IntegrityError: they differ.
    """
    allocator, prefix, sequences = pool.allocator, pool.prefix, rows.open()
    allocator.check_integrity()
    prefix.check_integrity()
    holders, cached = np.zeros(allocator.num_blocks, dtype=np.int64), prefix.stored_blocks()
    pool.check_integrity(pins.held())
    if pool.tiers is not None:
        pool.tiers.check_integrity(cached)
    num_pins = len(pins)
    if pool.reserved is not None:
        holders[pool.reserved] += 1
    for seq in sequences:
        np.add.at(holders, rows.blocks(seq._row)[rows.shared[seq._row] :], 1)
        _check_sequence(seq, rows, ids, cached)
    both = cached[holders[cached] > 0]
    holders[cached] += 1
    wrong = np.flatnonzero(holders != allocator.ref_counts(np.arange(allocator.num_blocks)))
    if both.size or wrong.size:
        got = f"blocks {both[:8].tolist()} in both, {wrong[:8].tolist()} counted otherwise"
        raise IntegrityError(
            "CacheManager",
            expected="each block free, cached or held by sequences, and counted so",
            got=got,
            fix="report it with the calls before",
        )
    facts = {
        f"{len(sequences) + num_pins} locks, one for each open sequence and pin": prefix.num_locks == len(sequences) + num_pins,
        "the sum of what rows were promised": pool.promised == int(rows.promised.sum()),
        "as many blocks to be had as are promised": pool.available >= 0,
        "a count of prompts begun in chunks": rows.num_chunked == int((rows.prompt_len > 0).sum()),
        "0 behind the blocks of each row": not rows.table[np.arange(rows.table.shape[1]) >= rows.num_blocks[:, None]].any(),
        "nothing promised to rows of nobody": not rows.promised[[seq is None for seq in rows.sequences]].any(),
    }
    _demand("CacheManager", facts, f"{prefix.num_locks} locks, {pool.promised} promised, {pool.available} available")


def _check_sequence(seq: Owner, rows: Rows, ids: TokenIds, cached: BlockIds) -> None:
    """Compare a sequence with itself, and its shared blocks with those that are cached."""
    row, handle, size = seq._row, seq._handle, rows.block_size
    shared, known = int(rows.shared[row]), int(rows.num_known[row])
    facts = {
        "a row of its own": rows.sequences[row] is seq,
        "blocks for its tokens": rows.num_blocks[row] == rows.blocks_for(rows.num_tokens[row]),
        "shared blocks that are cached": bool(np.isin(rows.blocks(row, 0, shared), cached).all()),
        "a lock on all it shares": shared <= rows.locked[row],
        "its lock where its handle is": handle is not None and rows.locked[row] * size == handle.cached_len,
        "no more computed than there is": rows.computed[row] <= min(rows.num_tokens[row], known),
        "the ids of its whole blocks": ids.check(row),
        "no promise below none": rows.promised[row] >= 0,
    }
    _demand(repr(seq), facts, "something else")


def _demand(subject: str, facts: dict[str, bool], got: str) -> None:
    wrong = ", ".join(name for name, holds in facts.items() if not holds)
    if wrong:
        raise IntegrityError(subject, expected=wrong, got=got, fix="report it with the calls before")
