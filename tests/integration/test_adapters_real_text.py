"""The adapters with a real model on real text: attention on pages under two engines' own interfaces, beside a pass without any cache."""

from __future__ import annotations

import pytest

from integration.test_real_text import encoded, loaded, pytestmark  # noqa: F401 - the marks count for this module too
from support_adapters import Nano, installed, mini_engine, serve

LEAST = 1e-3
"""How far each token is ahead of the next likely one: further than float32 differs when it rounds in another order."""

TOPICS = ("for", "while", "with", "yield")


def requests() -> list[tuple[list[int], int]]:
    """Return four prompts of 96 to 12 tokens, the longest twice, and two that begin like it."""
    prompts = [encoded(topic, tokens=96 >> place)["input_ids"][0].tolist() for place, topic in enumerate(TOPICS)]
    return [(prompt, 6) for prompt in (*prompts, prompts[0], prompts[0][:50] + prompts[1][:20], prompts[0][:64])]


@pytest.mark.parametrize("block_size", [16, 256])
def test_nano_vllm(block_size: int) -> None:
    with installed("kvdock_nano_vllm"):
        engine = Nano(1024 // block_size, block_size, budget=80, model=loaded()[0], least=LEAST)
        engine.serve(*requests())
        engine.serve(*requests())
        assert (engine.scheduler.hits > 0) == (block_size < 256), "whole blocks only"


@pytest.mark.parametrize("page_size", [1, 16])
def test_mini_sglang(page_size: int) -> None:
    with installed("kvdock_mini_sglang"):
        engine = mini_engine(1024 // page_size, page_size, 80, loaded()[0])
        serve(engine, *requests(), least=LEAST)
        again = serve(engine, *requests(), least=LEAST)
        assert sum(req.hits for req in again) > 200
