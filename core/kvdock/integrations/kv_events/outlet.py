"""The sockets of a publisher, in a thread of their own: whoever puts a batch here never waits for a reader."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import NamedTuple, TypeAlias

import zmq

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.integrations.kv_events.ledger import TOKENS_PER_EVENT
from kvdock.integrations.kv_events.wire import END, SEQUENCE_BYTES, BlockStored, KVEvent, KVEventBatch, Writer, sequence_frame

__all__ = ["MOST_WAITING", "Outlet", "Replayable", "Socket", "Told", "check_text", "opened", "portions"]

Socket: TypeAlias = zmq.Socket[bytes]

MOST_WAITING = 10_000
"""What may wait for the thread that sends; more is lost, and noticed."""

_BETWEEN_RESENDS = 1.0
"""Seconds: readers cannot keep a publisher busy with what they missed."""

_QUIET = 1.0, 60.0
"""Seconds without a batch after which one without events follows: the first time, and at most. A reader that missed the last ones
notices by the number."""

_LOG = logging.getLogger("kvdock")


class Told(NamedTuple):
    """Events of a rank, to be sent. They may be made when the thread comes to them."""

    ts: float
    rank: int
    events: Iterable[KVEvent]


class Replayable:
    """The last batches that were sent, for readers that missed some.

    Args:
        steps: how many at most.
        nbytes: how many bytes at most, but for the last.
    """

    def __init__(self, steps: int, nbytes: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._steps, self._most, self._nbytes = steps, nbytes, 0

    def add(self, number: int, payload: bytes) -> None:
        """Keep a batch, and forget the oldest beyond the bounds."""
        self._batches.append((number, payload))
        self._nbytes += len(payload)
        while len(self._batches) > self._steps or (self._nbytes > self._most and len(self._batches) > 1):
            self._nbytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Return the batches from a number on that are still here."""
        return [(each, payload) for each, payload in self._batches if each >= number]


def opened(context: zmq.Context[Socket], kind: int, endpoint: str, subject: str, *, bind: bool, **options: int) -> Socket:
    """Return a socket that is bound or connected.

    Args:
        context: the context.
        kind: of the socket.
        endpoint: address, such as ``"tcp://*:5557"``, ``"ipc:///tmp/events"`` or ``"inproc://events"``.
        subject: what to call it in an error.
        bind: whether to bind it; otherwise connect.
        options: options of ZeroMQ, set before.

    Raises:
        ArgumentValueError: ZeroMQ does not take the address.
    """
    socket = context.socket(kind)
    try:
        if not isinstance(endpoint, str) or "\0" in endpoint:
            raise TypeError("no text, or one that ZeroMQ reads a part of")
        for name, value in {"LINGER": 0, **options}.items():
            socket.setsockopt(getattr(zmq, name), value)
        (socket.bind if bind else socket.connect)(endpoint)
        socket.getsockopt_string(zmq.LAST_ENDPOINT)  # which ZeroMQ cannot say of very long ones
    except (zmq.ZMQError, TypeError, UnicodeError) as error:
        socket.close()
        verb = "bind" if bind else "connect"
        fix = "pass one such as 'tcp://127.0.0.1:5557' that nobody else has bound"
        raise ArgumentValueError(subject, expected=f"an address to {verb}", got=f"{endpoint!r}: {error}", fix=fix) from error
    return socket


def check_text(subject: str, value: object) -> str:
    """Return a text that UTF-8 can write, or raise."""
    if not isinstance(value, str):
        raise ArgumentTypeError(subject, expected="text", got=repr(value)[:80], fix="pass a str")
    try:
        value.encode()
    except UnicodeError as error:
        fix = "take out what is half of a surrogate pair"
        raise ArgumentValueError(subject, expected="text that UTF-8 can write", got=ascii(value)[:80], fix=fix) from error
    return value


