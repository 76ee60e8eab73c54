"""Sequences whose blocks are on their way: held until no byte of them moves any more, whatever becomes of the peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvdock.errors import ArgumentValueError, TransferError
from kvdock.scheduler.sequence import CacheSequence
from kvdock.transfer.interface import Ticket, TicketState
from kvdock.transfer.refusals import lost

__all__ = ["Inbound", "Limits", "Outbound", "Transfer"]


@attrs.frozen
class Limits:
    """How long to wait, in seconds of the exchange's clock.

    Args:
        deadline: for a sequence, from `Exchange.ask` or `Exchange.offer` on.
        silence: for a message of a peer, while something is expected from it or on its way to it: longer than its longest step.
        beat: between messages that say one is alive.
        grace: for tickets to end once they are cancelled; then the peer is disconnected.

    Raises:
        ArgumentValueError: one is not above 0, or no beat fits into the silence.
    """

    deadline: float = 120.0
    silence: float = 30.0
    beat: float = 3.0
    grace: float = 5.0

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ArgumentValueError(
                    f"Limits: {name}", expected="a number above 0", got=repr(value), fix="pass seconds, or leave it out"
                )
        if self.beat >= self.silence:
            fix = "let several beats fit into the silence"
            raise ArgumentValueError("Limits: beat", expected=f"less than silence, {self.silence}", got=self.beat, fix=fix)


class Transfer:
    """A sequence whose blocks are lent to a transport. Until `is_over` nobody but the exchange calls the manager with it.

    Attributes:
        name: what the engines call it.
        seq: the sequence.
        num_tokens: its tokens that go over.
        is_over: whether no byte of it moves any more.
        error: why it failed; None while it goes on, and where it came through.
        rest: tickets that may fail: of what no later token of the sequence reads, though it is in its blocks.
    """

    def __init__(self, name: str, seq: CacheSequence, num_tokens: int, deadline: float) -> None:
        self.name, self.seq, self.num_tokens, self.deadline = name, seq, num_tokens, deadline
        self.error: TransferError | None = None
        self.is_over = False
        self.tickets: dict[tuple[str, int], Ticket] = {}
        self.rest: set[tuple[str, int]] = set()
        self.stopped_at: float | None = None

    def __repr__(self) -> str:
        found = ", ".join(f"{peer}: {ticket.poll().value}" for (peer, _), ticket in self.tickets.items())
        state = f"failed: {self.error}" if self.error else "over" if self.is_over else "open"
        return f"{type(self).__name__}({self.name!r}, {self.num_tokens} tokens, {state}, {{{found}}})"

    def pending(self) -> Iterator[str]:
        """Yield the peers whose bytes may still move."""
        return (peer for (peer, _), ticket in list(self.tickets.items()) if ticket.poll() is TicketState.PENDING)

    def stop(self, error: TransferError, now: float) -> None:
        """End it as soon as may be; the first error stays."""
        if self.stopped_at is None:
            self.stopped_at, self.error = now, self.error or error
        for ticket in self.tickets.values():
            ticket.cancel(str(error))

    def failed(self) -> Iterator[tuple[str, str]]:
        """Yield peers whose tickets failed and may not, and why."""
        needed = ((key[0], ticket) for key, ticket in self.tickets.items() if key not in self.rest)
        return ((peer, ticket.error) for peer, ticket in needed if ticket.poll() is TicketState.FAILED)

    def step(self, now: float) -> None:
        """See how far it is."""
        if self.stopped_at is None and now > self.deadline:
            self.stop(lost(self.name, self.missing(), expected="all within the deadline"), now)
        if self.stopped_at is None:
            self.advance(now)
        elif not any(self.pending()):
            self.is_over = True

    def advance(self, now: float) -> None:
        """See how far it is, while it goes on."""
        raise NotImplementedError

    def missing(self) -> str:
        """Say what is not there yet."""
        raise NotImplementedError


class Inbound(Transfer):
    """Blocks that are to come: all that is needed of them from all peers, or the sequence is aborted."""

    @property
    def is_whole(self) -> bool:
        """Whether its blocks came whole, as far as the sequence has tokens."""
        return all(self.tickets[key].poll() is TicketState.DONE for key in self.rest)

    def missing(self) -> str:
        """Say who has not sent everything."""
        return f"not those of {', '.join(sorted(set(self.pending())))}"

    def advance(self, now: float) -> None:
        """End where all is there, or one peer failed."""
        for peer, why in self.failed():
            self.stop(lost(self.name, why, peer=f" from peer {peer!r}"), now)
        if self.stopped_at is None:
            self.is_over = not any(self.pending())


class Outbound(Transfer):
    """Blocks that peers may ask for: a peer that fails does not keep others from theirs.

    Attributes:
        takers: the peers that have not asked yet.
        forks: by number of tokens what holds their blocks, where the sequence itself has let go of some.
    """

    def __init__(self, name: str, seq: CacheSequence, num_tokens: int, deadline: float, takers: Iterable[str]) -> None:
        super().__init__(name, seq, num_tokens, deadline)
        self.takers = set(takers)
        self.forks: dict[int, CacheSequence] = {}

    def missing(self) -> str:
        """Say who has not got it."""
        return f"nothing taken by {', '.join(sorted({*self.takers, *self.pending()}))}"

    def advance(self, now: float) -> None:
        """End where all takers have come, and nothing moves to them."""
        for peer, why in self.failed():
            self.lose(peer, why)
        self.is_over = not self.takers and not any(self.pending())

    def lose(self, peer: str, why: str) -> None:
        """Note that a peer does not get it."""
        self.takers.discard(peer)
        self.error = self.error or lost(self.name, why, peer=f" to peer {peer!r}")
