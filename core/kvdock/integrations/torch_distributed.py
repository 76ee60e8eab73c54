"""Blocks through a process group of torch: whatever backend it has for the pool's device.

A push is a stream of parts, each a header and its bytes. A thread for each peer receives, and one sends, since some groups' operations
only end in a call that waits. No such call has a limit of time: one that passes breaks the connections to all other ranks. So limits are
for who holds the tickets, and a ticket that is cancelled is over at once: threads touch the pool under its lock only, and wait with
memory of their own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from kvdock.errors import ArgumentTypeError, ArgumentValueError, TransferError
from kvdock.transfer.interface import Ticket, TicketState, Transport
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.packing import Runs, gather, scatter
from kvdock.transfer.spans import Spans

__all__ = ["TorchDistributed"]

_MAGIC, _VERSION = 0x6B76646F636B, 1
_GOODBYE = -1
_FOREVER = timedelta(days=10_000)
_PATIENCE = 2.0


class TorchDistributed(Transport):
    """Pushes blocks with ``isend`` and ``irecv`` of a process group; headers go through host memory, blocks through the pool's device.

    So a pool on a device needs a group that serves both, as ``init_process_group("cpu:...,<device>:...")`` makes it; on such a group
    blocks should go one way between two ranks, since a device's sends and receives of a pair wait for one another.

    Args:
        group: the group; by default the default one. Nobody else may send to or receive from its ranks one to one.
        part_bytes: bytes of a part: so much memory is taken for each peer, beside the pool.

    Raises:
        ArgumentTypeError: ``part_bytes`` is no int.
        ArgumentValueError: torch's process groups are not set up; parts of no bytes, or of more than 1 GiB.
    """

    name = "torch.distributed"

    def __init__(self, group: dist.ProcessGroup | None = None, part_bytes: int = 32 << 20) -> None:
        if type(part_bytes) is not int:
            raise ArgumentTypeError("TorchDistributed: part_bytes", expected="an int", got=repr(part_bytes))
        if not 1 <= part_bytes <= 1 << 30:
            raise ArgumentValueError("TorchDistributed: part_bytes", expected="1 to 2**30", got=part_bytes)
        if not (dist.is_available() and dist.is_initialized()):
            fix = "call torch.distributed.init_process_group first"
            raise ArgumentValueError("TorchDistributed: group", expected="a process group", got="none that is set up", fix=fix)
        self.part_bytes, self._group = part_bytes, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._memory: Sequence[torch.Tensor] = ()
        self._links: dict[str, _Link] = {}
        self._left: list[_Link] = []  # a thread of theirs may still listen, and would take what a new one is to get

    def register(self, layout: PoolLayout, memory: Sequence[torch.Tensor]) -> bytes:
        """Take a pool, and return this process's rank in the group."""
        self._memory = memory
        return json.dumps({"rank": self._rank, "size": self._size}).encode()

    def connect(self, peer: str, layout: PoolLayout, described: bytes) -> None:
        """Get to know a peer by its rank in the group."""
        try:
            found = json.loads(described[:200])
            rank, size = found["rank"], found["size"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TransferError(f"peer {peer!r}", expected="its rank in a process group", got=repr(described[:40])) from error
        if peer in self._links or any(link.rank == rank for link in self._links.values()):
            raise TransferError(
                f"peer {peer!r}", expected="one that is not known yet", got=f"rank {rank!r} again", fix="disconnect it first"
            )
        if type(rank) is not int or size != self._size or not 0 <= rank < size or rank == self._rank:
            expected = f"another rank of the group of {self._size}, in which this is rank {self._rank}"
            raise TransferError(f"peer {peer!r}", expected=expected, got=f"rank {rank!r} of {size!r}"[:80])
        if any(link.rank == rank and link.listens for link in self._left):
            fix = "let the other side disconnect too; after a rank is lost, make a new group"
            raise TransferError(
                f"peer {peer!r}", expected="a rank that has said goodbye", got=f"rank {rank}, left on this side only", fix=fix
            )
        self._links[peer] = _Link(peer, rank, self._group, self._memory, self.part_bytes)

    def push(self, peer: str, spans: Spans, tag: int) -> Ticket:
        """Queue a push. It is done when the group has taken all bytes."""
        link = self._link(peer)
        _wait_for_stream(self._memory[0].device)
        ticket = _Ticket(Runs.of_source(spans), tag)
        link.send(ticket)
        return ticket

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        """Expect a push. It is done when all bytes are in the pool."""
        return self._link(peer).expect(_Ticket(Runs.of_target(spans), tag))

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and tell it so where it listens."""
        if link := self._links.pop(peer, None):
            self._left = [each for each in self._left if each.listens] + [link]
            link.fail("it was disconnected")
            link.send(None)

    def close(self) -> None:
        """Forget all peers. Call it before the process ends: a thread that still receives then would abort it.

        Peers answer a goodbye at once, and those that are gone break the connection: this waits 2 s at most, for one that hangs.
        """
        for peer in list(self._links):
            self.disconnect(peer)
        end = time.monotonic() + _PATIENCE
        for link in self._left:
            link.join(max(end - time.monotonic(), 0))
        self._memory = ()

    def _link(self, peer: str) -> _Link:
        link = self._links.get(peer)
        if link is None or link.broken:
            got = "a peer that is not connected" if link is None else link.broken
            raise TransferError(f"peer {peer!r}", expected="a connection", got=got, fix="connect it, again if need be")
        return link


class _Ticket(Ticket):
    """Runs of this pool, read or written part by part."""

    def __init__(self, runs: Runs, tag: int) -> None:
        self.runs, self.tag, self.total = runs, tag, int(runs.nbytes.sum())
        self.lock = threading.Lock()
        self.state = TicketState.PENDING if self.total else TicketState.DONE
        self.moved = 0

    def poll(self) -> TicketState:
        return self.state

    def cancel(self, reason: str) -> None:
        with self.lock:
            if self.state is TicketState.PENDING:
                self.error, self.state = reason, TicketState.FAILED

    def take(self, memory: Sequence[torch.Tensor], part_bytes: int) -> tuple[list[int], torch.Tensor] | None:
        """Return header and bytes of the next part; None where there is none."""
        with self.lock:
            if self.state is not TicketState.PENDING or self.moved == self.total:
                return None
            begin, self.moved = self.moved, min(self.moved + part_bytes, self.total)
            part = gather(memory, self.runs.part(begin, self.moved))
            _wait_for_stream(part.device)
            return [_MAGIC, _VERSION, self.tag, begin, self.moved - begin, self.total], part

    def put(self, memory: Sequence[torch.Tensor], begin: int, total: int, part: torch.Tensor) -> None:
        """Write a part, if it is the one that comes next."""
        with self.lock:
            if self.state is not TicketState.PENDING:
                return
            end = begin + part.numel()
            if begin != self.moved or total != self.total or end > total:
                self.error = f"expected bytes from {self.moved} on of {self.total}, got {begin} to {end} of {total}"
                self.state = TicketState.FAILED
                return
            scatter(memory, self.runs.part(begin, end), part)
            _wait_for_stream(part.device)
            self.moved = end
            if end == total:
                self.state = TicketState.DONE

    def end(self) -> None:
        """Note that all parts are sent."""
        with self.lock:
            if self.state is TicketState.PENDING:
                self.state = TicketState.DONE


class _Link:
    """The connection to one rank."""

    def __init__(self, peer: str, rank: int, group: dist.ProcessGroup | None, memory: Sequence[torch.Tensor], part_bytes: int) -> None:
        self.peer, self.rank, self.broken = peer, rank, ""
        self._group, self._memory, self._part_bytes = group, memory, part_bytes
        self._lock = threading.Lock()
        self._expected: dict[int, _Ticket] = {}
        self._queue: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._pushed: set[_Ticket] = set()
        self._speaker = threading.Thread(target=self._send, name=f"kvdock send {peer}", daemon=True)
        self._listener = threading.Thread(target=self._receive, name=f"kvdock receive {peer}", daemon=True)
        self._speaker.start()
        self._listener.start()

    @property
    def listens(self) -> bool:
        return self._listener.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for its threads."""
        self._speaker.join(seconds)
        self._listener.join(seconds)

    def send(self, ticket: _Ticket | None) -> None:
        if ticket is not None:
            with self._lock:
                if self.broken:
                    ticket.cancel(self.broken)
                self._pushed = {each for each in self._pushed if each.state is TicketState.PENDING} | {ticket}
        self._queue.put(ticket)

    def expect(self, ticket: _Ticket) -> _Ticket:
        with self._lock:
            self._expected = {tag: each for tag, each in self._expected.items() if each.state is TicketState.PENDING}
            if ticket.tag in self._expected:
                raise TransferError(f"peer {self.peer!r}: tag", expected="one that nothing is expected by", got=ticket.tag)
            self._expected[ticket.tag] = ticket
        return ticket

    def fail(self, reason: str) -> None:
        with self._lock:
            self.broken = self.broken or f"a connection that is broken: {reason}"
            for ticket in (*self._expected.values(), *self._pushed):
                ticket.cancel(reason)

    def _send(self) -> None:
        try:
            while (ticket := self._queue.get()) is not None:
                while part := ticket.take(self._memory, self._part_bytes):
                    self._out(torch.tensor(part[0]))
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
            raise TransferError(f"peer {self.peer!r}", expected=f"parts of version {_VERSION}", got=f"{magic:x}, version {version}")
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
            raise TransferError(f"peer {self.peer!r}", expected="a group that this process is in", got="none")
        work.wait(_FOREVER)
        _wait_for_stream(tensor.device)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _wait_for_stream(device: torch.device) -> None:
    """Wait for what the calling thread's stream of a device was given; host memory has none."""
    stream = torch.get_device_module(device).current_stream(device)
    if hasattr(stream, "synchronize"):
        stream.synchronize()
