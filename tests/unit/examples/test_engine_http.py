"""The example engine's HTTP endpoint, asked by OpenAI's own client, and by clients that go away."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("transformers")
pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import openai
import uvicorn

from support_docs import blocks
from support_tiny_engine import EOS, Engine, Request, ask, check_idle, make, tiny, uncached

from server import Endpoint  # isort: skip
from tiny_engine.worker import Worker  # isort: skip

pytestmark = pytest.mark.slow

BYTES = [bytes([97 + number % 26]) for number in range(EOS)] + [b""]
BYTES[30], BYTES[31] = b"\xc3", b"\xa9"  # two tokens for one letter, and for half of one where they come alone


class Letters:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def apply_chat_template(self, messages: Any, **settings: Any) -> dict[str, list[int]]:
        assert settings == {"add_generation_prompt": True, "return_dict": True}
        return self("".join(message["content"] + "z" for message in messages))

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return b"".join(BYTES[token] for token in ids).decode(errors="replace")


@attrs.define
class Served:
    """An endpoint that runs, what asks it, and the requests that its engine was given."""

    engine: Engine
    port: int
    client: openai.OpenAI
    requests: list[Request]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < until
            time.sleep(0.005)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    engine, requests = make(), []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: (requests.append(request), add(request)))
    worker = Worker(engine)
    config = uvicorn.Config(
        Endpoint(worker, Letters(), "tiny").app, port=0, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield Served(engine, port, client, requests)
    server.should_exit = True
    thread.join()
    worker.close()
    check_idle(engine)


def wanted(text: str, most: int) -> str:
    """Return the text that follows, as the model gives it without any cache."""
    engine, request = make(), ask(Letters()(text)["input_ids"], most)
    engine.add(request)
    while engine.is_busy:
        engine.step()
    assert request.tokens == uncached("llama", request)
    return Letters().decode(request.tokens[request.prompt_len :], skip_special_tokens=True)


def test_models(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]


def test_a_completion(served: Served) -> None:
    done = served.client.completions.create(model="tiny", prompt="hello", max_tokens=20, temperature=0)
    (request,), (choice,) = served.requests, done.choices
    assert choice.text == wanted("hello", 20)
    assert (choice.finish_reason, done.object) == (request.finish_reason, "text_completion")
    new = len(request.tokens) - 5
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, new, 5 + new)
    again = served.client.completions.create(model="tiny", prompt="hello", max_tokens=20, temperature=0)
    assert again.choices[0].text == choice.text
    assert again.usage.prompt_tokens_details.cached_tokens == 4


def test_a_completion_of_token_ids(served: Served) -> None:
    done = served.client.completions.create(model="tiny", prompt=Letters()("hello")["input_ids"], max_tokens=9, temperature=0)
    assert done.choices[0].text == wanted("hello", 9)


def test_a_chat(served: Served) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]
    done = served.client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0)
    assert done.object == "chat.completion"
    assert (done.choices[0].message.role, done.choices[0].message.content) == ("assistant", wanted("bezbriefz", 12))
    rest = served.client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert rest.choices[0].message.content == wanted("bezbriefz", 147), "what the pool has room for"


@pytest.mark.parametrize("text", ["hello", "abc", "stream", "xyzzy"])
def test_what_is_streamed_is_the_whole_text(served: Served, text: str) -> None:
    stream = served.client.completions.create(model="tiny", prompt=text, max_tokens=40, temperature=0, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == wanted(text, 40)
    assert len(chunks) > 5
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == served.requests[0].finish_reason


def test_a_chat_is_streamed_with_usage(served: Served) -> None:
    settings = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12, "temperature": 0}
    *chunks, last = served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], **settings)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == wanted("hiz", 12)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.usage for chunk in chunks} == {None}
    assert (last.choices, last.usage.prompt_tokens) == ([], 3)


def test_many_clients_at_once(served: Served) -> None:
    texts = [letter * count for letter in "abcd" for count in (1, 4, 9)]

    def complete(text: str) -> str:
        return served.client.completions.create(model="tiny", prompt=text, max_tokens=16, temperature=0).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(complete, texts)) == [wanted(text, 16) for text in texts]


def test_a_seed_says_what_is_drawn(served: Served) -> None:
    def drawn(**settings: Any) -> str:
        return served.client.completions.create(model="tiny", prompt="abc", max_tokens=20, temperature=2, **settings).choices[0].text

    assert drawn(seed=5) == drawn(seed=5)
    assert drawn(seed=5) != drawn(seed=6)
    assert drawn(seed=5, top_p=1e-6) == wanted("abc", 20)


def test_nothing_is_asked_for(served: Served) -> None:
    done = served.client.completions.create(model="tiny", prompt="abc", max_tokens=0)
    assert (done.choices[0].text, done.choices[0].finish_reason, done.usage.completion_tokens) == ("", "length", 0)
    stream = served.client.completions.create(model="tiny", prompt="abc", max_tokens=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a" * 200}, "the prompt has 200 tokens, and 16 new ones are asked for; pool and model hold 156. Fix: a shorter prompt"),
        ({"prompt": [61]}, "the prompt has ids of 61 to 61; the model has 61"),
        ({"prompt": ["abc", "def"]}, "ValueError: invalid literal for int"),
        ({"n": 2}, "not served: n. Fix: leave them out; model, prompt,"),
        ({"stop": ["x"], "logprobs": 1}, "not served: logprobs, stop."),
        ({"temperature": -1}, "temperature is -1.0"),
        ({"top_p": 2}, "top_p 2.0"),
        ({"extra_body": {"seed": "x"}}, "ValueError: invalid literal for int"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_an_error_of_that_request_alone(served: Served, change: dict[str, Any], text: str, stream: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.client.completions.create, model="tiny", prompt="hello", max_tokens=40, temperature=0)
        with pytest.raises(openai.BadRequestError) as caught:
            served.client.completions.create(**{"model": "tiny", "prompt": "abc", "stream": stream, **change})
        assert text in caught.value.body["message"]
        assert caught.value.type == "invalid_request_error"
        assert other.result().choices[0].text == wanted("hello", 40)


@pytest.mark.parametrize("body", [b"{", b"[1]", b"3", b"{}", b'{"messages": 3}'])
def test_a_body_that_is_no_request(served: Served, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["error"]["message"]
    connection.close()


def slowed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps slow enough for a client to go before the end."""
    step = served.engine.step
    monkeypatch.setattr(served.engine, "step", lambda: (time.sleep(0.02), step()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_releases_its_blocks(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(served, monkeypatch)
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 150, "temperature": 0, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(head.encode() + body)
        served.wait_until(lambda: bool(served.requests) and len(served.requests[0].tokens) > 5)
    served.wait_until(lambda: served.requests[0].finish_reason != "")
    assert served.requests[0].finish_reason == "cancelled"
    assert len(served.requests[0].tokens) < 100
    assert served.client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0).choices[0].text == wanted("abc", 5)


def test_a_stream_that_is_closed_releases_its_blocks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(served, monkeypatch)
    with served.client.completions.create(model="tiny", prompt="abc", max_tokens=150, temperature=0, stream=True) as stream:
        next(iter(stream))
    served.wait_until(lambda: served.requests[0].finish_reason != "")
    assert served.requests[0].finish_reason == "cancelled"


def test_a_step_that_fails_ends_a_stream_with_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = served.engine.step, iter(range(100))

    def fail() -> None:
        if next(count) == 6:
            raise RuntimeError("the device is gone")
        step()

    monkeypatch.setattr(served.engine, "step", fail)
    with pytest.raises(openai.APIError, match="RuntimeError: the device is gone"):
        for _ in served.client.completions.create(model="tiny", prompt="abc", max_tokens=50, temperature=0, stream=True):
            pass
    done = served.client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0)
    assert done.choices[0].text == wanted("abc", 5)


def test_the_ten_lines_of_its_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand there, with this model and this tokenizer in the place of downloaded ones."""
    import transformers

    class Letter(Letters):
        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            return super().decode(ids, skip_special_tokens=True)

        def __call__(self, text: str) -> dict[str, list[int]]:
            return super().__call__(text.replace(" ", ""))

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: tiny("llama"))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Letter())
    first, *_ = blocks(Path("examples/engine/README.md"), "py")
    assert len([line for line in first.text.splitlines() if line and "import" not in line]) <= 10
    exec(compile(first.text, str(first), "exec"), {})  # noqa: S102 - the page is ours
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.count("length") == 2
    assert "thesea" in printed
