"""An OpenAI-shaped HTTP endpoint: /v1/models, /v1/completions and /v1/chat/completions, streamed or whole."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tiny_engine.request import Request
from tiny_engine.worker import Worker

SERVED = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stream", "stream_options")
EVENT = "data: {}\n\n".format


class Endpoint:
    """Turns HTTP requests into the engine's, and tokens into text."""

    def __init__(self, worker: Worker, tokenizer: Any, name: str) -> None:
        self.worker, self.tokenizer, self.name = worker, tokenizer, name
        models = {"object": "list", "data": [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvdock"}]}
        routes = [Route(f"/v1/{path}", self.complete, methods=["POST"]) for path in ("completions", "chat/completions")]
        self.app = Starlette(routes=[Route("/v1/models", lambda http: JSONResponse(models)), *routes])

    async def complete(self, http: Http) -> Response:
        """Answer a completion or a chat."""
        arrived, loop = asyncio.Queue(), asyncio.get_running_loop()
        try:
            body = await http.json()
            request = self.read(body, is_chat := "messages" in body)
        except Exception as error:  # noqa: BLE001 - whatever cannot be read, tokenized or put into a template is the client's
            return _refusal(f"{type(error).__name__}: {error}", 400)
        request.emit = lambda token: loop.call_soon_threadsafe(arrived.put_nowait, token)
        self.worker.call(self.worker.engine.add, request)
        pieces = self.pieces(http, request, arrived)
        first = await anext(pieces)
        if request.finish_reason == "error":
            return _refusal(request.error, 400)
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(self.events(first, pieces, request, is_chat, usage), media_type="text/event-stream")
        text = first + "".join([piece async for piece in pieces])
        return _refusal(request.error, 500) if request.error else JSONResponse(self.answer(request, is_chat, text, ended=True))

    def read(self, body: dict[str, Any], is_chat: bool) -> Request:
        """Make a request of the engine; raise for what is not served, rather than ignore it."""
        other = sorted(key for key, value in body.items() if key not in SERVED and value is not None)
        if other:
            raise ValueError(f"not served: {', '.join(other)}. Fix: leave them out; {', '.join(SERVED)} are served")
        if is_chat:
            ids = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = body["prompt"] if isinstance(body["prompt"], list) else self.tokenizer(body["prompt"])["input_ids"]
        default = max(1, min(256, self.worker.engine.max_context - len(ids))) if is_chat else 16
        most = next((int(body[key]) for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None), default)
        temperature, top_p = (1.0 if body.get(key) is None else float(body[key]) for key in ("temperature", "top_p"))
        seed = None if body.get("seed") is None else int(body["seed"]) % 2**63
        return Request(map(int, ids), most, temperature, top_p, seed, frozenset({self.tokenizer.eos_token_id}))

    async def pieces(self, http: Http, request: Request, arrived: asyncio.Queue[int | None]) -> AsyncIterator[str]:
        """Yield the text as it grows. Where the client goes away, or this is closed, the request is cancelled."""
        ids, sent = [], ""
        try:
            while (token := await arrived.get()) is not None and not await http.is_disconnected():
                ids.append(token)
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                if not text.endswith("\ufffd"):  # half of a character: the next token has the rest
                    yield text[len(sent) :]
                    sent = text
            yield self.tokenizer.decode(ids, skip_special_tokens=True)[len(sent) :]
        finally:
            self.worker.call(self.worker.engine.cancel, request)

    async def events(self, first: str, rest: AsyncIterator[str], request: Request, is_chat: bool, usage: bool) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""
        yield EVENT(json.dumps(self.answer(request, is_chat, first, "delta")))
        async for piece in rest:
            yield EVENT(json.dumps(self.answer(request, is_chat, piece, "delta")))
        end = self.answer(request, is_chat, "", "delta", ended=True)
        yield EVENT(json.dumps({"error": {"message": request.error}} if request.error else {**end, "usage": None}))
        if usage:
            yield EVENT(json.dumps({**end, "choices": []}))
        yield EVENT("[DONE]")

    def answer(self, request: Request, is_chat: bool, text: str, form: str = "message", *, ended: bool = False) -> dict[str, Any]:
        """Return an answer, or a part of one."""
        kind = "chat.completion" + ".chunk" * (form == "delta") if is_chat else "text_completion"
        said = {form: {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, "logprobs": None, "finish_reason": request.finish_reason if ended else None, **said}
        content = {"id": f"cmpl-{id(request):x}", "object": kind, "created": int(time.time()), "model": self.name, "choices": [choice]}
        total, found = len(request.tokens), {"cached_tokens": request.cached_tokens}
        counts = {"prompt_tokens": request.prompt_len, "completion_tokens": total - request.prompt_len, "total_tokens": total}
        return {**content, "usage": {**counts, "prompt_tokens_details": found} if ended else None}


def _refusal(text: str, status: int) -> Response:
    error = {"message": text, "type": "invalid_request_error" if status == 400 else "server_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
