"""`CacheManager` and all that it gives out: random calls, with a pool that is really written, and a second manager that must decide alike.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/scheduler/test_cache_manager_model.py`` runs it for an hour.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvdock.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    IndexRangeError,
    OutOfBlocksError,
    StaleHandleError,
    WrongThreadError,
)
from kvdock.scheduler import (
    CacheManager,
    SequenceBatch,
    csr_table,
    dense_table,
    sequence_lengths,
    token_table,
)
from kvdock_conformance.checking.containers import overwrite
from support_blocks import JUNK
from support_descriptors import in_thread
from support_manager_model import STEPS, Pinned, Request, Rows, TwoManagers
from support_slow import examples

TOKENS = st.builds(lambda size, at: [int(i == at) for i in range(size)], st.integers(0, 14), st.integers(0, 20))
NEW = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=5)
WHICH = st.integers(0, 11)
SEVERAL = st.lists(WHICH, min_size=1, max_size=4)
SHARE = st.sampled_from([0, 0.3, 0.6, 0.9, 1, 1])
NAMESPACES = [(), (), (), (1,), (True,)]


class Managers(TwoManagers):
    """Sequences come, grow, split, shrink and go."""

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
        reserve=st.sampled_from([0, 0, 0, 3, 6, -1]),
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
        if reserve < 0:  # all that is left
            reserve = max(0, self.manager.available_size - len(ids) // self.size * self.size)
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
        one.limit, one.was_promised = one.seq.num_tokens + reserve if reserve else 0, reserve > 0
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
            one.computed, one.written, one.is_forgotten = found, one.ids[:found], False
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
            self.refused(
                IndexRangeError, lambda manager, at, wrong=wrong: manager.commit([one.pair[at] for one in some], tokens, computed=wrong)
            )

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
            assert one.was_promised
            return
        assert (pair[0].num_tokens, pair[0].computed) == (n, min(n, one.computed))
        self.open.append(Request(pair, one.namespace, list(one.ids), min(n, one.computed), one.written[:n], one.prompt, one.is_forgotten))

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

    @rule(keep_open=st.sampled_from([False, False, True]))
    def reset(self, keep_open: bool) -> None:
        """Forget everything; what is open then goes on by itself, and is never published."""
        if keep_open and not self.pins:
            free = self.manager.available_size
            self.both(lambda manager, _: manager.reset(keep_open=True))
            assert self.manager.available_size >= free
            for one in self.all:
                one.is_forgotten = True
        elif self.all or self.pins:
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
    @rule(which=WHICH, n=st.integers(0, 5), ahead=st.integers(0, 3), new=st.lists(st.integers(0, 1), min_size=10, max_size=10))
    def batch_grow(self, which: int, n: int, ahead: int, new: list[int]) -> None:
        """By what there is room for, or with room for what comes behind."""
        one = self.batches[which % len(self.batches)]
        start = one.batch.length
        pairs = self.attempt(lambda _, at: one.pair[at].reserve(n, whole_blocks=True)) if ahead else None
        if pairs is not None:
            assert one.batch.room >= n
            self.both(lambda _, at: one.pair[at].grow(n).size or None)
        else:
            pairs = self.attempt(lambda _, at: one.pair[at].grow(n))
        assert one.batch.length == start + n * (pairs is not None)
        if pairs is not None:
            assert pairs[0].tolist() == pairs[1].tolist()
            self.pool.copy(pairs[0])
            slots = one.batch.slot_mapping(start, start + n)
            for at, (row, row_slots) in enumerate(zip(one.rows, slots, strict=True)):
                slots_of_tokens = row_slots[row_slots >= 0]
                row.written = [*row.written, *(new[(at + place) % len(new)] for place in range(len(slots_of_tokens)))]
                assert row.seq.num_tokens >= len(row.written)
                self.pool.write(slots_of_tokens, row.namespace, row.written)

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
            row if row.seq is seqs[0] else Request(seqs, row.namespace, list(row.ids), row.computed, list(row.written), 0, row.is_forgotten)
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
        lengths, tables = [seq.num_tokens for seq in seqs], [seq.block_table().tolist() for seq in seqs]
        width = max(map(len, tables), default=0)
        assert dense_table(seqs, fill=-1).tolist() == [[*table, *[-1] * (width - len(table))] for table in tables]
        assert sequence_lengths(seqs).tolist() == lengths
        slots = [seq.slot_mapping(0, seq.num_tokens).tolist() for seq in seqs]
        assert token_table(seqs, fill=-9).tolist() == [[*row, *[-9] * (max(lengths) - len(row))] for row in slots]
        csr = csr_table(seqs)
        assert [csr.indices[a:b].tolist() for a, b in zip(csr.indptr, csr.indptr[1:], strict=False)] == tables
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

    @precondition(lambda self: self.open or self.closed)
    @rule(which=WHICH)
    def bad_sequence(self, which: int) -> None:
        """One that is over, or there twice, or another manager's."""
        one = [*self.closed[-3:], *self.open][which % len(self.closed[-3:] + self.open)]
        good, seq = [row.seq for row in self.open[:1] if row is not one], one.pair[1] if one.seq.is_open else one.seq
        calls: list[Callable[[CacheManager], object]] = [
            lambda manager: manager.extend([*good, seq], 1),
            lambda manager: manager.commit([seq, *good], [0] * (len(good) + 1), computed=[0] * (len(good) + 1)),
            lambda manager: manager.fork(seq),
            lambda manager: manager.truncate(seq, 0),
            lambda manager: manager.finish(seq),
            lambda manager: manager.abort(seq),
            lambda manager: SequenceBatch(manager, [seq]),
        ]
        if good or not one.seq.is_open:
            calls += [lambda _, table=table: table([*good, seq]) for table in (dense_table, token_table, csr_table, sequence_lengths)]
        if one.seq.is_open:
            self.refused(ArgumentValueError, lambda manager, at: manager.extend([one.pair[at]] * 2, 1))
            self.refused(ArgumentValueError, lambda manager, at: manager.commit([one.pair[at]] * 2, [], computed=[0, 0]))
        for call in calls:
            before = self.state()
            with pytest.raises(StaleHandleError):
                call(self.manager)
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
                *(lambda one=one: one.batch.grow(1) for one in self.batches),
            ]
            for call in calls:
                with pytest.raises(WrongThreadError):
                    call()

        before = self.state()
        in_thread(work)
        assert self.state() == before


COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}

Managers.TestCase.settings = settings(max_examples=examples(75), stateful_step_count=50, **COMMON)
TestManagers = Managers.TestCase


@pytest.mark.slow
def test_for_as_long_as_asked() -> None:
    """``KVDOCK_STATEFUL_MINUTES``, or one minute."""
    start, steps = time.monotonic(), STEPS[0]
    minutes = float(os.environ.get("KVDOCK_STATEFUL_MINUTES", "1"))
    while (left := 60 * minutes - (time.monotonic() - start)) > 0:
        run_state_machine_as_test(Managers, settings=settings(max_examples=60, stateful_step_count=100, database=None, **COMMON))
    print(f"\n{STEPS[0] - steps:,} steps in {60 * minutes - left:.0f} s")
