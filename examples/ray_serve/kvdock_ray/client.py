"""Asking the replicas: with requests of the engine, and over HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from server import Endpoint
from starlette.requests import Request as Http
from starlette.responses import Response
from tiny_engine.request import Request

TRIES = 3
"""Replicas that a request may lose."""


class Replicas:
    """All replicas, as if they were one engine and its worker: what `Endpoint` needs.

    A request whose replica dies goes on in another, behind the tokens that it has. With a temperature these are not
    the tokens that would have come.
    """

    def __init__(self, handle: DeploymentHandle, max_context: int) -> None:
        self.handle, self.max_context = handle.options(stream=True), max_context
        self.engine = self
        self._tasks: dict[Request, asyncio.Task[str]] = {}

    def call(self, method: Callable[[Request], None], request: Request) -> None:
        """Call a method, as `Worker.call`."""
        method(request)

    def add(self, request: Request) -> None:
        """Have a request answered, as `Engine.add`; from a coroutine."""
        self._tasks[request] = task = asyncio.create_task(self.answer(request))
        task.add_done_callback(lambda _: self._tasks.pop(request))

    def cancel(self, request: Request) -> None:
        """Stop a request, as `Engine.cancel`."""
        if task := self._tasks.get(request):
            task.cancel()

    async def answer(self, request: Request) -> str:
        """Have a request answered; return the name of the replica that ended it, or nothing if there was none."""
        for left in reversed(range(TRIES)):
            if len(request.tokens) > request.prompt_len and request.tokens[-1] in request.stop:
                request.end("stop")  # its replica died behind the last token
                break
            try:
                return await self._answer(request)
            except Exception as error:  # noqa: BLE001 - whoever waits is told, whatever Ray raises
                if not left or not isinstance(error, RayActorError):
                    request.end("error", f"{type(error).__name__}: {error}")
                    break
        return ""

    async def _answer(self, request: Request) -> str:
        settings = {name: getattr(request, name) for name in ("temperature", "top_p", "seed", "stop")}
        settings["max_tokens"] = request.most_tokens + 1 - len(request.tokens)
        stream = self.handle.answer.remote(list(request.tokens), settings)
        try:
            async for piece in stream:
                if isinstance(piece, int):
                    request.take(piece)
        finally:
            stream.cancel()  # does nothing to one that is over
        request.cached_tokens = piece["cached_tokens"]
        request.end(piece["finish_reason"], piece["error"])
        return piece["replica"]


class Front:
    """The HTTP endpoint of [the engine](../engine/README.md), before all replicas."""

    def __init__(self, handle: DeploymentHandle, make: Callable[[], Any], name: str, max_context: int) -> None:
        self.endpoint = Endpoint(Replicas(handle, max_context), make(), name)

    async def __call__(self, http: Http) -> Response:
        """Answer a completion or a chat."""
        return await self.endpoint.complete(http)
