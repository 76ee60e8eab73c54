"""What an engine of one-sided writes promises to `kvdock.transfer.OneSided`: it writes into a peer's memory, and says when it has."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvdock.transfer.interface import TicketState

__all__ = ["Writer"]


class Writer(ABC):
    """Writes bytes of registered memory into that of peers. One thread uses it, and no call waits for a peer.

    Writes may land in any order, in pieces, and late: whoever receives them finds out by itself what is there. Peers are never told.
    """

    @abstractmethod
    def register(self, memory: torch.Tensor) -> bytes:
        """Take the memory that is read and written, uint8 ``[nbytes]`` on the host; called once, first. Returns how to reach it."""

    @abstractmethod
    def connect(self, peer: str, described: bytes) -> None:
        """Get to know a peer by what its `register` returned. It is from outside. Whatever is wrong with it is raised, as any error."""

    @abstractmethod
    def write(self, peer: str, begin: int, at: int, nbytes: int) -> object:
        """Begin to write bytes of this memory from ``begin`` on into the peer's from ``at`` on. Returns what `state` is asked by.

        The bytes do not change until the write has ended. An error that is raised breaks the connection.
        """

    @abstractmethod
    def state(self, write: object) -> TicketState:
        """Return how far a write is. One that has ended is not asked for again, one of a peer that was disconnected is.

        It is pending for as long as this memory may be read for it.
        """

    def progress(self) -> None:  # noqa: B027 - as is said
        """Let the engine work, where it has no thread of its own for that. Peers' writes may depend on it, too."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer, and end its writes as far as that can be done."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory."""
