"""What a transport promises: it carries runs of bytes between registered pools, and says when they are there or never will be."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.spans import Spans

__all__ = ["Ticket", "TicketState", "Transport"]


class TicketState(enum.Enum):
    """How far a ticket is."""

    PENDING = "pending"
    """Bytes may still be read or written: blocks must not be given away."""

    DONE = "done"
    """All bytes are there: of `Transport.push` at the peer or on their way, of `Transport.expect` in the pool."""

    FAILED = "failed"
    """It will not come to an end, and nothing is read or written for it any more."""


class Ticket(ABC):
    """One push or one expected push.

    Attributes:
        error: why it failed; empty otherwise.
        note: of an expected push, what the peer's `Transport.push` is told, such as where to write; at most 1 KiB.
    """

    error: str = ""
    note: bytes = b""

    @abstractmethod
    def poll(self) -> TicketState:
        """Return how far it is, without waiting."""

    @abstractmethod
    def cancel(self, reason: str) -> None:
        """Ask for its end. It stays `TicketState.PENDING` for as long as its bytes may still move, and fails then, or is done."""


class Transport(ABC):
    """Carries blocks between this process's pool and those of its peers. One thread uses it.

    No call waits for a peer. A plugin brings one by the hook ``kvdock_transports``; `kvdock.transfer.Exchange` is what calls it, with
    peers whose layouts were checked. What comes from peers is untrusted: no pickle, and sizes are checked before memory is taken.

    Attributes:
        name: of the way in which bytes go: peers with another cannot be connected.
    """

    name: str

    @abstractmethod
    def register(self, layout: PoolLayout, memory: Sequence[torch.Tensor]) -> bytes:
        """Take a pool; called once, first.

        Args:
            layout: what lies where.
            memory: the bytes of each region, uint8 ``[nbytes]`` on the pool's device. They stay where they are.

        Returns:
            What peers need to `connect`; as bytes that mean something to the same transport only.
        """

    @abstractmethod
    def connect(self, peer: str, layout: PoolLayout, described: bytes) -> None:
        """Get to know a peer.

        Args:
            peer: how it is called from now on.
            layout: its pool.
            described: what its `register` returned. From outside: check it.

        Raises:
            TransferError: it is none of this transport's, the peer is known already, or this was closed. The text names the peer.
        """

    @abstractmethod
    def push(self, peer: str, spans: Spans, tag: int, note: bytes) -> Ticket:
        """Begin to write bytes of this pool into a peer's, which expects them by the same tag.

        What is written by then is what goes, whatever stream of the device it was written on.

        Args:
            peer: whom to.
            spans: from where to where.
            tag: a number of 62 bits that the peer chose.
            note: that of the peer's ticket. From outside: check it.

        Raises:
            TransferError: no such peer, the connection is broken, or a note that is none.
        """

    @abstractmethod
    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        """Expect a peer's push.

        Args:
            peer: whom from.
            spans: what it will write. Only target and bytes count: where they are there is known to the peer alone, so runs may be cut
                otherwise, but the bytes are those, in their order.
            tag: by which the peer pushes; another for each.

        Raises:
            TransferError: no such peer, or the connection is broken.
        """

    def poll(self) -> None:  # noqa: B027 - some have threads for that
        """Let bytes go on, without waiting, where nothing else does that; `kvdock.transfer.Exchange.poll` calls it in each step."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not. When this returns, none of its tickets is pending: nothing is read or written for them."""

    @abstractmethod
    def close(self) -> None:
        """Forget all peers, and release the pool. A second call does nothing."""
