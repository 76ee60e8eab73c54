"""What every transport is asked, as tests for its author's own suite: two of it in one process, with memory that is compared afterwards.

::

    from kvdock.transfer import create_transport
    from kvdock_conformance.transports import transport_tests

    test_transport = transport_tests(lambda: create_transport("acme"))

What only several processes show is not asked: a peer that is killed, or hangs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvdock.errors import TransferError
from kvdock.transfer import PoolLayout, Spans, Ticket, TicketState, Transport

__all__ = ["transport_tests"]

_BYTES = 1 << 20
_LAYOUT = PoolLayout("m", 1, 0, 1, (_BYTES, _BYTES), (), ())
_STILL = "when disconnect returned, a ticket of the peer was pending"


def transport_tests(make: Callable[[], Transport], *, seconds: float = 20.0) -> Callable[..., None]:
    """Return a test function with one item for each thing that is asked: assign it to a name that begins with ``test``.

    Args:
        make: makes a transport, whose peer is another one in this process.
        seconds: how long a ticket may take.
    """
    import pytest

    @pytest.mark.parametrize("check", _CHECKS, ids=lambda check: check.__name__)
    def test(check: Callable[[_Pair], None]) -> None:
        pair = _Pair(make(), make(), seconds)
        try:
            check(pair)
        finally:
            pair.a.close()
            pair.b.close()

    return test


class _Pair:
    """A side with random bytes, and one with others."""

    def __init__(self, a: Transport, b: Transport, seconds: float) -> None:
        self.a, self.b, self.seconds = a, b, seconds
        random = np.random.default_rng(5)
        self.source, self.target = ([torch.from_numpy(random.integers(0, 256, _BYTES, dtype=np.uint8)) for _ in range(2)] for _ in range(2))
        self.expected = [region.clone() for region in self.target]
        self.described = a.register(_LAYOUT, self.source), b.register(_LAYOUT, self.target)
        self.meet()

    def meet(self) -> None:
        """Connect both sides."""
        self.a.connect("b", _LAYOUT, self.described[1])
        self.b.connect("a", _LAYOUT, self.described[0])

    def begin(self, runs: Spans, tag: int) -> tuple[Ticket, Ticket]:
        """Return the tickets of a push."""
        expected = self.b.expect("a", runs, tag)
        _so(isinstance(expected.note, bytes) and len(expected.note) <= 1024, f"a note is at most 1024 bytes, not {expected.note!r:.80}")
        return self.a.push("b", runs, tag, expected.note), expected

    def wait(self, *tickets: Ticket) -> list[TicketState]:
        """Let both sides go on until tickets have ended, and return how."""
        end = time.monotonic() + self.seconds
        while TicketState.PENDING in (states := [ticket.poll() for ticket in tickets]) and time.monotonic() < end:
            self.a.poll()
            self.b.poll()
        _so(TicketState.PENDING not in states, f"still pending after {self.seconds} s: {states}")
        return states

    def come(self, runs: Spans, tag: int = 1) -> None:
        """Check that a push comes through, and that all is there when it is said to be."""
        pushed, expected = self.begin(runs, tag)
        _so(self.wait(expected) == [TicketState.DONE], f"a push that is expected failed: {expected.error}, {pushed.error}")
        self.has(runs)
        _so(self.wait(pushed) == [TicketState.DONE], f"a push failed: {pushed.error}")

    def has(self, *all_runs: Spans) -> None:
        """Check that the target's bytes are those of these runs, and otherwise as they were."""
        for runs in all_runs:
            columns = (runs.source_region, runs.source, runs.target_region, runs.target, runs.nbytes)
            for of, begin, to, at, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                self.expected[to][at : at + nbytes] = self.source[of][begin : begin + nbytes]
        for region, (found, wanted) in enumerate(zip(self.target, self.expected, strict=True)):
            wrong = int((found != wanted).sum())
            _so(not wrong, f"{wrong} bytes of region {region} are not what they should be")

    def stays(self, text: str) -> None:
        """Check that no byte of the target changes from now on."""
        self.expected = [region.clone() for region in self.target]
        for _ in range(50):
            self.a.poll()
            self.b.poll()
        _so(all(map(torch.equal, self.expected, self.target)), text)


