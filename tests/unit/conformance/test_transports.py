"""What every transport is asked: kvdock's own passes, and each fault that is seeded into one is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvdock.transfer import Spans, Ticket, TicketState
from kvdock_conformance.transports import _CHECKS, _Pair, transport_tests
from support_one_sided import Lanes

NAMES = iter(range(10**9))


def make(cls: type[Lanes] = Lanes) -> Lanes:
    return cls(f"t{next(NAMES)}", part_bytes=50_000)


test_one_sided = transport_tests(make, seconds=5)


class Deaf(Lanes):
    """A ticket that is cancelled, or whose peer is disconnected, goes on."""

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        ticket = super().expect(peer, spans, tag)
        ticket.cancel = lambda reason: None  # type: ignore[method-assign]  # on purpose
        return ticket


class Anybody(Lanes):
    """Takes a peer as often as it comes."""

    def connect(self, peer: str, layout: Any, described: bytes) -> None:
        if peer not in self._links:
            super().connect(peer, layout, described)


class Careless(Lanes):
    """Takes any tag."""

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        ends = self._links[peer].ends() if peer in self._links else []
        for end in ends:
            getattr(end, "_expected", {}).pop(tag, None)
        return super().expect(peer, spans, tag)


class Wrong(Lanes):
    """Writes a byte more than it should."""

    def poll(self) -> None:
        super().poll()
        self._memory[1][99] = 1


class Never(Lanes):
    """Does nothing."""

    def poll(self) -> None:
        pass


class Silent(Lanes):
    """Fails without a word, and is done though nothing came."""

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        ticket = super().expect(peer, spans, tag)
        ticket.poll = lambda: TicketState.DONE  # type: ignore[method-assign]  # on purpose
        return ticket


class Undead(Lanes):
    """Goes on after it was closed."""

    def close(self) -> None:
        memory = self._memory
        super().close()
        self._memory = memory


@pytest.mark.parametrize(
    ("cls", "noticed"),
    [
        (Deaf, ["what_was_cancelled", "a_peer_that_is_disconnected"]),
        (Careless, ["a_tag_and_a_peer"]),
        (Anybody, ["a_tag_and_a_peer"]),
        (Wrong, ["bytes_come", "other_bytes"]),
        (Never, ["bytes_come", "several", "blocks_go"]),
        (Undead, ["what_was_closed"]),
        (Silent, ["bytes_come", "several", "other_bytes"]),
    ],
)
def test_faults_are_noticed(cls: type[Lanes], noticed: list[str]) -> None:
    found = set(failing(cls))
    assert [name for name in noticed if not any(check.startswith(f"_{name}") for check in found)] == []


def failing(cls: type[Lanes]) -> Iterator[str]:
    """Yield the names of the checks that a transport does not pass."""
    for check in _CHECKS:
        if not passes(check, _Pair(make(cls), make(cls), 0.02)):
            yield check.__name__


def passes(check: Callable[[_Pair], None], pair: _Pair) -> bool:
    try:
        check(pair)
    except Exception:  # noqa: BLE001 - whatever a fault leads to is a failure
        return False
    return True
