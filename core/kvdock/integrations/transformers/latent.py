"""Latent attention (MLA) on pages: in the absorbed form, so that no cached latent is expanded.

Transformers caches latents from 5.16 on. An attention module expands all of them, at each step, to every head's keys and values, by its
``expand_kv``, and attends to those. What that does is linear: ``kv_b_proj`` has, for each head, the rows that make its keys without
rotation of a latent, and behind them those that make its values. So a query can be multiplied by the first, once, in place of all keys::

    cached row       [rank | rope]                what `mla_caching_` has written, one for all heads
    query            [nope | rope]                of a head
    absorbed query   [nope @ up_k | rope]         scores with cached rows as they are
    result           (weights @ latents) @ up_v

That a module is like this is seen by its parts, and proved by the trial of `kvdock.integrations.transformers.probe`, which compares both
forms in each layer. Weights are read in place, at each call: nothing is copied, and new values are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvdock.cache.mla import MLAKVCache
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

__all__ = ["absorbing", "expanding", "latent_layers_of", "latents_problem", "problem_of", "rope_of", "too_many"]

_EXPAND, _UP = "expand_kv", "kv_b_proj"
"""What such a module has: a method that expands latents and rotary parts, and the layer that it does so by."""


def expanding(module: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """Return what a module expands latents by; None if it caches none."""
    found: Any = getattr(module, _EXPAND, None)
    return found if callable(found) else None


def latent_layers_of(model: Any) -> set[int]:
    """Return the indices of a model's layers whose attention caches latents."""
    return {index for part in model.modules() if expanding(part) and isinstance(index := getattr(part, "layer_idx", None), int)}


def rope_of(pool: Any, layer: int) -> int:
    """Return the elements of the rotary part of what a pool holds of a token; 0 if it holds keys and values of heads."""
    return pool.k_cache(layer).shape[3] - pool.v_cache(layer).shape[3] if isinstance(pool, MLAKVCache) else 0


def latents_problem(pool: Any, model: Any) -> str:
    """Return why decode steps in place cannot absorb what a pool holds, or "": it is not looked at again in each step."""
    if not isinstance(pool, MLAKVCache):
        return ""
    old = "" if CACHE_KEYWORD == "cache" else "latents, which Transformers before 5.24 hands over to no compiled or captured step"
    parts = [] if model is None else [part for part in model.modules() if expanding(part)]
    return next(filter(None, map(_weights_problem, parts)), old)


def _weights_problem(module: Any) -> str:
    """Return why what a module expands latents by cannot be absorbed, or ""."""
    up = getattr(module, _UP, None)
    if type(up) is not torch.nn.Linear or type(up.weight) is not torch.nn.Parameter:
        kind = type(up) if type(up) is not torch.nn.Linear else type(up.weight)
        return f"a {_UP} that is no plain linear layer, but a {kind.__module__}.{kind.__qualname__}"
    if up.bias is not None or "forward" in vars(up) or up._forward_hooks or up._forward_pre_hooks:
        return f"a {_UP} with a bias, hooks or a forward of its own"
    return ""


def problem_of(module: Any, query: torch.Tensor, rope: int) -> str:
    """Return why queries cannot attend to latents as those are, or "".

    Args:
        module: the model's attention.
        query: ``[batch, Hq, tokens, nope + rope]``.
        rope: elements of the rotary part.
    """
    problem = _weights_problem(module)
    if problem:
        return problem
    weight = getattr(module, _UP).weight
    if weight.dtype != query.dtype or weight.device != query.device:
        return f"a {_UP} in {weight.dtype} on {weight.device}, and queries in {query.dtype} on {query.device}"
    values, left = divmod(weight.shape[0], query.shape[1])
    if left or not 0 < query.shape[3] - rope < values:
        return f"{weight.shape[0]} rows of {_UP}, which are no keys and values for {query.shape[1]} heads of {query.shape[3]}"
    return ""


def too_many(module: Any, query: torch.Tensor) -> str:
    """Return that queries would take more work on latents as they are than on what those expand to, or "".

    Of each head and each token that is seen, a query takes ``rank`` products for its score and as many for the result, in place of those
    of a key and a value; and expanding takes ``rank`` for each element of both, once for all queries. Rotary parts are the same.

    Args:
        module: the model's attention, with no `problem_of` it.
        query: ``[batch, Hq, tokens, nope + rope]``.
    """
    (rows, rank), (_, heads, tokens, _) = getattr(module, _UP).weight.shape, query.shape
    expanded = rows // heads
    more = tokens * (2 * rank - expanded) > rank * expanded
    return f"{tokens} new tokens of each row, for which expanding the latents is less work" if more else ""


def absorbing(
    module: Any, query: torch.Tensor, rope: int, scale: float | None, attend: Callable[[torch.Tensor, float], torch.Tensor]
) -> torch.Tensor:
    """Attend to latents.

    Args:
        module: the model's attention, with no `problem_of` it.
        query: ``[batch, Hq, tokens, nope + rope]``.
        rope: elements of the rotary part.
        scale: what scores are multiplied by; None for the square root of 1 / (nope + rope).
        attend: attends from ``[batch, Hq, tokens, rank + rope]`` with a scale, and returns ``[batch, tokens, Hq, rank]``.

    Returns:
        ``[batch, tokens, Hq, dim of the values]``.
    """
    nope, up = query.shape[3] - rope, getattr(module, _UP).weight.unflatten(0, (query.shape[1], -1))  # of each head, whatever its strides
    up_k, up_v = up[:, :nope], up[:, nope:]
    latent, rotary = torch.einsum("bhtd,hdr->bthr", query[..., :nope], up_k), query[..., nope:].transpose(1, 2)
    found = attend(torch.cat([latent, rotary], -1).transpose(1, 2), query.shape[3] ** -0.5 if scale is None else scale)
    return torch.einsum("bthr,hdr->bthd", found, up_v)
