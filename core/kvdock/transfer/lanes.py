"""Lanes: parts of a stream go through slots of one process's memory into those of another's, by one-sided writes.

::

    sender's lane                           receiver's lane
    | slot 0 | slot 1 | slot 2 | cell |     | slot 0 | slot 1 | slot 2 | cell |
      part 3   part 4   part 2  -----------> part 3            part 2
                                 cell <----- "2 taken"

A slot holds a part's bytes and behind them a label, which are one write. The label has a checksum of both. So a part is there when its
checksum is right: in whatever order an engine writes, and whatever comes late of a peer that was given up. Until the receiver has said
that it took a part, nothing is written into its slot. It takes a part by copying it, and then looks at the copy: what is written into a
lane later, by whomever, changes nothing in the pool.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections import deque
from collections.abc import Sequence

import attrs
import torch

from kvdock.errors import TransferError
from kvdock.transfer.interface import TicketState
from kvdock.transfer.refusals import refused, tag_taken
from kvdock.transfer.streams import StreamTicket
from kvdock.transfer.writer import Writer

__all__ = ["NOTE", "Arena", "Receiver", "Sender", "Shape"]

NOTE = struct.Struct("<2Q")
"""Of a ticket: where the receiver's lane begins, and what its labels are to have."""

_LABEL = struct.Struct("<8QQ")
"""Magic and version, the lane's number, which part, tag, first byte, total, bytes, where the sender's cell is; checksum."""

_MAGIC = int.from_bytes(b"kvdock\x00\x01", "big")
_LINE = 64


