"""A replica: the example engine, which tells what it has cached."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
import torch
from ray import serve
from tiny_engine.engine import Engine
from tiny_engine.request import Request
from tiny_engine.worker import Worker

from kvdock.integrations.kv_events import KVEventPublisher


class Replica:
    """Answers requests with one engine, in a process of its own.

    Args:
        make: makes the model.
        settings: of the `Engine`, such as ``num_blocks``.
    """

    def __init__(self, make: Callable[[], Any], settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # replicas share the machine
        address = f"tcp://{ray.util.get_node_ip_address()}:*"
        engine = Engine(make(), **settings)
        self.publisher = KVEventPublisher(engine.manager, endpoint=address, replay_endpoint=address)
        self.worker = Worker(engine)
        self.name = serve.get_replica_context().replica_id.unique_id

    def record_replica_metadata(self) -> dict[str, str]:
        """Return what routers need to know; Serve asks once, and hands it to each of them."""
        return {"events": self.publisher.endpoint, "replays": self.publisher.replay_endpoint}

    async def answer(self, tokens: list[int], settings: dict[str, Any]) -> AsyncIterator[int | dict[str, Any]]:
        """Yield new tokens, and last what became of the request. Whoever stops reading has cancelled it."""
        arrived, loop = asyncio.Queue(), asyncio.get_running_loop()
        request = Request(tokens, **settings, emit=lambda token: loop.call_soon_threadsafe(arrived.put_nowait, token))
        self.worker.call(self.worker.engine.add, request)
        try:
            while (token := await arrived.get()) is not None:
                yield token
            yield {name: getattr(request, name) for name in ("finish_reason", "error", "cached_tokens")} | {"replica": self.name}
        finally:
            self.worker.call(self.worker.engine.cancel, request)

    def __del__(self) -> None:
        """End threads and sockets: Serve calls this when it stops a replica."""
        if worker := getattr(self, "worker", None):  # otherwise the constructor failed
            worker.close()
            self.publisher.close()
