"""Whether a forward pass is plain: told nothing that could change keys and values beside its tokens and their positions.

What is known to be harmless passes; whatever else an argument may do, its keys and values are for nobody else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from kvdock.integrations.transformers.seen import Oddity

__all__ = ["by_name", "defaults_of", "hooks_of", "odd_argument", "odd_places", "parameters_of"]

CACHES = ("cache", "past_key_values")
"""Names that a cache is passed by."""

_KNOWN = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", *CACHES),
    *("use_cache", "return_dict", "logits_to_keep", "num_logits_to_keep", "labels", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}
"""Arguments that are looked at, or change nothing but what a pass returns."""

_ALONE = "pass nothing beside what bind() returns, or make a cache without prefix= for such calls"


def by_name(parameters: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names."""
    return {**dict(zip(parameters, args, strict=False)), **kwargs}


def parameters_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the arguments that a model takes, with their defaults; of a method of its class they are read once."""
    function = getattr(model.forward, "__func__", None)
    return defaults_of(function, 1) if function else defaults_of.__wrapped__(model.forward, 0)


@functools.lru_cache(maxsize=64)
def defaults_of(function: Callable[..., Any], skip: int) -> dict[str, Any]:
    """Return names and defaults of the arguments behind the first ``skip``."""
    found = list(inspect.signature(function).parameters.values())[skip:]
    return {parameter.name: parameter.default for parameter in found}


def hooks_of(model: torch.nn.Module) -> int:
    """Count what runs before and behind the parts of a model: PEFT's adapters for single rows come and go as such hooks."""
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


def odd_argument(model: torch.nn.Module, told: dict[str, Any], rows: int) -> Oddity | None:
    """Return what of the arguments of a pass is not known to be harmless, or None.

    Args:
        model: whose arguments they are. What has its default value is as if it were not there.
        told: the arguments by name.
        rows: of the tokens.
    """
    ids, mask, positions = told.get("input_ids"), told.get("attention_mask"), told.get("position_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
        return Oddity("from something else than token ids", "pass input_ids, or make a cache without prefix= for such calls")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and len(mask) == rows):
        return Oddity(
            f"with an attention_mask that is not [rows, tokens] but {_shape(mask)}", "pass the attention_mask that bind() returns"
        )
    if positions is not None and not (
        isinstance(positions, torch.Tensor) and positions.ndim in (2, 3) and positions.shape[-2] in (1, rows)
    ):
        return Oddity(f"with position_ids that are not [rows, tokens] but {_shape(positions)}", _ALONE)
    defaults = parameters_of(model)
    for name, value in told.items():
        if name not in _KNOWN and value is not defaults.get(name) and not _is_nothing(value):
            return Oddity(f"with {name}, on which keys and values may depend", _ALONE)
    return None


def odd_places(pads: torch.Tensor, start: int, first: int, told: dict[str, Any]) -> torch.Tensor | None:
    """Return whether a pass has other positions than its prompts, or hides something else than their padding.

    Args:
        pads: tokens of padding in each row, ``[rows, 1]`` on the device of the tokens.
        start: tokens before the first of the pass, padding included.
        first: the position that the model gives the first token of a prompt.
        told: the arguments of the pass, of which `odd_argument` found none odd.

    Returns:
        a boolean on the device, so that nobody waits for it here; None if there is nothing to look at.
    """
    mask, positions, places = (told.get(name) for name in ("attention_mask", "position_ids", "cache_position"))
    stop, odd = start + told["input_ids"].shape[1], []
    if mask is not None:
        odd.append(((mask != 0) != (torch.arange(mask.shape[1], device=mask.device) >= pads.to(mask.device))).any())
    if positions is not None:
        expected = torch.arange(start, stop, device=positions.device) - pads.to(positions.device)
        odd.append(((positions != expected + first) & (expected >= 0)).any())
    if places is not None:
        odd.append((places != torch.arange(start, stop, device=places.device)).any())
    return torch.stack([each.to(pads.device) for each in odd]).any() if odd else None


def _is_nothing(value: Any) -> bool:
    """Whether a value is None or holds nothing else."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return all(map(_is_nothing, value)) if isinstance(value, list | tuple) else value is None


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
