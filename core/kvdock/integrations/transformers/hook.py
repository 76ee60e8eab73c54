"""What a model is told before each forward pass: not to compute again what is cached.

``generate`` leaves out what a cache holds, except in assisted decoding, whose first pass is over the whole prompt (up to
Transformers 5.24 at least), and in chunked prefill up to 5.18: silently, the prompt is put behind itself. A forward
pass by hand does the same.
"""

from __future__ import annotations

from typing import Any

import torch

from kvdock.integrations.transformers.state import PagedState

__all__ = ["leave_out_cached", "watch"]

_BY_TOKEN = ("input_ids", "position_ids", "token_type_ids", "cache_position")
"""Arguments with one entry per new token, in their last dimension. A mask has one for the cached ones too, and stays."""


def watch(model: torch.nn.Module) -> None:
    """Let `leave_out_cached` see every call of a model from now on; once is enough for all caches of a model."""
    if leave_out_cached not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(leave_out_cached, with_kwargs=True)


def leave_out_cached(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Cut the cached tokens off the first pass over a prompt, where it begins with them; in chunks, let them be computed again.

    A function without state, so that models with it can be copied and pickled as before.

    Returns:
        the arguments to call with, or None to leave them as they are.
    """
    state = _fresh_state(kwargs)
    bound = state.bound if state else None
    ids = args[0] if args else kwargs.get("input_ids")
    if state is None or bound is None or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return None
    if not bound.begins_anew(ids, kwargs.get("position_ids"), kwargs.get("attention_mask")):
        return None
    if ids.shape[-1] < bound.prompts.length:
        state.forget_past()  # the first of several chunks
        return None
    cut = {name: kwargs[name][..., bound.past :] for name in _BY_TOKEN if _is_by_token(kwargs.get(name), ids.shape[-1])}
    return (args[0][..., bound.past :], *args[1:]) if args else (), {**kwargs, **cut}


def _fresh_state(kwargs: dict[str, Any]) -> PagedState | None:
    """Return the state of the cache in a call, if its batch has a past and this is the first pass over it."""
    cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
    state = getattr(cache, "state", None)
    bound = state.bound if isinstance(state, PagedState) else None
    return state if bound is not None and bound.is_fresh and bound.past else None


def _is_by_token(value: Any, count: int) -> bool:
    """Return whether an argument has one entry per new token."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[-1] == count
