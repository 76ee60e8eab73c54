"""Blocks through a process group of torch: whatever backend it has for the pool's device.

A push is a stream of parts, each a header and its bytes. A thread for each peer receives, and one sends, since some groups' operations
only end in a call that waits. No such call has a limit of time: one that passes breaks the connections to all other ranks. So limits are
for who holds the tickets, and a ticket that is cancelled is over at once: threads touch the pool under its lock only, and wait with
memory of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from kvdock.errors import ArgumentTypeError, ArgumentValueError, TransferError
from kvdock.integrations.torch_links import Link
from kvdock.rank import place_in
from kvdock.transfer.interface import Ticket, Transport
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.packing import Runs
from kvdock.transfer.refusals import no_pool, refused
from kvdock.transfer.spans import Spans
from kvdock.transfer.streams import StreamTicket, wait_for_stream

__all__ = ["TorchDistributed"]

_PATIENCE = 2.0

_links: weakref.WeakSet[Link] = weakref.WeakSet()
"""Those of which a thread may still receive."""
os.register_at_fork(after_in_child=_links.clear)  # the threads are the parent's, and may have held locks


@atexit.register
def _end_all() -> None:
    """Have the threads end that can: one that still receives when Python goes aborts the process."""
    end = time.monotonic() + _PATIENCE
    for link in (links := list(_links)):
        link.leave("the process ends")
    for link in links:
        link.join(end)


def _abandon(links: dict[str, Link], process: int) -> None:
    """Let the threads of a transport that nobody has any more end, as soon as the peers say goodbye too."""
    for link in links.values() if os.getpid() == process else ():
        link.leave("its transport is gone")


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
            raise ArgumentTypeError("TorchDistributed: part_bytes", expected="an int", got=repr(part_bytes), fix="pass a number of bytes")
        if not 1 <= part_bytes <= 1 << 30:
            raise ArgumentValueError(
                "TorchDistributed: part_bytes", expected="1 to 2**30", got=part_bytes, fix="leave it out, or take less"
            )
        self._size, self._rank = place_in("TorchDistributed: group", group)
        self.part_bytes, self._group = part_bytes, group
        self._memory: Sequence[torch.Tensor] = ()
        self._links: dict[str, Link] = {}
        weakref.finalize(self, _abandon, self._links, os.getpid()).atexit = False
        self._left: list[Link] = []  # a thread of theirs may still listen, and would take what a new one is to get

    def register(self, layout: PoolLayout, memory: Sequence[torch.Tensor]) -> bytes:
        """Take a pool, and return this process's rank in the group."""
        self._memory = memory
        return json.dumps({"rank": self._rank, "size": self._size}).encode()

    def connect(self, peer: str, layout: PoolLayout, described: bytes) -> None:
        """Get to know a peer by its rank in the group."""
        if not self._memory:
            raise no_pool(peer)
        try:
            found = json.loads(described[:200])
            rank, size = found["rank"], found["size"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise refused(f"peer {peer!r}", "its rank in a process group", repr(described[:40])) from error
        if peer in self._links or any(link.rank == rank for link in self._links.values()):
            raise TransferError(
                f"peer {peer!r}", expected="one that is not known yet", got=f"rank {rank!r} again", fix="disconnect it first"
            )
        if type(rank) is not int or size != self._size or not 0 <= rank < size or rank == self._rank:
            expected = f"another rank of the group of {self._size}, in which this is rank {self._rank}"
            fix = "make both transports over one group, and connect other ranks only"
            raise TransferError(f"peer {peer!r}", expected=expected, got=f"rank {rank!r} of {size!r}"[:80], fix=fix)
        if any(link.rank == rank and link.listens for link in self._left):
            fix = "let the other side disconnect too; after a rank is lost, make a new group"
            raise TransferError(
                f"peer {peer!r}", expected="a rank that has said goodbye", got=f"rank {rank}, left on this side only", fix=fix
            )
        self._links[peer] = Link(peer, rank, self._group, self._memory, self.part_bytes)
        _links.add(self._links[peer])

    def push(self, peer: str, spans: Spans, tag: int, note: bytes) -> Ticket:
        """Queue a push. It is done when the group has taken all bytes. Its tickets have no notes."""
        link = self._link(peer)
        wait_for_stream(self._memory[0].device)
        ticket = StreamTicket(Runs.of_source(spans), tag)
        link.send(ticket)
        return ticket

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        """Expect a push. It is done when all bytes are in the pool."""
        return self._link(peer).expect(StreamTicket(Runs.of_target(spans), tag))

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and tell it so where it listens."""
        if link := self._links.pop(peer, None):
            self._left = [each for each in self._left if each.listens] + [link]
            link.leave("it was disconnected")

    def close(self) -> None:
        """Forget all peers. What nobody closed says goodbye when the process ends.

        Peers answer a goodbye at once, and those that are gone break the connection: this waits 2 s at most, for one that hangs.
        """
        for peer in list(self._links):
            self.disconnect(peer)
        end = time.monotonic() + _PATIENCE
        for link in self._left:
            link.join(end)
        self._memory = ()

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None or link.broken:
            got = "a peer that is not connected" if link is None else link.broken
            raise TransferError(f"peer {peer!r}", expected="a connection", got=got, fix="connect it, again if need be")
        return link
