"""What happens to each forward pass over a batch that was bound, before the model sees it.

* What is cached is not computed again. ``generate`` leaves it out, except in assisted decoding, whose first pass is over the
  whole prompt (up to Transformers 5.24 at least), and in chunked prefill up to 5.18: silently, the prompt is put behind
  itself. A forward pass by hand does the same.
* Padding stays padding. ``generate`` names positions and masks; a forward pass by hand may leave them out, and most models
  then count padding as tokens, so that keys are turned by another angle than those of the same tokens elsewhere.
* What does not fit to what is cached is refused, or else not stored.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from kvdock.errors import ArgumentValueError
from kvdock.integrations.transformers.bound import Bound
from kvdock.integrations.transformers.state import PagedState

__all__ = ["prepare_pass", "watch"]

_BY_TOKEN = ("input_ids", "position_ids", "token_type_ids", "cache_position")
"""Arguments with one entry per new token, in their last dimension. A mask has one for the cached ones too, and stays."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def watch(model: torch.nn.Module) -> None:
    """Let `prepare_pass` see every call of a model from now on; once is enough for all caches of a model."""
    if prepare_pass not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(prepare_pass, with_kwargs=True)


def prepare_pass(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Make a pass over a bound batch fit to what is cached.

    A function without state, so that models with it can be copied and pickled as before.

    Returns:
        the arguments to call with, or None to leave them as they are.

    Raises:
        ArgumentValueError: a mask that does not reach over what is cached, or positions that are not those of the prompts.
    """
    state = _bound_state(kwargs)
    bound = state.bound if state else None
    if state is None or bound is None:
        return None
    ids = args[0] if args else kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
        bound.close("one that was computed from something else than token ids")
        return None
    state.check_whole("a forward pass")
    if not bound.is_fresh and len(ids) != len(bound.origin):
        return None  # which the table refuses
    if bound.is_fresh and bound.past and bound.begins_anew(ids, kwargs.get("position_ids"), kwargs.get("attention_mask")):
        if ids.shape[1] < bound.prompts.length:
            state.forget_past()  # the first of several chunks
        else:
            args, kwargs = _without(bound.past, args, kwargs, ids.shape[1])
            ids = ids[:, bound.past :]
    _check_start(state.table.length, bound, ids, kwargs.get("position_ids"), kwargs.get("attention_mask"))
    return args, {**kwargs, **_left_out(model, bound, state.table.length, ids, kwargs)}


def _bound_state(kwargs: dict[str, Any]) -> PagedState | None:
    """Return the state of the cache in a call, if it is one of ours."""
    cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
    state = getattr(cache, "state", None)
    return state if isinstance(state, PagedState) else None


def _without(past: int, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Arguments:
    """Leave out the first ``past`` of ``count`` tokens."""
    cut = {name: kwargs[name][..., past:] for name in _BY_TOKEN if _is_by_token(kwargs.get(name), count)}
    return (args[0][..., past:], *args[1:]) if args else (), {**kwargs, **cut}


def _is_by_token(value: Any, count: int) -> bool:
    """Return whether an argument has one entry per new token."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[-1] == count


def _check_start(start: int, bound: Bound, ids: torch.Tensor, positions: Any, mask: Any) -> None:
    """Raise if a pass is not over what comes behind the ``start`` tokens that are there; close a batch if it may not be.

    A mask that is too short Transformers would fill up with 0s, and so hide the new tokens.
    """
    reach = start + ids.shape[1]
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] < reach:
        raise _misplaced("attention_mask", f"{reach} entries in a row: for the {start} tokens that the cache holds, too", mask)
    if ids.shape[1] == 1 or bound.is_as_bound(start, ids, positions, mask):
        return
    if mask is None and bound.is_before(start, ids, positions):
        raise _misplaced("position_ids", f"those behind the {start} tokens that the cache holds", positions)
    bound.close("one that was computed with another attention_mask or other position_ids than its prompts have")


def _misplaced(name: str, expected: str, value: torch.Tensor) -> ArgumentValueError:
    """Make the error for a pass over tokens that are cached already."""
    got = f"{value.shape[1]}" if name == "attention_mask" else f"{value[0, :4].tolist()} for the first tokens of row 0"
    fix = "bind() the prompts anew before each generate(); in a loop of your own, append to the mask and pass new tokens only"
    return ArgumentValueError(f"PagedCacheForTransformers: {name}", expected=expected, got=got, fix=fix)


def _left_out(model: torch.nn.Module, bound: Bound, start: int, ids: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the positions and the mask of a pass from ``start`` on over rows with padding, where the caller has none."""
    missing = [name for name in ("position_ids", "attention_mask") if kwargs.get(name) is None]
    if not (missing and bound.prompts.is_padded):
        return {}
    positions = torch.from_numpy(bound.positions(0, start + ids.shape[1], len(ids))).to(ids.device)
    made = {"position_ids": positions[:, start:].clamp(min=0), "attention_mask": (positions >= 0).long()}
    taken = inspect.signature(model.forward).parameters
    return {name: made[name] for name in missing if name in taken}