@attrs.frozen
class Shape:
    """Bytes of a part, and slots of a lane: the same on both sides."""

    part_bytes: int
    parts: int

    @property
    def slot(self) -> int:
        """Bytes of a slot."""
        return -(-(self.part_bytes + _LABEL.size) // _LINE) * _LINE

    @property
    def lane(self) -> int:
        """Bytes of a lane: its slots, a cell that the other side writes, and one that is written from."""
        return self.slot * self.parts + 2 * _LINE


@attrs.frozen(eq=False)
class Arena:
    """The memory that an engine reads and writes, in lanes."""

    shape: Shape
    memory: torch.Tensor
    writer: Writer

    def slot_end(self, lane: int, part: int) -> int:
        """Return the byte behind the slot of a part."""
        return lane + (part % self.shape.parts + 1) * self.shape.slot

    def cell(self, lane: int) -> int:
        """Return the first byte of the cell that the other side writes; the one that is written from is a line behind it."""
        return lane + self.shape.slot * self.shape.parts

    def read_cell(self, at: int) -> int:
        """Return what a cell holds."""
        return int.from_bytes(bytes(self.memory.numpy()[at : at + 8].data), "little")

    def write_cell(self, at: int, value: int) -> None:
        """Write a cell at once: half a number is never sent."""
        self.memory[at : at + 8].view(torch.int64)[0] = value


def _counted(number: int, parts: int) -> int:
    """Return what a cell holds of a lane with a number of which so many parts were taken."""
    return (number & 0x7FFFFFFF) << 32 | parts


class Sender:
    """Parts that go to a peer."""

    def __init__(self, arena: Arena, peer: str, lane: int) -> None:
        self.lane, self._arena, self._peer = lane, arena, peer
        self._queue: deque[StreamTicket] = deque()
        self._writes: deque[tuple[object, StreamTicket]] = deque()
        self._place = self._next = (0, 0)  # the lane that is written, and the one that is to be
        self._sent = 0

    def push(self, ticket: StreamTicket, place: tuple[int, int]) -> None:
        """Queue a push to where a peer's note says. What has not gone elsewhere by then is not waited for there any more."""
        if place != self._next:
            for each in self._queue:
                if each.moved < each.total:
                    each.cancel("the peer began anew")
            self._queue.clear()
            self._next = place
        self._queue.append(ticket)

    def cancel(self, reason: str) -> None:
        """End all pushes."""
        for ticket in (*self._queue, *(ticket for _, ticket in self._writes)):
            ticket.cancel(reason)
        self._queue.clear()

    def is_still(self) -> bool:
        """Whether no write reads the lane any more; whether they ended well does not matter."""
        while self._writes and self._arena.writer.state(self._writes[0][0]) is not TicketState.PENDING:
            self._writes.popleft()
        return not self._writes

    def advance(self, memory: Sequence[torch.Tensor]) -> None:
        """Go on. Raises `TransferError` where a write failed."""
        self._end()
        if self._place != self._next and not self._writes:
            self._place, self._sent = self._next, 0
            self._arena.write_cell(self._arena.cell(self.lane), 0)
        while self._place == self._next and self._queue and len(self._writes) < self._arena.shape.parts and self._has_room():
            if part := self._queue[0].take(memory, self._arena.shape.part_bytes):
                self._write(self._queue[0], *part)
            else:
                self._queue.popleft()

    def _end(self) -> None:
        while self._writes and (state := self._arena.writer.state(self._writes[0][0])) is not TicketState.PENDING:
            _, ticket = self._writes.popleft()
            if state is TicketState.FAILED:
                raise _write_failed(self._peer)
            if ticket.moved == ticket.total and all(other is not ticket for _, other in self._writes):
                ticket.end()

    def _has_room(self) -> bool:
        number, taken = divmod(self._arena.read_cell(self._arena.cell(self.lane)), 1 << 32)
        mine = number == self._place[1] & 0x7FFFFFFF and taken <= self._sent  # else it is late, of another lane or peer
        return self._sent - (taken if mine else 0) < self._arena.shape.parts

    def _write(self, ticket: StreamTicket, begin: int, part: torch.Tensor) -> None:
        arena, nbytes, end = self._arena, part.numel(), self._arena.slot_end(self.lane, self._sent)
        first = end - _LABEL.size - nbytes
        data = arena.memory[first : first + nbytes]
        data.copy_(part)
        said = (_MAGIC, self._place[1], self._sent, ticket.tag, begin, ticket.total, nbytes, arena.cell(self.lane))
        _LABEL.pack_into(arena.memory.numpy().data, end - _LABEL.size, *said, _checksum(said, data))
        at = arena.slot_end(self._place[0], self._sent) - _LABEL.size - nbytes
        self._writes.append((arena.writer.write(self._peer, first, at, nbytes + _LABEL.size), ticket))
        self._sent += 1


class Receiver:
    """Parts that come from a peer."""

    def __init__(self, arena: Arena, peer: str, lane: int, reach: int) -> None:
        self.lane, self._arena, self._peer, self._reach = lane, arena, peer, reach
        self._expected: dict[int, StreamTicket] = {}
        self._number = self._taken = self._told = self._cell = 0
        self._write: object = None

    def expect(self, ticket: StreamTicket) -> None:
        """Expect a push. Raises `TransferError` where its tag is taken."""
        self._expected = {tag: each for tag, each in self._expected.items() if each.state is TicketState.PENDING}
        if ticket.tag in self._expected:
            raise tag_taken(self._peer, ticket.tag)
        if not self._expected:  # whatever either side has lost, they agree again
            self._number, self._taken, self._told = secrets.randbits(62), 0, 0
        self._expected[ticket.tag] = ticket
        ticket.note = NOTE.pack(self.lane, self._number)

    def cancel(self, reason: str) -> None:
        """End all that is expected."""
        for ticket in self._expected.values():
            ticket.cancel(reason)

    def is_still(self) -> bool:
        """Whether no write reads the lane any more."""
        if self._write is not None and self._arena.writer.state(self._write) is not TicketState.PENDING:
            self._write = None
        return self._write is None

    def advance(self, memory: Sequence[torch.Tensor]) -> None:
        """Take what is there. Raises `TransferError` where a peer cannot be told so."""
        while found := self._part():
            tag, begin, total, part = found
            self._taken += 1
            if ticket := self._expected.get(tag):  # otherwise it was cancelled, and what comes late goes nowhere
                ticket.put(memory, begin, total, part.to(memory[0].device))
        if self._write is not None and (state := self._arena.writer.state(self._write)) is not TicketState.PENDING:
            self._write = None
            if state is TicketState.FAILED:
                raise _write_failed(self._peer)
        if self._write is None and self._told < self._taken:
            source = self._arena.cell(self.lane) + _LINE
            self._arena.write_cell(source, _counted(self._number, self._taken))
            self._write, self._told = self._arena.writer.write(self._peer, source, self._cell, 8), self._taken

    def _part(self) -> tuple[int, int, int, torch.Tensor] | None:
        """Return tag, first byte, total and a copy of the next part, if all of it is there."""
        end = self._arena.slot_end(self.lane, self._taken)
        *said, checksum = _LABEL.unpack(bytes(self._arena.memory.numpy()[end - _LABEL.size : end].data))
        magic, number, which, tag, begin, total, nbytes, cell = said
        if (magic, number, which) != (_MAGIC, self._number, self._taken) or not 1 <= nbytes <= self._arena.shape.part_bytes:
            return None
        part = self._arena.memory[end - _LABEL.size - nbytes : end - _LABEL.size].clone()
        if _checksum(said, part) != checksum:
            return None
        if cell % 8 or cell + 8 > self._reach:
            raise refused(f"peer {self._peer!r}", f"a cell within its {self._reach} bytes", f"one at {cell}")
        self._cell = cell
        return tag, begin, total, part


def _write_failed(peer: str) -> TransferError:
    fix = "see whether it still runs and what the engine logged, and connect it again"
    return TransferError(f"peer {peer!r}", expected="a write that comes to an end", got="one that failed", fix=fix)


def _checksum(said: Sequence[int], part: torch.Tensor) -> int:
    return zlib.crc32(part.numpy().data, zlib.crc32(struct.pack("<8Q", *said)))
