"""The router in Ray Serve's interface. Serve makes one for each handle, in the process that has the handle."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvdock_ray.routing import Prefixes


class PrefixRouter(RequestRouter):
    """Sends a request to the replica where most of its prompt is cached, as long as that is not too busy.

    For methods whose first argument are token ids, of deployments whose ``record_replica_metadata`` gives the addresses of their events.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Take the arguments of `Prefixes`, which are the ``request_router_kwargs``."""
        self.prefixes = Prefixes(**settings)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow replicas that are new, and forget those that are gone."""
        super().update_replicas(replicas)
        told = {replica.replica_id: replica.replica_metadata for replica in replicas}
        self.prefixes.follow({name: (told["events"], told["replays"]) for name, told in told.items()})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget what it had cached."""
        super().on_replica_actor_died(replica_id)
        self.prefixes.drop(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates one by one, best first: Serve takes the first that has room."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all are full, wait before this is asked again
        there = {replica.replica_id: replica for replica in candidate_replicas}
        queued = {name: self.replica_queue_len_cache.get(name) or 0 for name in there}  # unknown where nothing was sent for long
        order = self.prefixes.ranked(pending_request.args[0] if pending_request.args else (), queued)
        # Serve counts a request when it is sent, and others that came at the same time are chosen for before that. It is counted
        # twice until the replica has accepted it, and says how many it has.
        self.replica_queue_len_cache.update(order[0], queued[order[0]] + 1)
        return [[there[name]] for name in order]
