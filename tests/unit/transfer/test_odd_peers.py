"""Transports that do not keep their contract, layouts that no pool has, messages out of order, and streams cut anywhere."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.errors import IndexRangeError, PluginError, TransferError
from kvdock.transfer import PoolLayout, Runs, Spans, TicketState, gather, spans
from kvdock.transfer.messages import BEAT, Stop
from kvdock.transfer.wire import written
from support_slow import examples
from support_transfer import AGAIN, Clock, Rank, Side, holds, relay

SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 2, 2),), 256, torch.bfloat16)
PROMPT = list(range(3, 17))


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    clock = Clock()
    owner, asker = Rank("p", SPEC, clock), Rank("d", SPEC, clock)
    owner.meet(asker)
    return owner, asker


FIX = "Fix: report it to the transport's author"


@pytest.mark.parametrize("made", [None, 7, TicketState.DONE])
def test_an_expect_that_makes_no_ticket(made: Any, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    _, asker = ranks
    monkeypatch.setattr(asker.loop, "expect", lambda *_: made)
    seq = asker.manager.begin(PROMPT)
    with pytest.raises(PluginError) as caught:
        asker.exchange.ask("r", seq, ["p"])
    assert str(caught.value) == f"transport 'loop': expected a Ticket, got {made!r}. {FIX}"
    assert (seq.is_open, asker.exchange.num_open, asker.exchange.outgoing()) == (True, 0, [])
    asker.manager.abort(seq)
    asker.check()


@pytest.mark.parametrize("note", ["a text", None, b"x" * 1025])
def test_a_note_that_cannot_be_sent(note: Any, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    _, asker = ranks
    monkeypatch.setattr("support_transfer.LoopTicket.note", note)
    seq = asker.manager.begin(PROMPT)
    with pytest.raises(PluginError, match=r"^transport 'loop': note: expected at most 1024 bytes, got .*Fix: report it to the transport's"):
        asker.exchange.ask("r", seq, ["p"])
    assert [ticket.poll() for ticket in asker.loop.expected.values()] == [TicketState.FAILED], "nobody writes into its blocks"
    asker.manager.abort(seq)
    asker.check()


def test_a_note_goes_to_the_push_of_the_peer_that_it_is_for(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, asker = ranks
    told = []
    push = owner.loop.push
    monkeypatch.setattr(owner.loop, "push", lambda peer, runs, tag, note: told.append((peer, note)) or push(peer, runs, tag, note))
    monkeypatch.setattr("support_transfer.LoopTicket.note", bytes(range(256)) * 4)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    assert told == [("d", bytes(range(256)) * 4)]


def test_each_step_lets_the_transport_go_on(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(ranks[0].loop, "poll", lambda: steps.append(1))
    for _ in range(3):
        ranks[0].exchange.poll()
    assert len(steps) == 3, "also where nothing is pending here: a peer's bytes may depend on it"


def test_a_push_that_makes_no_ticket_is_told_to_the_asker(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, asker = ranks
    monkeypatch.setattr(owner.loop, "push", lambda *_: None)
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    assert relay(owner, asker) == [transfer]
    said = f"transport 'loop': expected a Ticket, got None. {FIX}"
    assert str(transfer.error) == f"blocks of 'r': expected peer 'p' to send them, got {said}"
    asker.check()
    owner.exchange.cancel(offered, "it does not work")
    assert relay(owner) == [offered]
    owner.check()


def test_one_of_two_peers_that_cannot_be_expected_leaves_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    asker, owners = Rank("d", SPEC, clock), [Rank(f"p{rank}", SPEC, clock, 2, rank) for rank in range(2)]
    asker.meet(*owners)
    real = asker.loop.expect

    def expect(peer: str, runs: Spans, tag: int) -> Any:
        if peer == "p1":
            raise MemoryError("no more")
        return real(peer, runs, tag)

    monkeypatch.setattr(asker.loop, "expect", expect)
    seq = asker.manager.begin(PROMPT)
    with pytest.raises(MemoryError, match="no more"):
        asker.exchange.ask("r", seq, ["p0", "p1"])
    assert [(ticket.state, ticket.error) for ticket in asker.loop.expected.values()] == [
        (TicketState.FAILED, "another peer could not be asked")
    ]
    asker.manager.abort(seq)
    asker.check()


@pytest.mark.parametrize("described", ["é", "\u0661", "AAA", "A===", "!!!!", "\ud800"])
def test_what_a_transport_describes_is_base64(described: str, ranks: tuple[Rank, Rank]) -> None:
    owner, asker = ranks
    body = json.loads(asker.exchange.hello.split(b"\n", 1)[1])
    with pytest.raises(TransferError, match=r"^hello of peer 'x': described: expected base64, got .+"):
        owner.exchange.connect("x", written("hello", body | {"described": described}))
    assert list(owner.exchange.peers) == ["d"]


def test_a_layout_with_a_buffer_twice() -> None:
    """Each would be sent again: a message of a few MiB would have this side work for hours."""
    body = json.loads(Side.make(SPEC, 1, 4).layouts[0].to_bytes().split(b"\n", 1)[1])
    body["places"].append(body["places"][0])
    with pytest.raises(TransferError) as caught:
        PoolLayout.from_bytes("p0", written("layout", body))
    said = "places: expected each buffer of a layer once, got one that is there twice"
    fix = "run the same kvdock on both sides; if they do, the peer is broken or hostile: drop it"
    assert str(caught.value) == f"layout of peer 'p0': {said}. Fix: {fix}"


@pytest.mark.parametrize("order", list(itertools.permutations(["ask", "stop", "beat", "offer"])))
def test_messages_in_any_order(order: tuple[str, ...], ranks: tuple[Rank, Rank]) -> None:
    """What is stopped before it came is not known yet; what is asked for after that is served, or ends with the next word."""
    owner, asker = ranks
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    ((_, ask),) = asker.exchange.outgoing()
    tag = json.loads(ask.split(b"\n", 1)[1])["needed"]["tag"]
    messages = {"ask": ask, "stop": Stop(tag, "no more").to_bytes(), "beat": BEAT}
    offered = None
    for each in order:
        if each == "offer":
            offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
        else:
            owner.exchange.take("d", messages[each])
    assert offered is not None
    at = {each: place for place, each in enumerate(order)}
    owner.loop.move()
    ended = relay(owner, asker)
    if at["stop"] < at["ask"]:
        assert set(ended) == {offered, transfer}
        assert (offered.error, transfer.error) == (None, None)
        assert holds(asker, transfer.seq, PROMPT)
    elif at["offer"] > at["stop"]:
        assert (ended, owner.loop.pushed, offered.takers) == ([], {}, {"d"})
    else:
        assert ended == [offered]
        assert str(offered.error) == f"blocks of 'r' to peer 'd': expected all of them, got the peer stopped it: no more{AGAIN}"
    for rank in (owner, asker):
        rank.exchange.close()
        if transfer.seq.is_open and rank is asker:
            rank.manager.finish(transfer.seq)
        rank.check()


def test_an_ask_that_comes_twice_is_served_once(ranks: tuple[Rank, Rank]) -> None:
    owner, asker = ranks
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    ((_, ask),) = asker.exchange.outgoing()
    owner.exchange.take("d", ask)
    owner.exchange.take("d", ask)
    assert len(owner.loop.pushed) == 1
    ((peer, told),) = owner.exchange.outgoing()
    assert peer == "d"
    said, fix = "expected one of [], which have not asked yet, got 'd'", "name it when they are offered; it asks once"
    assert json.loads(told.split(b"\n", 1)[1])["reason"] == f"blocks of 'r': taker: {said}. Fix: {fix}"


@given(
    pieces=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=8),
    cuts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
)
@settings(max_examples=examples(30), deadline=None)
def test_any_part_of_a_stream_is_that_part(pieces: list[tuple[int, int]], cuts: tuple[int, int]) -> None:
    memory = [torch.arange(400, dtype=torch.int64).to(torch.uint8)]
    begins, sizes, at = list[int](), list[int](), 0
    for gap, size in pieces:
        begins.append(at + gap)
        sizes.append(size)
        at += gap + size
    runs = Runs(*(np.array(each, dtype=np.int64) for each in ([0] * len(sizes), begins, sizes)))
    whole = gather(memory, runs)
    assert whole.tolist() == [(begin + step) % 256 for begin, size in zip(begins, sizes, strict=True) for step in range(size)]
    start, stop = sorted(min(cut, sum(sizes)) for cut in cuts)
    part = runs.part(start, stop)
    assert gather(memory, part).tolist() == whole[start:stop].tolist()
    assert int(part.nbytes.sum()) == stop - start
    assert bool((part.nbytes > 0).all())


@pytest.mark.parametrize("wanted", [[], [(0, 0)], [(3, 3), (5, 5)]])
def test_nothing_that_is_wanted_is_no_run_whatever_the_tables(wanted: list[tuple[int, int]]) -> None:
    layout = Side.make(SPEC, 1, 8).layouts[0]
    for tables in ([[0, 1]], [[3, 3]]):
        found = spans(layout, layout, tables, tables, [wanted])
        assert (len(found), found.total, found.nbytes.dtype) == (0, 0, np.dtype(np.int64))


def test_one_block_and_the_same_block_twice() -> None:
    layout = Side.make(SPEC, 1, 8).layouts[0]
    one = spans(layout, layout, [[5]], [[7]], [[(0, 4)]])
    assert one.nbytes.tolist() == [64, 64], "keys and values"
    assert (one.target - one.source).tolist() == [128, 128]
    twice = spans(layout, layout, [[5, 5]], [[7, 8]], [[(0, 8)]])
    assert (twice.nbytes.tolist(), twice.source[0], twice.source[1]) == ([64] * 4, one.source[0], one.source[0])
    with pytest.raises(IndexRangeError, match=r"^spans: source_tables\[0\]: expected at least 1 blocks of 4 for 1 tokens, got 0"):
        spans(layout, layout, [[]], [[7]], [[(0, 1)]])
