"""`RadixPrefixCache` against a slow cache of dicts and lists: random calls, bad ones among them, all compared after each.

``KVDOCK_STATEFUL_MINUTES=60 pytest -m slow -s tests/unit/prefix/test_radix_model.py`` runs it for an hour.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, OutOfBlocksError, StaleHandleError, WrongThreadError
from kvdock.prefix import InsertResult, NaivePrefixCache, PrefixHandle, PrefixMatch, RadixPrefixCache
from kvdock_conformance.checking.containers import CONTAINERS, overwrite
from kvdock_conformance.checking.prefix_events import Replayed, where
from kvdock_conformance.checking.prefix_model import KEYS, Block, SlowPrefixCache, slots_of
from support_descriptors import in_thread
from support_prefix import blocks_of, seen, tree_of
from support_slow import examples

OTHERS: list[list[tuple[object, ...]]] = [
    [],
    [],
    [(1,), (True,)],
    [(1,), ("1",)],
    [("1",), (b"1",)],
    [((1,),), (1,)],
    [("tenant", None), ("tenant",)],
]
PIECES = st.lists(st.integers(0, 5), max_size=6)
HOW = st.sampled_from(sorted(CONTAINERS))
REST = st.integers(0, 15)
OWN = st.lists(st.booleans(), min_size=6, max_size=6)
PRIORITY = st.sampled_from([0, 0, 1, -1, 5])
STEPS = [0]


@attrs.define(eq=False)
class Held:
    """A handle, and what it stands for."""

    handle: PrefixHandle
    path: list[Block]
    namespace: Any
    epoch: int
    locks: int = 0


class Caches(RuleBasedStateMachine):
    """Does everything twice: in a radix tree, and slowly."""

    handles = Bundle("handles")

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 16]),
        policy=st.sampled_from(sorted(KEYS)),
        listens=st.booleans(),
        others=st.sampled_from(OTHERS),
        spread=st.sampled_from([1, 1, 1, 97]),
    )
    def start(self, block_size: int, policy: str, listens: bool, others: list[tuple[object, ...]], spread: int) -> None:
        self.block_size = block_size
        self.cache = RadixPrefixCache(block_size, policy)
        self.model = SlowPrefixCache(block_size, policy)
        self.foreign = RadixPrefixCache(block_size, policy)
        self.namespaces: list[Any] = [(), *others]
        self.free = [number * spread for number in range(300)][::-1]
        self.epoch = self.num_locks = 0
        self.is_wide = False
        self.held: list[Held] = []
        self.observer = Replayed(block_size) if listens else None
        if self.observer is not None:
            self.cache.subscribe(self.observer)

    # What is drawn: blocks that differ in one token only, at their beginning or end; a rest shorter than a block.

    def tokens(self, pieces: list[int], rest: int) -> list[int]:
        size, found = self.block_size, list[int]()
        for piece in pieces:
            block = [7] * size
            block[0 if piece % 2 else -1] = piece // 2
            if piece == 5 and self.is_wide:
                block[-1] = 2**32  # 0 in the lower half
            found += block
        return found + [7] * (rest % size)

    # Good calls.

    @rule(target=handles, pieces=PIECES, rest=REST, space=st.integers(0, 2), how=HOW, record=st.booleans())
    def match(self, pieces: list[int], rest: int, space: int, how: str, record: bool) -> Held:
        tokens, namespace = self.tokens(pieces, rest), self.namespaces[space % len(self.namespaces)]
        passed = CONTAINERS[how](tokens)
        found = self.cache.match_prefix(passed, namespace, record=record)
        overwrite(passed)
        path = self.model.find(tokens, namespace)
        if record:
            self.model.record(path, len(tokens))
        self.named([block.number for block in path], found)
        return self.hold(found.handle, path, namespace)

    def named(self, blocks: list[int], found: PrefixMatch | InsertResult) -> None:
        assert found.blocks.dtype == found.indices.dtype == np.int32
        assert found.blocks.tolist() == blocks
        assert found.indices.tolist() == slots_of(blocks, self.block_size)
        found.blocks[...] = -5

    def hold(self, handle: PrefixHandle, path: list[Block], namespace: Any) -> Held:
        assert handle.cached_len == len(path) * self.block_size
        held = Held(handle, path, namespace, self.epoch)
        self.held.append(held)
        return held

    def is_stale(self, held: Held) -> bool:
        return held.epoch != self.epoch or any(not block.is_stored for block in held.path)

    @rule(held=handles, num_tokens=st.integers(0, 40))
    def record(self, held: Held, num_tokens: int) -> None:
        if self.is_stale(held):
            self.refused(StaleHandleError, lambda: self.cache.record_match(held.handle, num_tokens))
        else:
            num_tokens += held.handle.cached_len
            self.cache.record_match(held.handle, num_tokens)
            self.model.record(held.path, num_tokens)

    @rule(held=handles)
    def lock(self, held: Held) -> None:
        if self.is_stale(held):
            self.refused(StaleHandleError, lambda: self.cache.lock_handle(held.handle))
        else:
            self.cache.lock_handle(held.handle)
            self.count(held, 1)

    @rule(held=handles)
    def unlock(self, held: Held) -> None:
        if self.is_stale(held) or not held.locks:
            self.refused(StaleHandleError, lambda: self.cache.lock_handle(held.handle, unlock=True))
        else:
            self.cache.lock_handle(held.handle, unlock=True)
            self.count(held, -1)

    def count(self, held: Held, change: int) -> None:
        held.locks += change
        self.num_locks += change
        if held.path:
            held.path[-1].locks += change

    @precondition(lambda self: self.num_locks)
    @rule()
    def unlock_all(self) -> None:
        for held in self.held:
            while held.locks and not self.is_stale(held):
                self.unlock(held)

    @rule(target=handles, pieces=PIECES, space=st.integers(0, 2), how=HOW, blocks_how=HOW, rest=REST, own=OWN, priority=PRIORITY)
    def insert(self, pieces: list[int], space: int, how: str, blocks_how: str, rest: int, own: list[bool], priority: int) -> Held:
        """Blocks of known tokens are their own, or duplicates that stay the caller's."""
        namespace = self.namespaces[space % len(self.namespaces)]
        return self.store([], self.tokens(pieces, rest), namespace, None, (how, blocks_how), own, priority)

    @rule(target=handles, held=handles, pieces=PIECES, how=HOW, blocks_how=HOW, rest=REST, own=OWN, priority=PRIORITY)
    def insert_behind(self, held: Held, pieces: list[int], how: str, blocks_how: str, rest: int, own: list[bool], priority: int) -> Any:
        """What follows a handle, wherever its place is by now."""
        if self.is_stale(held):
            self.refused(
                StaleHandleError, lambda: self.cache.insert_prefix([7] * self.block_size, [299], held.namespace, behind=held.handle)
            )
            return multiple()
        return self.store(held.path, self.tokens(pieces, rest), held.namespace, held.handle, (how, blocks_how), own, priority)

    @rule(target=handles, held=handles, count=st.integers(1, 9), piece=st.integers(0, 3))
    def generate(self, held: Held, count: int, piece: int) -> Any:
        """Block by block, each behind the last, which is locked."""
        for _ in range(count):
            if self.is_stale(held) or len(self.free) < 20:
                return multiple()
            made = self.store(held.path, self.tokens([piece], 0), held.namespace, held.handle, ("int32", "int32"), [True], 0)
            if held.locks == 1:
                self.lock(made)
                self.unlock(held)
            held = made
        return held

    def store(
        self,
        before: list[Block],
        tokens: list[int],
        namespace: Any,
        behind: PrefixHandle | None,
        how: tuple[str, str],
        own: list[bool],
        priority: int,
    ) -> Held:
        whole, count = [token for block in before for token in block.tokens] + tokens, len(tokens) // self.block_size
        known = [block.number for block in self.model.find(whole, namespace)[len(before) :]]
        if len(self.free) < count + 20:
            self.evict(count, None)
        known = [block.number for block in self.model.find(whole, namespace)[len(before) :]]
        fresh = [self.free.pop() for _ in range(count)]
        numbers = [known[at] if at < len(known) and own[at] else fresh[at] for at in range(count)]
        passed, blocks = CONTAINERS[how[0]](tokens), CONTAINERS[how[1]](numbers)
        made = self.cache.insert_prefix(passed, blocks, namespace, behind=behind, priority=priority)
        canonical = made.blocks.tolist()
        overwrite(passed)
        overwrite(blocks)
        there, path = self.model.insert(whole, [*(block.number for block in before), *numbers], namespace, priority)
        assert there == len(known) + len(before)
        assert made.cached_len == there * self.block_size
        assert canonical == [block.number for block in path[len(before) :]]
        self.free.extend(number for number in fresh[::-1] if number not in canonical)
        return self.hold(made.handle, path, namespace)

    @rule(held=handles, pieces=PIECES, skip=st.integers(0, 15))
    def match_partial(self, held: Held, pieces: list[int], skip: int) -> None:
        tokens = self.tokens(pieces, 15)[skip % self.block_size :]
        if self.is_stale(held):
            self.refused(StaleHandleError, lambda: self.cache.match_partial(held.handle, tokens))
            return
        before, alike = seen(self.cache), self.model.alike(held.path, held.namespace, tokens)
        found = self.cache.match_partial(held.handle, tokens)
        assert seen(self.cache) == before
        assert (found and found.num_tokens) == max(alike.values(), default=None)
        if found is not None:
            assert alike[found.block] == found.num_tokens
            assert found.handle.cached_len == held.handle.cached_len + self.block_size

    @rule(count=st.integers(0, 60), share=st.sampled_from([None, None, 0, 1, 0.5]))
    def evict(self, count: int, share: float | None) -> None:
        """As many blocks as asked for; or none."""
        if share is not None:
            count = int(share * self.cache.size_info.evictable_size / self.block_size)
        numbers = self.model.evict(count)
        if numbers is None:
            self.refused(OutOfBlocksError, lambda: self.cache.evict(count))
            return
        asked: Any = np.int64(count) if count % 2 else count
        blocks = self.cache.evict(asked)
        assert blocks.dtype == np.int32
        assert blocks.tolist() == numbers
        assert not set(numbers) & set(self.free)
        self.free.extend(numbers[::-1] if count % 3 else numbers)

    @rule(held=handles, keep=st.integers(0, 6))
    def discard(self, held: Held, keep: int) -> None:
        if self.is_stale(held):
            self.refused(StaleHandleError, lambda: self.cache.discard_prefix(held.handle, keep))
            return
        numbers = self.model.discard(held.path, keep)
        blocks = self.cache.discard_prefix(held.handle, keep)
        assert blocks.dtype == np.int32
        assert sorted(blocks.tolist()) == sorted(numbers)
        self.free.extend(numbers)

    @precondition(lambda self: self.model.clock > 6)
    @rule(sure=st.integers(0, 1))
    def reset(self, sure: int) -> None:
        if not sure:
            stored = sorted(block.number for _, block in self.model.blocks())
            assert self.cache.reset().tolist() == stored
            self.free.extend(stored)
            self.model.reset()
            self.epoch += 1
            self.num_locks = 0

    @rule()
    def go_wide(self) -> None:
        """From now on tokens may be beyond 32 bits."""
        self.is_wide = True

    @rule(target=handles)
    def go_on(self) -> Any:
        """Let it be somebody else's for a moment."""
        self.cache.hand_over()
        assert in_thread(self.cache.check_integrity) is None
        return multiple()

    # Bad calls: each raises, and nothing has changed.

    def refused(self, error: type[KVDockError], call: Callable[[], object]) -> None:
        before = seen(self.cache)
        events = len(self.observer.events) if self.observer else 0
        with pytest.raises(error):
            call()
        assert seen(self.cache) == before
        assert events == (len(self.observer.events) if self.observer else 0)

    @rule(kind=st.sampled_from(["foreign", "naive", "theirs", "none"]), unlock=st.booleans(), held=handles)
    def bad_handle(self, kind: str, unlock: bool, held: Held) -> None:
        if kind == "theirs":
            before = seen(self.cache)
            with pytest.raises(StaleHandleError):
                self.foreign.lock_handle(held.handle, unlock=unlock)
            assert seen(self.cache) == before
            return
        handle: Any = {
            "foreign": lambda: self.foreign.match_prefix([1]).handle,
            "naive": lambda: NaivePrefixCache(self.block_size).match_prefix([1]).handle,
            "none": lambda: (),
        }[kind]()
        self.refused(StaleHandleError, lambda: self.cache.lock_handle(handle, unlock=unlock))
        self.refused(StaleHandleError, lambda: self.cache.record_match(handle, 1))
        self.refused(StaleHandleError, lambda: self.cache.discard_prefix(handle, 0))
        self.refused(StaleHandleError, lambda: self.cache.match_partial(handle, [1]))
        self.refused(StaleHandleError, lambda: self.cache.insert_prefix([7] * self.block_size, self.free[-1:], behind=handle))

    @rule(held=handles)
    def bad_namespace_behind(self, held: Held) -> None:
        if not self.is_stale(held):
            one = [7] * self.block_size, self.free[-1:], ("another",)
            self.refused(ArgumentValueError, lambda: self.cache.insert_prefix(*one, behind=held.handle))

    @rule(pieces=PIECES, kind=st.sampled_from(["short", "long", "negative", "twice", "owned", "high"]), at=st.integers(0, 5))
    def bad_blocks(self, pieces: list[int], kind: str, at: int) -> None:
        tokens = self.tokens([*pieces, 1], 0)
        known = [block.number for block in self.model.find(tokens, ())]
        numbers = [*known, *self.free[-1 : -len(pieces) - 2 + len(known) : -1]]
        assert len(numbers) == len(pieces) + 1
        at %= len(numbers)
        if kind == "owned":
            taken = sorted({block.number for _, block in self.model.blocks()} - set(numbers))
            if not taken:
                return
            numbers[at] = taken[at % len(taken)]
        elif kind == "twice":
            if len(numbers) == 1:
                return
            numbers[at] = numbers[at - 1]
        elif kind in ("negative", "high"):
            numbers[at] = -1 if kind == "negative" else 2**31 // self.block_size
        else:
            numbers = numbers[:-1] if kind == "short" else [*numbers, 0]
        self.refused(ArgumentValueError, lambda: self.cache.insert_prefix(tokens, numbers))

    @rule(
        held=handles,
        bad=st.sampled_from([[1.0], np.ones(3), torch.ones(3), [True], np.array(["a"]), [2**64], [None], "text", None]),
        which=st.integers(0, 2),
    )
    def bad_types(self, held: Held, bad: Any, which: int) -> None:
        calls: list[Callable[[], object]] = [
            lambda: self.cache.match_prefix(bad),
            lambda: self.cache.insert_prefix(bad, [0]),
            lambda: self.cache.insert_prefix([0] * self.block_size, bad),
        ]
        self.refused(ArgumentTypeError, calls[which])

    @rule(bad=st.sampled_from([[1], "tenant", None, (1.0,), ([],), ((1, 2.0),), (np.int64(1),), 7]))
    def bad_namespace(self, bad: Any) -> None:
        self.refused(ArgumentTypeError, lambda: self.cache.match_prefix([1], bad))
        self.refused(ArgumentTypeError, lambda: self.cache.insert_prefix([1] * self.block_size, [299], bad))

    @rule(bad=st.sampled_from([-1, 1.5, "3", None, True]))
    def bad_size(self, bad: Any) -> None:
        before = seen(self.cache)
        with pytest.raises((ArgumentTypeError, ArgumentValueError)):
            self.cache.evict(bad)
        assert seen(self.cache) == before

    @rule(bad=st.sampled_from([1.0, "high", None, True]))
    def bad_priority(self, bad: Any) -> None:
        self.refused(ArgumentTypeError, lambda: self.cache.insert_prefix([1] * self.block_size, [299], priority=bad))

    @rule(held=handles, shape=st.sampled_from([(1, 1), (), (0, 4)]))
    def bad_shape(self, held: Held, shape: tuple[int, ...]) -> None:
        self.refused(ArgumentValueError, lambda: self.cache.match_prefix(np.zeros(shape, dtype=np.int64)))
        self.refused(ArgumentValueError, lambda: self.cache.insert_prefix(np.zeros(shape, dtype=np.int64), [0]))

    @rule(held=handles)
    def other_thread(self, held: Held) -> None:
        calls: list[Callable[[], object]] = [
            lambda: self.cache.match_prefix([1]),
            lambda: self.cache.record_match(held.handle, 1),
            lambda: self.cache.lock_handle(held.handle),
            lambda: self.cache.lock_handle(held.handle, unlock=True),
            lambda: self.cache.insert_prefix([1], [0]),
            lambda: self.cache.evict(0),
            self.cache.reset,
            self.cache.hand_over,
            self.cache.check_integrity,
        ]
        self.cache.check_integrity()  # it is ours now
        before = seen(self.cache)
        assert in_thread(lambda: [type(raised(call)) for call in calls]) == [WrongThreadError] * len(calls)
        assert seen(self.cache) == before

    # After each step.

    @invariant()
    def is_whole(self) -> None:
        STEPS[0] += 1
        self.cache.check_integrity()
        assert self.cache.size_info == self.model.size_info()
        assert self.cache.stats == self.model.stats()
        assert self.cache.num_locks == self.num_locks
        assert tree_of(self.cache) == blocks_of(self.model)
        assert self.cache.stored_blocks().tolist() == sorted(block.number for _, block in self.model.blocks())
        if self.observer is not None:
            assert self.observer.wrong == []
            assert self.observer.where == where(self.model)


def raised(call: Callable[[], object]) -> Exception | None:
    """What a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - handed to the test
        return error
    return None


COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}

Caches.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=50, **COMMON)
TestCaches = Caches.TestCase


@pytest.mark.slow
def test_for_as_long_as_asked() -> None:
    """``KVDOCK_STATEFUL_MINUTES``, or one minute."""
    start, steps = time.monotonic(), STEPS[0]
    minutes = float(os.environ.get("KVDOCK_STATEFUL_MINUTES", "1"))
    while (left := 60 * minutes - (time.monotonic() - start)) > 0:
        run_state_machine_as_test(Caches, settings=settings(max_examples=60, stateful_step_count=100, database=None, **COMMON))
    seconds = 60 * minutes - left
    print(f"\n{STEPS[0] - steps:,} steps in {seconds:.0f} s")
