"""Which replica a prompt goes to, by the events of all. Knows nothing of Ray."""

from collections.abc import Hashable, Mapping
from typing import Any

import kvdock
from kvdock.integrations.kv_events import KVEventSubscriber


class Prefixes:
    """What each replica has cached, as its events tell, and the order in which replicas are tried.

    A prompt goes where it costs least: tokens that are not cached there, and ``waiting_costs`` tokens for each request that the
    replica has already. So a long prefix is worth a queue, and a short one, such as a system prompt that all share, is not.
    Belongs to one thread at a time.

    Args:
        waiting_costs: how many tokens of a prompt could be computed in the time that a request takes which came before.
        most_ahead: a replica with so many requests more than the idlest comes last, whatever it has cached.
    """

    def __init__(self, waiting_costs: int = 64, most_ahead: int = 4) -> None:
        self.waiting_costs, self.most_ahead = waiting_costs, most_ahead
        self.readers: dict[Hashable, KVEventSubscriber] = {}
        self._chosen: dict[Hashable, int] = {}  # when each was chosen last, in prompts: who is equal takes turns

    def follow(self, addresses: Mapping[Hashable, tuple[str, str]]) -> None:
        """Read the events of these replicas, each at its address and its address for replays, and forget all others."""
        for replica in self.readers.keys() - addresses.keys():
            self.drop(replica)
        for replica in addresses.keys() - self.readers.keys():
            endpoint, replays = addresses[replica]
            # What a new reader has missed is asked for at its first message. Routing stands still for that, but not for long.
            self.readers[replica] = KVEventSubscriber(endpoint, replays, replay_timeout=0.2)

    def drop(self, replica: Hashable) -> None:
        """Forget a replica, such as one that died: one that begins in its place has another name, and nothing cached."""
        if reader := self.readers.pop(replica, None):
            reader.close()
        self._chosen.pop(replica, None)

    def close(self) -> None:
        """Forget all."""
        self.follow({})

    def cached_len(self, replica: Hashable, tokens: Any) -> int:
        """Return how many tokens of a prompt a replica has; 0 if it told nothing yet, events of it were lost, or these are no ids.

        So whatever comes is routed: to Serve an error here would be a request to be tried again and again.
        """
        if not (reader := self.readers.get(replica)):
            return 0
        try:
            reader.poll()  # what is no message counts as missed: the index is not complete until all is told again
            return reader.index.cached_len(tokens) if reader.index.is_complete() else 0
        except kvdock.KVDockError:
            return 0

    def ranked(self, tokens: Any, queued: Mapping[Hashable, int]) -> list[Hashable]:
        """Return replicas, the best one first.

        Args:
            tokens: ids of the prompt.
            queued: the replicas that there are, and how many requests each has.
        """
        least = min(queued.values(), default=0)

        def cost(replica: Hashable) -> tuple[bool, int, int]:
            is_far_ahead = queued[replica] - least >= self.most_ahead
            waiting = self.waiting_costs * queued[replica]
            return is_far_ahead, waiting - self.cached_len(replica, tokens), self._chosen.get(replica, 0)

        order = sorted(queued, key=cost)
        if order:
            self._chosen[order[0]] = max(self._chosen.values(), default=0) + 1
        return order