class Outlet:
    """Numbers batches, sends them, and answers requests for those that a reader missed.

    Args:
        sending: the socket for batches.
        replaying: the socket for requests; none: no replay.
        topic: first frame of each message.
        writer: how batches are written.
        kept: what was sent.
        resend: called where more was missed than is kept, or than could wait here; puts everything again.
    """

    def __init__(
        self,
        sending: Socket,
        replaying: Socket | None,
        topic: bytes,
        writer: Writer,
        kept: Replayable,
        resend: Callable[[], None],
    ) -> None:
        self._sending, self._replaying, self._topic = sending, replaying, topic
        self._writer, self._kept, self._resend = writer, kept, resend
        self._waiting: deque[Told | None] = deque()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_wanted = self._is_closing = False
        self._may_resend, self._quiet = 0.0, inf
        self.number = self._rank = 0
        self.num_refused = 0
        self._thread = threading.Thread(target=self._run, name="kvdock-kv-events", daemon=True)
        self._thread.start()

    def put(self, told: Told, *, at_any_rate: bool = False) -> None:
        """Send events, soon. Where too many wait they are lost, and all is sent again when the thread has caught up."""
        if len(self._waiting) < MOST_WAITING or at_any_rate:
            self._waiting.append(told)
        else:
            self.lose()
            self._is_wanted = True
        os.eventfd_write(self._wakes, 1)

    def lose(self) -> None:
        """Let a number be missing: readers notice that something is."""
        if not self._waiting or self._waiting[-1] is not None:  # one gap is as good as many
            self._waiting.append(None)

    def close(self, timeout: float) -> bool:
        """Send what waits, for ``timeout`` seconds at most, and close the sockets. Returns whether all was sent."""
        if self._wakes >= 0:
            self._is_closing = True
            os.eventfd_write(self._wakes, 1)
            self._thread.join(timeout)
            if not self._thread.is_alive():  # nobody reads it any more
                os.close(self._wakes)
                self._wakes = -1
        return not self._thread.is_alive() and not self._waiting

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._replaying is not None:
            poller.register(self._replaying, zmq.POLLIN)
        try:
            while not (self._is_closing and not self._waiting):
                quiet = None if self._quiet == inf else int(1000 * self._quiet)
                ready = dict(poller.poll(100 if self._is_wanted else quiet))
                if self._wakes in ready:
                    os.eventfd_read(self._wakes)
                elif not ready and not self._is_wanted and self._quiet < inf:
                    self._send(KVEventBatch(time.time(), [], self._rank))
                    self._quiet = min(2 * self._quiet, _QUIET[1])
                self._send_waiting()
                if self._replaying in ready:
                    self._answer()
                self._resend_wanted()
        finally:
            for socket in filter(None, (self._sending, self._replaying)):
                socket.close(linger=1000)  # what is on its way may arrive

    def _send_waiting(self) -> None:
        while self._waiting:
            told = self._waiting.popleft()
            if told is None:
                self.number += 1
                continue
            for events in portions(told.events):
                self._send(KVEventBatch(told.ts, events, told.rank))
            self._rank, self._quiet = told.rank, _QUIET[0]

    def _send(self, batch: KVEventBatch) -> None:
        number, self.number = self.number, self.number + 1
        try:
            payload = self._writer.payload(batch)
            self._sending.send_multipart((self._topic, sequence_frame(number), payload))
        except Exception:  # noqa: BLE001 - readers notice the missing number, and the thread must go on
            _LOG.exception("kv events: batch %d was not sent", number)
        else:
            self._kept.add(number, payload)

    def _answer(self) -> None:
        """Send a reader what it missed, as far as it is kept. Where its queue is full, it gets no more: nobody waits for it."""
        assert self._replaying is not None  # noqa: S101 - narrows the type
        frames = self._replaying.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            self.num_refused += 1
            return
        start = int.from_bytes(frames[2], "big")
        batches = self._kept.since(start)
        for number, payload in batches:
            self._replaying.send_multipart((frames[0], b"", *self._writer.answer(self._topic, sequence_frame(number), payload)))
        self._replaying.send_multipart((frames[0], b"", *self._writer.answer(b"", END, b"")))
        self._is_wanted |= start < (batches[0][0] if batches else self.number)

    def _resend_wanted(self) -> None:
        now = time.monotonic()
        if self._is_wanted and now >= self._may_resend and not self._is_closing:
            self._is_wanted, self._may_resend = False, now + _BETWEEN_RESENDS
            self._resend()
            self._send_waiting()


def portions(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yield events in batches that readers take."""
    portion, tokens = list[KVEvent](), 0
    for event in events:
        size = len(event.token_ids) if isinstance(event, BlockStored) else 1
        if portion and tokens + size > TOKENS_PER_EVENT:
            yield portion
            portion, tokens = [], 0
        portion.append(event)
        tokens += size
    if portion:
        yield portion
