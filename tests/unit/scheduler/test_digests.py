"""Digests over random histories: one for managers that are fed alike, at every call, and another as soon as a decision differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.layers import KeepAll, KeepWindow
from kvdock_conformance.checking.group_engine import group_of

BLOCK, BLOCKS = 2, 12
KINDS: dict[str, dict[str, Any]] = {
    "radix": {"block_size": BLOCK},
    "naive": {"block_size": BLOCK, "prefix": "naive"},
    "window": {"groups": [group_of(KeepAll(), BLOCK), group_of(KeepWindow(4), BLOCK)]},
}
Call = tuple[str, int, tuple[int, ...]]
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
CALLS: st.SearchStrategy[Call] = st.tuples(
    st.sampled_from(["begin", "begin", "extend", "commit", "fork", "truncate", "finish", "drop"]), st.integers(0, 6), IDS
)
HISTORIES = st.lists(CALLS, min_size=1, max_size=12)
quick = settings(max_examples=8, deadline=None)


class Fed:
    """A manager that is told a history; a call that has no sequence to go to, or no room, is left out."""

    def __init__(self, kind: str) -> None:
        self.manager = kvdock.CacheManager(BLOCKS, **KINDS[kind])
        self.manager.keep_digest()
        self.open: list[Any] = []

    def tell(self, call: Call) -> None:
        what, number, ids = call
        try:
            if what == "begin":
                self.open.append(self.begun(ids))
            elif self.open:
                self._go_on(what, self.open[number % len(self.open)], number, ids)
        except kvdock.OutOfBlocksError:
            pass

    def begun(self, ids: Sequence[int]) -> Any:
        seq = self.manager.begin(ids)
        self.manager.commit(seq, [], computed=len(ids))
        return seq

    def _go_on(self, what: str, seq: Any, number: int, ids: tuple[int, ...]) -> None:
        if what == "extend":
            self.manager.extend(seq, len(ids))
            self.manager.commit(seq, ids, computed=seq.num_tokens)
        elif what == "commit":
            self.manager.commit(seq, [], computed=seq.num_tokens)
        elif what == "fork":
            self.open.append(self.manager.fork(seq))
        elif what == "truncate":
            self.manager.truncate(seq, max(seq.num_tokens - number, seq.shortest))
        else:
            self.open.remove(seq)
            self.manager.finish(seq, keep=what == "finish")

    def ended(self) -> Fed:
        """Make room without a trace of what was open but in the digest."""
        while self.open:
            self.manager.finish(self.open.pop())
        return self

    def digest(self) -> bytes:
        return self.manager.digest()


def told(kind: str, history: list[Call], count: int = 2) -> list[Fed]:
    found = [Fed(kind) for _ in range(count)]
    for each in found:
        for call in history:
            each.tell(call)
        each.ended()
    return found


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(history=HISTORIES)
def test_fed_alike_they_are_alike_after_each_call(kind: str, history: list[Call]) -> None:
    one, other = Fed(kind), Fed(kind)
    assert one.digest() == other.digest()
    for call in history:
        one.tell(call)
        other.tell(call)
        assert one.digest() == other.digest(), call
    one.manager.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(history=HISTORIES)
def test_asking_changes_nothing(kind: str, history: list[Call]) -> None:
    """One is asked twice behind each call, the other at the end only."""
    one, other = Fed(kind), Fed(kind)
    for call in history:
        one.tell(call)
        other.tell(call)
        first = one.digest()
        one.manager.keep_digest()
        assert one.digest() == first
    assert one.digest() == other.digest()


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(history=HISTORIES, ids=IDS, at=st.integers(0, 6), after=HISTORIES)
def test_one_token_id_differs_for_good(kind: str, history: list[Call], ids: tuple[int, ...], at: int, after: list[Call]) -> None:
    one, other = told(kind, history)
    changed = list(ids)
    changed[at % len(ids)] += 3
    one.begun(ids)
    other.begun(changed)
    assert one.digest() != other.digest()
    for call in after:
        one.tell(call)
        other.tell(call)
    assert one.digest() != other.digest()


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(history=HISTORIES, ids=IDS, token=st.integers(0, 2))
def test_one_length_differs(kind: str, history: list[Call], ids: tuple[int, ...], token: int) -> None:
    """Whether it is a prompt that is longer, or as many ids in another number of calls."""
    one, other, third = told(kind, history, 3)
    one.begun(ids)
    other.begun((*ids, token))
    seq = third.begun(ids)
    third.manager.extend(seq, 1)
    third.manager.commit(seq, [token], computed=len(ids) + 1)
    assert len({each.digest() for each in (one, other, third)}) == 3


ONE_MORE: dict[str, Callable[[kvdock.CacheManager, Any], Any]] = {
    "a fork": lambda manager, seq: manager.fork(seq),
    "a fork that is over": lambda manager, seq: manager.finish(manager.fork(seq)),
    "a token cut": lambda manager, seq: manager.truncate(seq, seq.num_tokens - 1),
    "a block of room": lambda manager, seq: manager.extend(seq, BLOCK),
}


@pytest.mark.parametrize("more", ONE_MORE)
@pytest.mark.parametrize("kind", KINDS)
@quick
@given(history=HISTORIES, ids=IDS)
def test_one_more_call_differs(kind: str, more: str, history: list[Call], ids: tuple[int, ...]) -> None:
    one, other = told(kind, history)
    seq, _ = one.begun(ids), other.begun(ids)
    assert one.digest() == other.digest()
    ONE_MORE[more](one.manager, seq)
    assert one.digest() != other.digest()


def test_one_eviction_differs() -> None:
    """Fed the same calls, but what one evicts first is what the other would keep longest."""
    digests = []
    for policy in ("lru", "lru", "fifo"):
        manager = kvdock.CacheManager(5, BLOCK, policy=policy)
        manager.keep_digest()
        for first in (1, 2, 1):
            ids = [first] * 2 * BLOCK + [9]
            seq = manager.begin(ids)
            manager.commit(seq, [], computed=len(ids))
            manager.finish(seq)
        before = manager.digest()
        manager.begin([3] * 2 * BLOCK)
        digests.append((before, manager.digest()))
    assert len({before for before, _ in digests}) == 1, "so far there was room for all"
    assert digests[0] == digests[1]
    assert digests[0][1] != digests[2][1]
