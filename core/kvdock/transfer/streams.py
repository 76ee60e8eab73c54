"""Pushes as streams of parts: the tickets of transports that pack blocks, and touch the pool themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvdock.transfer.interface import Ticket, TicketState
from kvdock.transfer.packing import Runs, gather, scatter

__all__ = ["StreamTicket", "wait_for_stream"]


class StreamTicket(Ticket):
    """Runs of this pool, read or written part by part."""

    def __init__(self, runs: Runs, tag: int) -> None:
        self.runs, self.tag, self.total = runs, tag, int(runs.nbytes.sum())
        self.lock = threading.Lock()
        self.state = TicketState.PENDING if self.total else TicketState.DONE
        self.moved = 0

    def poll(self) -> TicketState:
        """Return how far it is."""
        return self.state

    def cancel(self, reason: str) -> None:
        """End it now: threads touch the pool under its lock only."""
        with self.lock:
            if self.state is TicketState.PENDING:
                self.error, self.state = reason, TicketState.FAILED

    def take(self, memory: Sequence[torch.Tensor], part_bytes: int) -> tuple[int, torch.Tensor] | None:
        """Return first byte and bytes of the next part, in memory of their own; None where there is none."""
        with self.lock:
            if self.state is not TicketState.PENDING or self.moved == self.total:
                return None
            begin, self.moved = self.moved, min(self.moved + part_bytes, self.total)
            part = gather(memory, self.runs.part(begin, self.moved))
            wait_for_stream(part.device)
            return begin, part

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
            wait_for_stream(part.device)
            self.moved = end
            if end == total:
                self.state = TicketState.DONE

    def end(self) -> None:
        """Note that all parts are sent."""
        with self.lock:
            if self.state is TicketState.PENDING:
                self.state = TicketState.DONE


def wait_for_stream(device: torch.device) -> None:
    """Wait for what the calling thread's stream of a device was given; host memory has none."""
    stream = torch.get_device_module(device).current_stream(device)
    if hasattr(stream, "synchronize"):
        stream.synchronize()
