"""What the stand-ins of engines share: a real model whose attention is an engine's, and modules under an engine's names.

`support_nano_vllm` and `support_mini_sglang` are small engines with the interfaces that the adapters in `examples/adapters` are written
for. They compute with a model of Transformers: whatever is read from a wrong place shows in the text.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface

from support_tiny_engine import tiny

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""An engine's attention in a layer: takes queries, keys and values ``[tokens, heads, dim]``, returns what queries see."""


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **told: Any) -> Any:
    rows = (part[0].transpose(0, 1) for part in (query, key, value))
    return module.engine(*rows).unflatten(0, (1, -1)), None


AttentionInterface.register("engine", _attend)


@functools.cache
def model_of(name: str) -> Any:
    """Return a tiny model with random weights, in float64: rounding in another order chooses no other token.

    Its attention has a scale that is not the usual one, so that whoever loses it is noticed.
    """
    model = copy.deepcopy(tiny(name)).double()
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.5
    return model


def attend_with(model: Any, layers: Sequence[Attention]) -> None:
    """Let each layer of a model have an engine's attention, for `logits_of`."""
    for layer, attention in zip(model.model.layers, layers, strict=True):
        if hasattr(layer.self_attn, "engine"):  # it may be a module or a function
            del layer.self_attn.engine
        layer.self_attn.engine = attention


def logits_of(model: Any, ids: Sequence[int], positions: Sequence[int], last: torch.Tensor) -> torch.Tensor:
    """Run tokens of any sequences, one behind the other, with the engine's attention; return logits at ``last``."""
    model.set_attn_implementation("engine")
    try:
        with torch.inference_mode():
            row, places = torch.tensor([ids]), torch.tensor([positions])
            logits: torch.Tensor = model(input_ids=row, position_ids=places, use_cache=False, logits_to_keep=last.long()).logits[0]
    finally:
        model.set_attn_implementation("sdpa")
    return logits


def assert_as_without_a_cache(model: Any, prompt_len: int, tokens: Sequence[int], least: float = 1e-9) -> None:
    """Compare a text with what the model gives, without any cache, for what is before each token: one pass over the text tells.

    Args:
        model: with its own attention.
        prompt_len: how many tokens were given.
        tokens: prompt and text.
        least: how far each token has to be ahead of the next likely one; less is a tie, and another text is to be chosen.
    """
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, prompt_len - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > least
    assert list(tokens[prompt_len:]) == logits.argmax(-1).tolist()


@contextmanager
def modules(**made: ModuleType) -> Iterator[None]:
    """Let modules of these names (dots as two underscores) be imported."""
    names = {name.replace("__", "."): module for name, module in made.items()}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def module_of(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made
