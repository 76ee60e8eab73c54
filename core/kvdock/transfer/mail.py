"""What one side says and hears: messages to be carried, peers that were heard of, and asks that wait for their offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvdock.transfer.messages import BEAT, Ask

__all__ = ["Mail", "Waiting"]

_MOST_ASKS, _MOST_BLOCKS = 4096, 1 << 22
"""Asks that wait, of all peers together, and block ids in them: peers cannot make this side hold more."""


class Mail:
    """Messages to peers in their order, and when each peer was last heard of and spoken to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._spoke: dict[str, float] = {}
        self._outgoing: list[tuple[str, bytes]] = []

    def say(self, peer: str, message: bytes) -> None:
        """Have a message carried."""
        self._outgoing.append((peer, message))
        self._spoke[peer] = self._clock()

    def hear(self, peer: str) -> None:
        """Note that a peer is alive."""
        self._heard[peer] = self._clock()

    def silence(self, peer: str) -> float:
        """Return for how long a peer was not heard of."""
        now = self._clock()
        return now - self._heard.get(peer, now)

    def beat(self, peers: Iterable[str], interval: float) -> None:
        """Tell peers that were not spoken to for an interval that this side is alive."""
        now = self._clock()
        for peer in peers:
            if now - self._spoke.get(peer, now - interval) >= interval:
                self.say(peer, BEAT)

    def forget(self, peer: str) -> None:
        """Say nothing more to a peer."""
        self._heard.pop(peer, None)
        self._spoke.pop(peer, None)
        self._outgoing = [item for item in self._outgoing if item[0] != peer]

    def collect(self) -> list[tuple[str, bytes]]:
        """Return what is to be carried, and forget it."""
        found, self._outgoing = self._outgoing, []
        return found


class Waiting:
    """Asks that came before what they ask for was offered."""

    def __init__(self) -> None:
        self._asks: dict[tuple[str, int], tuple[Ask, float]] = {}

    def add(self, peer: str, ask: Ask, end: float) -> str:
        """Let an ask wait until a time; return why not, or an empty text."""
        if len(self._asks) >= _MOST_ASKS or ask.num_blocks + sum(each.num_blocks for each, _ in self._asks.values()) > _MOST_BLOCKS:
            return f"{len(self._asks)} asks wait already"
        self._asks[peer, ask.needed.tag] = ask, end
        return ""

    def take(self, name: str) -> Iterator[tuple[str, Ask]]:
        """Yield those that ask for a name, with their peers; they wait no more."""
        for (peer, tag), (ask, _) in list(self._asks.items()):
            if ask.name == name:
                del self._asks[peer, tag]
                yield peer, ask

    def over(self, now: float) -> Iterator[tuple[str, Ask]]:
        """Yield those whose time is over, with their peers; they wait no more."""
        for (peer, tag), (ask, end) in list(self._asks.items()):
            if now > end:
                del self._asks[peer, tag]
                yield peer, ask

    def stop(self, peer: str, tag: int) -> None:
        """Forget an ask, if it waits."""
        self._asks.pop((peer, tag), None)

    def forget(self, peer: str) -> None:
        """Forget all asks of a peer."""
        self._asks = {key: value for key, value in self._asks.items() if key[0] != peer}

    def peers(self) -> set[str]:
        """Return who waits."""
        return {peer for peer, _ in self._asks}

    def clear(self) -> None:
        """Forget all."""
        self._asks.clear()