def _runs(count: int, seed: int = 0, most: int = 2000) -> Spans:
    """Return runs of all lengths in both regions, at any place; they do not overlap where they are written."""
    random = np.random.default_rng(seed)
    sides, starts, nbytes = random.integers(0, 2, (2, count)), random.integers(0, _BYTES - most, count), random.integers(1, most, count)
    return Spans(sides[0], starts, np.sort(sides[1]), np.sort(random.choice(_BYTES // most, count, replace=False)) * most, nbytes)


def _one(nbytes: int, at: int = 100) -> Spans:
    return Spans(*(np.array([number], dtype=np.int64) for number in (0, 7, 1, at, nbytes)))


def _bytes_come_and_no_other_is_written(pair: _Pair) -> None:
    for tag, runs in enumerate([_one(1), _one(999_999), _runs(1), _runs(500), _runs(300, seed=1)]):
        pair.come(runs, tag)


def _a_push_of_no_bytes_is_done(pair: _Pair) -> None:
    _so(pair.wait(*pair.begin(Spans(*[np.empty(0, dtype=np.int64)] * 5), 1)) == [TicketState.DONE] * 2, "there is nothing to wait for")
    pair.has()


def _several_go_at_a_time_in_any_order(pair: _Pair) -> None:
    all_runs = [_one(5000, at=10_000 * number) for number in range(6)]
    expected = [pair.b.expect("a", runs, number) for number, runs in enumerate(all_runs)]
    pushed = [pair.a.push("b", all_runs[number], number, expected[number].note) for number in (3, 0, 5, 1, 4, 2)]
    _so(set(pair.wait(*expected)) == {TicketState.DONE}, f"pushes failed: {[ticket.error for ticket in expected]}")
    pair.has(*all_runs)
    _so(set(pair.wait(*pushed)) == {TicketState.DONE}, f"pushes failed: {[ticket.error for ticket in pushed]}")


def _blocks_go_both_ways(pair: _Pair) -> None:
    before = pair.target[0][7:5007].clone()
    back = pair.a.expect("b", _one(5000), 9)
    tickets = [back, pair.b.push("a", _one(5000), 9, back.note), *pair.begin(_one(3000, at=700_000), 1)]
    _so(set(pair.wait(*tickets)) == {TicketState.DONE}, f"pushes failed: {[ticket.error for ticket in tickets]}")
    pair.has(_one(3000, at=700_000))
    _so(torch.equal(pair.source[1][100:5100], before), "what comes back is not what the other side had")


def _what_was_cancelled_ends_and_is_not_written(pair: _Pair) -> None:
    pushed, expected = pair.begin(_one(200_000), 1)
    for ticket in (expected, pushed):
        ticket.cancel("not wanted")
    states = pair.wait(pushed, expected)
    if states[1] is TicketState.FAILED:
        _so(expected.error == "not wanted", f"a ticket's error is why it was cancelled, not {expected.error!r}")
        pair.stays("bytes were written for a ticket that had failed")
    else:
        pair.has(_one(200_000))
    pair.come(_one(5000, at=500_000), 3)


def _other_bytes_than_are_expected_are_an_error(pair: _Pair) -> None:
    for tag, (theirs, mine) in enumerate([(600, 1000), (1000, 600)]):
        expected = pair.b.expect("a", _one(mine), tag)
        pushed = pair.a.push("b", _one(theirs), tag, expected.note)
        pair.wait(pushed, expected)
        _so(expected.poll() is TicketState.FAILED, f"{theirs} bytes came where {mine} are expected, and that is no error")
        _so(bool(expected.error), "a ticket that failed does not say why")
        pair.expected[1][100 : 100 + mine] = pair.target[1][100 : 100 + mine]  # whatever it is now
        pair.has()


def _a_tag_and_a_peer_are_taken_once(pair: _Pair) -> None:
    pair.b.expect("a", _one(10), 1)
    _refused("a", lambda: pair.b.expect("a", _one(10), 1))
    _refused("b", lambda: pair.a.connect("b", _LAYOUT, pair.described[1]))


def _a_peer_that_is_not_known_is_an_error(pair: _Pair) -> None:
    _refused("nobody", lambda: pair.a.push("nobody", _one(10), 1, b""))
    _refused("nobody", lambda: pair.a.expect("nobody", _one(10), 1))
    pair.a.disconnect("nobody")


def _a_description_that_is_none_is_an_error(pair: _Pair) -> None:
    for described in (b"", b"\x80\x04K\x01.", b"[" * 5000, b"{}", bytes(range(256)), pair.described[1][:-9]):
        _refused("other", partial(pair.a.connect, "other", _LAYOUT, described))
    pair.come(_one(500))


def _a_peer_that_is_disconnected_has_no_ticket_and_can_come_back(pair: _Pair) -> None:
    tickets = pair.begin(_one(300_000), 1)
    pair.b.disconnect("a")
    _so(tickets[1].poll() is not TicketState.PENDING, _STILL)
    pair.stays("bytes were written for a peer that was disconnected")
    pair.a.disconnect("b")
    _so(tickets[0].poll() is not TicketState.PENDING, _STILL)
    pair.meet()
    pair.come(_one(5000, at=500_000), 2)


def _a_peer_that_is_gone_is_waited_for_by_no_call(pair: _Pair) -> None:
    note, before, pushed = pair.b.expect("a", _one(5000), 1).note, time.monotonic(), None
    pair.b.close()
    with contextlib.suppress(TransferError):
        pushed = pair.a.push("b", _one(5000), 1, note)
        for _ in range(50):
            pair.a.poll()
            pushed.poll()
    pair.a.disconnect("b")
    _so(time.monotonic() - before < 5, "a call waited for a peer")
    _so(pushed is None or pushed.poll() is not TicketState.PENDING, _STILL)


def _what_was_closed_connects_nobody(pair: _Pair) -> None:
    pair.a.close()
    _refused("b", lambda: pair.a.connect("b", _LAYOUT, pair.described[1]))
    pair.a.close()


def _so(is_so: bool, text: str) -> None:
    if not is_so:
        raise AssertionError(text)


def _refused(name: str, call: Callable[[], object]) -> None:
    """Check that a call raises a `TransferError` that names a peer."""
    try:
        call()
    except TransferError as error:
        _so(repr(name) in str(error), f"the error does not name the peer: {error}")
    else:
        raise AssertionError(f"expected a TransferError that names peer {name!r}")


_CHECKS: Sequence[Callable[[_Pair], None]] = (
    _bytes_come_and_no_other_is_written,
    _a_push_of_no_bytes_is_done,
    _several_go_at_a_time_in_any_order,
    _blocks_go_both_ways,
    _what_was_cancelled_ends_and_is_not_written,
    _other_bytes_than_are_expected_are_an_error,
    _a_tag_and_a_peer_are_taken_once,
    _a_peer_that_is_not_known_is_an_error,
    _a_description_that_is_none_is_an_error,
    _a_peer_that_is_disconnected_has_no_ticket_and_can_come_back,
    _a_peer_that_is_gone_is_waited_for_by_no_call,
    _what_was_closed_connects_nobody,
)
