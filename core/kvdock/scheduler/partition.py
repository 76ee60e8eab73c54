"""Proving that every block of a pool has exactly one kind of owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import PrefixCache
from kvdock.scheduler.block_allocator import BlockAllocator
from kvdock.scheduler.sequence import CacheSequence

__all__ = ["check_partition"]


def check_partition(allocator: BlockAllocator, prefix: PrefixCache, sequences: Sequence[CacheSequence]) -> None:
    """Compare the holders that the allocator counts with who holds what.

    The prefix cache holds each of its blocks once, and so does each sequence its own.

    Raises:
        IntegrityError: they differ.
    """
    allocator.check_integrity()
    prefix.check_integrity()
    holders = np.zeros(allocator.num_blocks, dtype=np.int64)
    cached = prefix.stored_blocks()
    for seq in sequences:
        np.add.at(holders, seq._blocks.view[seq._shared :], 1)
        _check_sequence(seq, cached)
    both = cached[holders[cached] > 0]
    holders[cached] += 1
    wrong = np.flatnonzero(holders != allocator.ref_counts(np.arange(allocator.num_blocks)))
    if both.size or wrong.size:
        got = f"blocks {both[:8].tolist()} in both, {wrong[:8].tolist()} counted otherwise"
        raise IntegrityError("CacheManager", expected="each block free, cached or held by sequences, and counted so", got=got)
    if prefix.num_locks != len(sequences):
        raise IntegrityError("CacheManager", expected=f"{len(sequences)} locks, one for each open sequence", got=prefix.num_locks)


def _check_sequence(seq: CacheSequence, cached: npt.NDArray[np.int64]) -> None:
    """Compare a sequence with itself, and its shared blocks with those that are cached."""
    shared, handle = seq._blocks.view[: seq._shared], seq._handle
    facts = {
        "blocks for its tokens": seq._blocks.size == -(-seq.num_tokens // seq.block_size),
        "shared blocks that are cached": bool(np.isin(shared, cached).all()),
        "a lock on all it shares": handle is not None and handle.cached_len >= seq._shared * seq.block_size,
        "no more computed than there is": seq.computed <= min(seq.num_tokens, seq._ids.size),
    }
    if not all(facts.values()):
        raise IntegrityError(repr(seq), expected=", ".join(name for name, holds in facts.items() if not holds), got="something else")
