"""Messages in their order, beats in their time, and asks that wait within bounds."""

from __future__ import annotations

import pytest

from kvdock.transfer.mail import Mail, Waiting
from kvdock.transfer.messages import BEAT, Ask, Part
from support_transfer import Clock


def ask(name: str, tag: int, blocks: int = 1) -> Ask:
    """Return an ask with so many blocks."""
    return Ask(name, 4, "", ((0,) * blocks,), Part(tag, (((0, 4),),)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_messages_keep_their_order_and_are_handed_out_once(clock: Clock) -> None:
    mail = Mail(clock)
    for peer, message in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        mail.say(peer, message)
    mail.forget("b")
    assert mail.collect() == [("a", b"1"), ("a", b"3")]
    assert mail.collect() == []


def test_beats_are_for_peers_that_were_not_spoken_to(clock: Clock) -> None:
    mail = Mail(clock)
    mail.beat(["a"], 2)
    assert mail.collect() == [("a", BEAT)]
    clock.now += 1
    mail.say("a", b"1")
    clock.now += 1.5
    mail.beat(["a", "b"], 2)
    assert mail.collect() == [("a", b"1"), ("b", BEAT)]
    clock.now += 0.5
    mail.beat(["a", "b"], 2)
    assert mail.collect() == [("a", BEAT)]


def test_silence_counts_from_the_last_word(clock: Clock) -> None:
    mail = Mail(clock)
    assert mail.silence("a") == 0, "whoever is not known is not waited for"
    mail.hear("a")
    clock.now += 3
    assert mail.silence("a") == 3
    mail.hear("a")
    assert mail.silence("a") == 0
    clock.now += 1
    mail.forget("a")
    assert mail.silence("a") == 0


def test_asks_wait_for_their_name(clock: Clock) -> None:
    waiting = Waiting()
    for peer, name, tag in (("a", "r", 1), ("b", "r", 2), ("a", "s", 3)):
        assert waiting.add(peer, ask(name, tag), clock.now + tag) == ""
    assert waiting.peers() == {"a", "b"}
    assert [(peer, each.needed.tag) for peer, each in waiting.take("r")] == [("a", 1), ("b", 2)]
    assert list(waiting.take("r")) == []
    assert list(waiting.over(clock.now + 3)) == []
    assert [(peer, each.needed.tag) for peer, each in waiting.over(clock.now + 3.5)] == [("a", 3)]
    assert waiting.peers() == set()


def test_asks_are_forgotten_one_by_one_by_peer_and_all(clock: Clock) -> None:
    waiting = Waiting()
    for peer, tag in (("a", 1), ("a", 2), ("b", 1), ("b", 2)):
        waiting.add(peer, ask("r", tag), clock.now)
    waiting.stop("a", 1)
    waiting.stop("a", 7)
    waiting.forget("b")
    assert [(peer, each.needed.tag) for peer, each in waiting.take("r")] == [("a", 2)]
    waiting.add("c", ask("r", 1), clock.now)
    waiting.clear()
    assert waiting.peers() == set()


def test_asks_have_bounds_in_number_and_in_blocks(clock: Clock) -> None:
    waiting = Waiting()
    assert waiting.add("a", ask("r", 1, (1 << 22) + 1), clock.now) == "0 asks wait already"
    assert waiting.add("a", ask("r", 1, 1 << 22), clock.now) == ""
    assert waiting.add("b", ask("r", 2), clock.now) == "1 asks wait already"
    waiting.stop("a", 1)
    assert waiting.add("b", ask("r", 2), clock.now) == ""
