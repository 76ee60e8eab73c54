"""Transports over engines that write into a peer's memory, such as those of RDMA: blocks go through lanes, never into the peer's pool.

A peer that was given up may still write: an engine cannot take back what it allowed, or only from all peers at once. So no peer is
allowed to write into the pool. Each side registers memory beside it, an arena: blocks are packed into lanes of it, written into a lane
of the peer's, and unpacked by the peer itself. Then a ticket can end at any time, and its blocks can be given away.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, TransferError
from kvdock.transfer.interface import Ticket, Transport
from kvdock.transfer.lanes import NOTE, Arena, Receiver, Sender, Shape
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.packing import Runs
from kvdock.transfer.refusals import no_pool, refused
from kvdock.transfer.spans import Spans
from kvdock.transfer.streams import StreamTicket, wait_for_stream
from kvdock.transfer.wire import as_text, read, written
from kvdock.transfer.writer import Writer

__all__ = ["OneSided"]

_PATIENCE = 2.0
_MOST_BYTES, _MOST_LANES = 1 << 30, 1 << 12

_kept: list[Arena] = []
"""Arenas of writes that did not end in time: their memory may still be read, so it is never given back."""


class OneSided(Transport):
    """Moves blocks by a `Writer`. Bytes go on in `poll`; nothing runs between.

    Args:
        name: see `Transport`.
        writer: the engine.
        part_bytes: bytes that go in one write, at most.
        parts: writes that are on their way to a peer at a time. So much memory goes over in a step of both sides, at most.
        lanes: peers that blocks are sent to, plus those that they come from. Each takes ``parts * part_bytes`` of host memory, all at once:
            128 MiB as it is.

    Raises:
        ArgumentTypeError, ArgumentValueError: a number that is none, or out of range.
    """

    def __init__(self, name: str, writer: Writer, *, part_bytes: int = 4 << 20, parts: int = 4, lanes: int = 8) -> None:
        if not isinstance(writer, Writer):
            fix = "derive the engine's class from it"
            raise ArgumentTypeError("OneSided: writer", expected="a kvdock.transfer.Writer", got=repr(writer)[:80], fix=fix)
        for what, value, most in (("part_bytes", part_bytes, _MOST_BYTES), ("parts", parts, _MOST_LANES), ("lanes", lanes, _MOST_LANES)):
            if type(value) is not int:
                raise ArgumentTypeError(f"OneSided: {what}", expected="an int", got=repr(value), fix="pass a number, or leave it out")
            if not 1 <= value <= most:
                raise ArgumentValueError(f"OneSided: {what}", expected=f"1 to {most}", got=value, fix="pass one of these, or leave it out")
        self.name, self._writer, self._shape, self._lanes = name, writer, Shape(part_bytes, parts), lanes
        self._id = secrets.randbits(62)
        self._memory: Sequence[torch.Tensor] = ()
        self._links: dict[str, _Link] = {}
        self._free: list[int] = []
        self._left: list[Sender | Receiver] = []  # of peers that were given up: their writes may still read their lanes

    def register(self, layout: PoolLayout, memory: Sequence[torch.Tensor]) -> bytes:
        """Take a pool, and make the arena beside it."""
        self._memory = memory
        self._free = [lane * self._shape.lane for lane in range(self._lanes)]
        self._arena = Arena(self._shape, torch.zeros(self._lanes * self._shape.lane, dtype=torch.uint8), self._writer)
        engine = as_text(self._writer.register(self._arena.memory))
        sizes = {"part_bytes": self._shape.part_bytes, "parts": self._shape.parts, "lanes": self._lanes}
        return written("one-sided", {"id": self._id, **sizes, "engine": engine})

    def connect(self, peer: str, layout: PoolLayout, described: bytes) -> None:
        """Get to know a peer. Both sides have the same parts."""
        if not self._memory:
            raise no_pool(peer)
        if peer in self._links:
            raise TransferError(f"peer {peer!r}", expected="one that is not known yet", got="a second one", fix="disconnect it first")
        kind, fields = read(peer, described)
        if kind != "one-sided":
            raise refused(f"peer {peer!r}", "a memory of one-sided writes", repr(kind[:20]))
        theirs = Shape(fields.integer("part_bytes", 1, _MOST_BYTES), fields.integer("parts", 1, _MOST_LANES))
        if theirs != self._shape:
            fix = "give both sides the same part_bytes and parts"
            raise TransferError(f"peer {peer!r}", expected=str(self._shape), got=str(theirs), fix=fix)
        number, reach = fields.integer("id", 0, (1 << 62) - 1), fields.integer("lanes", 1, _MOST_LANES) * theirs.lane
        if number == self._id or any(link.id == number for link in self._links.values()):
            fix = "connect each exchange once, by its own hello, and not to itself"
            raise TransferError(f"peer {peer!r}", expected="another memory", got="this one, or one that is connected already", fix=fix)
        try:
            self._writer.connect(peer, fields.raw("engine", 1 << 20))
        except Exception as error:
            fix = "see whether the peer still runs, and whether its engine is reached from here"
            raise TransferError(f"peer {peer!r}", expected=f"a memory that {self.name} reaches", got=_line(error), fix=fix) from error
        self._links[peer] = _Link(self, peer, number, reach)

    def push(self, peer: str, spans: Spans, tag: int, note: bytes) -> Ticket:
        """Queue a push. It is done when all writes have ended."""
        link = self._link(peer)
        if len(note) != NOTE.size or (place := NOTE.unpack(note))[0] % self._shape.lane or place[0] >= link.reach:
            raise refused(f"peer {peer!r}: note", "where a lane of its memory begins", repr(note[:40]))
        wait_for_stream(self._memory[0].device)
        return link.push(StreamTicket(Runs.of_source(spans), tag), place)

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        """Expect a push. It is done when all bytes are in the pool. Its note says which lane is waited at."""
        link = self._link(peer)
        return link.expect(StreamTicket(Runs.of_target(spans), tag))

    def poll(self) -> None:
        """Go on with all connections. Whatever an engine raises breaks them."""
        for link in [link for link in self._links.values() if not link.broken]:
            try:
                self._writer.progress()
                for end in link.ends():
                    end.advance(self._memory)
            except Exception as error:  # noqa: BLE001 - an engine's own, and who holds tickets is told
                link.fail(_line(error))

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Its writes that are late are not looked at any more."""
        if link := self._links.pop(peer, None):
            link.fail("it was disconnected")
            self._left += link.ends()
            self._writer.disconnect(peer)

    def close(self) -> None:
        """Forget all peers. Waits for this side's writes, 2 s at most."""
        for peer in list(self._links):
            self.disconnect(peer)
        end = time.monotonic() + _PATIENCE
        while not self._all_still() and time.monotonic() < end:
            self._writer.progress()
            time.sleep(0.001)
        if self._left:
            _kept.append(self._arena)
        self._writer.close()
        self._memory, self._free = (), []

    def _sender(self, peer: str) -> Sender:
        """Return a sender with a lane."""
        return Sender(self._arena, peer, self._lane(peer))

    def _receiver(self, peer: str, reach: int) -> Receiver:
        """Return a receiver with a lane."""
        return Receiver(self._arena, peer, self._lane(peer), reach)

    def _all_still(self) -> bool:
        """Whether no write is left of peers that were given up. Their lanes are free then."""
        still = [end for end in self._left if end.is_still()]
        self._left = [end for end in self._left if end not in still]
        self._free += [end.lane for end in still]
        return not self._left

    def _lane(self, peer: str) -> int:
        self._all_still()
        if not self._free:
            got = f"all in use by {', '.join(map(repr, self._links))}, {len(self._left)} by writes that have not ended"
            raise TransferError(f"peer {peer!r}", expected=f"a free lane of {self._lanes}", got=got, fix="pass more lanes")
        return self._free.pop(0)  # the one that nobody has written for the longest time

    def _link(self, peer: str) -> _Link:
        link = self._links.get(peer)
        if link is None or link.broken:
            got = "a peer that is not connected" if link is None else link.broken
            raise TransferError(f"peer {peer!r}", expected="a connection", got=got, fix="connect it, again if need be")
        return link


class _Link:
    """The connection to a peer: a lane for each way that is used."""

    def __init__(self, transport: OneSided, peer: str, number: int, reach: int) -> None:
        self.transport, self.peer, self.id, self.reach, self.broken = transport, peer, number, reach, ""
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None

    def ends(self) -> list[Sender | Receiver]:
        """Return its lanes; what comes is taken before more is sent."""
        return [end for end in (self._receiver, self._sender) if end is not None]

    def push(self, ticket: StreamTicket, place: tuple[int, int]) -> StreamTicket:
        """Queue a push."""
        self._sender = self._sender or self.transport._sender(self.peer)
        self._sender.push(ticket, place)
        return ticket

    def expect(self, ticket: StreamTicket) -> StreamTicket:
        """Expect a push."""
        self._receiver = self._receiver or self.transport._receiver(self.peer, self.reach)
        self._receiver.expect(ticket)
        return ticket

    def fail(self, reason: str) -> None:
        """Break it: no ticket of it comes to an end."""
        self.broken = self.broken or f"a connection that is broken: {reason}"
        for end in self.ends():
            end.cancel(reason)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]
