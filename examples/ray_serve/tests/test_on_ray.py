"""The example on Ray Serve itself, with tiny random models. Needs what README.md lists, and kvdock's own `tests` on the path."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from http.client import HTTPConnection
from typing import Any, TypeVar

import kvdock_ray.app
import openai
import pytest
import ray
from kvdock_ray.app import engines, front, running
from kvdock_ray.client import Replicas
from kvdock_ray.replica import Replica
from ray import serve

from support_tiny_engine import EOS, Request, ask, tiny, uncached

BLOCK, LONGEST = 4, 200
T = TypeVar("T")


def model() -> Any:
    """In a replica."""
    return tiny("llama")


class Slow(Replica):
    """Takes its time for each step, and says how many requests it has."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.engine = self.worker.engine
        step = self.engine.step
        self.engine.step = lambda: (time.sleep(0.05), step())

    def busy(self) -> int:
        return len(self.engine.batcher.running) + len(self.engine.batcher.waiting)


class Numbers:
    """A tokenizer of texts such as ``"7 8 9"``."""

    eos_token_id = EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*map(int, text.split())]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module", autouse=True)
def cluster(port: int) -> Iterator[None]:
    before = children()
    with running(2, port):
        yield
    end = time.monotonic() + 30
    while left := children() - before:
        assert time.monotonic() < end, f"processes are left: {left}"
        time.sleep(0.2)


