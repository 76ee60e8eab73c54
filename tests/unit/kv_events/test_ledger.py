"""Names by block ids: what a ledger tells, in which order, and that it stays what the prefix cache has."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdock.errors import IntegrityError, OutOfBlocksError
from kvdock.integrations.kv_events import AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored, KVEventBatch
from kvdock.integrations.kv_events import ledger as ledgers
from kvdock.integrations.kv_events.ledger import Ledger
from kvdock.prefix import Cleared, RadixPrefixCache, Removed, Stored, block_names
from support_kv_events import SPACES
from support_prefix import tree_of


def put(parent: int | None, tokens: list[int], blocks: list[int], namespace: tuple[Any, ...] = ()) -> Stored:
    return Stored(namespace, parent, np.array(tokens, np.int64), np.array(blocks, np.int32))


def gone(*blocks: int) -> Removed:
    return Removed(np.array(blocks, np.int32))


def test_names_go_on_from_the_block_before() -> None:
    ledger = Ledger(2)
    (first,) = ledger.read(put(None, [1, 2, 3, 4], [7, 3], ("a",)))
    (second,) = ledger.read(put(7, [5, 6], [0], ("a",)))
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    names = block_names([1, 2, 3, 4], 2, ("a",))
    assert (first.block_hashes, first.parent_block_hash, list(first.token_ids)) == (names, None, [1, 2, 3, 4])
    assert (second.block_hashes, second.parent_block_hash) == (block_names([1, 2, 5, 6], 2, ("a",))[1:], names[0])
    assert len(ledger) == 3


def test_a_removal_is_one_event_by_name_and_the_id_is_free_again() -> None:
    ledger = Ledger(1)
    ledger.read(put(None, [1, 2, 3], [0, 1, 2]))
    one, two, three = block_names([1, 2, 3], 1)
    assert ledger.read(gone(2, 1)) == [BlockRemoved([three, two])]
    (again,) = ledger.read(put(0, [9], [2]))
    assert again.block_hashes == block_names([1, 9], 1)[1:]
    assert again.parent_block_hash == one


def test_clearing_forgets_everything() -> None:
    ledger = Ledger(1)
    ledger.read(put(None, [1, 2], [0, 1]))
    assert ledger.read(Cleared()) == [AllBlocksCleared()]
    assert (len(ledger), list(ledger.everything())) == (0, [])


def test_what_follows_a_lost_event_is_lost_and_its_removal_is_not_told() -> None:
    ledger = Ledger(1)
    with pytest.raises(
        IntegrityError, match=r"KVEventPublisher: expected block 5 to be stored by an earlier event.*Fix: call manager.reset"
    ):
        ledger.read(put(5, [1], [6]))
    ledger.read(put(None, [1], [0]))
    assert ledger.read(gone(6)) == []
    assert ledger.read(gone(6, 0, 5)) == [BlockRemoved(block_names([1], 1))]


def test_everything_is_told_in_runs_each_behind_the_one_before() -> None:
    ledger = Ledger(1)
    ledger.read(put(None, [1, 2, 3], [0, 1, 2]))
    ledger.read(put(0, [8, 9], [3, 4]))
    ledger.read(put(2, [4], [5]))
    ledger.read(put(4, [7], [6]))
    events = list(ledger.everything())
    assert [list(event.token_ids) for event in events] == [[1, 2, 3], [8, 9], [4], [7]]
    known: set[object] = {None}
    for event in events:
        assert event.parent_block_hash in known
        known.update(event.block_hashes)
    assert len(known) == 1 + len(ledger)


def test_runs_are_as_long_as_readers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "TOKENS_PER_EVENT", 4)
    ledger = Ledger(2)
    events = ledger.read(put(None, list(range(10)), [4, 3, 2, 1, 0], (("salt", "s"),)))
    assert [list(event.token_ids) for event in events] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [event.extra_keys for event in events] == [[("s",), None], None, None], "the first block of the prefix says it"
    assert [event.parent_block_hash for event in events] == [None, events[0].block_hashes[-1], events[1].block_hashes[-1]]
    monkeypatch.setattr(ledgers, "TOKENS_PER_EVENT", 1)
    assert [len(event.block_hashes) for event in ledger.everything()] == [1] * 5, "a block is told whole, however large"


def test_what_is_told_does_not_change_with_what_comes_later() -> None:
    ledger = Ledger(1)
    ledger.read(put(None, [1, 2], [0, 1]))
    told = ledger.everything()
    ledger.read(gone(1))
    ledger.read(put(0, [5, 6], [1, 2]))
    (event,) = told
    assert list(event.token_ids) == [1, 2]


class Followed(RuleBasedStateMachine):
    """A radix tree, a ledger of its events, and two readers: of every event, and of what is told anew from time to time."""

    @initialize(size=st.integers(1, 3))
    def start(self, size: int) -> None:
        self.size = size
        self.cache = RadixPrefixCache(size)
        self.ledger, self.index, self.late = Ledger(size), BlockIndex(), BlockIndex()
        self.free = list(range(24))
        self.cache.subscribe(self.told)

    def told(self, event: Any) -> None:
        self.index.apply(KVEventBatch(0.0, self.ledger.read(event)))

    @rule(tokens=st.lists(st.integers(0, 2), max_size=12), space=st.sampled_from(SPACES))
    def insert(self, tokens: list[int], space: tuple[Any, ...]) -> None:
        count = len(tokens) // self.size
        if len(self.free) < count:
            try:
                self.free += self.cache.evict(count).tolist()
            except OutOfBlocksError:
                return
        blocks = [self.free.pop() for _ in range(count)]
        self.cache.insert_prefix(tokens, blocks, space)
        kept = set(self.cache.stored_blocks().tolist())
        self.free += [block for block in blocks if block not in kept]

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        size = self.cache.size_info.evictable_size // self.size
        self.free += self.cache.evict(min(count, size)).tolist()

    @rule(tokens=st.lists(st.integers(0, 2), max_size=12), space=st.sampled_from(SPACES), keep=st.integers(0, 3))
    def discard(self, tokens: list[int], space: tuple[Any, ...], keep: int) -> None:
        self.free += self.cache.discard_prefix(self.cache.match_prefix(tokens, space).handle, keep).tolist()

    @rule()
    def reset(self) -> None:
        self.free += self.cache.reset().tolist()

    @rule()
    def tell_anew(self) -> None:
        self.late.apply(KVEventBatch(0.0, [AllBlocksCleared(), *self.ledger.everything()]))
        assert self.late.parents() == self.index.parents()

    @invariant()
    def the_reader_has_what_is_stored(self) -> None:
        spaces, expected = {repr(space): space for space in SPACES}, {}
        for space, path in tree_of(self.cache):
            names = block_names([token for block in path for token in block], self.size, spaces[space])
            expected[names[-1]] = names[-2] if names[1:] else None
        assert self.index.parents() == expected
        assert len(self.ledger) == len(expected) == len(self.cache.stored_blocks())


Followed.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestFollowed = Followed.TestCase


class FollowedForLong(Followed):
    """The same, for long."""


FollowedForLong.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestFollowedForLong = pytest.mark.slow(FollowedForLong.TestCase)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=20), st.integers(1, 4))
def test_any_token_ids(tokens: list[int], size: int) -> None:
    count = len(tokens) // size
    ledger = Ledger(size)
    events = ledger.read(put(None, tokens[: count * size], list(range(count))))
    assert [name for event in events for name in event.block_hashes] == block_names(tokens, size)


def test_a_match_follows_the_blocks_one_by_one() -> None:
    choose = random.Random(5)  # noqa: S311 - no secret
    ledger, index = Ledger(2), BlockIndex()
    prompts = [[choose.randrange(2) for _ in range(12)] for _ in range(6)]
    cache = RadixPrefixCache(2)
    cache.subscribe(lambda event: index.apply(KVEventBatch(0.0, ledger.read(event), 3)))
    free = iter(range(100))
    for prompt in prompts:
        cache.insert_prefix(prompt, [next(free) for _ in range(6)], ("a",))
    for prompt in [*prompts, *([choose.randrange(2) for _ in range(13)] for _ in range(40))]:
        expected = cache.match_prefix(prompt, ("a",)).handle.cached_len
        assert index.cached_len(prompt, ("a",), rank=3) == expected
        assert index.cached_len(prompt, ("b",), rank=3) == index.cached_len(prompt, ("a",)) == 0
    whole = index.cached_len(prompts[0], ("a",), rank=3)
    second = block_names(prompts[0], 2, ("a",))[1]
    index.apply(KVEventBatch(0.0, [BlockRemoved([second])], 3))
    assert (whole, index.cached_len(prompts[0], ("a",), rank=3)) == (12, 2), "what is behind a hole is no prefix"
