"""The example engine on a GPU: captured decoding, and the tokens that the model gives without any cache."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch

from support_tiny_engine import MODELS, Engine, ask, check_idle, prompts, run, tiny


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_blocks", [40, 14], ids=["enough blocks", "some begin again"])
def test_requests_get_the_tokens_of_the_model(name: str, num_blocks: int) -> None:
    model = copy.deepcopy(tiny(name)).to("cuda")
    engine = Engine(model, num_blocks, 4, batch_sizes=(1, 2, 4), max_tokens=9)
    assert engine.captured.is_captured
    asked = [ask(prompt, 3 + 5 * number % 17) for number, prompt in enumerate(prompts(8))]
    run(engine, asked, every=2)
    check_idle(engine)
    for request in asked:
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens], device="cuda"), use_cache=False).logits[0]
        assert request.tokens[request.prompt_len :] == logits[request.prompt_len - 1 : -1].argmax(-1).tolist()


def test_what_is_drawn_on_a_gpu_follows_from_the_seed() -> None:
    model = copy.deepcopy(tiny("llama")).to("cuda")
    drawn = []
    for _ in range(2):
        engine, request = Engine(model, 40, 4, batch_sizes=(1, 2)), ask([3, 4, 5], 24, temperature=1.5, top_p=0.9, seed=7)
        run(engine, [request])
        drawn.append(request.tokens)
    assert drawn[0] == drawn[1]
