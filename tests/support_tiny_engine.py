"""The example engine with tiny random models, and what `generate()` gives for them without any cache."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from support_docs import ROOT

sys.path.insert(0, str(ROOT / "examples" / "engine"))

from tiny_engine.engine import Engine
from tiny_engine.request import Request

__all__ = ["EOS", "MODELS", "Engine", "Request", "ask", "check_idle", "generated", "make", "prompts", "run", "tiny", "uncached"]

VOCABULARY, EOS = 61, 60
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
"""By family, and what is not usual about it."""


@functools.cache
def tiny(name: str) -> Any:
    """Return a model with random weights, biases and norms too: where they are lost, tokens change."""
    import transformers

    family, settings = MODELS[name]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    usual = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": False, "head_dim": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **usual, **ids, **settings})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return model


def make(name: str = "llama", num_blocks: int = 40, block_size: int = 4, **settings: Any) -> Engine:
    return Engine(tiny(name), num_blocks, block_size, **{"batch_sizes": (1, 2, 4), "max_tokens": 9, **settings})


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of 1 to 24 tokens, many of which begin alike."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    text = [draw.randrange(2, EOS) for _ in range(24)]
    return [text[: draw.randrange(20)] + [draw.randrange(2, EOS) for _ in range(draw.randrange(1, 5))] for _ in range(count)]


def run(engine: Engine, requests: Sequence[Request], every: int = 0) -> None:
    """Answer requests, all at once or one more every so many steps; after each step no block is lost."""
    coming, steps = list(requests), 0
    while coming or engine.is_busy:
        while coming and (not every or steps % every == 0 or not engine.is_busy):
            engine.add(coming.pop(0))
            if every:
                break
        engine.step()
        engine.manager.check_integrity()
        steps += 1
        assert steps < 5000, "somebody does not get on"


def check_idle(engine: Engine) -> None:
    """Check that no block is lost, and none is held."""
    engine.manager.check_integrity()
    assert engine.manager.num_sequences == 0
    assert not engine.is_busy
    assert engine.manager.available_size == (engine.manager.allocator.num_blocks - 1) * engine.manager.block_size


def ask(tokens: Sequence[int], max_tokens: int = 4, **settings: Any) -> Request:
    """Return a request that ends where `generate()` ends."""
    return Request(tokens, max_tokens, **{"stop": frozenset({EOS}), **settings})


def generated(name: str, request: Request) -> list[int]:
    """Return prompt and new tokens as `generate()` gives them without any cache: a pass over the whole text for each."""
    ids = torch.tensor([request.tokens[: request.prompt_len]])
    mask = torch.ones_like(ids)
    out = tiny(name).generate(ids, attention_mask=mask, max_new_tokens=request.max_tokens, do_sample=False, use_cache=False)
    return out[0].tolist()


def uncached(name: str, request: Request) -> list[int]:
    """Return prompt and tokens that follow: at each place the one that the model gives without any cache for what is before it.

    They are those of the request exactly if `generate()` without a cache gives these; one pass over the text tells.
    """
    with torch.no_grad():
        logits = tiny(name)(torch.tensor([request.tokens]), use_cache=False).logits[0]
    return [*request.tokens[: request.prompt_len], *logits[request.prompt_len - 1 : -1].argmax(-1).tolist()]
