"""Which request has which blocks: the life of a sequence, over a prefix cache and a block allocator.

::

    pool:   free | cached, evictable | cached, locked by sequences | a sequence's own (and its forks')

    begin     match, lock, allocate            extend    allocate; copies due before shared blocks are written
    commit    own, computed, whole blocks become cached; of two equal blocks the cached one stays
    fork      share everything                 truncate  release the blocks behind
    finish    unlock, release own blocks       abort     the same, publishing nothing

Every block is in exactly one of these four states, which `CacheManager.check_integrity` proves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, OutOfBlocksError, StaleHandleError
from kvdock.prefix.factory import prefix_cache_of_pool
from kvdock.prefix.inputs import as_integers, check_block_size, check_priority, count_of, slots_of
from kvdock.prefix.interface import Namespace, PrefixCache, PrefixHandle
from kvdock.prefix.ownership import OneThread
from kvdock.scheduler.block_allocator import BlockAllocator, BlockIds
from kvdock.scheduler.partition import check_partition
from kvdock.scheduler.sequence import CacheSequence, Growing

__all__ = ["CacheManager"]


class CacheManager(OneThread):
    """Gives sequences their blocks, shares what they have in common, and evicts what nobody uses when blocks run out.

    A call that raises has changed nothing. What it decides follows from the calls alone, so that the ranks of a
    tensor-parallel group, fed the same calls, decide alike. It belongs to one thread at a time; see `hand_over`.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block, 1 to 512.
        prefix: name of a prefix cache, or an empty one of the same block size that nobody else uses.
        options: what else a prefix cache made by name takes, such as ``policy="lfu"``.

    Raises:
        ArgumentValueError: a prefix cache of another block size, or with something in it.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix: str | PrefixCache = "radix", **options: Any) -> None:
        self.block_size = check_block_size("CacheManager", block_size)
        self.allocator = BlockAllocator(num_blocks)
        self.prefix = prefix_cache_of_pool("CacheManager", prefix, num_blocks=num_blocks, block_size=block_size, options=options)
        self._open: dict[int, CacheSequence] = {}

    def __repr__(self) -> str:
        return f"CacheManager({self.allocator}, {self.prefix}, sequences={len(self._open)})"

    @property
    def available_size(self) -> int:
        """Tokens that new sequences can have: those of free blocks and of evictable ones."""
        return self.allocator.num_free * self.block_size + self.prefix.size_info.evictable_size

    @property
    def num_sequences(self) -> int:
        """Sequences that are open."""
        return len(self._open)

    def begin(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, priority: int = 0) -> CacheSequence:
        """Start a sequence: find what is cached of it, and make room for the rest.

        Args:
            tokens: token ids ``[n]`` of the prompt, at least one.
            namespace: where its prefix is looked up and shared: tenant, adapter, image.
            priority: for the eviction policy ``priority``: what it commits stays longer than what has a lower one.

        Returns:
            A sequence with room for ``n`` tokens. Tokens from ``cached_len`` on are to be computed: at least one.

        Raises:
            OutOfBlocksError: the pool is too small, or too full.
            ArgumentTypeError: tokens that are no integers, a namespace that is no tuple.
            ArgumentValueError: no tokens.
        """
        self._enter()
        ids = as_integers("CacheManager.begin: tokens", tokens)
        if not ids.size:
            raise ArgumentValueError("CacheManager.begin: tokens", expected="at least one token", got="none")
        check_priority("CacheManager.begin: priority", priority)
        if self._blocks_for(ids.size) > self.allocator.num_blocks:
            raise self._too_large(ids.size)
        # Without the last token, so that the block it is in is neither taken nor locked where all of it is cached.
        most = (ids.size - 1) // self.block_size * self.block_size
        found = self.prefix.match_prefix(ids[:most], namespace, record=False)
        cached = found.handle.cached_len
        self.prefix.lock_handle(found.handle)
        try:
            fresh = self._take(self._blocks_for(ids.size) - cached // self.block_size)
        except BaseException:
            self.prefix.lock_handle(found.handle, unlock=True)
            raise
        self.prefix.record_match(found.handle, ids.size)
        blocks = Growing(np.concatenate((self._blocks_at(found.indices), fresh.astype(np.int32))))
        seq = CacheSequence(self, self.block_size, Growing(ids), blocks, namespace, priority)
        seq.cached_len = seq.computed = cached
        seq._found, seq._shared, seq._published = cached, cached // self.block_size, cached // self.block_size
        return self._add(seq, found.handle)

    def extend(self, seq: CacheSequence, n: int) -> tuple[npt.NDArray[np.int64], BlockIds]:
        """Make room for ``n`` more tokens.

        Returns:
            Their slots, int64 ``[n]``, and int64 ``[N, 2]`` pairs (source, destination) of blocks that are shared and must be
            copied before the new tokens are written; the sequence has the destinations already. Copy at once: a source may
            be handed out by a later call.

        Raises:
            OutOfBlocksError: too few blocks are free or evictable.
            StaleHandleError: the sequence is finished, or another manager's.
        """
        self._check(seq, "extend")
        start, stop = seq.num_tokens, seq.num_tokens + count_of("CacheManager.extend: n", n)
        last = start // self.block_size if n and start % self.block_size and self._is_shared(seq, start // self.block_size) else None
        fresh = self._take(self._blocks_for(stop) - seq._blocks.size + (last is not None)).astype(np.int32)
        pairs = np.empty((0, 2), dtype=np.int64)
        if last is not None:
            pairs = np.array([[seq._blocks.view[last], fresh[0]]], dtype=np.int64)
            self._replace(seq, last, int(fresh[0]))
            fresh = fresh[1:]
        seq._blocks.append(fresh)
        seq.num_tokens = stop
        return seq.slot_mapping(start, stop), pairs

    def commit(self, seq: CacheSequence, tokens: npt.ArrayLike, *, computed: int) -> None:
        """Tell what became of a sequence. Whole blocks of computed tokens can be shared from now on.

        Where equal tokens were cached meanwhile, the sequence goes on with the cached blocks and gives its own back: ask for
        its block table again.

        Args:
            seq: the sequence.
            tokens: ids that are new since it began or since the last commit; may be none. They may run ahead of the room.
            computed: how many tokens of the whole sequence have their keys and values written.

        Raises:
            IndexRangeError: ``computed`` is less than before, or more than there is room for or ids are known.
            StaleHandleError: the sequence is finished, or another manager's.
        """
        self._check(seq, "commit")
        fresh = as_integers("CacheManager.commit: tokens", tokens)
        computed = count_of("CacheManager.commit: computed", computed)
        most = min(seq._ids.size + fresh.size, seq.num_tokens)
        if not seq.computed <= computed <= most:
            raise IndexRangeError(
                "CacheManager.commit: computed",
                expected=f"{seq.computed} (as before) to {most} (ids known: {seq._ids.size + fresh.size}, room: {seq.num_tokens})",
                got=computed,
                fix="count all tokens of the sequence, cached ones too; pass the ids of new ones",
            )
        seq._ids.append(fresh)
        seq.computed = computed
        whole = computed // self.block_size
        if whole != seq._published and whole >= seq._shared:  # fewer, where it was cut within a shared block, which stays locked
            self._publish(seq, whole)

    def fork(self, seq: CacheSequence) -> CacheSequence:
        """Return another sequence that goes on from here. All blocks are shared until one of the two writes into them.

        Room for tokens whose ids are not known yet stays with ``seq``: the fork has tokens of its own to come.

        Raises:
            StaleHandleError: the sequence is finished, or another manager's.
        """
        handle = self._check(seq, "fork")
        tokens = min(seq.num_tokens, seq._ids.size)
        blocks = seq._blocks.view[: self._blocks_for(tokens)]
        self.prefix.lock_handle(handle)
        self.allocator.share(blocks[seq._shared :])
        other = CacheSequence(self, self.block_size, seq._ids.copy(), Growing(blocks), seq.namespace, seq._priority)
        other.cached_len, other.computed, other.num_tokens = seq.cached_len, seq.computed, tokens
        other._found, other._shared, other._published = handle.cached_len, min(seq._shared, blocks.size), -1
        return self._add(other, handle)

    def truncate(self, seq: CacheSequence, n: int) -> None:
        """Keep the first ``n`` tokens, as when drafted tokens were not accepted, and release the blocks behind them.

        Raises:
            IndexRangeError: there are fewer.
            StaleHandleError: the sequence is finished, or another manager's.
        """
        handle = self._check(seq, "truncate")
        n = count_of("CacheManager.truncate: n", n)
        if n > seq.num_tokens:
            raise IndexRangeError("CacheManager.truncate: n", expected=f"at most the {seq.num_tokens} tokens there are", got=n)
        keep = self._blocks_for(n)
        self.allocator.release(seq._blocks.view[max(keep, seq._shared) :])
        if keep < seq._shared:
            shorter = self.prefix.match_prefix(seq._ids.view[: keep * self.block_size], seq.namespace, record=False).handle
            if shorter.cached_len == keep * self.block_size:
                self._relock(seq, handle, shorter)
        seq._blocks.size, seq._ids.size, seq.num_tokens = keep, min(n, seq._ids.size), n
        seq.computed, seq.cached_len = min(seq.computed, n), min(seq.cached_len, n)
        seq._shared, seq._published = min(seq._shared, keep), -1
        seq._found = min(seq._found, n // self.block_size * self.block_size)

    def finish(self, seq: CacheSequence, keep: bool = True) -> None:
        """End a sequence, and release its blocks.

        Args:
            seq: the sequence.
            keep: whether what it committed stays cached. Otherwise the blocks that it brought into the cache go, as far as
                nobody has come to use them.

        Raises:
            StaleHandleError: the sequence is finished already, or another manager's.
        """
        handle = self._check(seq, "finish")
        self._close(seq, handle)
        if not keep and handle.cached_len > seq._found:
            self._give_back(self.prefix.discard_prefix(handle, seq._found))

    def abort(self, seq: CacheSequence) -> None:
        """End a sequence that failed: nothing is published that was not committed.

        Raises:
            StaleHandleError: the sequence is finished already, or another manager's.
        """
        self._close(seq, self._check(seq, "abort"))

    def reset(self) -> None:
        """Forget everything that is cached.

        Raises:
            ArgumentValueError: sequences are open.
        """
        self._enter()
        if self._open:
            fix = "finish or abort them first"
            raise ArgumentValueError("CacheManager.reset", expected="no open sequences", got=f"{len(self._open)} open", fix=fix)
        self._give_back(self.prefix.reset())

    def check_integrity(self) -> None:
        """Prove that free blocks, cached ones and those of sequences partition the pool. Costs time in its size.

        Raises:
            IntegrityError: they do not, or locks are not those of open sequences; the text says what.
        """
        self._enter()
        check_partition(self.allocator, self.prefix, list(self._open.values()))

    def hand_over(self) -> None:
        """Give the manager up: it belongs to the thread that uses it next. Raises `WrongThreadError` in another thread."""
        self.prefix.hand_over()
        self.allocator.hand_over()
        super().hand_over()

    def _add(self, seq: CacheSequence, handle: PrefixHandle) -> CacheSequence:
        """Note an open sequence with its locked handle."""
        seq._handle = handle
        self._open[id(seq)] = seq
        return seq

    def _check(self, seq: CacheSequence, method: str) -> PrefixHandle:
        """Return the handle of an open sequence of this manager, or raise."""
        self._enter()
        if not isinstance(seq, CacheSequence):
            raise ArgumentTypeError(f"CacheManager.{method}: seq", expected="a sequence from begin() or fork()", got=repr(seq)[:80])
        if seq._manager is not self or seq._handle is None:
            got = "one that is finished" if seq._manager is self else "another manager's"
            raise StaleHandleError(f"CacheManager.{method}: seq", expected="an open sequence of this manager", got=f"{got}: {seq}")
        return seq._handle

    def _close(self, seq: CacheSequence, handle: PrefixHandle) -> None:
        """Give back all that a sequence holds."""
        self.prefix.lock_handle(handle, unlock=True)
        self.allocator.release(seq._blocks.view[seq._shared :])
        del self._open[id(seq)]
        seq._handle, seq.is_open = None, False

    def _publish(self, seq: CacheSequence, count: int) -> None:
        """Insert the first ``count`` blocks of a sequence, and go on with what is cached of them."""
        handle, size = seq._handle, count * self.block_size
        assert handle is not None  # noqa: S101 - `_check` has seen it
        own = seq._blocks.view[:count].copy()
        result = self.prefix.insert_prefix(seq._ids.view[:size], slots_of(own, self.block_size), seq.namespace, priority=seq._priority)
        if result.cached_len > handle.cached_len:
            seq._found = result.cached_len  # somebody else has stored these meanwhile
        self._relock(seq, handle, result.handle)
        owned, known = result.handle.cached_len // self.block_size, result.cached_len // self.block_size
        canonical = self._blocks_at(result.indices)
        duplicates = own[seq._shared : known]
        held_by_others = self.allocator.ref_counts(own[max(known, seq._shared) : owned]) > 1
        seq._blocks.view[:owned] = canonical
        seq._shared, seq._published = max(owned, seq._shared), count
        self.allocator.release(duplicates)
        if held_by_others.any():
            self._adopt(canonical, seq._ids.view[: canonical.size * self.block_size])

    def _adopt(self, cached: npt.NDArray[np.int32], ids: npt.NDArray[Any]) -> None:
        """Let forks share through the cache what has just become cached and was their own too.

        A fork that has a block at the same place as the cache has the same tokens before it, and in it as far as it goes,
        since a block is copied before it is written; so it can go on with the cached ones before it too, where it had
        duplicates.

        Args:
            cached: the blocks.
            ids: their token ids.
        """
        for seq in self._open.values():
            own, handle = seq._blocks.view, seq._handle
            size = min(own.size, cached.size)
            equal = np.flatnonzero(own[:size] == cached[:size])
            same = int(equal[-1]) + 1 if equal.size else 0
            if same > seq._shared and handle is not None:
                found = self.prefix.match_prefix(ids[: same * self.block_size], seq.namespace, record=False)
                self._relock(seq, handle, found.handle)
                self.allocator.release(own[seq._shared : same])
                own[:same] = cached[:same]
                seq._shared, seq._published = same, -1

    def _relock(self, seq: CacheSequence, old: PrefixHandle, new: PrefixHandle) -> None:
        """Hold another handle instead of the one before."""
        self.prefix.lock_handle(new)
        self.prefix.lock_handle(old, unlock=True)
        seq._handle = new

    def _is_shared(self, seq: CacheSequence, index: int) -> bool:
        """Whether a block of a sequence must be copied before it is written."""
        return index < seq._shared or self.allocator.ref_count(int(seq._blocks.view[index])) > 1

    def _replace(self, seq: CacheSequence, index: int, block: int) -> None:
        """Put a block of its own in the place of a shared one, the last of a sequence."""
        if index >= seq._shared:
            self.allocator.release(seq._blocks.view[index : index + 1])
        seq._blocks.view[index] = block
        # The handle stays, and with it what is copied from, until the next commit.
        seq._shared, seq._published = min(seq._shared, index), -1

    def _take(self, n: int) -> BlockIds:
        """Allocate blocks, evicting what is missing; all or none."""
        missing = n - self.allocator.num_free
        if missing > 0:
            evictable = self.prefix.size_info.evictable_size // self.block_size
            if missing > evictable:
                raise OutOfBlocksError(
                    "CacheManager",
                    expected=f"at most {self.allocator.num_free} free and {evictable} evictable blocks, of {self.allocator.num_blocks}",
                    got=f"a request for {n}",
                    fix="finish sequences first, or make the pool larger",
                )
            self._give_back(self.prefix.evict(missing * self.block_size))
        return self.allocator.allocate(n)

    def _give_back(self, slots: npt.NDArray[Any]) -> None:
        """Free blocks that the prefix cache let go."""
        self.allocator.release(self._blocks_at(slots))

    def _blocks_at(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the blocks of slots that come in whole blocks."""
        return (slots[:: self.block_size] // self.block_size).astype(np.int32)

    def _blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def _too_large(self, tokens: int) -> OutOfBlocksError:
        """Describe a prompt that the pool could never hold."""
        return OutOfBlocksError(
            "CacheManager.begin: tokens",
            expected=f"at most {self.allocator.num_blocks * self.block_size} tokens, the whole pool",
            got=tokens,
            fix="refuse the request, or make the pool larger",
        )
