"""A lease, step by step: over when no ticket is pending, whatever was asked of it before."""

from __future__ import annotations

from typing import Any

import pytest

import kvdock
from kvdock.errors import TransferError
from kvdock.transfer import Inbound, Outbound, Ticket, TicketState
from support_transfer import AGAIN

PENDING, DONE, FAILED = TicketState


class Given(Ticket):
    """A ticket whose state the test sets; ``stuck``: it does not end when it is cancelled."""

    def __init__(self, state: TicketState = PENDING, error: str = "", *, stuck: bool = False) -> None:
        self.state, self.error, self.stuck = state, error, stuck

    def poll(self) -> TicketState:
        return self.state

    def cancel(self, reason: str) -> None:
        if self.state is PENDING and not self.stuck:
            self.state, self.error = FAILED, reason


@pytest.fixture
def seq() -> kvdock.scheduler.CacheSequence:
    return kvdock.CacheManager(8, 4).begin([1, 2, 3])


def inbound(seq: Any, **tickets: Given) -> Inbound:
    """Return a lease until time 10."""
    made = Inbound("r", seq, 3, 10)
    made.tickets.update({(peer, 1): ticket for peer, ticket in tickets.items()})
    return made


def outbound(seq: Any, *takers: str, **tickets: Given) -> Outbound:
    """Return an offer until time 10."""
    made = Outbound("r", seq, 3, 10, takers)
    made.tickets.update({(peer, 1): ticket for peer, ticket in tickets.items()})
    return made


def test_all_have_to_come(seq: Any) -> None:
    one, two = Given(), Given()
    lease = inbound(seq, a=one, b=two)
    for ticket in (one, two):
        lease.step(1)
        assert not lease.is_over
        ticket.state = DONE
    lease.step(2)
    assert (lease.is_over, lease.error, lease.stopped_at) == (True, None, None)


def test_nothing_that_is_to_come_is_over_at_once(seq: Any) -> None:
    lease = inbound(seq)
    lease.step(1)
    assert (lease.is_over, lease.error) == (True, None)


def test_one_that_fails_ends_all_and_those_that_are_stuck_are_waited_for(seq: Any) -> None:
    one, two = Given(FAILED, "out of order"), Given(stuck=True)
    lease = inbound(seq, a=one, b=two)
    lease.step(3)
    assert (lease.is_over, lease.stopped_at, list(lease.pending())) == (False, 3, ["b"])
    assert str(lease.error) == f"blocks of 'r' from peer 'a': expected all of them, got out of order{AGAIN}"
    lease.step(100)
    assert not lease.is_over
    two.state = DONE
    lease.step(101)
    assert lease.is_over
    assert lease.error is not None, "what came in the end does not make it whole"


def test_the_first_error_stays(seq: Any) -> None:
    lease = inbound(seq, a=Given())
    lease.stop(TransferError("first"), 1)
    lease.stop(TransferError("second"), 2)
    assert (str(lease.error), lease.stopped_at) == ("first", 1)


def test_the_deadline_names_who_is_late(seq: Any) -> None:
    lease = inbound(seq, a=Given(DONE), c=Given(), b=Given())
    lease.step(10)
    assert lease.error is None
    lease.step(10.1)
    assert str(lease.error) == f"blocks of 'r': expected all within the deadline, got not those of b, c{AGAIN}"


def test_an_offer_waits_for_takers_and_for_what_moves(seq: Any) -> None:
    lease = outbound(seq, "a", "b")
    lease.step(1)
    assert not lease.is_over
    lease.takers.clear()
    lease.tickets["a", 1], lease.tickets["b", 1] = one, two = Given(), Given(DONE)
    lease.step(2)
    assert not lease.is_over
    one.state = DONE
    lease.step(3)
    assert (lease.is_over, lease.error, two.state) == (True, None, DONE)


def test_a_taker_that_fails_leaves_the_others_alone(seq: Any) -> None:
    other = Given()
    lease = outbound(seq, a=Given(FAILED, "gone"), b=other)
    lease.step(1)
    assert (lease.is_over, lease.stopped_at, other.state) == (False, None, PENDING)
    other.state = DONE
    lease.step(2)
    assert lease.is_over
    assert str(lease.error) == f"blocks of 'r' to peer 'a': expected all of them, got gone{AGAIN}"


def test_an_offer_that_is_late_names_who_did_not_come(seq: Any) -> None:
    lease = outbound(seq, "a", b=Given(), c=Given(DONE))
    lease.step(11)
    assert str(lease.error) == f"blocks of 'r': expected all within the deadline, got nothing taken by a, b{AGAIN}"
    lease.step(12)
    assert lease.is_over


def test_a_taker_that_is_lost_is_not_waited_for(seq: Any) -> None:
    lease = outbound(seq, "a")
    lease.lose("a", "its process is gone")
    lease.step(1)
    assert lease.is_over
    assert str(lease.error) == f"blocks of 'r' to peer 'a': expected all of them, got its process is gone{AGAIN}"


def test_what_it_says_of_itself(seq: Any) -> None:
    lease = outbound(seq, "a", b=Given())
    assert repr(lease) == "Outbound('r', 3 tokens, open, {b: pending})"
    lease.stop(TransferError("no more"), 1)
    assert repr(lease) == "Outbound('r', 3 tokens, failed: no more, {b: failed})"
    whole = inbound(seq, a=Given(DONE))
    whole.step(1)
    assert repr(whole) == "Inbound('r', 3 tokens, over, {a: done})"
