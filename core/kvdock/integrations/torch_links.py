"""The connections of `kvdock.integrations.torch_distributed`: two threads for each peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from kvdock.errors import TransferError
from kvdock.transfer.interface import TicketState
from kvdock.transfer.refusals import refused, tag_taken
from kvdock.transfer.streams import StreamTicket, wait_for_stream

__all__ = ["Link"]

_MAGIC, _VERSION = 0x6B76646F636B, 1
_GOODBYE = -1
_FOREVER = timedelta(days=10_000)


class Link:
    """The connection to one rank."""

    def __init__(self, peer: str, rank: int, group: dist.ProcessGroup | None, memory: Sequence[torch.Tensor], part_bytes: int) -> None:
        self.peer, self.rank, self.broken = peer, rank, ""
        self._group, self._memory, self._part_bytes = group, memory, part_bytes
        self._lock = threading.Lock()
        self._expected: dict[int, StreamTicket] = {}
        self._queue: SimpleQueue[StreamTicket | None] = SimpleQueue()
        self._pushed: set[StreamTicket] = set()
        self._speaker = threading.Thread(target=self._send, name=f"kvdock send {peer}", daemon=True)
        self._listener = threading.Thread(target=self._receive, name=f"kvdock receive {peer}", daemon=True)
        self._speaker.start()
        self._listener.start()

    @property
    def listens(self) -> bool:
        """Whether a thread still takes what the rank sends."""
        return self._listener.is_alive()

    def join(self, end: float) -> None:
        """Wait for its threads, until a time of the monotonic clock."""
        for thread in (self._speaker, self._listener):
            thread.join(max(end - time.monotonic(), 0))

    def send(self, ticket: StreamTicket | None) -> None:
        """Queue a push; None says goodbye."""
        if ticket is not None:
            with self._lock:
                if self.broken:
                    ticket.cancel(self.broken)
                self._pushed = {each for each in self._pushed if each.state is TicketState.PENDING} | {ticket}
        self._queue.put(ticket)

    def expect(self, ticket: StreamTicket) -> StreamTicket:
        """Expect a push. Raises `TransferError` where its tag is taken."""
        with self._lock:
            self._expected = {tag: each for tag, each in self._expected.items() if each.state is TicketState.PENDING}
            if ticket.tag in self._expected:
                raise tag_taken(self.peer, ticket.tag)
            self._expected[ticket.tag] = ticket
        return ticket

    def fail(self, reason: str) -> None:
        """Break the connection: no ticket of it comes to an end."""
        with self._lock:
            self.broken = self.broken or f"a connection that is broken: {reason}"
            for ticket in (*self._expected.values(), *self._pushed):
                ticket.cancel(reason)

    def leave(self, reason: str) -> None:
        """Break it, and say goodbye."""
        self.fail(reason)
        self.send(None)

    def _send(self) -> None:
        try:
            while (ticket := self._queue.get()) is not None:
                while part := ticket.take(self._memory, self._part_bytes):
                    self._out(torch.tensor([_MAGIC, _VERSION, ticket.tag, part[0], part[1].numel(), ticket.total]))
                    self._out(part[1])
                ticket.end()
            self._out(torch.tensor([_MAGIC, _VERSION, _GOODBYE, 0, 0, 0]))
        except Exception as error:  # noqa: BLE001 - whatever a process group raises, who holds tickets is told
            self.fail(_line(error))

    def _receive(self) -> None:
        try:
            while (header := self._header()) is not None:
                tag, begin, nbytes, total = header
                part = torch.empty(nbytes, dtype=torch.uint8, device=self._memory[0].device)
                self._in(part)
                with self._lock:
                    ticket = self._expected.get(tag)
                if ticket is not None:  # otherwise it was cancelled, and what comes late goes nowhere
                    ticket.put(self._memory, begin, total, part)
            self.fail("it said goodbye")
            self._queue.put(None)  # so that its own thread ends, too
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(_line(error))

    def _header(self) -> tuple[int, int, int, int] | None:
        """Return tag, first byte, bytes and total of the next part; None at the end."""
        header = torch.zeros(6, dtype=torch.int64)
        self._in(header)
        magic, version, tag, begin, nbytes, total = header.tolist()
        if magic != _MAGIC or version != _VERSION:
            raise refused(f"peer {self.peer!r}", f"parts of version {_VERSION}", f"{magic:x}, version {version}")
        if tag == _GOODBYE:
            return None
        if not 1 <= nbytes <= self._part_bytes:
            fix = "give both sides the same part_bytes"
            raise TransferError(f"peer {self.peer!r}", expected=f"parts of 1 to {self._part_bytes} bytes", got=nbytes, fix=fix)
        return tag, begin, nbytes, total

    def _out(self, tensor: torch.Tensor) -> None:
        self._finish(dist.isend(tensor, group=self._group, group_dst=self.rank), tensor)

    def _in(self, tensor: torch.Tensor) -> None:
        self._finish(dist.irecv(tensor, group=self._group, group_src=self.rank), tensor)

    def _finish(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        if work is None:
            fix = "make the group with this rank in it"
            raise TransferError(f"peer {self.peer!r}", expected="a group that this process is in", got="none", fix=fix)
        work.wait(_FOREVER)
        wait_for_stream(tensor.device)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]
