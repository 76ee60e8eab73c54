"""A reader of KV events: it notices what it missed, asks for it again, and refuses what is no message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq

from kvdock.checks import check_size
from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.integrations.kv_events.index import BlockIndex
from kvdock.integrations.kv_events.outlet import Socket, check_text, opened
from kvdock.integrations.kv_events.reading import read_batch
from kvdock.integrations.kv_events.wire import END, SEQUENCE_BYTES, KVEventBatch, sequence_frame

__all__ = ["KVEventSubscriber"]

_AT_ONCE = 1000
"""Messages that one call reads at most: a publisher that never stops does not keep its reader."""

_ALL_OF_A_REPLAY = 10
"""How many times as long as for a message a reader waits for all of a replay, which may never end either."""


class KVEventSubscriber:
    """Reads one publisher's events into an index; vLLM's and SGLang's, too.

    Numbers that are missing are asked for at ``replay_endpoint``. What cannot be had is counted in `num_missed`, and the index is
    incomplete (`BlockIndex.is_complete`) until the publisher clears, as kvdock's does by itself behind such a request. A publisher that
    began anew is noticed by its numbers, unless it has sent more already than was read of the one before.

    Messages are not trusted: a frame that is too large is cut off by ZeroMQ before memory is taken for it, no value is unpickled, and
    what is no batch is refused. Belongs to one thread at a time.

    Args:
        endpoint: where batches come from, such as ``"tcp://engine:5557"``.
        replay_endpoint: where to ask for what was missed.
        topic: which messages: those whose topic begins so.
        index: what to fill; none: a new one.
        bind: whether to bind ``endpoint``, where many publishers connect. Each publisher needs a subscriber of its own all the same.
        max_message_bytes: the longest frame.
        max_waiting: messages that may wait here to be read; what comes meanwhile is missed.
        replay_timeout: seconds to wait for each message of a replay; ten times as long for all of it.

    Raises:
        ArgumentTypeError, ArgumentValueError: an address that ZeroMQ does not take; a bad bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        index: BlockIndex | None = None,
        bind: bool = False,
        max_message_bytes: int = 2**22,
        max_waiting: int = 1000,
        replay_timeout: float = 1.0,
    ) -> None:
        if not isinstance(index, BlockIndex | None):
            raise ArgumentTypeError(
                "KVEventSubscriber: index", expected="a BlockIndex", got=repr(index)[:80], fix="leave it out for a new one"
            )
        topic = check_text("KVEventSubscriber: topic", topic)
        self.index = BlockIndex() if index is None else index
        self.num_missed = 0
        self._bounds = {
            "MAXMSGSIZE": check_size("KVEventSubscriber: max_message_bytes", max_message_bytes, 2**63 - 1),
            "RCVHWM": check_size("KVEventSubscriber: max_waiting", max_waiting),
        }
        self._patience = _milliseconds("KVEventSubscriber: replay_timeout", replay_timeout)
        self._replay_endpoint = replay_endpoint
        self._next, self._last = 0, -1
        self._context: zmq.Context[Socket] = zmq.Context.instance()
        self._socket = opened(self._context, zmq.SUB, endpoint, "KVEventSubscriber: endpoint", bind=bind, **self._bounds)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def __repr__(self) -> str:
        return f"KVEventSubscriber(next={self._next}, missed={self.num_missed}, {self.index})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def poll(self, timeout: float = 0.0) -> list[KVEventBatch]:
        """Read what has come, up to a thousand messages, and follow it in the index.

        Args:
            timeout: seconds to wait for a first message.

        Returns:
            the batches, in order, those of a replay among them.

        Raises:
            ArgumentValueError: a message that is none, or that the index refuses. It counts as missed, and the next call goes on
                behind it; batches before it are in the index.
            CapacityError: the index is full; likewise.
        """
        done: list[KVEventBatch] = []
        wait = _milliseconds("KVEventSubscriber.poll: timeout", timeout)
        if self._socket.closed:
            raise ArgumentValueError("KVEventSubscriber.poll", expected="an open reader", got="a closed one", fix="make another one")
        for _ in range(_AT_ONCE):
            if not self._socket.poll(wait):
                break
            wait = 0
            done += self._message(self._socket.recv_multipart())
        return done

    def _message(self, frames: list[bytes]) -> Iterator[KVEventBatch]:
        """Follow a message, and before it what is missing."""
        if len(frames) != 3:
            raise self._refused("three frames: topic, number, batch", f"{len(frames)} frames")
        number = self._number(frames[1])
        if number <= self._last:  # a publisher's numbers go up: this is another one
            self._next = 0
            self.index.forget()
        self._last = number
        if number > self._next:
            yield from self._replay(number)
        if number >= self._next:  # otherwise a replay brought it already
            yield self._apply(number, frames[2])

    def _apply(self, number: int, payload: bytes) -> KVEventBatch:
        missing, self._next = number - self._next, number + 1
        if missing:
            self._miss(missing)
        try:
            batch = read_batch(payload)
            self.index.apply(batch)
        except Exception:
            self._miss(1)
            raise
        return batch

    def _miss(self, count: int) -> None:
        self.num_missed += count
        self.index.doubt()

    def _replay(self, stop: int) -> Iterator[KVEventBatch]:
        """Ask for the batches before ``stop`` that did not come."""
        if self._replay_endpoint is None:
            return
        subject = "KVEventSubscriber: replay_endpoint"
        asking = opened(self._context, zmq.DEALER, self._replay_endpoint, subject, bind=False, **self._bounds)
        try:
            asking.send_multipart((b"", sequence_frame(self._next)))
            for number, payload in self._answers(asking, stop):
                yield self._apply(number, payload)
        finally:
            asking.close()

    def _answers(self, asking: Socket, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield what a replay brings, in order, up to its end or what was not asked for."""
        end = time.monotonic() + _ALL_OF_A_REPLAY * self._patience / 1000
        while time.monotonic() < end and asking.poll(self._patience):
            frames = asking.recv_multipart()
            if len(frames) not in (3, 4) or frames[-2] == END:  # with a topic, or without as it was before
                return
            number = self._number(frames[-2])
            if not self._next <= number < stop:
                return
            yield number, frames[-1]

    def _number(self, frame: bytes) -> int:
        number = int.from_bytes(frame, "big")
        if len(frame) != SEQUENCE_BYTES or number >= 2**63:
            raise self._refused("a number of 8 bytes, from 0", f"{len(frame)} bytes, {frame[:8].hex()}")
        return number

    def _refused(self, expected: str, got: str) -> ArgumentValueError:
        self._miss(1)
        fix = "connect to a publisher of vLLM's KV events"
        return ArgumentValueError("KV events: message", expected=expected, got=got, fix=fix)


def _milliseconds(subject: str, seconds: float) -> int:
    """Return seconds as ZeroMQ takes them, or raise. What is longer than it can wait is as long as it can."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ArgumentTypeError(subject, expected="seconds", got=repr(seconds)[:80], fix="pass a number")
    if not seconds >= 0:
        raise ArgumentValueError(
            subject, expected="seconds, 0 or more", got=seconds, fix="pass float('inf') to wait for as long as it takes"
        )
    return int(1000 * min(seconds, 2e6))
