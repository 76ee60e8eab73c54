"""`CacheManager` with its prefix cache: random calls, with a memory that is really written, and a second manager that must decide alike.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/scheduler/test_cache_manager_model.py`` runs it for an hour.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

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
from kvdock.scheduler import CacheManager, CacheSequence
from kvdock_conformance.checking.containers import overwrite
from kvdock_conformance.checking.prefix_model import KEYS
from support_descriptors import in_thread
from support_prefix import inside, seen, tree_of

FREE, JUNK = -1, -2
TOKENS = st.builds(lambda size, at: [int(i == at) for i in range(size)], st.integers(0, 14), st.integers(0, 20))
WHICH = st.integers(0, 11)
NAMESPACES = [(), (1,), (True,)]
STEPS = [0]


@attrs.define(eq=False)
class Request:
    """A sequence of each manager, and what is known of its tokens: as many of them as are computed must be read back."""

    pair: tuple[CacheSequence, CacheSequence]
    ids: list[int]
    namespace: tuple[object, ...]
    computed: int

    @property
    def seq(self) -> CacheSequence:
        return self.pair[0]


class Managers(RuleBasedStateMachine):
    """Sequences come, grow, split, shrink and go, in a pool that is too small for them."""

    @initialize(
        num_blocks=st.integers(3, 16),
        block_size=st.sampled_from([1, 2, 3, 4]),
        options=st.sampled_from([*({"policy": name} for name in sorted(KEYS)), {"policy": "lru"}, {"prefix": "naive"}]),
    )
    def start(self, num_blocks: int, block_size: int, options: dict[str, str]) -> None:
        self.managers = CacheManager(num_blocks, block_size, **options), CacheManager(num_blocks, block_size, **options)
        self.block_size, self.num_blocks = block_size, num_blocks
        self.memory = np.full(num_blocks * block_size, FREE)
        self.open: list[Request] = []
        self.closed: list[Request] = []
        self.stats = [0, 0, 0]
        self.foreign = CacheManager(4, block_size)
        self.is_radix = isinstance(self.manager.prefix, RadixPrefixCache)

    @property
    def manager(self) -> CacheManager:
        return self.managers[0]

    def both(self, call: Callable[[CacheManager, int], Any]) -> tuple[Any, Any]:
        return call(self.managers[0], 0), call(self.managers[1], 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # Good calls, or such as ask for too much.

    @rule(ids=TOKENS, space=st.integers(0, 4), priority=st.integers(0, 2), wide=st.booleans())
    def begin(self, ids: list[int], space: int, priority: int, wide: bool) -> None:
        namespace = NAMESPACES[max(0, space - 2)]
        tokens = np.array([*ids, 0], dtype=np.int64 if wide else np.int32)
        ids = tokens.tolist()
        whole = (len(ids) - 1) // self.block_size * self.block_size
        found = self.manager.prefix.match_prefix(ids[:whole], namespace, record=False).handle
        self.manager.prefix.lock_handle(found)
        room = self.manager.allocator.num_free + self.manager.prefix.size_info.evictable_size // self.block_size
        self.manager.prefix.lock_handle(found, unlock=True)
        self.managers[1].prefix.match_prefix(ids[:whole], namespace, record=False)
        if self.blocks_for(len(ids)) - found.cached_len // self.block_size > room:
            self.refused(OutOfBlocksError, lambda manager, _: manager.begin(tokens, namespace))
            return
        pair = self.both(lambda manager, _: manager.begin(tokens, namespace, priority=priority))
        overwrite(tokens)
        self.stats = [self.stats[0] + 1, self.stats[1] + len(ids), self.stats[2] + found.cached_len]
        assert pair[0].cached_len == pair[0].computed == found.cached_len < len(ids)
        assert pair[0].num_tokens == len(ids)
        self.open.append(Request(pair, ids, namespace, found.cached_len))

    @precondition(lambda self: self.open)
    @rule(which=WHICH, n=st.integers(0, 7), is_drafted=st.booleans())
    def extend(self, which: int, n: int, is_drafted: bool) -> None:
        """Room for more; what is written there and not committed may be anything."""
        self.grow(self.open[which % len(self.open)], n, is_drafted)

    def grow(self, one: Request, n: int, is_drafted: bool) -> None:
        start = one.seq.num_tokens
        try:
            slots, pairs = self.manager.extend(one.seq, n)
        except OutOfBlocksError:
            assert n > 0
            need = self.blocks_for(start + n) - self.blocks_for(start) + (start % self.block_size > 0)
            assert need > self.manager.available_size // self.block_size
            self.refused(OutOfBlocksError, lambda manager, at: manager.extend(one.pair[at], n))
            return
        others = self.managers[1].extend(one.pair[1], n)
        assert [slots.tolist(), pairs.tolist()] == [others[0].tolist(), others[1].tolist()]
        self.copy(pairs)
        assert slots.tolist() == one.seq.slot_mapping(start, start + n).tolist()
        assert one.seq.num_tokens == start + n
        if is_drafted:
            self.memory[slots] = JUNK  # drafted

    def copy(self, pairs: np.ndarray[Any, Any]) -> None:
        rows = self.memory.reshape(-1, self.block_size)
        rows[pairs[:, 1]] = rows[pairs[:, 0]].copy()

    @precondition(lambda self: self.open)
    @rule(which=WHICH, new=st.lists(st.sampled_from([0, 0, 0, 1]), max_size=5), share=st.sampled_from([0, 0.5, 1, 1, 1]))
    def commit(self, which: int, new: list[int], share: float) -> None:
        """Compute some of what can be, and say so."""
        one = self.open[which % len(self.open)]
        ids = [*one.ids, *new]
        most = min(len(ids), one.seq.num_tokens)
        for bad in (one.computed - 1, most + 1):
            error = IndexRangeError if bad >= 0 else ArgumentValueError
            self.refused(error, lambda manager, at, bad=bad: manager.commit(one.pair[at], new, computed=bad))
        computed = one.computed + int(share * (most - one.computed))
        slots = one.seq.slot_mapping(one.computed, computed)
        self.memory[slots] = ids[one.computed : computed]
        tokens = np.array(new, dtype=np.int64)
        is_free = computed // self.block_size >= one.seq._shared  # else it was cut within a cached block
        self.both(lambda manager, at: manager.commit(one.pair[at], tokens, computed=computed))
        overwrite(tokens)
        one.ids, one.computed = ids, computed
        assert one.seq.computed == computed
        if self.is_radix and is_free:
            size = computed // self.block_size * self.block_size
            found, _ = self.both(lambda manager, _: manager.prefix.match_prefix(ids[:size], one.namespace, record=False))
            assert found.indices.tolist() == one.seq.slot_mapping(0, size).tolist(), "cached, and the sequence goes on with that"

    @precondition(lambda self: self.open)
    @rule(which=WHICH, n=st.integers(1, 6), accepted=st.integers(0, 6), new=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=6, max_size=6))
    def speculate(self, which: int, n: int, accepted: int, new: list[int]) -> None:
        """Draft tokens, compute them all, keep some; or cut the sequence first, and draft from there."""
        one = self.open[which % len(self.open)]
        known = len(one.ids)
        self.truncate(which, 1 if accepted % 2 else 0.8, 0)
        self.commit(which, [], 1)
        if len(one.ids) == one.computed == one.seq.num_tokens:
            self.grow(one, n, is_drafted=True)
            if one.seq.num_tokens == one.computed + n:
                self.commit(which, new[:n] if accepted < n else new[: accepted - n], 1)
                self.truncate(which, 1, max(0, n - accepted))
        assert len(one.ids) <= known + n

    @precondition(lambda self: self.open)
    @rule(which=WHICH, share=st.sampled_from([0, 0.5, 0.9]), new=st.lists(st.integers(0, 1), min_size=24, max_size=24))
    def try_again(self, which: int, share: float, new: list[int]) -> None:
        """Cut between blocks, and go on to the same length with other tokens."""
        one = self.open[which % len(self.open)]
        self.commit(which, [], 1)
        length = one.computed
        self.truncate(which, int(share * one.seq.num_tokens) // self.block_size * self.block_size / max(1, one.seq.num_tokens), 0)
        if len(one.ids) == one.seq.num_tokens < length:
            start = one.seq.num_tokens
            self.grow(one, length - start, is_drafted=True)
            self.commit(which, new[: one.seq.num_tokens - start], 1)

    @precondition(lambda self: self.open)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        one = self.open[which % len(self.open)]
        pair = self.both(lambda manager, at: manager.fork(one.pair[at]))
        assert pair[0].num_tokens == min(one.seq.num_tokens, len(one.ids))
        self.open.append(Request(pair, list(one.ids), one.namespace, one.computed))

    @precondition(lambda self: self.open)
    @rule(which=WHICH, share=st.sampled_from([0, 0.3, 0.6, 0.9, 1]), less=st.integers(0, 2))
    def truncate(self, which: int, share: float, less: int) -> None:
        one = self.open[which % len(self.open)]
        self.refused(IndexRangeError, lambda manager, at: manager.truncate(one.pair[at], one.seq.num_tokens + 1))
        n = max(0, int(share * one.seq.num_tokens) - less)
        self.both(lambda manager, at: manager.truncate(one.pair[at], n))
        one.ids, one.computed = one.ids[:n], min(one.computed, n)
        assert (one.seq.num_tokens, one.seq.computed) == (n, one.computed)

    @precondition(lambda self: self.open)
    @rule(which=WHICH, how=st.sampled_from(["keep", "keep", "drop", "abort"]))
    def end(self, which: int, how: str) -> None:
        one = self.open[which % len(self.open)]
        calls: dict[str, Callable[[CacheManager, int], None]] = {
            "keep": lambda manager, at: manager.finish(one.pair[at]),
            "drop": lambda manager, at: manager.finish(one.pair[at], keep=False),
            "abort": lambda manager, at: manager.abort(one.pair[at]),
        }
        one = self.open[which % len(self.open)]
        self.both(calls[how])
        self.open.remove(one)
        self.closed.append(one)
        assert not one.seq.is_open

    def after_the_end(self, which: int) -> None:
        one = self.closed[which % len(self.closed)]
        calls: list[Callable[[CacheManager, int], object]] = [
            lambda manager, at: manager.extend(one.pair[at], 1),
            lambda manager, at: manager.commit(one.pair[at], [], computed=one.computed),
            lambda manager, at: manager.fork(one.pair[at]),
            lambda manager, at: manager.truncate(one.pair[at], 0),
            lambda manager, at: manager.finish(one.pair[at]),
            lambda manager, at: manager.abort(one.pair[at]),
        ]
        for call in calls:
            self.refused(StaleHandleError, call)

    @rule()
    def reset(self) -> None:
        if self.open:
            self.refused(ArgumentValueError, lambda manager, _: manager.reset())
        else:
            self.both(lambda manager, _: manager.reset())
            assert self.manager.allocator.num_free == self.num_blocks

    # Bad calls: each raises, and nothing has changed.

    def state(self) -> list[object]:
        found: list[object] = []
        for manager in self.managers:
            counts = manager.allocator.ref_counts(np.arange(self.num_blocks)).tolist()
            prefix = (
                seen(manager.prefix) if isinstance(manager.prefix, RadixPrefixCache) else (manager.prefix.stats, manager.prefix.num_locks)
            )
            found += [counts, prefix, manager.available_size, manager.num_sequences]
        for one in self.open:
            for seq in one.pair:
                facts = (seq.num_tokens, seq.cached_len, seq.computed, seq.is_open)
                found.append([seq.block_table.tolist(), seq.tokens.tolist(), str(seq.tokens.dtype), facts])
        return found

    def refused(self, error: type[KVDockError], call: Callable[[CacheManager, int], object]) -> None:
        before = self.state()
        for at, manager in enumerate(self.managers):
            with pytest.raises(error):
                call(manager, at)
        assert self.state() == before

    def of_another_manager(self, which: int) -> None:
        one, before = self.open[which % len(self.open)], self.state()
        calls: list[Callable[[CacheManager], object]] = [
            lambda manager: manager.extend(one.seq, 1),
            lambda manager: manager.commit(one.seq, [], computed=0),
            lambda manager: manager.fork(one.seq),
            lambda manager: manager.truncate(one.seq, 0),
            lambda manager: manager.finish(one.seq),
            lambda manager: manager.abort(one.seq),
        ]
        for call in calls:
            for manager in (self.foreign, self.managers[1]):
                with pytest.raises(StaleHandleError):
                    call(manager)
        assert self.state() == before

    def bad_types(self, bad: Any) -> None:
        self.refused(ArgumentTypeError, lambda manager, _: manager.begin(bad))
        self.refused(ArgumentTypeError, lambda manager, _: manager.begin([1], "tenant"))  # type: ignore[arg-type]
        self.refused(ArgumentTypeError, lambda manager, _: manager.finish(bad))
        if self.open:
            one = self.open[0]
            self.refused(ArgumentTypeError, lambda manager, at: manager.commit(one.pair[at], bad, computed=one.computed))

    def too_large(self, size: int) -> None:
        self.refused(ArgumentValueError, lambda manager, _: manager.begin([]))
        self.refused(OutOfBlocksError, lambda manager, _: manager.begin([0] * (self.num_blocks * self.block_size + size)))

    def other_thread(self) -> None:
        def work() -> None:
            calls: Sequence[Callable[[], object]] = [
                lambda: self.manager.begin([1]),
                self.manager.check_integrity,
                self.manager.hand_over,
                self.manager.reset,
            ]
            for call in calls:
                with pytest.raises(WrongThreadError):
                    call()

        before = self.state()
        in_thread(work)
        assert self.state() == before

    @rule(kind=st.integers(0, 4), which=WHICH, bad=st.sampled_from([[1.0], [True], np.ones(2), "text", None, [2**64]]))
    def bad_call(self, kind: int, which: int, bad: Any) -> None:
        if kind == 0 and self.open:
            self.of_another_manager(which)
        elif kind == 1 and self.closed:
            self.after_the_end(which)
        elif kind == 2:
            self.bad_types(bad)
        elif kind == 3:
            self.too_large(which + 1)
        else:
            self.other_thread()

    # After each step.

    @invariant()
    def is_whole(self) -> None:
        STEPS[0] += 1
        counts, counts2 = self.both(lambda manager, _: manager.allocator.ref_counts(np.arange(self.num_blocks)).tolist())
        self.both(lambda manager, _: manager.check_integrity())
        rows = self.memory.reshape(-1, self.block_size)
        rows[np.array(counts) == 0] = FREE
        for one in self.open:
            assert self.memory[one.seq.slot_mapping(0, one.computed)].tolist() == one.ids[: one.computed]
            assert one.seq.tokens.tolist() == one.ids
            assert one.seq.block_table.tolist() == one.pair[1].block_table.tolist()
            assert one.seq.block_table.size == self.blocks_for(one.seq.num_tokens)
            assert one.seq.cached_len <= one.seq.num_tokens
        assert counts == counts2
        stats = self.manager.prefix.stats
        assert [stats.lookups, stats.lookup_tokens, stats.hit_tokens] == self.stats
        cached = set(self.manager.prefix.stored_blocks().tolist())
        held = set(itertools.chain.from_iterable(one.seq.block_table.tolist() for one in self.open))
        assert held | cached == {block for block, count in enumerate(counts) if count}
        free = self.manager.allocator.num_free * self.block_size
        assert self.manager.available_size == free + self.manager.prefix.size_info.evictable_size
        assert len(held - cached) + len(cached) + self.manager.allocator.num_free == self.num_blocks

    @invariant()
    def what_is_cached_is_computed(self) -> None:
        if not self.is_radix:
            return
        first, second = (manager.prefix for manager in self.managers)
        assert isinstance(first, RadixPrefixCache)
        assert isinstance(second, RadixPrefixCache)
        assert inside(first) == inside(second)
        for (_, path), (blocks, *_) in tree_of(first).items():
            assert isinstance(blocks, list)
            wanted = [list(tokens) for tokens in path[len(path) - len(blocks) :]]
            assert self.memory.reshape(-1, self.block_size)[blocks].tolist() == wanted

    def teardown(self) -> None:
        """Where all sequences are gone, so are their blocks and locks."""
        if hasattr(self, "managers"):
            for one in list(self.open):
                self.both(lambda manager, at, one=one: manager.finish(one.pair[at]))
            assert self.manager.available_size == self.num_blocks * self.block_size
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
