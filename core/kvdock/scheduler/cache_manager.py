"""Which request has which blocks: the life of a sequence, over a prefix cache and a block allocator.

::

    pool:   free | cached, evictable | cached, locked by sequences and pins | a sequence's own (and its forks')

    plan      would it fit?                        begin     match, lock, allocate
    extend    allocate; copies due before shared   commit    own, computed, whole blocks become cached; of two equal
              blocks are written                             blocks the cached one stays
    fork      share everything                     truncate  release the blocks behind
    finish    unlock, release own blocks           abort     the same, publishing nothing

Every block is in exactly one of these four states, which `CacheManager.check_integrity` proves; `kvdock.scheduler.publishing`
has the table of who owns what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, overload
from weakref import ref

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.layers.groups import LayerGroup
from kvdock.prefix.inputs import as_integers, check_priority, count_of
from kvdock.prefix.interface import Namespace, PrefixCache
from kvdock.scheduler.batches import as_rows, ids_of_step, written_of
from kvdock.scheduler.beginnings import Beginnings
from kvdock.scheduler.facts import Facts
from kvdock.scheduler.ids import TokenIds
from kvdock.scheduler.partition import check_partition
from kvdock.scheduler.pins import Pin, Pins
from kvdock.scheduler.planning import Fit, Prompt
from kvdock.scheduler.pools import pool_of
from kvdock.scheduler.promises import Promises
from kvdock.scheduler.publishing import NOTHING_MORE, Publisher
from kvdock.scheduler.refusals import in_the_middle
from kvdock.scheduler.sequence import CacheSequence
from kvdock.scheduler.steps import Steps
from kvdock.scheduler.tier import Tier

__all__ = ["CacheManager"]


class CacheManager(Facts):
    """Gives sequences their blocks, shares what they have in common, and evicts what nobody uses when blocks run out.

    A call that raises has changed nothing. What it decides follows from the calls alone, so that the ranks of a
    tensor-parallel group, fed the same calls, decide alike; but for times of pins, where ``clock`` is not such a counter.
    It belongs to one thread at a time; see `hand_over`. Observers of its prefix cache cannot call it. It cannot be copied or pickled.

    With several layer groups, or one that lets tokens go, ``block_size`` is the least number of tokens in which blocks of all groups
    end together: prefixes are found and shared in so many, by any prefix cache, whose blocks are numbers of such units then. Numbers
    of blocks that are promised, asked for and available count units, too. A sequence goes on behind the longest prefix of which
    each group has what it needs: all tokens, the last window, a checkpoint of the state.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block, 1 to 512, 16 unless you say; at most 2**31 tokens in all. With ``groups`` it follows from them.
        prefix: name of a prefix cache, or an empty one of the same block size that nobody else uses.
        groups: layer groups of the cache, as `kvdock.plan_blocks` plans them; none: one that keeps all tokens.
        state_interval: tokens between two checkpoints of a sequence's states, at least. There is one at the end of each prompt that
            is begun with ``at_most``, too; each takes a block for every group of states.
        null_block: whether block 0 is never handed out, so that it stays as it was made: zero. What pads a batch can point there, and
            states of new sequences begin as copies of it.
        tiers: where blocks go that are evicted, the first to be filled first, see `kvdock.scheduler.tier`: what a prompt finds there is
            brought back before it begins. Each is one manager's.
        clock: what times of pins are measured with, in seconds unless you pass another: ranks that must decide alike pass
            the number of steps.
        options: what else a prefix cache made by name takes, such as ``policy="lfu"``.

    Raises:
        ArgumentValueError: more slots than 2**31; a prefix cache of another block size, or with something in it; another manager's tier.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int | None = None,
        prefix: str | PrefixCache = "radix",
        *,
        groups: Sequence[LayerGroup] | None = None,
        state_interval: int = 4096,
        null_block: bool = False,
        tiers: Sequence[Tier] = (),
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        how: dict[str, Any] = {"null_block": null_block, "tiers": tiers, "options": options}
        self._pool, self._rows = pool_of(num_blocks, block_size, prefix, groups, state_interval, **how)
        self.allocator, self.prefix, self.block_size = self._pool.allocator, self._pool.prefix, self._rows.block_size
        self._pool.hand_over()  # to the thread of the first call
        self._ids = TokenIds(self._rows)
        self._publisher = Publisher(self._pool, self._rows, self._ids)
        self._promises = Promises(self._pool, self._rows)
        self._steps = Steps(self._pool, self._rows, self._ids, self._publisher)
        self._beginnings = Beginnings(self._pool, self._rows, self._ids, self._promises, self._publisher)
        self._pins, self._late = Pins(clock), deque[list[CacheSequence]]()
        self._noting = (*self._pool.allocators, self._ids)
        for tier in tiers:  # last: what raised above has taken none
            tier._manager = ref(self)

    def __repr__(self) -> str:
        return f"CacheManager({self.allocator}, {self.prefix}, sequences={self.num_sequences}, pins={len(self._pins)})"

    def plan(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, reserve: int = 0, at_most: int | None = None) -> Fit:
        """Say what `begin` would find and take, with the same arguments, and whether it would succeed. Changes nothing.

        Raises:
            ArgumentTypeError, ArgumentValueError: as `begin` does.
        """
        self._enter()
        prompt = Prompt.read("CacheManager.plan", tokens, namespace, reserve=reserve, at_most=at_most)
        return self._beginnings.plan(prompt)

    def begin(
        self,
        tokens: npt.ArrayLike,
        namespace: Namespace = (),
        *,
        reserve: int = 0,
        at_most: int | None = None,
        max_cached_len: int | None = None,
        partial: bool = False,
        priority: int = 0,
    ) -> CacheSequence:
        """Start a sequence: find what is cached of it, and make room for the rest.

        Args:
            tokens: token ids ``[n]`` of the prompt, at least one.
            namespace: where its prefix is looked up and shared: tenant, adapter, image.
            reserve: tokens to come for which room is promised: `extend` gets it, whoever else asks. What is truncated is
                promised again, as far as its blocks became free. With ``at_most`` they count from the end of the chunk.
            at_most: room for at most so many tokens behind the cached ones: a chunk of a long prompt. `extend` makes room for
                the next chunk, and matches first, in case others have published more of the prompt meanwhile.
            max_cached_len: use at most so many cached tokens, as where rows of a batch go on at one place; in later chunks too.
            partial: where a cached block begins with at least half a block of the tokens that come next, go on behind these:
                ``block_pairs`` of the sequence then has that block to copy, at once: a later call may hand it out. Costs time in
                the branches at that place.
            priority: for the eviction policy ``priority``: what it commits stays longer than what has a lower one.

        Returns:
            A sequence with room for ``n`` tokens, or for the chunk. Tokens from ``cached_len`` on are to be computed: at least
            one of the prompt.

        Raises:
            OutOfBlocksError: the pool is too small, or too full.
            ArgumentTypeError: tokens that are no integers, a namespace that is no tuple.
            ArgumentValueError: no tokens; a number below 0.
        """
        self._enter()
        prompt = Prompt.read("CacheManager.begin", tokens, namespace, reserve=reserve, at_most=at_most, max_cached_len=max_cached_len)
        check_priority("CacheManager.begin: priority", priority)
        return self._beginnings.begin(prompt, priority, partial=partial)

    def fetch(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, priority: int = 0) -> int:
        """Bring what tiers have of a prompt back to the pool, as `begin` does itself: ahead of it, or before `can_go_on`.

        Returns:
            How many tokens of the prompt can be found in the pool now. They can be evicted until a sequence begins with them.

        Raises:
            ArgumentTypeError, ArgumentValueError: as `begin` does.
        """
        self._enter()
        check_priority("CacheManager.fetch: priority", priority)
        return self._beginnings.fetch(Prompt.read("CacheManager.fetch", tokens, namespace, reserve=0, at_most=0), priority)

    def can_go_on(self, tokens: npt.ArrayLike, namespace: Namespace = ()) -> npt.NDArray[np.bool_]:
        """Say behind how many cached tokens of a prompt a sequence could go on, for each number of them below the prompt's length.

        Returns:
            ``[n]`` for a prompt of ``n`` tokens; the first, for none of them, is True. Changes nothing.
        """
        self._enter()
        return self._beginnings.ends(as_integers("CacheManager.can_go_on: tokens", tokens), namespace)

    @overload
    def extend(
        self, seq: CacheSequence, n: int, *, slots: None = None, match: bool = True
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...

    @overload
    def extend(
        self, seq: Sequence[CacheSequence], n: int | npt.ArrayLike, *, slots: npt.NDArray[Any] | None = None, match: bool = True
    ) -> npt.NDArray[np.int64]: ...

    def extend(
        self,
        seq: CacheSequence | Sequence[CacheSequence],
        n: int | npt.ArrayLike,
        *,
        slots: npt.NDArray[Any] | None = None,
        match: bool = True,
    ) -> Any:
        """Make room for ``n`` more tokens, in one sequence or in each of a batch, in all or in none.

        A prompt that was begun in chunks is matched again first, if all of its room is computed: where others have published
        more of it, the sequence goes on behind that, and no room is made beyond the prompt. What is to be computed then is
        ``seq.computed`` to ``seq.num_tokens``.

        Args:
            seq: a sequence, or several.
            n: how many tokens; for several also one number for each, integers ``[batch]``.
            slots: for several, an int32 or int64 array ``[sum of n]`` that gets the slots of the new tokens, one sequence behind
                the other; -1 where a prompt needed fewer.
            match: whether to match a prompt again.

        Returns:
            For several: pairs (source, destination), int64 ``[N, 2]``, of blocks that are shared and must be copied before the new
            tokens are written; the sequences have the destinations already. Copy at once: a source may be handed out by a
            later call. For one sequence: its slots, int64 ``[n]`` or fewer, and the pairs.

        Raises:
            OutOfBlocksError: too few blocks are free or evictable.
            StaleHandleError: a sequence is over, or another manager's.
            ArgumentValueError: a sequence is there twice; ``slots`` of another size or dtype.
        """
        self._enter()
        if isinstance(seq, CacheSequence):
            return self._steps.extend_one(as_rows(self._rows, "CacheManager.extend: seq", [seq]), n, slots, match=match)
        return self._steps.extend(as_rows(self._rows, "CacheManager.extend: seq", seq), n, slots, match=match)

    def commit(self, seq: CacheSequence | Sequence[CacheSequence], tokens: Any, *, computed: Any) -> None:
        """Tell what became of a sequence, or of each of a batch. Whole blocks of computed tokens can be shared from now on.

        Where equal tokens were cached meanwhile, the sequence goes on with the cached blocks and releases its own: see
        `CacheSequence.table_version`.

        Args:
            seq: a sequence, or several.
            tokens: ids that are new since it began or since the last commit; may be none. They may run ahead of the room. For
                several: ``[batch]`` for one each, ``[batch, n]``, or a list of as many arrays.
            computed: how many tokens of the whole sequence have their keys and values written; for several ``[batch]``.

        Raises:
            IndexRangeError: ``computed`` is less than before, or more than there is room for or ids are known.
            StaleHandleError: a sequence is over, or another manager's.
            ArgumentValueError: a sequence is there twice; tokens or ``computed`` not for each sequence.
        """
        self._enter()
        is_one = isinstance(seq, CacheSequence)
        rows = as_rows(self._rows, "CacheManager.commit: seq", [seq] if is_one else seq)
        ids, counts = ids_of_step(tokens, rows.size, is_one=is_one)
        if is_one:
            computed = [count_of("CacheManager.commit: computed", computed)]
        self._steps.commit(rows, ids, counts, as_integers("CacheManager.commit: computed", computed))

    def note_written(self, seq: Sequence[CacheSequence], written: npt.ArrayLike) -> None:
        """Tell how many tokens of each of a batch have their keys and values written, where their ids come later or never.

        What no later token reads may go from now on, when its room is wanted. Until then `truncate` goes back to it, and `commit`
        publishes it. Where all layers keep all tokens this changes nothing.

        Args:
            seq: sequences.
            written: how many tokens of the whole sequence, ``[batch]``.

        Raises:
            IndexRangeError: more than there is room for, or fewer than were computed.
            StaleHandleError: a sequence is over, or another manager's.
        """
        self._enter()
        self._pool.written(*written_of(self._rows, seq, written))

    def fork(self, seq: CacheSequence, num_tokens: int | None = None) -> CacheSequence:
        """Return another sequence that goes on from here. All blocks are shared until one of the two writes into them.

        What ``seq`` was promised stays with it: the fork has tokens of its own to come.

        Args:
            seq: the sequence.
            num_tokens: how many tokens of its room to share; by default those whose ids are known. The fork knows all ids that
                ``seq`` does, and goes on to compute those; to go on with others, `truncate` it to ``num_tokens`` as well.

        Raises:
            StaleHandleError: the sequence is over, or another manager's.
            IndexRangeError: there is room for fewer tokens; or what the next one needs was let go, see `CacheSequence.shortest`.
            OutOfBlocksError: ``seq`` was promised room, and there is no block for the copy that it will need now; or none for a state,
                or for what was let go and it would need again.
        """
        row, rows = self._row(seq, "fork"), self._rows
        room, known = int(rows.num_tokens[row]), int(rows.num_known[row])
        tokens = min(room, known) if num_tokens is None else count_of("CacheManager.fork: num_tokens", num_tokens)
        if tokens > room:
            raise IndexRangeError(
                "CacheManager.fork: num_tokens", expected=f"at most the {room} tokens there is room for", got=tokens, fix="extend it first"
            )
        self._pool.check_kept("CacheManager.fork: num_tokens", row, tokens)
        self._promises.before_fork(row, rows.blocks_for(tokens))  # first: it may be refused
        handle, blocks, shared = rows.handle(row), rows.blocks(row, 0, rows.blocks_for(tokens)).copy(), int(rows.shared[row])
        self.allocator.share(blocks[shared:])  # the others are protected by the lock of the fork
        other = self._beginnings.open(seq.namespace, handle)
        shared = min(shared, blocks.size)
        other._cached_len = min(seq._cached_len, tokens)
        other._row = rows.add(
            other,
            blocks,
            num_tokens=tokens,
            prompt_len=int(rows.prompt_len[row]),
            computed=min(int(rows.computed[row]), tokens),
            written=min(int(rows.written[row]), tokens),
            shared=shared,
            published=NOTHING_MORE if rows.published[row] == NOTHING_MORE else shared,
            priority=int(rows.priority[row]),
            least=int(rows.least[row]),
        )
        self._ids.begin(other._row, self._ids.get(row, 0, known))
        self._pool.settle(np.array([row, other._row]))  # that of the one, too: what it needs may not be told yet
        other.block_pairs = self._pool.states.fork(row, other._row)
        return other

    def truncate(self, seq: CacheSequence, n: int) -> None:
        """Keep the first ``n`` tokens, as when drafted tokens were not accepted, and release the blocks behind them.

        Raises:
            IndexRangeError: there are fewer; or what the next token needs was let go, see `CacheSequence.shortest`.
            OutOfBlocksError: it would need blocks again that were let go, and others were promised their room.
            StaleHandleError: the sequence is over, or another manager's.
        """
        row, rows = self._row(seq, "truncate"), self._rows
        n = count_of("CacheManager.truncate: n", n)
        if n > rows.num_tokens[row]:
            raise IndexRangeError(
                "CacheManager.truncate: n",
                expected=f"at most the {rows.num_tokens[row]} tokens there are",
                got=n,
                fix="pass how many are left, not how many go",
            )
        self._pool.check_kept("CacheManager.truncate: n", row, n)
        keep, shared = rows.blocks_for(n), int(rows.shared[row])
        self._publisher.remember(seq, n)  # before `_ids.truncate` forgets the ids behind n
        gone = rows.blocks(row)[max(keep, shared) :].copy()
        if keep < rows.num_blocks[row]:
            self._publisher.leave(seq, keep)
            if keep < shared:
                self._publisher.lock_less(seq, keep)
            rows.cut(row, keep)
        if -(-n // self._pool.finest) < -(-int(rows.num_tokens[row]) // self._pool.finest):
            rows.touch(np.array([row]))
        self._ids.truncate(row, min(n, int(rows.num_known[row])))
        rows.num_tokens[row] = n
        rows.computed[row], rows.written[row] = min(rows.computed[row], n), min(rows.written[row], n)
        self._pool.settle(np.array([row]))
        self.allocator.release(gone)
        rows.end_chunks(row)
        seq._cached_len = min(seq._cached_len, n)
        self._promises.renew(row)

    def finish(self, seq: CacheSequence, keep: bool = True) -> None:
        """End a sequence, and release its blocks.

        Args:
            seq: the sequence.
            keep: whether what it published stays cached. Otherwise exactly what it published itself goes, as far as nobody has
                come to use it; `kvdock.scheduler.publishing` has the rule.

        Raises:
            StaleHandleError: the sequence is over already, or another manager's.
        """
        row = self._row(seq, "finish")
        prefixes = [*seq._left, self._publisher.shared_ids(row)]  # before `_close` frees its row
        self._close(seq)
        if not keep:  # behind `_close`: what it still locks would not be discarded
            self._publisher.take_back(seq, prefixes)

    def abort(self, seq: CacheSequence) -> None:
        """End a sequence that failed: nothing is published that was not committed.

        Raises:
            StaleHandleError: the sequence is over already, or another manager's.
        """
        self._row(seq, "abort")
        self._close(seq)

    def abort_later(self, sequences: list[CacheSequence]) -> None:
        """Abort those of ``sequences`` that are open then, at the next call, whatever it is.

        Changes nothing now and asks for no thread: this is the call for finalizers, which the garbage collector runs anywhere.
        """
        self._late.append(sequences)

    def pin(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, ttl: float | None = None) -> Pin:
        """Keep the whole blocks of a prefix cached, such as a system prompt that was computed and committed.

        Args:
            tokens: token ids ``[n]``, at least a block of them.
            namespace: where they are cached.
            ttl: how long, in seconds, or in what ``clock`` counts; None: until it is released. The pin is gone at the first
                call of the manager after that.

        Raises:
            ArgumentValueError: fewer are cached than whole blocks were named; a ttl that is not above 0.
            OutOfBlocksError: the blocks are all that is left for what sequences were promised.
        """
        self._enter()
        ids = as_integers("CacheManager.pin: tokens", tokens)
        whole = ids.size // self.block_size * self.block_size
        self._beginnings.fetch_whole(ids[:whole], namespace)
        match = self._pool.match(ids[:whole], namespace)
        handle = match.handle
        if not whole or handle.cached_len < whole:
            raise ArgumentValueError(
                "CacheManager.pin: tokens",
                expected=f"at least a block of {self.block_size} tokens that are cached",
                got=f"{ids.size} tokens, of which {handle.cached_len} are cached",
                fix="compute and commit the prefix first, and pin it before it is evicted",
            )
        end = self._pins.end_of(ttl)  # before the lock, since a clock may raise
        held = self._pool.lock(match, "CacheManager.pin")  # a pin must not break a promise
        pin = Pin(handle, held, self._unpin)
        self._pins.add(pin, end)
        return pin

    def reset(self, *, keep_open: bool = False) -> None:
        """Forget everything that is cached. With ``keep_open`` open sequences keep their blocks, for themselves, and publish no more.

        Raises:
            ArgumentValueError: sequences are open, without ``keep_open``; or prefixes are pinned.
        """
        self._enter()
        if len(self._pins) or (self.num_sequences and not keep_open):
            got, fix = f"{self.num_sequences} open, {len(self._pins)} pins", "end them first"
            raise ArgumentValueError("CacheManager.reset", expected="no open sequences and no pins", got=got, fix=fix)
        self._publisher.forget()

    def check_integrity(self) -> None:
        """Prove that free blocks, cached ones and those of sequences partition the pool. Costs time in its size.

        Raises:
            IntegrityError: they do not, or locks are not those of open sequences and pins; the text says what.
        """
        self._enter()
        check_partition(self._pool, self._rows, self._ids, self._pins)

    def hand_over(self) -> None:
        """Give the manager up: it belongs to the thread that uses it next. Raises `WrongThreadError` in another thread."""
        self._enter()
        self.prefix.hand_over()
        self._pool.hand_over()
        super().hand_over()

    def open_empty(self, namespace: Namespace = ()) -> CacheSequence:
        """Start a sequence whose token ids come later or never: nothing is looked up, and nothing is held yet."""
        self._enter()
        return self._beginnings.open_empty(namespace)

    def _claim(self) -> None:
        """Belong to the calling thread, unless another has this or its prefix cache, or somebody else has changed that."""
        self.prefix.hand_over()
        self._pool.check_unchanged()
        super()._claim()

    def _enter(self) -> None:
        """Notice another thread, and end what is over: sequences of finalizers, pins whose time has come."""
        super()._enter()
        if self._pool.is_busy:  # by an observer: what was just stored is not locked yet
            raise in_the_middle()
        while self._late:  # the garbage collector runs finalizers anywhere, so these only leave a note
            for seq in self._late.popleft():
                if seq.is_open:
                    self._close(seq)
        for pin in self._pins.over():
            self._unpin(pin)

    def _row(self, seq: CacheSequence, method: str) -> int:
        """Return the row of an open sequence of this manager, or raise."""
        self._enter()
        return int(as_rows(self._rows, f"CacheManager.{method}: seq", [seq])[0])

    def _close(self, seq: CacheSequence) -> None:
        rows, row = self._rows, seq._row
        self._pool.leave(row)
        self.prefix.lock_handle(rows.handle(row), unlock=True)
        self.allocator.release(rows.blocks(row)[rows.shared[row] :])  # shared ones stay the prefix cache's
        self._promises.add(row, -int(rows.promised[row]))
        rows.remove(row)
        seq._handle, seq._row = None, -1

    def _unpin(self, pin: Pin) -> None:
        """Release a pin, if it is held."""
        super()._enter()
        # Above, the base's `_enter`: the manager's own releases pins whose time is over, and would come back here.
        handle = pin._handle
        if handle is not None:
            pin._handle = None
            self._pins.remove(pin)
            self._pool.unlock(handle, pin._held)
