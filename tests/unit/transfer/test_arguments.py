"""What callers of an exchange pass: wrong things are refused where they are passed, and no peer, block or ticket has to do with them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, StaleHandleError, TransferError, WrongThreadError
from kvdock.transfer import Exchange, Limits, PoolLayout
from support_transfer import AGAIN, Clock, Loop, Rank, holds, relay

SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 2, 2),), 256, torch.bfloat16)
PROMPT = list(range(3, 17))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pair(clock: Clock) -> tuple[Rank, Rank]:
    owner, asker = Rank("p", SPEC, clock), Rank("d", SPEC, clock, block_size=8)
    owner.meet(asker)
    return owner, asker


def untouched(rank: Rank) -> None:
    """Check that nothing is under way."""
    assert (rank.exchange.num_open, rank.exchange.outgoing(), rank.loop.expected, rank.loop.pushed) == (0, [], {}, {})
    rank.manager.check_integrity()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("manager", None, "a CacheManager, got None. Fix: pass one of kvdock's own: CacheManager(...)"),
        ("cache", "x", "a GroupedCache, got 'x'. Fix: pass one of kvdock's own: GroupedCache(...)"),
        ("transport", Loop, f"a Transport, got {Loop!r}. Fix: make one with kvdock.transfer.create_transport"),
        ("limits", 5, "a Limits, got 5. Fix: pass one of kvdock's own: Limits(...)"),
        ("limits", 0, "a Limits, got 0. Fix: pass one of kvdock's own: Limits(...)"),
    ],
)
def test_what_an_exchange_cannot_be_made_of(name: str, value: Any, said: str, clock: Clock) -> None:
    rank = Rank("p", SPEC, clock)
    given: dict[str, Any] = {"manager": rank.manager, "cache": rank.cache, "transport": Loop("q"), "limits": None, name: value}
    with pytest.raises(ArgumentTypeError) as caught:
        Exchange(model="m", clock=clock, **given)
    assert str(caught.value) == f"Exchange: {name}: expected {said}"


@pytest.mark.parametrize(("blocks", "size"), [(25, 4), (24, 8), (24, 2)])
def test_the_manager_of_another_cache(blocks: int, size: int, clock: Clock) -> None:
    """Its block tables would say other tokens, or blocks that there are not."""
    rank = Rank("p", SPEC, clock)
    with pytest.raises(ArgumentValueError) as caught:
        Exchange(kvdock.CacheManager(blocks, size), rank.cache, Loop("q"), model="m")
    fix = "Fix: make it with CacheManager(cache.num_blocks, groups=cache.groups)"
    said = f"expected one of this cache, with blocks of [4] tokens, at most 24, got {blocks} blocks of [{size}]. {fix}"
    assert str(caught.value) == f"Exchange: manager: {said}"
    Exchange(kvdock.CacheManager(23, 4), rank.cache, Loop("q"), model="m")  # of a part of it


@pytest.mark.parametrize("model", [None, 5, b"m", "m" * 257])
def test_a_model_that_peers_would_refuse(model: Any, clock: Clock) -> None:
    fix = "Fix: name the weights, such as by a repository and its revision: peers are told it"
    with pytest.raises(ArgumentValueError) as caught:
        Rank("p", SPEC, clock, model=model)
    assert str(caught.value) == f"PoolLayout: model: expected a str of at most 256 characters, got {repr(model)[:80]}. {fix}"
    whole = Rank("p", SPEC, clock, model="m" * 256)
    layout = PoolLayout.of(whole.cache, whole.cache.rank, "\ud800" * 256)
    assert PoolLayout.from_bytes("p", layout.to_bytes()) == layout


@pytest.mark.parametrize("call", ["ask", "offer"])
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (7, ArgumentTypeError, "expected a str, got 7. Fix: pass what both sides call it"),
        (None, ArgumentTypeError, "expected a str, got None. Fix: pass what both sides call it"),
        (b"r", ArgumentTypeError, "expected a str, got b'r'. Fix: pass what both sides call it"),
        ("r" * 1025, ArgumentValueError, "expected at most 1024 characters, got 1025. Fix: pass a digest of it"),
    ],
)
def test_a_name_that_peers_would_take_for_hostile(call: str, name: Any, kind: type[Exception], said: str, clock: Clock) -> None:
    owner, asker = pair(clock)
    rank, peer = (asker, "p") if call == "ask" else (owner, "d")
    seq = rank.computed(PROMPT)
    with pytest.raises(kind) as caught:
        getattr(rank.exchange, call)(name, seq, [peer])
    assert str(caught.value) == f"Exchange.{call}: name: {said}"
    untouched(owner)
    untouched(asker)


@pytest.mark.parametrize("peers", ["p", b"p", 7, None, [7], [["p"]], {"p": 1}, iter(["p"])])
def test_peers_that_are_no_names(peers: Any, clock: Clock) -> None:
    owner, asker = pair(clock)
    calls = (
        ("ask: peers", lambda: asker.exchange.ask("r", asker.manager.begin(PROMPT), peers)),
        ("offer: takers", lambda: owner.exchange.offer("r", owner.computed(PROMPT), peers)),
    )
    for where, call in calls:
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        assert str(caught.value) == f'Exchange.{where}: expected a list of names of peers, got {repr(peers)[:80]}. Fix: pass ["name"]'
    untouched(owner)
    untouched(asker)


@pytest.mark.parametrize("which", ["ask num_tokens", "ask start", "offer num_tokens"])
@pytest.mark.parametrize("value", ["9", 9.0, True, [9], -1, np.float32(9), np.int64(-1)])
def test_counts_that_are_none(which: str, value: Any, clock: Clock) -> None:
    owner, asker = pair(clock)
    call, name = which.split()
    kind = ArgumentValueError if isinstance(value, int | np.integer) and not isinstance(value, bool) else ArgumentTypeError
    rank = asker if call == "ask" else owner
    seq = asker.manager.begin(PROMPT) if call == "ask" else owner.computed(PROMPT)
    with pytest.raises(kind, match=rf"^Exchange\.{call}: {name}: expected (an int of )?at least 0, got "):
        getattr(rank.exchange, call)("r", seq, ["p" if call == "ask" else "d"], **{name: value})
    assert seq.is_open
    untouched(rank)


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint8])
def test_counts_may_be_numpys(kind: type[Any], clock: Clock) -> None:
    """A peer is told them in JSON, which has ints only."""
    owner, asker = pair(clock)
    owner.exchange.offer("r", owner.computed(PROMPT), ("d",), num_tokens=kind(12))
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), {"p"}, num_tokens=kind(11), start=kind(0))  # type: ignore[arg-type] # a set is fine
    relay(owner, asker)
    owner.loop.move()
    assert [each.error for each in relay(owner, asker)] == [None, None]
    assert (transfer.num_tokens, transfer.seq.computed) == (11, 11)
    asker.manager.abort(transfer.seq)
    owner.check()


@pytest.mark.parametrize("call", ["ask", "offer"])
def test_a_sequence_that_is_none_closed_or_anothers(call: str, clock: Clock) -> None:
    owner, asker = pair(clock)
    rank, other, peer = (asker, owner, "p") if call == "ask" else (owner, asker, "d")
    closed = rank.computed(PROMPT)
    rank.manager.finish(closed)
    foreign = other.computed(PROMPT)
    fix = "Fix: begin it again, in this manager"
    wanted: list[tuple[Any, type[Exception], str]] = [
        (None, ArgumentTypeError, "expected sequences from begin() or fork(), got None"),
        (PROMPT, ArgumentTypeError, f"expected sequences from begin() or fork(), got {PROMPT}"),
        (closed, StaleHandleError, f"expected an open sequence of this manager, got one that is finished or aborted. {fix}"),
        (foreign, StaleHandleError, f"expected an open sequence of this manager, got another manager's: {foreign}. {fix}"),
    ]
    for seq, kind, said in wanted:
        with pytest.raises(kind) as caught:
            getattr(rank.exchange, call)("r", seq, [peer])
        assert str(caught.value) == f"Exchange.{call}: seq: {said}"
    assert foreign.is_open
    untouched(rank)


def test_a_sequence_is_in_one_transfer_at_a_time(clock: Clock) -> None:
    """The first that ends would give blocks away that the other still reads or writes."""
    owner, asker = pair(clock)
    seq, wanted = owner.computed(PROMPT), asker.manager.begin(PROMPT)
    owner.exchange.offer("one", seq, ["d"])
    transfer = asker.exchange.ask("one", wanted, ["p"])
    fix = "Fix: wait until that is over, or fork it first"
    for exchange, of, peer, call in (
        (owner.exchange, seq, "d", "offer"),
        (asker.exchange, wanted, "p", "ask"),
        (asker.exchange, wanted, "p", "offer"),
    ):
        with pytest.raises(ArgumentValueError) as caught:
            getattr(exchange, call)("two", of, [peer])
        assert str(caught.value) == f"Exchange.{call}: seq: expected one in no transfer, got that of 'one'. {fix}"
    relay(owner, asker)
    owner.loop.move()
    assert len(relay(owner, asker)) == 2
    assert holds(asker, wanted, PROMPT)
    again = asker.exchange.offer("two", transfer.seq, [])
    assert asker.exchange.poll() == [again], "what is over may be lent again; nobody wants it, so that is over, too"
    owner.check()
    asker.check()


def test_another_thread_is_refused(clock: Clock) -> None:
    owner, asker = pair(clock)
    seq, wanted, caught = owner.computed(PROMPT), asker.manager.begin(PROMPT), list[str]()

    def elsewhere() -> None:
        for call in (lambda: owner.exchange.offer("r", seq, ["d"]), lambda: asker.exchange.ask("r", wanted, ["p"])):
            try:
                call()
            except WrongThreadError as error:
                caught.append(str(error).split(" only")[0])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert caught == ["RadixPrefixCache: expected calls from thread 'MainThread'"] * 2
    untouched(owner)
    untouched(asker)


@pytest.mark.parametrize("value", [float("nan"), None, [], 1j, "inf", float("-inf")])
def test_limits_that_are_no_numbers_above_zero(value: Any) -> None:
    with pytest.raises(ArgumentValueError) as caught:
        Limits(deadline=value)
    assert str(caught.value) == f"Limits: deadline: expected a number above 0, got {value!r}. Fix: pass seconds, or leave it out"


def test_without_a_deadline(clock: Clock) -> None:
    rank = Rank("p", SPEC, clock, limits=Limits(deadline=float("inf")))
    rank.meet(Rank("d", SPEC, clock))
    offered = rank.exchange.offer("r", rank.computed(PROMPT), ["d"])
    clock.now += 1e12
    assert (rank.exchange.poll(), offered.is_over) == ([], False)
    rank.exchange.cancel(offered, "enough")
    assert rank.exchange.poll() == [offered]
    rank.exchange.cancel(offered, "again")
    assert str(offered.error) == f"blocks of 'r': expected all of them, got a call to cancel: enough{AGAIN}", (
        "what is over is not ended twice"
    )
    assert rank.exchange.poll() == []
    rank.check()
    with pytest.raises(TransferError, match="peer 'x': expected one that is connected: 'd', got another"):
        rank.exchange.take("x", b"")


@pytest.mark.parametrize("peer", [5, None, [], b"d"])
def test_a_peer_that_is_no_name(peer: Any, clock: Clock) -> None:
    owner, asker = pair(clock)
    with pytest.raises(ArgumentTypeError, match=r"^Exchange\.connect: peer: expected a str, got"):
        owner.exchange.connect(peer, asker.exchange.hello)
    assert list(owner.exchange.peers) == ["d"]


def test_a_closed_exchange_closes_its_transport_once_and_meets_nobody(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transport has let go of the pool: a peer that was connected then could be asked, and a push of its own read what is gone."""
    owner, asker = pair(clock)
    calls = []
    monkeypatch.setattr(owner.loop, "close", lambda: calls.append("close"))
    monkeypatch.setattr(owner.loop, "poll", lambda: calls.append("poll"))
    assert (owner.exchange.close(), owner.exchange.close(), owner.exchange.poll(), calls) == ([], [], [], ["close"])
    with pytest.raises(TransferError) as caught:
        owner.exchange.connect("d", asker.exchange.hello)
    assert str(caught.value) == "peer 'd': expected an open exchange, got a closed one. Fix: make another, with a transport of its own"
    assert dict(owner.exchange.peers) == {}


def test_a_namespace_that_cannot_be_written_leaves_no_ticket(clock: Clock) -> None:
    """A peer could not be told it; the ticket was pending for ever, and its blocks were given away."""
    _, asker = pair(clock)
    seq = asker.manager.begin(PROMPT, (10**5000,))
    with pytest.raises(ArgumentValueError, match=r"^namespace: expected integers of at most 4,300 digits, .*Fix: put a digest"):
        asker.exchange.ask("r", seq, ["p"])
    assert (asker.loop.expected, asker.exchange.num_open) == ({}, 0)
    asker.manager.abort(seq)
    untouched(asker)
