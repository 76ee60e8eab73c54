"""How sequences begin: what is found of a prompt is locked, and room is made for the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import OutOfBlocksError
from kvdock.prefix.interface import Namespace, PrefixHandle
from kvdock.scheduler.fetching import Fetching
from kvdock.scheduler.ids import TokenIds
from kvdock.scheduler.planning import Fit, Needs, Planner, Prompt
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.promises import Promises
from kvdock.scheduler.publishing import Publisher
from kvdock.scheduler.rows import Rows
from kvdock.scheduler.sequence import CacheSequence

__all__ = ["Beginnings"]


class Beginnings:
    """Makes sequences.

    Args:
        pool: the blocks.
        rows: what is known of the sequences.
        ids: their token ids.
        promises: for tokens to come.
        publisher: publishes what comes back from tiers.
    """

    def __init__(self, pool: PoolBlocks, rows: Rows, ids: TokenIds, promises: Promises, publisher: Publisher) -> None:
        self._pool = pool
        self._rows = rows
        self._ids = ids
        self._promises = promises
        self._planner = Planner(pool)
        self._fetching = None if pool.tiers is None else Fetching(pool, publisher, self._planner, pool.tiers)
        self._serial = 0

    def plan(self, prompt: Prompt) -> Fit:
        """Say what `begin` would find and take, and whether it would succeed."""
        needs = self._planner.look_up(prompt, partial=False)
        if self._fetching is not None and (more := self._fetching.plan(prompt, needs)):
            return Fit(more.cached_len, more.blocks, fits=True)
        self._pool.prefix.lock_handle(needs.handle)
        fits = self._pool.has(needs.blocks, 1, needs.match.blocks)  # under a lock: what is found cannot be evicted to make room, too
        self._pool.prefix.lock_handle(needs.handle, unlock=True)
        return Fit(needs.cached_len, needs.blocks, fits)

    def ends(self, ids: npt.NDArray[Any], namespace: Namespace) -> npt.NDArray[np.bool_]:
        """Return behind how many cached tokens of a prompt a sequence could go on, ``[tokens]``."""
        size = self._rows.block_size
        match, found = self._pool.match(ids[: (ids.size - 1) // size * size], namespace), np.zeros(ids.size, dtype=np.bool_)
        found[: match.handle.cached_len + 1] = self._pool.ends(match.blocks, match.handle.cached_len)
        return found

    def begin(self, prompt: Prompt, priority: int, *, partial: bool) -> CacheSequence:
        """Start a sequence, or raise OutOfBlocksError."""
        needs = self._fetched(prompt, priority, partial=partial)
        try:
            return self._begin(prompt, needs, priority)
        except OutOfBlocksError:
            if needs.partial is None:
                raise
        # Locking the block to copy from takes it from what can be evicted; without it the prompt may fit.
        return self._begin(prompt, self._planner.look_up(prompt, partial=False), priority)

    def fetch(self, prompt: Prompt, priority: int = 0) -> int:
        """Bring what tiers have of a prompt, if it fits; return how many tokens of it are cached."""
        return self._fetched(prompt, priority, partial=False).cached_len

    def fetch_whole(self, ids: npt.NDArray[Any], namespace: Namespace) -> None:
        """Bring what tiers have of whole blocks, all of them."""
        if self._fetching is not None and ids.size:
            # With a token behind them, which is never looked up: of a prompt the last one is left to compute.
            self.fetch(Prompt.read("CacheManager.pin", np.append(ids, ids[:1]), namespace, reserve=0, at_most=0))

    def _fetched(self, prompt: Prompt, priority: int, *, partial: bool) -> Needs:
        """Return what a prompt finds and needs, with what comes back from tiers for it."""
        needs = self._planner.look_up(prompt, partial=partial)
        if self._fetching is not None and (match := self._fetching.bring(prompt, needs, priority)) is not None:
            return self._planner.look_up(prompt, partial=partial, match=match)
        return needs

    def _begin(self, prompt: Prompt, needs: Needs, priority: int) -> CacheSequence:
        """Lock, allocate, and note the sequence."""
        self._planner.check_size(needs)
        ids, rows, pool = prompt.ids, self._rows, self._pool
        shared = needs.cached_len // rows.block_size
        pool.prefix.lock_handle(needs.handle)
        held = pool.hold(needs.match.blocks)
        try:
            pool.check(needs.blocks, "CacheManager.begin", states=1)  # promised ones too, though only `needs.new` are taken now
            fresh = pool.take(needs.new, "CacheManager.begin", states=1)
        except BaseException:
            pool.unlock(needs.handle, held)
            raise
        pool.prefix.record_match(needs.match.handle, ids.size)  # a refused prompt must not count as a match
        pool.use(needs.match)
        seq = self.open(prompt.namespace, needs.match.handle)  # its own lock, before that on `needs.handle` is released
        seq._cached_len = needs.cached_len
        seq._row = row = rows.add(
            seq,
            np.concatenate((needs.match.blocks[:shared], fresh)),
            num_tokens=needs.num_tokens,
            prompt_len=ids.size if prompt.matches_again and needs.num_tokens < ids.size else 0,
            computed=needs.cached_len,
            shared=shared,
            published=shared,
            limit=needs.num_tokens + prompt.reserve if prompt.reserve else 0,
            priority=priority,
        )
        pool.settle(np.array([row]))
        seq.block_pairs = pool.states.begin(row, ids.size)
        pool.unlock(needs.handle, held)
        self._ids.begin(row, ids)
        self._promises.add(row, needs.promised)
        # It goes on within a cached block, which others read: it writes into a copy, which the caller makes.
        if needs.cached_len % rows.block_size:
            source = needs.partial.block if needs.partial else int(needs.match.blocks[shared])
            seq.block_pairs = np.array([[source, fresh[0]]], dtype=np.int64)
        return seq

    def open_empty(self, namespace: Namespace) -> CacheSequence:
        """Start a sequence of no tokens."""
        handle = self._pool.prefix.match_prefix((), namespace, record=False).handle
        self._pool.take(0, "CacheManager.open_empty", states=1)
        seq = self.open(namespace, handle)
        seq._row = self._rows.add(seq, np.empty(0, dtype=np.int32))
        self._pool.settle(np.array([seq._row]))
        seq.block_pairs = self._pool.states.begin(seq._row, 0)
        self._ids.begin(seq._row, np.empty(0, dtype=np.int32))
        return seq

    def open(self, namespace: Namespace, handle: PrefixHandle) -> CacheSequence:
        """Make a sequence that has a handle locked, and no row yet."""
        self._serial += 1
        seq = CacheSequence(self._pool, self._rows, self._ids, namespace, handle, self._serial)
        self._pool.prefix.lock_handle(handle)
        return seq
