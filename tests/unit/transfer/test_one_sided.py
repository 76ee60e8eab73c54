"""Blocks by one-sided writes that land late, in pieces, in any order, or after somebody was given up."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, TransferError
from kvdock.transfer import OneSided, PoolLayout, Spans, TicketState
from kvdock.transfer.lanes import Shape
from kvdock.transfer.wire import as_text, written
from support_faults import Faults
from support_one_sided import Direct, Lanes
from support_transfer import Rank
from support_world import LIMITS, SPEC, World

LAYOUT = PoolLayout("m", 1, 0, 1, (4096,), (), ())


def runs(nbytes: int, source: int = 8, target: int = 1000) -> Spans:
    """Return a run of so many bytes."""
    return Spans(*(np.array([number], dtype=np.int64) for number in (0, source, 0, target, nbytes)))


class Pair:
    """A side that sends, with numbers in its memory, and one that receives, with zeros."""

    def __init__(self, **options: Any) -> None:
        self.a, self.b = Lanes("a", **options), Lanes("b", **options)
        random = np.random.default_rng(1).integers(1, 256, 4096, dtype=np.uint8)
        self.source, self.target = torch.from_numpy(random), torch.zeros(4096, dtype=torch.uint8)
        self.described = {"a": self.a.register(LAYOUT, [self.source]), "b": self.b.register(LAYOUT, [self.target])}
        self.meet()

    def meet(self) -> None:
        self.a.connect("b", LAYOUT, self.described["b"])
        self.b.connect("a", LAYOUT, self.described["a"])

    def begin(self, nbytes: int, tag: int = 5, target: int = 1000) -> tuple[Any, Any]:
        """Return the tickets of both sides."""
        expected = self.b.expect("a", runs(nbytes, target=target), tag)
        return self.a.push("b", runs(nbytes), tag, expected.note), expected

    def go(self, sides: str = "ab", times: int = 40) -> None:
        """Let sides go on."""
        for _ in range(times):
            for side in sides:
                getattr(self, side).poll()

    def came(self, nbytes: int, target: int = 1000) -> bool:
        """Whether so many bytes came, and no other was written."""
        whole = torch.zeros(4096, dtype=torch.uint8)
        whole[target : target + nbytes] = self.source[8 : 8 + nbytes]
        return torch.equal(self.target, whole)


@pytest.mark.parametrize("nbytes", [1, 95, 96, 97, 288, 289, 2000])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_pushed_comes_and_nothing_else_is_written(nbytes: int, parts: int) -> None:
    pair = Pair(parts=parts)
    pushed, expected = pair.begin(nbytes)
    pair.go()
    assert (pushed.poll(), expected.poll()) == (TicketState.DONE, TicketState.DONE)
    assert pair.came(nbytes)


@pytest.mark.parametrize("seed", range(8))
def test_in_pieces_and_in_any_order(seed: int) -> None:
    pair, chance = Pair(), random.Random(seed)  # noqa: S311 - what is drawn is a test case
    pair.a.writer.held = pair.b.writer.held = True
    pushed, expected = pair.begin(1500)
    for _ in range(3000):
        chance.choice([pair.a.writer, pair.b.writer]).land(chance)
        before = int((pair.target != 0).sum())
        pair.go(chance.choice("ab"), times=1)
        assert before in (*range(0, 1500, 96), 1500), "whole parts only"
    assert (pushed.state, expected.state, pair.came(1500)) == (TicketState.DONE, TicketState.DONE, True)


def test_a_part_is_not_there_until_all_of_it_is() -> None:
    pair = Pair()
    pair.a.writer.held = True
    pushed, expected = pair.begin(90)
    pair.go()
    (write,) = pair.a.writer.pending()
    write.target[10:] = write.source[10:]  # bytes and label, but for the first
    pair.go()
    assert (pushed.poll(), expected.poll(), pair.came(0)) == (TicketState.PENDING, TicketState.PENDING, True)
    write.land()
    pair.go()
    assert pair.came(90)


def test_no_more_is_on_its_way_than_there_are_slots() -> None:
    pair = Pair(parts=2)
    pair.begin(900)
    pair.go("a")
    assert len(pair.a.writer.writes) == 2, "the other side has not taken any"
    pair.go()
    assert pair.came(900)


def test_several_pushes_at_a_time_both_ways() -> None:
    pair = Pair()
    tickets = [ticket for number in range(3) for ticket in pair.begin(200, tag=number, target=1000 + 200 * number)]
    back = pair.a.expect("b", runs(50, target=3000), 7)
    tickets += [back, pair.b.push("a", runs(50, source=1000), 7, back.note)]
    pair.go()
    assert {ticket.poll() for ticket in tickets} == {TicketState.DONE}
    assert torch.equal(pair.target[1000:1600], pair.source[8:208].repeat(3))
    assert torch.equal(pair.source[3000:3050], pair.target[1000:1050])


def test_a_ticket_that_is_cancelled_is_over_and_what_comes_late_goes_nowhere() -> None:
    pair = Pair()
    pair.a.writer.held = True
    pushed, expected = pair.begin(500)
    pair.go()
    for ticket in (pushed, expected):
        ticket.cancel("too late")
        assert (ticket.poll(), ticket.error) == (TicketState.FAILED, "too late")
    others = pair.begin(40, tag=6)
    pair.a.writer.land()
    pair.a.writer.held = False
    pair.go()
    assert {ticket.poll() for ticket in others} == {TicketState.DONE}
    assert pair.came(40)


def test_a_push_that_the_peer_has_all_of_is_no_failure_when_it_begins_anew() -> None:
    pair = Pair()
    first = pair.begin(288)  # as much as there are slots
    pair.go("a", times=1)
    pair.go("b")
    second = pair.begin(60, tag=6, target=2000)
    pair.go()
    assert {ticket.poll() for ticket in (*first, *second)} == {TicketState.DONE}


def test_a_push_that_the_peer_gave_up_without_a_word() -> None:
    pair = Pair()
    first = pair.begin(900)
    pair.go(times=1)
    first[1].cancel("nobody was told")
    second = pair.begin(60, tag=6)
    pair.go()
    assert (first[0].poll(), first[0].error) == (TicketState.FAILED, "the peer began anew")
    assert second[1].poll() is TicketState.DONE


@pytest.mark.parametrize("who", ["a", "b"])
def test_one_side_that_lost_a_peer_and_found_it_again(who: str) -> None:
    """The other side was not told. What it still has is given up, and then both agree."""
    pair = Pair()
    pair.begin(250)
    pair.go()
    first = pair.begin(900, tag=6)
    pair.go(times=1)
    (pair.a if who == "a" else pair.b).disconnect("b" if who == "a" else "a")
    assert first["ab".index(who)].error == "it was disconnected"
    first[0].cancel("its transfer failed")
    first[1].cancel("its transfer failed")
    (pair.a if who == "a" else pair.b).connect("b" if who == "a" else "a", LAYOUT, pair.described["b" if who == "a" else "a"])
    pair.target.zero_()
    second = pair.begin(700, tag=7)
    pair.go()
    assert {ticket.poll() for ticket in second} == {TicketState.DONE}
    assert pair.came(700)


def test_writes_of_a_peer_that_was_given_up_change_nothing() -> None:
    pair = Pair(lanes=1)
    pair.a.writer.held = True
    _, expected = pair.begin(280)
    pair.go()
    late = list(pair.a.writer.pending())
    assert len(late) == 3
    pair.b.disconnect("a")
    assert (expected.poll(), expected.error) == (TicketState.FAILED, "it was disconnected")
    other = Lanes("c", lanes=1)
    memory = torch.arange(4096).to(torch.uint8)
    described = other.register(LAYOUT, [memory])
    other.connect("b", LAYOUT, pair.described["b"])
    pair.b.connect("c", LAYOUT, described)
    expected = pair.b.expect("c", runs(280), 9)  # in the lane that the late writes go to
    other.push("b", runs(280), 9, expected.note)
    other.poll()
    late[0].land()
    for _ in range(9):
        pair.b.poll()
        other.poll()
    assert not torch.equal(pair.target[1000:1096], pair.source[8:104])
    assert expected.poll() is TicketState.PENDING, "a part is lost, and what was written over it is not taken for it"
    assert pair.came(0)


def test_a_lane_is_not_used_again_before_its_writes_have_ended() -> None:
    pair = Pair(lanes=1)
    pair.a.writer.held = True
    pair.begin(50)
    pair.go("a")
    pair.a.disconnect("b")
    pair.a.connect("b", LAYOUT, pair.described["b"])
    note = pair.b.expect("a", runs(4), 6).note
    with pytest.raises(
        TransferError, match=r"peer 'b': expected a free lane of 1, got all in use by 'b', 1 by writes that .* pass more lanes"
    ):
        pair.a.push("b", runs(4), 6, note)
    pair.a.writer.land()
    pushed = pair.a.push("b", runs(4), 6, note)
    pair.a.writer.held = False
    pair.go("a")
    assert pushed.poll() is TicketState.DONE


def test_the_lane_that_is_taken_is_the_one_that_nobody_wrote_for_the_longest_time() -> None:
    pair, lanes = Pair(lanes=3), []
    for tag in range(4):
        lanes.append(int.from_bytes(pair.b.expect("a", runs(4), tag).note[:8], "little") // Shape(96, 3).lane)
        pair.b.disconnect("a")
        pair.b.connect("a", LAYOUT, pair.described["a"])
    assert lanes == [0, 1, 2, 0]


def test_a_write_that_fails_breaks_the_connection() -> None:
    pair = Pair()
    pushed, expected = pair.begin(300)
    pair.go("a", times=1)
    pair.a.writer.fails = True
    pair.go("a")
    assert pushed.poll() is TicketState.FAILED
    fix = "see whether it still runs and what the engine logged, and connect it again"
    assert pushed.error == f"peer 'b': expected a write that comes to an end, got one that failed. Fix: {fix}"
    with pytest.raises(TransferError, match="peer 'b': expected a connection, got a connection that is broken: peer 'b': expected a write"):
        pair.a.push("b", runs(4), 6, expected.note)
    pair.b.writer.fails = True
    pair.go("b")
    assert expected.poll() is TicketState.FAILED, "the peer cannot be told what was taken"
    pair.a.disconnect("b")
    pair.b.disconnect("a")
    pair.a.writer.fails = pair.b.writer.fails = False
    pair.meet()
    pair.target.zero_()
    pair.begin(300)
    pair.go()
    assert pair.came(300)


def test_an_engine_that_raises_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pushed, _ = pair.begin(300)
    monkeypatch.setattr(pair.a.writer, "progress", lambda: 1 / 0)
    pair.go("a")
    assert (pushed.poll(), pushed.error) == (TicketState.FAILED, "division by zero")


@pytest.mark.parametrize(("theirs", "total"), [(40, 50), (50, 40)])
def test_another_number_of_bytes_than_is_expected(theirs: int, total: int) -> None:
    pair = Pair()
    expected = pair.b.expect("a", runs(total), 5)
    pair.a.push("b", runs(theirs), 5, expected.note)
    pair.go()
    assert (expected.poll(), expected.error) == (
        TicketState.FAILED,
        f"expected bytes from 0 on of {total}, got 0 to {theirs} of {theirs}",
    )
    assert pair.came(0)
    pair.begin(70, tag=6)
    pair.go()
    assert pair.came(70), "others go on"


@pytest.mark.parametrize("note", [b"", b"x" * 15, b"x" * 16, (1).to_bytes(16, "little"), (4 * Shape(96, 3).lane).to_bytes(16, "little")])
def test_a_note_that_is_none(note: bytes) -> None:
    with pytest.raises(TransferError, match="peer 'b': note: expected where a lane of its memory begins, got b'"):
        Pair().a.push("b", runs(4), 5, note)


GOOD = {"id": 7, "part_bytes": 96, "parts": 3, "lanes": 4, "engine": as_text(b'"a"')}


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (b"", "message of peer 'p': expected one of kvdock's transfers"),
        (written("hello", GOOD), "peer 'p': expected a memory of one-sided writes, got 'hello'"),
        (written("one-sided", GOOD | {"part_bytes": 97}), r"expected Shape\(part_bytes=96, parts=3\), got .*97.* give both sides the same"),
        (written("one-sided", GOOD | {"parts": 0}), "parts: expected an integer from 1 to"),
        (written("one-sided", GOOD | {"lanes": 1 << 20}), "lanes: expected an integer from 1 to"),
        (written("one-sided", GOOD | {"id": -1}), "id: expected an integer from 0 to"),
        (written("one-sided", GOOD | {"engine": "?"}), "engine: expected base64"),
        (written("one-sided", GOOD | {"engine": as_text(b"\x80\x04K\x01.")}), "peer 'p': expected a memory that lanes reaches, got"),
        (written("one-sided", GOOD | {"engine": as_text(b'"nobody"')}), "peer 'p': expected a memory that lanes reaches, got 'nobody'"),
    ],
)
def test_a_peer_that_is_none(described: bytes, text: str) -> None:
    pair = Pair()
    with pytest.raises(TransferError, match=text):
        pair.a.connect("p", LAYOUT, described)
    with pytest.raises(TransferError, match=r"peer 'p': expected a connection, got a peer that is not connected\. Fix: connect it"):
        pair.a.expect("p", runs(4), 5)


def test_a_peer_is_connected_once() -> None:
    pair = Pair()
    with pytest.raises(TransferError, match=r"peer 'b': expected one that is not known yet, got a second one\. Fix: disconnect it first"):
        pair.a.connect("b", LAYOUT, pair.described["b"])
    for name in "ab":
        with pytest.raises(TransferError, match="peer 'q': expected another memory, got this one, or one that is connected already"):
            pair.a.connect("q", LAYOUT, pair.described[name])


def test_one_tag_is_expected_once() -> None:
    pair = Pair()
    pair.b.expect("a", runs(4), 5)
    with pytest.raises(TransferError, match="peer 'a': tag: expected one that nothing is expected by, got 5"):
        pair.b.expect("a", runs(4), 5)


def test_close_ends_all_and_keeps_memory_that_may_still_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr("kvdock.transfer.one_sided._kept", kept)
    monkeypatch.setattr("kvdock.transfer.one_sided._PATIENCE", 0.02)
    pair = Pair()
    pair.a.writer.held = True
    pushed, expected = pair.begin(50)
    pair.go("a")
    for side, ticket in ((pair.a, pushed), (pair.b, expected)):
        side.close()
        assert (ticket.poll(), ticket.error) == (TicketState.FAILED, "it was disconnected")
        assert not side._writer.is_open
    assert [arena.memory is pair.a.writer.memory for arena in kept] == [True]
    Lanes("never used").close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"writer": 3}, ArgumentTypeError, r"OneSided: writer: expected a kvdock\.transfer\.Writer, got 3"),
        ({"part_bytes": 1.5}, ArgumentTypeError, "OneSided: part_bytes: expected an int, got 1.5"),
        ({"part_bytes": 0}, ArgumentValueError, "OneSided: part_bytes: expected 1 to 1073741824, got 0"),
        ({"parts": 5000}, ArgumentValueError, "OneSided: parts: expected 1 to 4096, got 5000"),
        ({"lanes": True}, ArgumentTypeError, "OneSided: lanes: expected an int, got True"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        OneSided(**{"name": "x", "writer": Direct("x"), **options})


@attrs.define(eq=False)
class Pieces(World):
    """The histories of `test_chaos`, where writes land in pieces, also those of whoever is dead or was given up."""

    def make_ranks(self) -> None:
        both = {"limits": LIMITS, "transport": lambda name: Lanes(name, part_bytes=self.chance.choice([64]), lanes=6)}
        self.owners += [Rank(f"p{rank}", SPEC, self.clock, 2, rank, **both) for rank in range(2)]
        self.askers += [Rank(f"d{rank}", SPEC, self.clock, 2, rank, **both, block_size=8, num_blocks=12) for rank in range(2)]
        for rank in (*self.owners, *self.askers):
            rank.loop.writer.held = True

    def move(self) -> None:
        for rank in (*self.owners, *self.askers):
            for _ in range(6):
                rank.loop.writer.land(self.chance)

    def stick(self) -> None:
        """Let a rank's writes land at once, or not."""
        writer = self.chance.choice([*self.owners, *self.askers]).loop.writer
        writer.held = not writer.held


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_wrong_or_for_ever(seed: int) -> None:
    world = Pieces(Faults(random.Random(seed)))  # noqa: S311 - as above
    world.run(40)
    assert world.right + world.failed > 0


@pytest.mark.slow
def test_many_histories() -> None:
    right = failed = killed = 0
    for seed in range(100, 180):
        world = Pieces(Faults(random.Random(seed)))  # noqa: S311 - as above
        world.run(80)
        right, failed, killed = right + world.right, failed + world.failed, killed + bool(world.dead)
    assert min(right, failed, killed) > 20, "all of it happens"
