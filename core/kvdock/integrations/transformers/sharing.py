"""Which keys and values of a model can be shared: where they follow from token ids and positions alone.

A configuration does not tell that either, so it is measured like the rest, except for one thing: two kinds of rotary embeddings
turn all keys of a pass by its length, ``longrope`` from a length on, ``dynamic`` more and more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.measure import run_tokens

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
    """

    limit: int = sys.maxsize
    padded: bool = True


def sharing_of(model: Any) -> Sharing:
    """Run three tokens through a model, with others before and behind them, and see whether that changes their keys and values.

    Args:
        model: a ``PreTrainedModel`` whose cache was measured.

    Raises:
        UnsupportedError: what comes behind them does.
    """
    told = {"position_ids": [[0, 0, 1, 2]]} if "position_ids" in inspect.signature(model.forward).parameters else {}
    plain = _stored(run_tokens(model, [[1, 2, 3, 0]], keep_all=True), slice(0, 3))
    other = _stored(run_tokens(model, [[1, 2, 3, 1]], keep_all=True), slice(0, 3))
    padded = _stored(run_tokens(model, [[0, 1, 2, 3]], keep_all=True, attention_mask=[[0, 1, 1, 1]], **told), slice(1, 4))
    if not _same(plain, other):
        raise UnsupportedError(
            f"PagedCacheForTransformers: {type(model).__name__}",
            expected="keys and values that do not depend on later tokens, so that prompts can share them",
            got="others when another token followed",
            fix="call model.eval() if it drops out at random; else make the cache without prefix=",
        )
    limit = min((length for module in model.modules() for length in _lengths(module)), default=sys.maxsize)
    return Sharing(limit, _same(plain, padded))


def _stored(cache: Any, tokens: slice) -> list[torch.Tensor]:
    """Return keys and values of some tokens, layer by layer."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [states[:, :, tokens].float() for layer in layers for states in (layer.keys, layer.values)]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether two passes gave the same, but for rounding."""
    first, behind = _CLOSE
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
