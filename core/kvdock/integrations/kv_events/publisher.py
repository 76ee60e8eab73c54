"""Publishing what managers store and evict."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from types import TracebackType
from typing import Literal, Self

import zmq

from kvdock.checks import check_int, check_size
from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.integrations.kv_events.ledger import Ledger
from kvdock.integrations.kv_events.outlet import Outlet, Replayable, Socket, Told, check_text, opened
from kvdock.integrations.kv_events.wire import AllBlocksCleared, KVEvent, Writer
from kvdock.prefix import Cleared, PrefixEvent
from kvdock.scheduler import CacheManager

__all__ = ["KVEventPublisher"]

_MOST = 2**30 - 1
"""Of ranks and batches: what ZeroMQ's bounds and the format's numbers hold, twice over."""


class KVEventPublisher:
    """Tells routers what managers store and evict, in the wire format of vLLM's KV events.

    Several managers are several data-parallel ranks, in one numbered stream. An event is told when the call that caused it is done,
    in a batch of its own, or with ``auto_flush=False`` in one batch with the others of its rank at `flush`, which an engine calls once
    in a step. Names of blocks are computed in the calling thread; a thread of the publisher's sends them. Nobody waits for a reader: one
    that is too slow misses numbers, asks for them at ``replay_endpoint``, and where they are no longer kept, everything is sent again.

    With several layer groups a block of the events is a unit of the manager: ``manager.block_size`` tokens in all groups. What
    a window lets go of within a unit is not told, so that a router may expect more of a prefix than is left.

    Threads: any may call it, and each manager belongs to its own. A forked child publishes nothing.

    Args:
        managers: one for each rank; nothing may be cached in them yet.
        endpoint: where batches go, such as ``"tcp://*:5557"``, ``"ipc:///tmp/events"`` or ``"inproc://events"``.
        replay_endpoint: where readers ask for what they missed; always bound.
        topic: first frame of each message, which readers subscribe to.
        shape: events as ``"maps"``, or as ``"arrays"`` for readers from before vLLM wrote maps, and topics into replays. Dynamo and
            `KVEventSubscriber` read both.
        hashes: ``"short"``: the last 64 bits of each name, as integers, which all readers know; ``"whole"``: its 32 bytes.
        medium: where the blocks are.
        first_rank: rank of the first manager.
        auto_flush: whether each event is sent at once.
        bind: whether to bind ``endpoint``; otherwise connect, where one reader for many publishers has bound it.
        buffer_steps: batches that are kept for replay, and that may wait for a slow reader.
        buffer_bytes: bytes that are kept for replay at most.

    Raises:
        ArgumentTypeError, ArgumentValueError: no managers; something is cached already; an address that cannot be bound.
    """

    def __init__(
        self,
        *managers: CacheManager,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        shape: Literal["maps", "arrays"] = "maps",
        hashes: Literal["short", "whole"] = "short",
        medium: str | None = "GPU",
        first_rank: int = 0,
        auto_flush: bool = True,
        bind: bool = True,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 2**26,
    ) -> None:
        _check(managers, shape, hashes)
        self._first = check_int("KVEventPublisher: first_rank", first_rank, 0)
        if first_rank >= _MOST:
            fix = "pass the data-parallel rank of the first manager"
            raise ArgumentValueError("KVEventPublisher: first_rank", expected=f"less than {_MOST}", got=first_rank, fix=fix)
        steps = check_size("KVEventPublisher: buffer_steps", buffer_steps, _MOST)
        topic = check_text("KVEventPublisher: topic", topic)
        medium = None if medium is None else check_text("KVEventPublisher: medium", medium)
        kept = Replayable(steps, check_int("KVEventPublisher: buffer_bytes", buffer_bytes, 0))
        self.auto_flush = auto_flush
        self._lock = threading.Lock()
        self._is_closed = False
        self._ledgers = [Ledger(manager.block_size) for manager in managers]
        self._gathered: list[list[KVEvent]] = [[] for _ in managers]
        context: zmq.Context[Socket] = zmq.Context.instance()
        sending = opened(context, zmq.PUB, endpoint, "KVEventPublisher: endpoint", bind=bind, SNDHWM=steps)
        self.endpoint = sending.getsockopt_string(zmq.LAST_ENDPOINT)
        replaying, self.replay_endpoint = None, None
        if replay_endpoint is not None:
            try:
                # ZeroMQ counts what was read in steps of half the bound: twice of it holds a whole replay.
                how = {"SNDHWM": 2 * (steps + 1), "MAXMSGSIZE": 1024}
                replaying = opened(context, zmq.ROUTER, replay_endpoint, "KVEventPublisher: replay_endpoint", bind=True, **how)
            except ArgumentValueError:
                sending.close()
                raise
            self.replay_endpoint = replaying.getsockopt_string(zmq.LAST_ENDPOINT)
        writer = Writer(arrays=shape == "arrays", whole_names=hashes == "whole", medium=medium)
        self._outlet = Outlet(sending, replaying, topic.encode(), writer, kept, self.resend)
        weakref.finalize(self, self._outlet.close, 1.0)  # at exit, since the outlet's thread refers to this
        self._ends = [manager.prefix.subscribe(partial(self._told, rank)) for rank, manager in enumerate(managers)]

    def __repr__(self) -> str:
        return f"KVEventPublisher({self.endpoint!r}, ranks={len(self._ledgers)}, batches={self._outlet.number})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def flush(self) -> None:
        """Send what was gathered: a batch for each rank of which there is something to tell."""
        with self._lock:
            for rank in range(len(self._gathered)):
                self._flush(rank)

    def resend(self) -> None:
        """Send everything that is stored again, behind an `AllBlocksCleared` of every rank.

        For readers that came late or missed more than is kept for replay. Costs time in the number of blocks.
        """
        with self._lock:
            self._resend()

    def close(self, timeout: float = 1.0) -> bool:
        """Stop: send what waits, for ``timeout`` seconds at most, and close the sockets.

        Returns:
            whether all was sent. A second call does nothing.
        """
        for end in self._ends:
            end()
        with self._lock:
            if self._is_closed:
                return True
            for rank in range(len(self._gathered)):
                self._flush(rank)
            self._is_closed = True
        return self._outlet.close(timeout)

    def _told(self, rank: int, event: PrefixEvent) -> None:
        """Observe a prefix cache."""
        with self._lock:
            try:
                self._gathered[rank] += self._ledgers[rank].read(event)
            except Exception:
                self._outlet.lose()
                raise
            if isinstance(event, Cleared) and len(self._ledgers) > 1:
                self._resend()  # some readers take one rank's clearing for all ranks'
            elif self.auto_flush:
                self._flush(rank)

    def _flush(self, rank: int) -> None:
        events, self._gathered[rank] = self._gathered[rank], []
        if events and not self._is_closed:
            self._outlet.put(Told(time.time(), self._first + rank, events))

    def _resend(self) -> None:
        """Put everything, of which what was gathered and not sent is a part."""
        now, count = time.time(), len(self._ledgers)
        self._gathered = [[] for _ in range(count)]
        if self._is_closed:
            return
        for rank in range(count):
            self._outlet.put(Told(now, self._first + rank, [AllBlocksCleared()]), at_any_rate=True)
        for rank, ledger in enumerate(self._ledgers):
            self._outlet.put(Told(now, self._first + rank, ledger.everything()), at_any_rate=True)


def _check(managers: tuple[CacheManager, ...], shape: str, hashes: str) -> None:
    for manager in managers:
        if not isinstance(manager, CacheManager):
            fix = "pass each manager as an argument of its own, first of all"
            raise ArgumentTypeError("KVEventPublisher: managers", expected="CacheManagers", got=repr(manager)[:80], fix=fix)
        if cached := manager.prefix.size_info.total_size:
            fix = "make the publisher before the first sequence, or call manager.reset()"
            raise ArgumentValueError("KVEventPublisher: managers", expected="nothing cached yet", got=f"{cached} tokens", fix=fix)
    if not managers or len({id(manager) for manager in managers}) < len(managers):
        got = "one twice" if managers else "none"
        raise ArgumentValueError("KVEventPublisher: managers", expected="one for each rank", got=got, fix="pass each manager once")
    for name, value, kinds in (("shape", shape, ("maps", "arrays")), ("hashes", hashes, ("short", "whole"))):
        if value not in kinds:
            expected, fix = " or ".join(map(repr, kinds)), f"pass {kinds[0]!r}"
            raise ArgumentValueError(f"KVEventPublisher: {name}", expected=expected, got=repr(value), fix=fix)
