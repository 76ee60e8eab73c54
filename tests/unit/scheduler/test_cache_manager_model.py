"""`CacheManager` and all that it gives out: random calls, with a pool that is really written, and a second manager that must decide alike.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/scheduler/test_cache_manager_model.py`` runs it for an hour.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kvdock.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    IndexRangeError,
    KVDockError,
    OutOfBlocksError,
    StaleHandleError,
    WrongThreadError,
)
from kvdock.prefix import RadixPrefixCache
from kvdock.scheduler import (
    BatchTables,
    CacheManager,
    CacheSequence,
    Pin,
    SequenceBatch,
    csr_table,
    dense_table,
    sequence_lengths,
    token_table,
)
from kvdock_conformance.checking.containers import overwrite
from support_blocks import FREE, JUNK, Contents, Path, Pool, chain
from support_descriptors import in_thread

TOKENS = st.builds(lambda size, at: [int(i == at) for i in range(size)], st.integers(0, 14), st.integers(0, 20))
NEW = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=5)
WHICH = st.integers(0, 11)
SEVERAL = st.lists(WHICH, min_size=1, max_size=4)
SHARE = st.sampled_from([0, 0.3, 0.6, 0.9, 1, 1])
NAMESPACES = [(), (), (), (1,), (True,)]
POLICIES = [{"policy": name} for name in ("lru", "lfu", "fifo", "priority")]
STEPS = [0]


@attrs.define(eq=False)
class Request:
    """A sequence of each manager, and what is known of it: the ids in ``written`` are those whose keys and values can be read back."""

    pair: tuple[CacheSequence, CacheSequence]
    namespace: tuple[object, ...]
    ids: list[int]
    computed: int
    written: list[int]
    prompt: int = 0
    limit: int = 0
    seen: tuple[int, list[int]] = (0, [])

    @property
    def seq(self) -> CacheSequence:
        return self.pair[0]


@attrs.define(eq=False)
class Rows:
    """A batch of each manager, and its rows; all their room is written."""

    pair: tuple[SequenceBatch, SequenceBatch]
    rows: list[Request]

    @property
    def batch(self) -> SequenceBatch:
        return self.pair[0]


@attrs.define(eq=False)
class Pinned:
    """A pin of each manager."""

    pair: tuple[Pin, Pin]
    path: Path
    end: float


class Managers(RuleBasedStateMachine):
    """Sequences come, grow, split, shrink and go, in a pool that is too small for them."""

    @initialize(
        num_blocks=st.integers(3, 18),
        block_size=st.sampled_from([1, 2, 3, 4]),
        options=st.sampled_from([*POLICIES, *POLICIES[:1] * 3, {"prefix": "naive"}]),
        null_block=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, options: dict[str, str], null_block: bool) -> None:
        self.now = 0.0
        how: dict[str, Any] = {**options, "null_block": null_block, "clock": lambda: self.now}
        self.managers = CacheManager(num_blocks, block_size, **how), CacheManager(num_blocks, block_size, **how)
        self.size, self.num_blocks, self.null = block_size, num_blocks, int(null_block)
        self.pool = Pool(num_blocks, block_size)
        self.contents = [Contents(manager.prefix) for manager in self.managers]
        self.publisher: dict[Path, Request] = {}
        self.open: list[Request] = []
        self.closed: list[Request] = []
        self.batches: list[Rows] = []
        self.pins: list[Pinned] = []
        self.foreign = CacheManager(4, block_size)
        self.is_radix = isinstance(self.manager.prefix, RadixPrefixCache)
        self.tables = BatchTables(self.manager, 4, num_blocks, max_tokens=256) if null_block else None

    @property
    def manager(self) -> CacheManager:
        return self.managers[0]

    @property
    def all(self) -> list[Request]:
        return [*self.open, *(row for one in self.batches for row in one.rows)]

    def both(self, call: Callable[[CacheManager, int], Any]) -> tuple[Any, Any]:
        return call(self.managers[0], 0), call(self.managers[1], 1)

    def attempt(self, call: Callable[[CacheManager, int], Any]) -> tuple[Any, Any] | None:
        """The results of a call that may find too few blocks; then nothing has changed."""
        before = self.state()
        try:
            first = call(self.managers[0], 0)
        except OutOfBlocksError:
            with pytest.raises(OutOfBlocksError):
                call(self.managers[1], 1)
            assert self.state() == before
            return None
        return first, call(self.managers[1], 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def some(self, which: Sequence[int]) -> list[Request]:
        return list({id(one): one for one in (self.open[at % len(self.open)] for at in which)}.values())

    # What is held.

    def end_of(self, handle: Any) -> Path | None:
        """The prefix that a handle ends."""
        own = self.manager.prefix._checked(handle) if self.is_radix else None  # type: ignore[attr-defined]
        return self.contents[0].paths[int(own.node.blocks[own.position - own.node.start - 1])] if own and own.node else None

    def held(self, but: Request | None = None) -> set[Path]:
        """All prefixes of what sequences and pins have locked."""
        ends = [self.end_of(one.seq._handle) for one in self.all if one is not but] + [pin.path for pin in self.pins]
        return {(end[0], end[1][:n]) for end in ends if end for n in range(self.size, len(end[1]) + 1, self.size)}

    def taken_back(self, one: Request) -> set[Path]:
        """What goes with a sequence that is not kept: its own publications that nobody holds, and behind which nothing stays."""
        held, stays, gone = self.held(but=one), set(self.contents[0].paths.values()), set[Path]()
        for path in sorted(stays, key=lambda path: -len(path[1])):
            behind = any(other[0] == path[0] and other[1][: len(path[1])] == path[1] for other in stays if len(other[1]) > len(path[1]))
            if self.publisher[path] is one and path not in held and not behind:
                stays.remove(path)
                gone.add(path)
        return gone

    def read_events(self, committed: Iterable[Request] = ()) -> None:
        """Note who has published what was stored: the first of a batch that has computed it."""
        stored, others = self.contents[0].read(), self.contents[1].read()
        assert stored == others
        for namespace, ids in stored:
            owners = (one for one in committed if repr(one.namespace) == namespace)
            self.publisher[namespace, ids] = next(one for one in owners if tuple(one.ids[: one.computed][: len(ids)]) == ids)
        left = set(self.contents[0].paths.values())
        self.publisher = {path: one for path, one in self.publisher.items() if path in left}

    # Good calls, or such as ask for too much.

    def look_up(self, ids: list[int], namespace: tuple[object, ...], most: int, *, partial: bool) -> tuple[int, int]:
        """How many tokens a prompt finds in whole blocks, and in a part of the next."""
        looked = min((len(ids) - 1) // self.size, self.blocks_for(most)) * self.size
        found = self.contents[0].longest(namespace, ids[:looked], self.size)
        if not partial or min(found, most) < found:
            return min(found, most), 0
        wanted = ids[found : min(len(ids) - 1, most, found + self.size)]
        nexts = [path[1] for path in self.publisher if path[0] == repr(namespace) and len(path[1]) == found + self.size]
        alike = [next((i for i, (a, b) in enumerate(zip(ids_[found:], wanted, strict=False)) if a != b), len(wanted)) for ids_ in nexts
                 if list(ids_[:found]) == ids[:found]]  # fmt: skip
        part = min(max(alike, default=0), self.size - 1)
        return found, part if 2 * part >= self.size else 0

    @rule(
        ids=TOKENS,
        namespace=st.sampled_from(NAMESPACES),
        reserve=st.sampled_from([0, 0, 0, 3, 6]),
        at_most=st.sampled_from([None, None, 0, 1, 4]),
        most=st.sampled_from([None, None, None, 0, 3, 5]),
        partial=st.booleans(),
        priority=st.integers(0, 2),
        wide=st.booleans(),
    )
    def begin(
        self, ids: list[int], namespace: Any, reserve: int, at_most: int | None, most: int | None, partial: bool, priority: int, wide: bool
    ) -> None:
        ids = [*ids, 0]
        tokens = np.array(ids, dtype=np.int64 if wide else np.int32)
        how: dict[str, Any] = {"reserve": reserve, "at_most": at_most}
        before = self.state()
        fit, _ = self.both(lambda manager, _: manager.plan(tokens, namespace, **how))
        assert self.state() == before
        pair = self.attempt(
            lambda manager, _: manager.begin(tokens, namespace, **how, max_cached_len=most, partial=partial, priority=priority)
        )
        if most is None and not partial:
            assert fit.fits == (pair is not None)
        if pair is None:
            return
        overwrite(tokens)
        one = Request(pair, namespace, ids, pair[0].computed, ids[: pair[0].computed])
        found, part = self.look_up(ids, namespace, len(ids) if most is None else most, partial=partial)
        assert one.seq.cached_len == one.computed < len(ids)
        assert one.computed in (found + part, self.look_up(ids, namespace, len(ids) if most is None else most, partial=False)[0])
        assert one.seq.num_tokens == min(len(ids), one.computed + (len(ids) if at_most is None else at_most))
        if most is None and not partial:
            new = self.blocks_for(one.seq.num_tokens + reserve) - one.computed // self.size
            assert (fit.cached_len, fit.new_blocks) == (one.computed, new)
        one.prompt = len(ids) if at_most is not None and one.seq.num_tokens < len(ids) else 0
        one.limit = one.seq.num_tokens + reserve if reserve else 0
        self.pool.copy(one.seq.block_pairs)
        self.open.append(one)

    @precondition(lambda self: self.open)
    @rule(which=SEVERAL, n=st.lists(st.integers(0, 4), min_size=4, max_size=4), match=st.booleans(), form=st.integers(0, 3))
    def extend(self, which: list[int], n: list[int], match: bool, form: int) -> None:
        """Room for more; what is written there and not committed may be anything."""
        some = self.some(which)
        n = n[: len(some)]
        starts, available = [one.seq.num_tokens for one in some], self.manager.available_size // self.size
        out = np.full(sum(n), -7, dtype=np.int32 if form else np.int64)

        def call(manager: CacheManager, at: int) -> Any:
            seqs = [one.pair[at] for one in some]
            if form > 1 and len(seqs) == 1:
                slots, pairs = manager.extend(seqs[0], n[0], match=match)
                out[: len(slots)], out[len(slots) :] = slots, -1
                return out.tolist(), pairs.tolist(), pairs
            pairs = manager.extend(seqs, n, slots=out, match=match)
            return out.tolist(), pairs.tolist(), pairs

        made = self.attempt(call)
        if made is None:
            assert any(start + count > one.limit for one, start, count in zip(some, starts, n, strict=True)), "it was promised"
            need = sum(
                self.blocks_for(start + count) - self.blocks_for(start) + (start % self.size > 0)
                for start, count in zip(starts, n, strict=True)
            )
            assert need > available
            return
        assert made[0][:2] == made[1][:2]
        self.pool.copy(made[0][2])
        for one, start, count in zip(some, starts, n, strict=True):
            slots, out = out[:count], out[count:]
            self.has_grown(one, start, count, slots, match=match)

    def has_grown(self, one: Request, start: int, count: int, slots: Any, *, match: bool) -> None:
        """Look at the room that a sequence got."""
        found, stop = 0, start + count
        if one.prompt and match and one.computed == start:
            found = self.contents[0].longest(one.namespace, one.ids[: (one.prompt - 1) // self.size * self.size], self.size)
        if one.seq.computed != one.computed:
            assert one.seq.computed == one.seq.cached_len == found > start
            one.computed, one.written = found, one.ids[:found]
            start, stop = found, min(found + count, max(one.prompt, stop))
        assert one.seq.num_tokens == stop
        assert slots.tolist() == [*one.seq.slot_mapping(start, stop).tolist(), *[-1] * (count - (stop - start))]
        self.pool.slots[one.seq.slot_mapping(start, stop)] = JUNK  # drafted
        one.prompt = one.prompt if stop < one.prompt else 0

    @precondition(lambda self: self.open)
    @rule(which=SEVERAL, new=st.lists(NEW, min_size=4, max_size=4), share=SHARE, form=st.integers(0, 3))
    def commit(self, which: list[int], new: list[list[int]], share: float, form: int) -> None:
        """Compute some of what can be, and say so."""
        some = self.some(which)
        tokens: Any = [list(ids) for ids in new[: len(some)]]
        if form == 0:
            tokens = np.array([[*ids, 0][0] for ids in tokens])
        for one, ids in zip(some, np.array(tokens).reshape(-1, 1).tolist() if form == 0 else tokens, strict=True):
            one.ids = [*one.ids, *ids]
        most = [min(len(one.ids), one.seq.num_tokens) for one in some]
        computed = [one.computed + int(share * (top - one.computed)) for one, top in zip(some, most, strict=True)]
        for one, upto in zip(some, computed, strict=True):
            self.pool.write(one.seq.slot_mapping(one.computed, upto), one.namespace, one.ids[:upto])
        for bad in (some[0].computed - 1, most[0] + 1):
            wrong = [bad, *computed[1:]]
            self.refused(IndexRangeError, lambda manager, at, wrong=wrong: manager.commit([one.pair[at] for one in some], tokens, computed=wrong))

        def call(manager: CacheManager, at: int) -> None:
            if form > 1 and len(some) == 1:
                manager.commit(some[0].pair[at], tokens[0], computed=computed[0])
            else:
                manager.commit([one.pair[at] for one in some], tokens, computed=np.array(computed))

        self.both(call)
        overwrite(tokens)
        for one, upto in zip(some, computed, strict=True):
            one.computed, one.written = upto, one.ids[:upto]
        self.read_events(some)

    @precondition(lambda self: self.open)
    @rule(which=WHICH, share=SHARE)
    def fork(self, which: int, share: float) -> None:
        one = self.open[which % len(self.open)]
        n = int(share * min(one.seq.num_tokens, len(one.ids)))
        tokens = None if share == 1 else n
        pair = self.attempt(lambda manager, at: manager.fork(one.pair[at], tokens))
        if pair is None:
            assert one.limit
            return
        assert (pair[0].num_tokens, pair[0].computed) == (n, min(n, one.computed))
        self.open.append(Request(pair, one.namespace, list(one.ids), min(n, one.computed), one.written[:n], one.prompt))

    @precondition(lambda self: self.open)
    @rule(which=WHICH, share=SHARE, less=st.integers(0, 2))
    def truncate(self, which: int, share: float, less: int) -> None:
        one = self.open[which % len(self.open)]
        self.refused(IndexRangeError, lambda manager, at: manager.truncate(one.pair[at], one.seq.num_tokens + 1))
        n = max(0, int(share * one.seq.num_tokens) - less)
        self.both(lambda manager, at: manager.truncate(one.pair[at], n))
        self.was_cut(one, n)
        if self.manager.available_size == 0:  # else all it lacks was promised again
            one.limit = 0

    def was_cut(self, one: Request, n: int) -> None:
        one.ids, one.written, one.computed, one.prompt = one.ids[:n], one.written[:n], min(one.computed, n), 0
        assert (one.seq.num_tokens, one.seq.computed, one.seq.num_known) == (n, one.computed, len(one.ids))

    @precondition(lambda self: self.open)
    @rule(which=WHICH, n=st.integers(1, 6), accepted=st.integers(0, 6), new=st.lists(st.sampled_from([0, 0, 1]), min_size=6, max_size=6))
    def speculate(self, which: int, n: int, accepted: int, new: list[int]) -> None:
        """Draft tokens, compute them all, keep some."""
        one = self.open[which % len(self.open)]
        self.commit([which], [[]] * 4, 1, 1)
        if len(one.ids) == one.computed == one.seq.num_tokens:
            self.extend([which], [n] * 4, False, 1)
            if one.seq.num_tokens == one.computed + n:
                self.commit([which], [new[:n]] * 4, 1, 1)
                self.truncate(which, 1, max(0, n - accepted))

    @precondition(lambda self: self.open)
    @rule(which=WHICH, how=st.sampled_from(["keep", "drop", "drop", "abort"]))
    def end(self, which: int, how: str) -> None:
        one = self.open.pop(which % len(self.open))
        if how == "drop":
            self.drop(one, lambda manager, at: manager.finish(one.pair[at], keep=False))
        else:
            self.both(lambda manager, at: manager.finish(one.pair[at]) if how == "keep" else manager.abort(one.pair[at]))
        assert not one.seq.is_open
        self.closed.append(one)

    def drop(self, one: Request, call: Callable[[CacheManager, int], None]) -> None:
        """End a sequence that is not kept: exactly what it published and nobody uses goes."""
        gone = self.taken_back(one)
        before = set(self.publisher)
        self.both(call)
        self.read_events()
        assert before - set(self.publisher) == gone

    @rule()
    def reset(self) -> None:
        if self.all or self.pins:
            self.refused(ArgumentValueError, lambda manager, _: manager.reset())
        else:
            self.both(lambda manager, _: manager.reset())
            assert self.manager.allocator.num_used == self.null

    # Pins.

    @rule(ids=TOKENS, namespace=st.sampled_from(NAMESPACES), ttl=st.sampled_from([None, 2, 0.5]), which=WHICH)
    def pin(self, ids: list[int], namespace: Any, ttl: float | None, which: int) -> None:
        paths = sorted(self.publisher, key=repr)
        if paths and which % 3:
            name, known = paths[which % len(paths)]
            ids, namespace = list(known), next(one for one in NAMESPACES if repr(one) == name)
        whole = len(ids) // self.size * self.size
        if not whole or self.contents[0].longest(namespace, ids, self.size) < whole:
            self.refused(ArgumentValueError, lambda manager, _: manager.pin(ids, namespace, ttl=ttl))
            return
        pair = self.attempt(lambda manager, _: manager.pin(ids, namespace, ttl=ttl))
        if pair is not None:
            path = repr(namespace), tuple(ids[:whole])
            self.pins.append(Pinned(pair, path, self.now + ttl if ttl else np.inf))
            assert pair[0].num_tokens == whole

    @precondition(lambda self: self.pins)
    @rule(which=WHICH, times=st.integers(1, 2))
    def release(self, which: int, times: int) -> None:
        one = self.pins.pop(which % len(self.pins))
        for _ in range(times):
            self.both(lambda _, at: one.pair[at].release())

    @rule(by=st.sampled_from([0.25, 1, 3]))
    def time_passes(self, by: float) -> None:
        self.now += by
        over = [pin for pin in self.pins if pin.end <= self.now]
        self.pins = [pin for pin in self.pins if pin not in over]
        self.both(lambda manager, _: manager.num_pins)
        assert not any(pin.is_held for one in over for pin in one.pair)

    # Batches.

    @precondition(lambda self: len(self.batches) < 3)
    @rule(prompts=st.lists(TOKENS, min_size=1, max_size=3), is_empty=st.booleans(), more=st.integers(0, 2))
    def batch(self, prompts: list[list[int]], is_empty: bool, more: int) -> None:
        """Rows of nothing, or of prompts that are padded to one length."""
        if is_empty:
            empty = self.both(lambda manager, _: SequenceBatch.empty(manager, len(prompts)))
            rows = [Request(pair, (), [], 0, []) for pair in zip(empty[0].sequences, empty[1].sequences, strict=True)]
            self.batches.append(Rows(empty, rows))
            return
        rows = list[Request]()
        for ids in ([*prompt, 0] for prompt in prompts):
            pair = self.attempt(lambda manager, _, ids=ids: manager.begin(ids, reserve=more))
            if pair is not None:
                cached = pair[0].cached_len
                self.pool.write(pair[0].slot_mapping(cached, len(ids)), (), ids)
                rows.append(Request(pair, (), ids, cached, list(ids)))
        if rows:
            length = max(len(one.ids) for one in rows)
            pads = [length - len(one.ids) for one in rows]
            made = self.both(lambda manager, at: SequenceBatch(manager, [one.pair[at] for one in rows], length=length, pads=pads))
            self.batches.append(Rows(made, rows))

    @precondition(lambda self: self.batches)
    @rule(which=WHICH, n=st.integers(0, 5), new=st.lists(st.integers(0, 1), min_size=10, max_size=10))
    def batch_grow(self, which: int, n: int, new: list[int]) -> None:
        one = self.batches[which % len(self.batches)]
        start = one.batch.length
        pairs = self.attempt(lambda _, at: one.pair[at].grow(n))
        assert one.batch.length == start + n * (pairs is not None)
        if pairs is not None:
            assert pairs[0].tolist() == pairs[1].tolist()
            self.pool.copy(pairs[0])
            slots = one.batch.slot_mapping(start, start + n)
            for at, (row, row_slots) in enumerate(zip(one.rows, slots, strict=True)):
                row.written = [*row.written, *new[at : at + n]]
                self.pool.write(row_slots, row.namespace, row.written)

    @precondition(lambda self: self.batches)
    @rule(which=WHICH, share=SHARE)
    def batch_commit(self, which: int, share: float) -> None:
        rows = self.batches[which % len(self.batches)].rows
        new = [row.written[len(row.ids) :] for row in rows]
        for row in rows:
            row.ids = list(row.written)
            row.computed += int(share * (len(row.ids) - row.computed))
        computed = [row.computed for row in rows]
        self.both(lambda manager, at: manager.commit([row.pair[at] for row in rows], new, computed=computed))
        self.read_events(rows)

    @precondition(lambda self: self.batches)
    @rule(which=WHICH, rows=st.lists(WHICH, min_size=1, max_size=4), times=st.integers(1, 2))
    def batch_select(self, which: int, rows: list[int], times: int) -> None:
        one = self.batches[which % len(self.batches)]
        chosen = [row % len(one.rows) for row in rows] if times == 1 else list(np.arange(len(one.rows)).repeat(2))
        done = self.attempt(lambda _, at: one.pair[at].select(chosen) if times == 1 else one.pair[at].repeat(2))
        if done is not None:
            one.rows = self.rows_of(one.pair, [one.rows[row] for row in chosen])

    def rows_of(self, pair: tuple[SequenceBatch, SequenceBatch], rows: list[Request]) -> list[Request]:
        """The rows of a batch, like ``rows``: the same requests where it has the same sequences, or forks of them."""
        sequences = zip(pair[0].sequences, pair[1].sequences, strict=True)
        return [
            row if row.seq is seqs[0] else Request(seqs, row.namespace, list(row.ids), row.computed, list(row.written))
            for row, seqs in zip(rows, sequences, strict=True)
        ]

    @precondition(lambda self: 0 < len(self.batches) < 3)
    @rule(which=WHICH)
    def batch_fork(self, which: int) -> None:
        one = self.batches[which % len(self.batches)]
        pair = self.attempt(lambda _, at: one.pair[at].fork())
        if pair is not None:
            self.batches.append(Rows(pair, self.rows_of(pair, one.rows)))

    @precondition(lambda self: self.batches)
    @rule(which=WHICH, share=SHARE)
    def batch_truncate(self, which: int, share: float) -> None:
        one = self.batches[which % len(self.batches)]
        length, pads = int(share * one.batch.length), one.batch.pads
        self.both(lambda _, at: one.pair[at].truncate(length))
        for row, pad in zip(one.rows, pads.tolist(), strict=True):
            self.was_cut(row, max(0, length - pad))

    @precondition(lambda self: self.batches)
    @rule(which=WHICH, how=st.sampled_from(["close", "drop", "collect"]))
    def batch_end(self, which: int, how: str) -> None:
        one = self.batches.pop(which % len(self.batches))
        if how == "collect":
            del one
            gc.collect(0)
            self.both(lambda manager, _: manager.num_pins)  # any call will do
            return
        if how == "close":
            self.both(lambda _, at: one.pair[at].close())
        else:
            self.open += one.rows
            for row in one.rows:
                self.open.remove(row)
                self.drop(row, lambda manager, at, row=row: manager.finish(row.pair[at], keep=False))

    # What attention reads.

    @rule(which=st.lists(WHICH, max_size=4), share=SHARE)
    def show(self, which: list[int], share: float) -> None:
        some = list({id(one): one for one in (self.all[at % len(self.all)] for at in which)}.values()) if self.all else []
        seqs = [one.seq for one in some]
        lengths, tables = [seq.num_tokens for seq in seqs], [seq.block_table.tolist() for seq in seqs]
        width = max(map(len, tables), default=0)
        assert dense_table(seqs, fill=-1).tolist() == [[*table, *[-1] * (width - len(table))] for table in tables]
        assert sequence_lengths(seqs).tolist() == lengths
        slots = [seq.slot_mapping(0, seq.num_tokens).tolist() for seq in seqs]
        assert token_table(seqs, fill=-9).tolist() == [[*row, *[-9] * (max(lengths) - len(row))] for row in slots]
        csr = csr_table(seqs)
        assert np.split(csr.indices, csr.indptr[1:-1]) == [] or [part.tolist() for part in np.split(csr.indices, csr.indptr[1:-1])][: len(seqs)] == tables
        if self.tables:
            queries = [int(share * length) for length in lengths]
            self.tables.update(seqs, queries)
            host, total = self.tables.host, sum(queries)
            assert host.block_table.tolist() == [
                [*table, *[0] * (self.num_blocks - len(table))] for table in [*tables, *[[]] * (4 - len(seqs))]
            ]
            starts = [length - query for length, query in zip(lengths, queries, strict=True)]
            positions = [at for start, length in zip(starts, lengths, strict=True) for at in range(start, length)]
            wanted = [slot for row, start in zip(slots, starts, strict=True) for slot in row[start:]]
            assert host.slot_mapping.tolist() == [*wanted, *[-1] * (256 - total)]
            assert host.positions.tolist() == [*positions, *[0] * (256 - total)]
            assert np.diff(host.cu_query_lens).tolist() == host.query_lens.tolist() == [*queries, *[0] * (4 - len(seqs))]
            assert host.seq_lens.tolist() == [*lengths, *[0] * (4 - len(seqs))]

    # Bad calls: each raises, and nothing has changed.

    def state(self) -> list[object]:
        found: list[object] = []
        for at, manager in enumerate(self.managers):
            counts = manager.allocator.ref_counts(np.arange(self.num_blocks)).tolist()
            prefix = manager.prefix
            found += [counts, prefix.stats, prefix.size_info, prefix.num_locks, prefix.stored_blocks().tolist()]
            found += [manager.available_size, manager.num_sequences, manager.num_pins, manager._pool.promised]
            for one in self.all:
                seq, rows = one.pair[at], manager._rows
                facts = [int(getattr(rows, name)[seq._row]) for name in rows._INTEGERS]
                found.append([seq.block_table.tolist(), seq.tokens.tolist(), str(seq.tokens.dtype), seq.cached_len, facts])
            found += [[one.pair[at].length, one.pair[at].pads.tolist(), list(map(id, one.pair[at].sequences))] for one in self.batches]
        return found

    def refused(self, error: type[KVDockError], call: Callable[[CacheManager, int], object]) -> None:
        before = self.state()
        for at, manager in enumerate(self.managers):
            with pytest.raises(error):
                call(manager, at)
        assert self.state() == before

    @rule(which=WHICH, kind=st.integers(0, 2))
    def bad_sequence(self, which: int, kind: int) -> None:
        """One that is over, another manager's, or there twice."""
        one = [*self.closed, *self.open][which % len(self.closed + self.open)] if self.closed or self.open else None
        if one is None:
            return
        seq = one.pair[1] if one.seq.is_open else one.seq
        good = [row.seq for row in self.open][:1]
        calls: list[Callable[[CacheManager], object]] = [
            lambda manager: manager.extend([*good, seq], 1),
            lambda manager: manager.commit([seq, *good], [0] * (len(good) + 1), computed=[0] * (len(good) + 1)),
            lambda manager: manager.fork(seq),
            lambda manager: manager.truncate(seq, 0),
            lambda manager: manager.finish(seq),
            lambda manager: manager.abort(seq),
            lambda manager: SequenceBatch(manager, [seq]),
            lambda _: dense_table([*good, seq]) if good else seq._live("it"),
        ]
        before = self.state()
        if one.seq.is_open:
            for twice in (lambda: self.manager.extend([one.seq, one.seq], 1), lambda: SequenceBatch(self.manager, [one.seq] * 2)):
                with pytest.raises(ArgumentValueError):
                    twice()
        else:
            for name in ("block_table", "tokens", "num_tokens", "computed", "cached_len", "num_known", "table_version"):
                with pytest.raises(StaleHandleError):
                    getattr(seq, name)
        for call in calls if one.seq.is_open is False or kind else calls[:-1]:
            if call is not calls[-1] or good or not one.seq.is_open:
                with pytest.raises(StaleHandleError):
                    call(self.managers[0])
        assert self.state() == before

    @rule(bad=st.sampled_from([[1.0], [True], np.ones(2), "text", None, [2**64]]), more=st.integers(1, 9))
    def bad_types(self, bad: Any, more: int) -> None:
        self.refused(ArgumentTypeError, lambda manager, _: manager.begin(bad))
        self.refused(ArgumentTypeError, lambda manager, _: manager.begin([1], "tenant"))  # type: ignore[arg-type]
        self.refused(ArgumentTypeError, lambda manager, _: manager.finish(bad))
        self.refused(ArgumentValueError, lambda manager, _: manager.begin([]))
        self.refused(OutOfBlocksError, lambda manager, _: manager.begin([0] * (self.num_blocks * self.size + more)))
        if self.open:
            one = self.open[0]
            self.refused(ArgumentTypeError, lambda manager, at: manager.commit(one.pair[at], bad, computed=one.computed))

    @rule()
    def other_thread(self) -> None:
        def work() -> None:
            calls: list[Callable[[], object]] = [
                lambda: self.manager.begin([1]),
                self.manager.check_integrity,
                self.manager.hand_over,
                self.manager.reset,
                *(pin.pair[0].release for pin in self.pins),
                *(one.pair[0].repeat for one in [])
            ]
            for call in calls:
                with pytest.raises(WrongThreadError):
                    call()

        before = self.state()
        in_thread(work)
        assert self.state() == before

    # After each step.

    @invariant()
    def is_whole(self) -> None:
        STEPS[0] += 1
        self.both(lambda manager, _: manager.check_integrity())
        self.read_events()
        counts, counts2 = self.both(lambda manager, _: manager.allocator.ref_counts(np.arange(self.num_blocks)).tolist())
        assert counts == counts2
        self.pool.blocks[np.array(counts) == 0] = FREE
        paths, versions = self.contents[0].paths, set[int]()
        assert paths == self.contents[1].paths
        for one in self.all:
            table, whole = one.seq.block_table.tolist(), one.computed // self.size
            assert table == one.pair[1].block_table.tolist()
            assert len(table) == len(set(table)) == self.blocks_for(one.seq.num_tokens)
            assert 0 not in table or not self.null
            assert self.pool.slots[one.seq.slot_mapping(0, len(one.written))].tolist() == chain(one.namespace, one.written)
            assert (one.seq.tokens.tolist(), one.seq.num_known, one.seq.computed) == (one.ids, len(one.ids), one.computed)
            if self.is_radix:
                prefixes = [(repr(one.namespace), tuple(one.ids[: (at + 1) * self.size])) for at in range(whole)]
                assert [paths.get(block) for block in table[:whole]] == prefixes, "cached, and the sequence goes on with that"
            assert table == one.seen[1] or one.seq.table_version != one.seen[0]
            one.seen = one.seq.table_version, table
            versions.add(one.seq.table_version)
        assert len(versions) == len(self.all) == self.manager.num_sequences
        for block, (namespace, ids) in paths.items():
            assert self.pool.blocks[block].tolist() == chain(eval(namespace), ids)[-self.size :]

    @invariant()
    def blocks_are_counted(self) -> None:
        self.read_events()
        allocator, size_info = self.manager.allocator, self.manager.prefix.size_info
        cached, held = set(self.contents[0].paths), self.held()
        own = {block for one in self.all for block in one.seq.block_table.tolist()} - cached
        assert allocator.num_used == len(cached) + len(own) + self.null
        assert size_info.protected_size == len(held) * self.size
        assert size_info.total_size == len(cached) * self.size
        promised = sum(int(self.manager._rows.promised[one.seq._row]) for one in self.all)
        evictable = len(cached) - len(held)
        assert self.manager.available_size == (allocator.num_free + evictable - promised) * self.size >= 0
        assert self.manager.num_pins == len(self.pins)
        assert held <= set(self.publisher), "what is pinned or shared stays"

    def teardown(self) -> None:
        """Where all is over, so are blocks and locks."""
        if hasattr(self, "managers"):
            self.batches.clear()
            gc.collect(0)
            for one in self.open:
                self.both(lambda manager, at, one=one: manager.finish(one.pair[at]))
            for pin in self.pins:
                self.both(lambda _, at, pin=pin: pin.pair[at].release())
            assert self.manager.available_size == (self.num_blocks - self.null) * self.size
            assert self.manager.prefix.num_locks == 0
            self.manager.check_integrity()


COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}

Managers.TestCase.settings = settings(max_examples=125, stateful_step_count=50, **COMMON)
TestManagers = Managers.TestCase


@pytest.mark.slow
def test_for_as_long_as_asked() -> None:
    """``KVDOCK_STATEFUL_MINUTES``, or one minute."""
    start, steps = time.monotonic(), STEPS[0]
    minutes = float(os.environ.get("KVDOCK_STATEFUL_MINUTES", "1"))
    while (left := 60 * minutes - (time.monotonic() - start)) > 0:
        run_state_machine_as_test(Managers, settings=settings(max_examples=60, stateful_step_count=100, database=None, **COMMON))
    print(f"\n{STEPS[0] - steps:,} steps in {60 * minutes - left:.0f} s")
