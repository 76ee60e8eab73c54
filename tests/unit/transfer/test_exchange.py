"""Sequences that move between ranks: what comes is what was computed, and whatever fails, no block is lost and nothing waits for ever."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import attrs
import pytest
import torch

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, TransferError
from kvdock.layers import Buffer, StateLayerSpec
from kvdock.transfer import Exchange, Inbound, Limits, Outbound
from support_transfer import AGAIN, Clock, Rank, holds, relay, sealed

HEADS = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 2, 2), kvdock.LayerSpec(4, 2, 3, 5)), 256, torch.bfloat16)
WINDOWS = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 4, 4), kvdock.LayerSpec(4, 4, 4, 4, window=5)), 4096, torch.bfloat16)
STATES = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 4, 4), StateLayerSpec([Buffer("s", (64,), torch.float32)])), 4096, torch.bfloat16)
LIMITS = Limits(deadline=60, silence=10, beat=2, grace=3)
SILENT = ". Fix: see whether it still runs; if it does, have it call poll and outgoing in each step, or raise Limits.silence"
PROMPT = list(range(3, 17))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pair(clock: Clock, spec: kvdock.KVSpec = HEADS) -> tuple[Rank, Rank]:
    """Return an owner and an asker that know each other."""
    owner, asker = Rank("p", spec, clock, limits=LIMITS), Rank("d", spec, clock, limits=attrs.evolve(LIMITS, deadline=59), block_size=8)
    owner.meet(asker)
    return owner, asker


@pytest.mark.parametrize(("owners", "askers"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("asks_first", [False, True], ids=["offered first", "asked first"])
def test_what_comes_is_what_was_computed(owners: int, askers: int, clock: Clock, *, asks_first: bool) -> None:
    spec = HEADS
    sources = [Rank(f"p{rank}", spec, clock, owners, rank) for rank in range(owners)]
    targets = [Rank(f"d{rank}", spec, clock, askers, rank, block_size=8, head_layout=kvdock.HeadLayout.HND) for rank in range(askers)]
    for source in sources:
        source.meet(*targets)
    order: list[Callable[[], list[object]]] = [
        lambda: [source.exchange.offer("r", source.computed(PROMPT), [target.name for target in targets]) for source in sources],
        lambda: [target.exchange.ask("r", target.manager.begin(PROMPT), [source.name for source in sources]) for target in targets],
    ]
    got = [call() for call in (reversed(order) if asks_first else order)]
    inbound = [each for part in got for each in part if isinstance(each, Inbound)]
    assert relay(*sources, *targets) == []
    for source in sources:
        source.loop.move()
    ended = relay(*sources, *targets)
    assert {transfer.error for transfer in ended} == {None}
    assert len(ended) == owners + askers, "each owner knows who comes to it, and waits for nobody else"
    for target, transfer in zip(targets, inbound, strict=True):
        assert transfer.is_over
        assert transfer.seq.computed == len(PROMPT)
        assert holds(target, transfer.seq, PROMPT)
        target.manager.finish(transfer.seq)
        assert target.manager.plan(PROMPT).cached_len == 8, "what came can be shared"
    for rank in (*sources, *targets):
        rank.check()


@pytest.mark.parametrize("spec", [WINDOWS, STATES], ids=["windows", "states"])
def test_layers_that_let_tokens_go_send_what_is_needed(spec: kvdock.KVSpec, clock: Clock) -> None:
    owner, asker = pair(clock, spec)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    seq = asker.manager.begin(PROMPT)
    asker.cache.copy_blocks(torch.from_numpy(seq.block_pairs))
    asker.exchange.ask("r", seq, ["p"])
    relay(owner, asker)
    owner.loop.move()
    assert [transfer.error for transfer in relay(owner, asker)] == [None, None]
    assert holds(asker, seq, PROMPT)
    asker.manager.finish(seq)
    owner.check()
    asker.check()


def test_what_is_cached_is_not_sent_again(clock: Clock) -> None:
    owner, asker = pair(clock)
    asker.manager.finish(asker.computed(PROMPT))
    seq = asker.manager.begin([*PROMPT[:10], 7, 7])
    assert seq.cached_len == 8
    owner.exchange.offer("r", owner.computed([*PROMPT[:10], 7, 7]), ["d"])
    asker.exchange.ask("r", seq, ["p"])
    relay(owner, asker)
    owner.loop.move()
    (sent,) = owner.loop.pushed.values()
    assert sent.runs.total == 4 * (4 * 2 * 2 + 4 * 3 + 2 * 5) * 2
    relay(owner, asker)
    assert holds(asker, seq, [*PROMPT[:10], 7, 7], start=8)


def test_an_owner_that_falls_silent_is_given_up(clock: Clock) -> None:
    _, asker = pair(clock)
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    clock.now += 9
    assert relay(asker) == []
    asker.check(free=False)
    clock.now += 2
    assert relay(asker) == [transfer]
    assert str(transfer.error) == f"peer 'p': expected a word within 10 s, got none{SILENT}"
    asker.check()
    with pytest.raises(kvdock.StaleHandleError):
        transfer.seq.block_table()


def test_beats_keep_a_slow_owner_alive_until_the_deadline(clock: Clock) -> None:
    owner, asker = pair(clock)
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    for _ in range(29):
        assert relay(owner, asker) == []
        clock.now += 2
    clock.now += 1.5
    assert relay(owner, asker) == [transfer]
    assert str(transfer.error) == f"blocks of 'r': expected all within the deadline, got not those of p{AGAIN}"
    asker.check()
    owner.check()
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    assert relay(owner, asker) == [], "the owner was told, and does not serve what is over"
    assert not owner.loop.pushed


def test_a_sender_that_dies_takes_no_block_with_it(clock: Clock) -> None:
    owners = [Rank(f"p{rank}", HEADS, clock, 2, rank, limits=LIMITS) for rank in range(2)]
    asker = Rank("d", HEADS, clock, limits=LIMITS)
    asker.meet(*owners)
    for owner in owners:
        owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p0", "p1"])
    relay(*owners, asker)
    owners[0].loop.move()
    assert relay(*owners, asker)[0].name == "r", "one of the two has sent its half"
    asker.exchange.drop("p1", "its process is gone")
    assert relay(owners[0], asker) == [transfer]
    assert str(transfer.error) == f"blocks of 'r': expected peer 'p1', got none: its process is gone{AGAIN}"
    asker.check()
    owners[0].check()
    owners[1].loop.move()  # what comes late goes nowhere
    with pytest.raises(TransferError, match=r"^peer 'p1': expected one that is connected: 'p0', got another\. Fix: connect it first$"):
        asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p0", "p1"])


def test_a_receiver_that_dies_takes_no_block_with_it(clock: Clock) -> None:
    owner, asker = pair(clock)
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    owner.check(free=False)
    owner.exchange.drop("d", "its process is gone")
    assert relay(owner) == [offered]
    assert str(offered.error) == f"blocks of 'r' to peer 'd': expected all of them, got disconnected{AGAIN}"
    owner.check()
    assert owner.manager.plan(PROMPT).cached_len == 12, "what was computed stays cached"


def test_an_offer_to_somebody_who_is_gone_ends_at_once(clock: Clock) -> None:
    owner, _ = pair(clock)
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    owner.exchange.drop("d", "its process is gone")
    assert owner.exchange.poll() == [offered]
    assert str(offered.error) == f"blocks of 'r' to peer 'd': expected all of them, got its process is gone{AGAIN}"
    owner.check()


def test_an_offer_that_nobody_takes_ends(clock: Clock) -> None:
    owner, _ = pair(clock)
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    clock.now += 61
    assert owner.exchange.poll() == [offered]
    assert str(offered.error) == f"blocks of 'r': expected all within the deadline, got nothing taken by d{AGAIN}"
    owner.check()


def test_an_ask_for_what_nobody_offers_ends(clock: Clock) -> None:
    owner, asker = pair(clock)
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    clock.now += 1
    owner.exchange.cancel(owner.exchange.offer("other", owner.computed([1, 2]), ["d"]), "not wanted")
    for _ in range(31):
        relay(owner, asker)
        clock.now += 2
    assert transfer.error is not None
    owner.check()
    asker.check()


def test_blocks_are_held_while_bytes_may_move_and_the_peer_is_dropped_then(clock: Clock) -> None:
    owner, asker = pair(clock)
    asker.loop.stuck = True
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    asker.exchange.cancel(transfer, "the user has gone")
    clock.now += 2
    assert relay(owner, asker) == []
    assert transfer.seq.is_open
    assert asker.manager.available_size < asker.free, "a remote write might still land in them"
    assert repr(transfer) == f"Inbound('r', 14 tokens, failed: {transfer.error}, {{p: pending}})"
    clock.now += 2
    assert relay(owner, asker) == [transfer]
    assert "p" not in asker.exchange.peers
    asker.check()


def test_both_sides_hear_of_an_end(clock: Clock) -> None:
    owner, asker = pair(clock)
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    asker.exchange.cancel(transfer, "no more")
    assert relay(owner, asker) == [transfer, offered]
    why = f"expected all of them, got a call to cancel: no more{AGAIN}"
    assert str(offered.error) == f"blocks of 'r' to peer 'd': expected all of them, got the peer stopped it: blocks of 'r': {why}"
    owner.loop.move()
    asker.check()
    owner.check()
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    owner.exchange.cancel(offered, "shutting down")
    assert set(relay(owner, asker)) == {transfer, offered}
    why = f"expected all of them, got a call to cancel: shutting down{AGAIN}"
    assert str(transfer.error) == f"blocks of 'r': expected peer 'p' to send them, got blocks of 'r': {why}"
    asker.check()
    owner.check()


def test_closing_gives_everything_back(clock: Clock) -> None:
    owner, asker = pair(clock)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    asker.loop.stuck = True
    asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    relay(owner, asker)
    for rank in (owner, asker):
        (ended,) = rank.exchange.close()
        assert ended.error is not None
        rank.check()


def test_other_token_ids_under_one_name_are_refused(clock: Clock) -> None:
    owner, asker = pair(clock)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin([*PROMPT[:-1], 99]), ["p"])
    assert relay(owner, asker) == [transfer]
    assert "ask of peer 'd' for 'r': digest: expected the token ids that are offered, got others. Fix: use one name" in str(transfer.error)
    asker.check()
    assert not owner.loop.pushed


def test_namespaces_are_told_apart(clock: Clock) -> None:
    owner, asker = pair(clock)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    asker.exchange.ask("r", asker.manager.begin(PROMPT, ("a tenant",)), ["p"])
    (transfer,) = relay(owner, asker)
    assert "digest" in str(transfer.error)


def test_more_tokens_than_are_offered_are_refused(clock: Clock) -> None:
    owner, asker = pair(clock)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"], num_tokens=8)
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    assert relay(owner, asker) == [transfer]
    why = "expected at most 8, which are offered, got 14. Fix: give ask and offer the same num_tokens"
    assert str(transfer.error) == f"blocks of 'r': expected peer 'p' to send them, got ask of peer 'd' for 'r': num_tokens: {why}"


def test_a_second_taker_of_what_is_for_one_is_refused(clock: Clock) -> None:
    owner, asker = pair(clock)
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    first, second = (asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"]) for _ in range(2))
    assert relay(owner, asker) == [second]
    assert "blocks of 'r': taker: expected one of [], which have not asked yet, got 'd'" in str(second.error)
    owner.loop.move()
    assert first in relay(owner, asker)
    assert first.error is None


def test_wrong_calls_change_nothing(clock: Clock) -> None:
    owner, asker = pair(clock)
    seq = owner.computed(PROMPT)
    with pytest.raises(
        ArgumentValueError, match=r"Exchange\.offer: num_tokens: expected 1 to 14 tokens, which are computed and kept, got 15"
    ):
        owner.exchange.offer("r", seq, ["d"], num_tokens=15)
    with pytest.raises(TransferError, match="peer 'x': expected one that is connected: 'd', got another"):
        owner.exchange.offer("r", seq, ["d", "x"])
    owner.exchange.offer("r", seq, ["d"])
    with pytest.raises(ArgumentValueError, match=r"Exchange\.offer: name: expected a new one, got 'r'\. Fix: wait"):
        owner.exchange.offer("r", seq, ["d"])
    wanted = asker.manager.begin(PROMPT)
    with pytest.raises(ArgumentValueError, match=r"Exchange\.ask: expected 0 <= start <= num_tokens <= 14, .*, got start=0, num_tokens=15"):
        asker.exchange.ask("r", wanted, ["p"], num_tokens=15)
    with pytest.raises(ArgumentValueError, match=r"Exchange\.ask: peers: expected all 1064 bytes, got 0, where \. Fix: name every rank"):
        asker.exchange.ask("r", wanted, [])
    asker.loop.connected.clear()
    with pytest.raises(TransferError, match="a broken connection"):
        asker.exchange.ask("r", wanted, ["p"])
    assert asker.exchange.num_open == 0
    assert wanted.is_open
    with pytest.raises(ArgumentTypeError, match=r"Exchange: transport: expected a Transport, got 3\. Fix: make one"):
        Exchange(owner.manager, owner.cache, 3, model="m")  # type: ignore[arg-type]  # on purpose


def test_ranks_that_are_left_out_are_missed(clock: Clock) -> None:
    owners = [Rank(f"p{rank}", HEADS, clock, 2, rank) for rank in range(2)]
    asker = Rank("d", HEADS, clock)
    asker.meet(*owners)
    with pytest.raises(ArgumentValueError, match="expected all 1064 bytes, got 532, where p1 is rank 1 of 2"):
        asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p1"])
    assert not asker.exchange.outgoing()


REFUSED: dict[str, tuple[Callable[[Clock], Rank], str]] = {
    "model": (lambda clock: Rank("d", HEADS, clock, model="other"), "layout of peer 'd': expected keys and values of the same model"),
    "shape": (lambda clock: Rank("d", WINDOWS, clock), "layout of peer 'd': expected keys and values of the same model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_peer_with_another_model_is_refused_by_name(name: str, clock: Clock) -> None:
    make, text = REFUSED[name]
    owner, other = Rank("p", HEADS, clock), make(clock)
    with pytest.raises(TransferError, match=text):
        owner.exchange.connect("d", other.exchange.hello)
    assert not owner.exchange.peers
    assert not owner.loop.connected


HELLOS = {
    "version": (lambda hello: hello.replace(b"transfer/2", b"transfer/1", 1), "message of peer 'd': expected version 2 .*, got version 1"),
    "kind": (lambda hello: hello.replace(b" hello", b" layout", 1), "message of peer 'd': expected a hello, got 'layout'"),
    "transport": (lambda hello: hello.replace(b'"loop"', b'"nixl"', 1), "peer 'd': expected the transport 'loop', as here, got 'nixl'"),
    "base64": (lambda hello: hello.replace(b'"described":"', b'"described":"?', 1), "hello of peer 'd': described: expected base64, got"),
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_hello_that_is_none_is_refused_by_name(name: str, clock: Clock) -> None:
    change, text = HELLOS[name]
    owner, asker = (Rank(name, HEADS, clock) for name in "pd")
    with pytest.raises(TransferError, match=text):
        owner.exchange.connect("d", sealed(change(asker.exchange.hello)))
    owner.exchange.connect("d", asker.exchange.hello)
    with pytest.raises(TransferError, match=r"peer 'd': expected a new one, got one that is connected\. Fix: drop it first"):
        owner.exchange.connect("d", asker.exchange.hello)


def asked(tag: bytes, tables: bytes, wanted: bytes, name: bytes = b"r") -> bytes:
    """Write an ask of 4 tokens by hand."""
    needed = b'{"tag":%b,"wanted":%b,"note":""}' % (tag, wanted)
    text = b'kvdock-transfer/2 ask\n{"name":"%b","num_tokens":4,"digest":"","tables":%b,"needed":%b,"rest":[]}'
    return text % (name, tables, needed)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"kvdock-transfer/2 hello\n{}", "message of peer 'd': expected an ask, a stop or a beat, got 'hello'"),
        (b"kvdock-transfer/1 beat\n{}", "message of peer 'd': expected version 2"),
        (b'kvdock-transfer/2 stop\n{"tag":-1,"reason":""}', "stop of peer 'd': tag: expected an integer from 0"),
        (asked(b"1", b"[[0]]", b"[[4,0]]"), "ask of peer 'd': needed: wanted: expected pairs"),
        (asked(b"1", b"[[0]]", b"[[4]]"), "ask of peer 'd': needed: wanted: expected pairs"),
        (asked(b"1", b"[7]", b"[[0,4]]"), "ask of peer 'd': tables: expected a list"),
    ],
)
def test_messages_that_nobody_says(message: bytes, text: str, clock: Clock) -> None:
    owner, _ = pair(clock)
    with pytest.raises(TransferError, match=text):
        owner.exchange.take("d", sealed(message))
    with pytest.raises(TransferError, match="peer 'x': expected one that is connected: 'd', got another"):
        owner.exchange.take("x", message)


def ask_of(owner: Rank, asker: Rank, changes: dict[bytes, bytes]) -> str:
    """Send an ask with something else in it, and return what the asker is told."""
    owner.exchange.offer("r", owner.computed(PROMPT), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    ((_, message),) = asker.exchange.outgoing()
    for old, new in changes.items():
        assert old in message
        message = message.replace(old, new)
    owner.exchange.take("d", sealed(message))
    relay(owner, asker)
    return str(transfer.error)


TABLE = b'"tables":[[1,2]]'
BAD_ASKS = {
    "too few blocks": ({TABLE: b'"tables":[[1]]'}, r"target_tables\[0\]: expected at least 2 blocks of 8 for 14 tokens, got 1"),
    "a block outside": ({TABLE: b'"tables":[[1,24]]'}, r"target_tables\[0\]: expected blocks from 0 to 23, got 24"),
    "no table": ({TABLE: b'"tables":[]'}, "target_tables: expected 1, one for each group, got 0"),
    "tokens that are not there": ({b"[[0,14]]": b"[[0,15]]"}, r"needed: expected tokens that layer 0 has: \[\(0, 14\)\], got 0 to 15"),
    "many tokens": ({b"[[0,14]]": b"[[0,2147483648]]"}, "needed: expected tokens that layer 0 has"),
    "groups": ({b"[[0,14]]": b"[[0,14],[0,1]]"}, "needed: expected one for each of 1 groups, got 2"),
}


@pytest.mark.parametrize("name", BAD_ASKS)
def test_a_block_list_that_does_not_fit_is_refused_and_nothing_is_lost(name: str, clock: Clock) -> None:
    changes, text = BAD_ASKS[name]
    owner, asker = pair(clock)
    assert re.search(text, ask_of(owner, asker, changes))
    asker.check()
    assert not owner.loop.pushed
    clock.now += 61
    relay(owner)
    owner.check()


def test_a_peer_cannot_make_another_wait_for_ever_by_asking(clock: Clock) -> None:
    owner, asker = pair(clock)
    ask = asked(b"%d", b"[[0]]", b"[[0,4]]", name=b"n%d")
    for number in range(4096):
        owner.exchange.take("d", sealed(ask % (number, number)))
    assert owner.exchange.outgoing() == []
    owner.exchange.take("d", sealed(ask % (5000, 5000)))
    ((peer, told),) = owner.exchange.outgoing()
    assert peer == "d"
    assert b"4096 asks wait already" in told
    clock.now += 61
    owner.exchange.poll()
    assert len(owner.exchange.outgoing()) == 4096, "each is told that nobody offers it"
    asker.check()


def test_asks_that_wait_have_so_many_blocks_in_all(clock: Clock) -> None:
    owner, _ = pair(clock)
    table = b",".join([b"0"] * (1 << 20))
    for number in range(4):
        owner.exchange.take("d", sealed(asked(b"%d" % number, b"[[%b]]" % table, b"[[0,4]]")))
    assert owner.exchange.outgoing() == []
    owner.exchange.take("d", sealed(asked(b"5", b"[[0]]", b"[[0,4]]")))
    ((_, told),) = owner.exchange.outgoing()
    assert b"4 asks wait already" in told


def test_an_asker_that_falls_silent_keeps_no_other_from_its_blocks(clock: Clock) -> None:
    owner = Rank("p", HEADS, clock, limits=LIMITS)
    askers = [Rank(f"d{number}", HEADS, clock, 2, number, limits=LIMITS) for number in range(2)]
    owner.meet(*askers)
    offered = owner.exchange.offer("r", owner.computed(PROMPT), ["d0", "d1"])
    wanted = [asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"]) for asker in askers]
    relay(owner, *askers)
    for _ in range(4):
        clock.now += 3
        assert relay(owner, askers[1]) == []
    why = f"peer 'd0': expected a word within 10 s, got none{SILENT}"
    assert str(offered.error) == f"blocks of 'r' to peer 'd0': expected all of them, got {why}"
    owner.loop.move()
    assert set(relay(owner, askers[1])) == {offered, wanted[1]}
    assert wanted[1].error is None
    assert askers[0].exchange.poll() == [wanted[0]], "that one hears nothing, either"
    owner.check()
    askers[0].check()


def test_a_sequence_that_was_ended_by_somebody_else_is_not_ended_twice(clock: Clock) -> None:
    owner, asker = pair(clock)
    seq = owner.computed(PROMPT)
    offered = owner.exchange.offer("r", seq, ["d"])
    owner.manager.finish(seq)
    owner.exchange.drop("d", "gone")
    assert owner.exchange.poll() == [offered]
    owner.check()
    transfer = asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])
    asker.manager.abort(transfer.seq)
    asker.exchange.cancel(transfer, "no more")
    assert asker.exchange.poll() == [transfer]
    asker.check()


@pytest.mark.parametrize(("name", "value"), [*itertools.product(["deadline", "silence", "beat", "grace"], [0, -1, "3", True])])
def test_limits_are_numbers_above_zero(name: str, value: object) -> None:
    with pytest.raises(ArgumentValueError, match=f"Limits: {name}: expected a number above 0, got {value!r}"):
        Limits(**{name: value})  # type: ignore[arg-type]  # on purpose


def test_a_beat_fits_into_the_silence() -> None:
    with pytest.raises(ArgumentValueError, match="Limits: beat: expected less than silence, 3, got 3"):
        Limits(silence=3, beat=3)


def test_kinds_of_transfers(clock: Clock) -> None:
    owner, asker = pair(clock)
    assert isinstance(owner.exchange.offer("r", owner.computed(PROMPT), ["d"]), Outbound)
    assert repr(asker.exchange.ask("r", asker.manager.begin(PROMPT), ["p"])) == "Inbound('r', 14 tokens, open, {p: pending})"
