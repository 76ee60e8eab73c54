"""Which keys and values of a model can be shared: where they follow from token ids and positions alone.

A configuration does not tell that either, so it is measured like the rest, except for one thing: two kinds of rotary embeddings
turn all keys of a pass by its length, ``longrope`` from a length on, ``dynamic`` more and more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from transformers import DynamicCache, GenerationMixin

from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD
from kvdock.integrations.transformers.measure import has_states, input_device, run_tokens
from kvdock.integrations.transformers.plain import parameters_of
from kvdock.integrations.transformers.states import held

__all__ = ["Sharing", "sharing_of"]

_CLOSE = 0.01, 0.05
"""How far keys or values may be apart, as a part of their length, in the first layer and in all behind it: more than rounding
changes, less than another position or another token does."""


@attrs.frozen
class Sharing:
    """What of a batch can be shared.

    Args:
        limit: length up to which a pass over the same tokens gives the same keys; for most models `sys.maxsize`.
        padded: whether tokens behind padding have the same keys as without. Some models count padding as tokens whatever
            they are told.
        first: the position that ``generate`` gives the first token of a prompt; for most models 0.
        own_positions: whether ``generate`` gets positions from the model, which some make of what their last call left behind.
    """

    limit: int = sys.maxsize
    padded: bool = True
    first: int = 0
    own_positions: bool = False


def sharing_of(model: Any) -> Sharing:
    """Run three tokens through a model, with others before and behind them, and see whether that changes their keys and values.

    Args:
        model: a ``PreTrainedModel`` whose cache was measured.

    Raises:
        UnsupportedError: what comes behind them does.
    """
    first = _first_position(model)
    plain, other, padded = (
        _stored(run_tokens(model, [ids], None, keep_all=True, attention_mask=[mask], **_positions(first, mask)), mask.index(1))
        for ids, mask in (
            # Three tokens; the same before other ones; the same behind padding.
            ([1, 2, 3, 0, 0, 0, 0, 0], [1] * 8),
            ([1, 2, 3, 3, 1, 2, 1, 3], [1] * 8),
            ([0, 1, 2, 3], [0, 1, 1, 1]),
        )
    )
    if not _same(plain, other, _rounding(model.dtype)):
        raise UnsupportedError(
            f"PagedCacheForTransformers: {type(model).__name__}",
            expected="keys and values that do not depend on later tokens, so that prompts can share them",
            got="others when other tokens followed",
            fix="call model.eval() if it drops out at random; else make the cache without prefix=",
        )
    split, whole, behind_padding = _states_of(model, first)
    if not _same(split, whole, _CLOSE):
        raise UnsupportedError(
            f"PagedCacheForTransformers: {type(model).__name__}",
            expected="states that do not depend on how tokens are divided into passes, so that prompts can go on from them",
            got="others when four tokens came in two passes",
            fix="make the cache without prefix=",
        )
    limit = min((length for module in model.modules() for length in _lengths(module)), default=sys.maxsize)
    makes = getattr(type(model), "_prepare_position_ids_for_generation", None)
    return Sharing(
        limit,
        _same(plain, padded, _CLOSE) and _same(whole, behind_padding, _CLOSE),
        first or 0,
        makes is not getattr(GenerationMixin, "_prepare_position_ids_for_generation", None),
    )


def _first_position(model: Any) -> int | None:
    """Return the position that ``generate`` would give the first token of a prompt; None if the model takes no positions."""
    if "position_ids" not in parameters_of(model):
        return None
    ids = torch.tensor([[1, 2]], device=input_device(model))
    told = {"position_ids": torch.arange(2, device=ids.device)[None], "attention_mask": torch.ones_like(ids), "use_cache": True}
    made = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **told, **{CACHE_KEYWORD: DynamicCache()})
    positions = made.get("position_ids")
    return 0 if positions is None else int(positions.flatten()[0])


def _positions(first: int | None, mask: list[int]) -> dict[str, list[list[int]]]:
    return {} if first is None else {"position_ids": [[first + max(place - mask.index(1), 0) for place in range(len(mask))]]}


def _stored(cache: Any, start: int) -> list[torch.Tensor]:
    """Return keys and values of three tokens, layer by layer."""
    tokens = slice(start, start + 3)
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [states[:, :, tokens].float() for layer in layers for states in (layer.keys, layer.values)]


def _states_of(model: Any, first: int | None) -> Iterator[list[torch.Tensor]]:
    """Yield the states behind four tokens in two passes, in one, and in one behind padding; of most models nothing is run."""
    for passes in ((([1, 2], [1] * 2), ([3, 1], [1] * 4)), (([1, 2, 3, 1], [1] * 4),), (([0, 1, 2, 3, 1], [0, 1, 1, 1, 1]),)):
        cache: Any = None
        for ids, mask in passes if has_states(model) else ():
            told = {name: [row[-len(ids) :] for row in value] for name, value in _positions(first, mask).items()}
            cache = run_tokens(model, [ids], cache, keep_all=True, attention_mask=[mask], **told)
        layers = cache.layers if cache else ()
        yield [state.float() for layer in layers for of, key in held(layer) for state in (of[key],)]


def _rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Return how far keys or values may be apart, see `_CLOSE`, of tokens that are multiplied in the same places."""
    first, behind = _CLOSE
    limit = max(1e-3, 8 * torch.finfo(dtype).eps)
    return min(first, limit), min(behind, limit)


def _same(left: list[torch.Tensor], right: list[torch.Tensor], limit: tuple[float, float]) -> bool:
    first, behind = limit
    limits = [first, first, *[behind] * len(left)]
    return all(bool((a - b).norm() <= limit * a.norm()) for a, b, limit in zip(left, right, limits, strict=False))


def _lengths(module: Any) -> Iterator[int]:
    """Yield the lengths up to which rotary embeddings stay as they are; of other modules nothing."""
    kinds = getattr(module, "rope_type", None)
    for name, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            parameters = getattr(module.config, "rope_parameters", None) or {}
            original = (parameters.get(name) or parameters).get("original_max_position_embeddings") if kind == "longrope" else None
            yield (original or module.original_max_seq_len) - 1  # exactly at that length some go on with what the last call left