def children() -> set[str]:
    """Processes of Ray's that there are on this machine, by number and name."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.strip()[:80] for line in lines if "ray::" in line or "raylet" in line or "gcs_server" in line}


@pytest.fixture(scope="module")
def handle() -> Any:
    app = engines(model, 2, routing={"waiting_costs": 16, "most_ahead": 3}, num_blocks=120, block_size=BLOCK, batch_sizes=(1, 2, 4))
    return serve.run(app, name="engine", route_prefix=None)


@pytest.fixture
def replicas(handle: Any) -> Replicas:
    return Replicas(handle, LONGEST)


def within(seconds: float, work: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work(), seconds)

    return asyncio.run(limited())


def prompt(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)  # noqa: S311 - no secret
    return [draw.randrange(2, EOS) for _ in range(count)]


async def talk(replicas: Replicas, seed: int, turns: int = 3) -> list[tuple[str, Request, int]]:
    """Have a conversation; return for each turn who answered, the request and what could be found."""
    said, before, done = prompt(seed, 50), 0, []
    for turn in range(turns):
        request = ask(said, 6)
        name = await replicas.answer(request)
        done.append((name, request, before // BLOCK * BLOCK))
        before = len(request.tokens) - 1
        said = [token for token in request.tokens if token != EOS] + prompt(1000 * seed + turn, 7)
    return done


def test_conversations_stay_where_they_are_cached_and_get_the_tokens_of_generate(replicas: Replicas) -> None:
    async def all_of_them() -> list[list[tuple[str, Request, int]]]:
        return await asyncio.gather(*(talk(replicas, seed) for seed in range(1, 4)))

    talks = within(120, all_of_them)
    assert all(len({name for name, *_ in talk}) == 1 for talk in talks), talks
    assert len({talk[0][0] for talk in talks}) == 2, "both replicas have work"
    for talk_ in talks:
        for _, request, findable in talk_:
            assert not request.error
            assert request.tokens == uncached("llama", request)
            assert request.cached_tokens >= (findable if EOS not in request.tokens[:-1] else 0)
    assert sum(findable for talk_ in talks for *_, findable in talk_) > 0


def test_a_prefix_that_all_want_does_not_fill_one_replica(replicas: Replicas) -> None:
    within(60, lambda: talk(replicas, 77, turns=1))
    first = prompt(77, 50)

    async def crowd() -> list[str]:
        return await asyncio.gather(*(replicas.answer(ask([*first, number], 20)) for number in range(2, 14)))

    answered = within(120, crowd)
    counts = [answered.count(name) for name in set(answered)]
    assert len(counts) == 2, counts
    assert max(counts) - min(counts) <= 4, "twelve at once: as soon as one is three ahead, the other one gets them"


def test_what_the_engine_refuses_is_an_error_and_others_go_on(replicas: Replicas) -> None:
    async def three() -> list[Request]:
        requests = [ask([EOS + 1000], 4), ask([], 4), ask([5, 6, 7], 4)]
        await asyncio.gather(*map(replicas.answer, requests))
        return requests

    unknown, empty, fine = within(60, three)
    assert "the model has" in unknown.error
    assert "the prompt is empty" in empty.error
    assert fine.tokens == uncached("llama", fine)


def test_a_replica_that_dies_loses_no_request_and_is_replaced(replicas: Replicas) -> None:
    """While requests run in both: those of the dead one go on in the other. Serve starts a third, which gets work too."""
    requests = [ask(prompt(seed, 30), 100, stop=frozenset()) for seed in range(200, 204)]
    victim: list[str] = []

    async def kill() -> list[str]:
        tasks = [asyncio.create_task(replicas.answer(request)) for request in requests]
        while not all(len(request.tokens) > request.prompt_len + 2 for request in requests):
            await asyncio.sleep(0.01)
        actors = [each for each in ray.util.list_named_actors(all_namespaces=True) if "#engine#" in each["name"]]
        victim.append(actors[0]["name"])
        ray.kill(ray.get_actor(actors[0]["name"], namespace=actors[0]["namespace"]))
        return list(await asyncio.gather(*tasks))

    ended = within(120, kill)
    assert [request.error for request in requests] == [""] * 4
    assert all(request.tokens == uncached("llama", request) for request in requests)
    assert all(len(request.tokens) == 130 for request in requests)
    dead = victim[0].rsplit("#", 1)[1]
    assert dead not in ended
    deadline, seen, seed = time.monotonic() + 120, set[str](), 1000
    while len(seen) < 2:
        assert time.monotonic() < deadline, f"no third replica answers: {seen}"
        seed += 1
        seen |= {name for name, *_ in within(60, lambda seed=seed: talk(replicas, seed, turns=1))}
    assert dead not in seen
    for name, request, findable in within(60, lambda: talk(replicas, 300)):
        assert request.tokens == uncached("llama", request), name
        assert request.cached_tokens >= (findable if EOS not in request.tokens[:-1] else 0)


@pytest.fixture(scope="module")
def client(handle: Any, port: int) -> Iterator[openai.OpenAI]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvdock_ray.app, "Replica", Slow)
        app = engines(model, 1, num_blocks=60, block_size=BLOCK, batch_sizes=(1, 2, 4))
    serve.run(front(app, Numbers, "tiny", LONGEST), name="http", route_prefix="/v1")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_http_gives_the_same_tokens_whole_and_streamed(client: openai.OpenAI) -> None:
    ids = prompt(9, 20)
    settings: dict[str, Any] = {"model": "tiny", "prompt": " ".join(map(str, ids)), "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**settings)
    streamed = client.completions.create(**settings, stream=True)
    text = whole.choices[0].text
    assert "".join(piece.choices[0].text for piece in streamed) == text
    request = Request(ids)
    request.tokens += map(int, text.split())
    assert request.tokens == uncached("llama", request)
    assert len(text.split()) == whole.usage.completion_tokens
    again = client.completions.create(**settings)
    assert again.usage.prompt_tokens_details.cached_tokens == 16


def test_http_refuses_what_the_engine_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the model has"):
        client.completions.create(model="tiny", prompt="99999", max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="not served: n"):
        client.completions.create(model="tiny", prompt="7", n=2)


def test_clients_that_go_away_have_their_requests_cancelled(client: openai.OpenAI, port: int) -> None:
    """Each would take seven seconds."""
    body = json.dumps({"model": "tiny", "prompt": "7 8 9", "max_tokens": 150, "temperature": 0, "stream": True})
    slow = serve.get_deployment_handle("engine", "http")

    def busy() -> int:
        return int(slow.busy.remote().result(timeout_s=10))

    there = [HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(6)]
    for part in (there[:4], there[4:]):  # the first four run before the others come: a replica takes them in any order
        for connection in part:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        for connection in part if part[0] is there[0] else ():
            connection.getresponse().read(10)
    end = time.monotonic() + 4
    while (found := busy()) != 6:  # four run, and two wait once they have come
        assert time.monotonic() < end, f"{found} requests of 6"
    for connection in there:
        connection.close()
    end = time.monotonic() + 4
    while left := busy():
        assert time.monotonic() < end, f"{left} requests run for nobody"
        time.sleep(0.05)
