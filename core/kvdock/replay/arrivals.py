"""When requests come and go: one after the other, or at their times, while others still hold their blocks."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import attrs

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from kvdock.replay.pool import Begun, ReplayPool
from kvdock.replay.tokens import TokenMaker
from kvdock.replay.trace import TraceRequest

__all__ = ["Arrivals", "AtTheirTimes", "OneByOne", "Rates", "Waits"]


def _check_rate(instance: object, attribute: attrs.Attribute[float], value: object) -> None:
    subject = f"Rates: {attribute.name}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(subject, expected="tokens per second, a number", got=repr(value)[:80])
    if not 0 < value < float("inf"):
        raise ArgumentValueError(subject, expected="tokens per second, above 0", got=value)


@attrs.frozen
class Rates:
    """How quickly each running request gets on, whatever else runs.

    Args:
        prefill: tokens of a prompt that are computed in a second; cached ones take no time.
        decode: tokens that are generated in a second.
    """

    prefill: float = attrs.field(default=10_000.0, validator=_check_rate)
    decode: float = attrs.field(default=30.0, validator=_check_rate)


@attrs.frozen
class Waits:
    """What became of requests that found no room at once.

    Args:
        waited: how many.
        longest_s: how long one waited at most, in the trace's seconds.
        most_running: how many held blocks at one time, at most.
    """

    waited: int
    longest_s: float
    most_running: int


class Arrivals(ABC):
    """An order in which the requests of a trace begin and finish."""

    @abstractmethod
    def replay(self, requests: Sequence[TraceRequest], pool: ReplayPool, maker: TokenMaker) -> Iterator[Begun]:
        """Let all requests begin, store and finish; yield each when it has begun. In the end nothing is held."""

    @property
    @abstractmethod
    def waits(self) -> Waits | None:
        """Who had to wait; None if the order knows no time."""


class OneByOne(Arrivals):
    """Each request is done before the next one begins. Times and outputs do not count."""

    waits = None

    def replay(self, requests: Sequence[TraceRequest], pool: ReplayPool, maker: TokenMaker) -> Iterator[Begun]:
        """Let requests begin, store and finish; see `Arrivals.replay`."""
        for request in requests:
            begun = pool.begin(request, maker.tokens(request))
            if begun is None:
                raise _stuck(request)
            pool.store(begun)
            pool.finish(begun)
            yield begun


class AtTheirTimes(Arrivals):
    """Requests come at their times. Those that do not fit wait, in a line, until one that runs gives blocks back.

    A request holds its prefix and all its blocks, those of its output too, from its beginning to its end. Its prompt can be
    shared once it is computed. Its output is never shared: a trace does not say which prompt it became part of.

    Args:
        rates: how quickly requests get on.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._line: deque[TraceRequest] = deque()
        self._running = self._most_running = self._waited = 0
        self._longest_s = 0.0

    @property
    def waits(self) -> Waits:
        """Who had to wait, so far."""
        return Waits(self._waited, self._longest_s, self._most_running)

    def replay(self, requests: Sequence[TraceRequest], pool: ReplayPool, maker: TokenMaker) -> Iterator[Begun]:
        """Let requests begin, store and finish; see `Arrivals.replay`."""
        for request in requests:
            # What is due by now comes first: it may release the blocks that this request needs.
            yield from self._until(request.arrival_s, pool, maker)
            self._line.append(request)
            yield from self._admit(request.arrival_s, pool, maker)
            self._waited += bool(self._line and self._line[-1] is request)
        yield from self._until(float("inf"), pool, maker)

    def _until(self, now: float, pool: ReplayPool, maker: TokenMaker) -> Iterator[Begun]:
        """Let everything happen that is due."""
        while self._due and self._due[0][0] <= now:
            time, _, happen = heapq.heappop(self._due)
            happen()
            yield from self._admit(time, pool, maker)

    def _admit(self, now: float, pool: ReplayPool, maker: TokenMaker) -> Iterator[Begun]:
        """Let requests begin, in the order in which they came, as long as there is room."""
        while self._line:
            request = self._line[0]
            begun = pool.begin(request, maker.tokens(request))
            if begun is None:
                # Nobody runs, so nobody will release a block: waiting would never end.
                if not self._running:
                    raise _stuck(request)
                return
            self._line.popleft()
            self._start(begun, now, pool)
            yield begun

    def _start(self, begun: Begun, now: float, pool: ReplayPool) -> None:
        """Note when a request that begins now will have computed its prompt, and when it will finish."""
        request = begun.request
        stored = now + (request.input_length - begun.cached_len) / self._rates.prefill
        self._running += 1
        self._most_running = max(self._most_running, self._running)
        self._longest_s = max(self._longest_s, now - request.arrival_s)

        def finish() -> None:
            pool.finish(begun)
            self._running -= 1

        self._at(stored, lambda: pool.store(begun))
        self._at(stored + request.output_length / self._rates.decode, finish)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        """Note what is to happen at a time; of equal times, what was noted first comes first."""
        heapq.heappush(self._due, (time, next(self._order), happen))


def _stuck(request: TraceRequest) -> OutOfBlocksError:
    """Describe a request that finds no room although nobody else holds any."""
    return OutOfBlocksError(
        f"trace: line {request.line}",
        expected="room for a request that fits in the pool, when no other runs",
        got="a prefix cache that releases too little",
        fix="report it, with the name of the prefix cache",
    )
