"""What happens to each forward pass that gets a paged cache, before the model sees it.

* Where states are to be kept within a pass, it is split there.
* What is cached is not computed again. ``generate`` leaves it out, except in assisted decoding, whose first pass is over the
  whole prompt (up to Transformers 5.24 at least), and in chunked prefill up to 5.18: silently, the prompt is put behind
  itself. A forward pass by hand does the same.
* Padding stays padding. ``generate`` names positions and masks; a forward pass by hand may leave them out, and most models
  then count padding as tokens, so that keys are turned by another angle than those of the same tokens elsewhere.
* Positions are those of the prompts, where a model makes them from what an earlier call left behind (``rope_deltas``).
* What does not fit to what is cached is refused; what may be fit for its caller only is not stored.
* Attention reads pages, if it can: see `kvdock.integrations.transformers.reading`. That ends with the pass.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin

from kvdock.errors import ArgumentValueError
from kvdock.integrations.transformers.bound import Bound
from kvdock.integrations.transformers.compat import CACHE_KEYWORD
from kvdock.integrations.transformers.decoding import PagedDecoding
from kvdock.integrations.transformers.passes import enter, leave
from kvdock.integrations.transformers.plain import CACHES, by_name, hooks_of, odd_argument, odd_places, parameters_of
from kvdock.integrations.transformers.seen import HIDDEN, Oddity
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.untraced import untraced

__all__ = ["finish_pass", "prepare_pass", "what_runs"]

_BY_TOKEN = ("input_ids", "position_ids", "cache_position")
"""Plain arguments with one entry per new token, in their last dimension. A mask has one for the cached ones too, and stays."""

_CHANGED = Oddity(
    "with hooks that came or went since bind(), such as PEFT's for adapter_names", "name the adapter in bind(), with a namespace for it"
)


def what_runs(model: Any) -> Any:
    """Return what ``generate`` of a model calls: the model, or what `torch.compile` or PEFT wrapped."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((module for module in modules if isinstance(module, GenerationMixin)), model)


def prepare_pass(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Make a pass over a bound batch fit to what is cached.

    A function without state, so that models with it can be copied and pickled as before.

    Returns:
        the arguments to call with, all by name, or None to leave them as they are.

    Raises:
        ArgumentValueError: a pass that is to use no cache; over a bound batch also a mask that does not reach over what is
            cached, positions that are not those of the prompts, or where something is cached, what else could change it.
    """
    return None if isinstance(kwargs.get(CACHE_KEYWORD), PagedDecoding) else _prepare(model, args, kwargs)


@untraced
def _prepare(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    leave(model)  # what was interrupted before it came to its end
    told = by_name(parameters_of(model), args, kwargs) if args else kwargs
    state = _paged_state(told)
    if state is None:
        return None
    _check_use(told)
    changed = _fit(model, state, state.bound, told) if state.bound is not None else None
    if len(state.states):
        _make_room(state, told if changed is None else changed)
    enter(model, state, told if changed is None else changed)
    return None if changed is None else ((), changed)


def finish_pass(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """End a pass, which may have failed: then there is no output.

    Raises:
        UnsupportedError: attention has passed by what the cache returned.
    """
    if not isinstance(kwargs.get(CACHE_KEYWORD), PagedDecoding):
        _finish(model, by_name(parameters_of(model), args, kwargs) if args else kwargs, output)


def _make_room(state: PagedState, told: dict[str, Any]) -> None:
    """Make room for a pass that changes states, so that it does not fail in the middle for want of it."""
    given = next((value for name in ("input_ids", "inputs_embeds") if isinstance(value := told.get(name), torch.Tensor)), None)
    if given is not None and given.ndim > 1:
        state.reserve(given.shape[0], given.shape[1])


@untraced
def _finish(model: torch.nn.Module, told: dict[str, Any], output: Any) -> None:
    state = _paged_state(told)
    if state is not None and len(state.states):
        state.unreserve(failed=output is None)
    ended = leave(model)
    if ended is not None and output is not None:
        ended.check_read()
    if state is not None and output is not None:
        state.settle()


def _fit(model: torch.nn.Module, state: PagedState, bound: Bound, told: dict[str, Any]) -> dict[str, Any] | None:
    """Make a pass over a bound batch fit to what is cached; return its arguments, or None to leave them as they are."""
    ids = told.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
        _judge(bound, odd_argument(model, told, 0))
        return None
    state.lengths.check_whole("a forward pass")
    if not bound.is_fresh and len(ids) != len(bound.origin):
        return None  # which the table refuses
    told = _with_own_positions(state, bound, told)
    _judge(bound, odd_argument(model, told, len(ids)) or _changed(model, bound))
    if bound.is_fresh and bound.past and bound.begins_anew(ids, told.get("position_ids"), told.get("attention_mask")):
        told = _behind_past(state, bound, told)
    if bound.places and bound.seen.oddity is None:
        told = _behind_places(model, state, bound, told)
    return _announced(model, state, bound, told)


def _behind_places(model: torch.nn.Module, state: PagedState, bound: Bound, told: dict[str, Any]) -> dict[str, Any]:
    """Compute a pass up to each place in it where states are to be kept, and keep them; return what is left of it."""
    stop = state.length + told["input_ids"].shape[1]
    for place in [place for place in bound.places if state.length < place < stop]:
        count, ahead = told["input_ids"].shape[1], place - state.length
        parts = [
            {name: value[..., part] if name in _BY_TOKEN and _is_by_token(value, count) else value for name, value in told.items()}
            for part in (slice(ahead), slice(ahead, None))
        ]
        mask = told.get("attention_mask")
        first = {name: value for name, value in parts[0].items() if name != "labels"}
        model(**(first if mask is None else {**first, "attention_mask": mask[:, :place]}))
        bound.keep(place, state.states)
        told = parts[1]
    return told


def _changed(model: torch.nn.Module, bound: Bound) -> Oddity | None:
    """Return whether hooks came or went since a batch was bound that just begins."""
    return _CHANGED if bound.is_fresh and bound.hooks not in (None, hooks_of(model)) else None


def _check_use(told: dict[str, Any]) -> None:
    """Raise if a pass is to use no cache: ``generate`` then feeds the whole text to it again at each step."""
    if told.get("use_cache") is False:
        raise ArgumentValueError(
            "PagedCacheForTransformers: use_cache",
            expected="True where a cache is passed",
            got="False, from the call or from the model's configuration",
            fix="call model.generate(**cache.bind(**inputs)), which sets it, or pass use_cache=True",
        )


def _judge(bound: Bound, oddity: Oddity | None) -> None:
    """Refuse an odd pass where its prompts are cached, and note it elsewhere."""
    if oddity is None:
        return
    if bound.is_fresh and bound.past:
        raise ArgumentValueError(
            "PagedCacheForTransformers: first pass",
            expected=f"what was bound and nothing else, behind the {bound.past} tokens of each row that are cached",
            got=f"one that is computed {oddity.why}",
            fix=oddity.fix,
        )
    bound.seen.note(oddity)


def _paged_state(told: dict[str, Any]) -> PagedState | None:
    cache = next((told[name] for name in CACHES if told.get(name) is not None), None)
    state = getattr(cache, "state", None)
    return state if isinstance(state, PagedState) else None


def _with_own_positions(state: PagedState, bound: Bound, told: dict[str, Any]) -> dict[str, Any]:
    """Leave out positions of several planes that a model made, behind what is cached, of what an earlier call left behind.

    In a plain batch there is text only, of which all planes say the same but for an offset; so these are filled in anew.
    """
    planes = told.get("position_ids")
    if not (isinstance(planes, torch.Tensor) and planes.ndim == 3 and state.length and bound.seen.oddity is None):
        return told
    steps = planes - planes[..., :1]
    return {**told, "position_ids": None} if bool((steps == steps[:1]).all()) else told


def _behind_past(state: PagedState, bound: Bound, told: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a pass that begins anew what is cached, or let it be computed: a chunk of a prompt may be shorter than that."""
    count = told["input_ids"].shape[1]
    if count < bound.prompts.length:
        state.forget_past()
        return told
    return {name: value[..., bound.past :] if name in _BY_TOKEN and _is_by_token(value, count) else value for name, value in told.items()}


def _is_by_token(value: Any, count: int) -> bool:
    """Return whether an argument has one entry per new token."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[-1] == count


def _announced(model: torch.nn.Module, state: PagedState, bound: Bound, told: dict[str, Any]) -> dict[str, Any]:
    """Check a pass, fill in what its caller left out, and announce it."""
    start, ids = state.length, told["input_ids"]
    _check_start(start, bound, ids, told.get("position_ids"), told.get("attention_mask"))
    told = {**told, **_left_out(model, bound, start, ids, told)}
    doubt = None
    if bound.seen.oddity is None:
        pads = torch.from_numpy(bound.pads(len(ids)))[:, None].to(ids.device)
        # A boolean on the device, which is read only where the answer decides something now: decoding does not wait for it.
        doubt = odd_places(pads, start, bound.sharing.first, told)
        if bound.is_fresh and bound.past and doubt is not None and bool(doubt):
            _judge(bound, HIDDEN)
    bound.seen.announce(ids, doubt)
    return told


def _check_start(start: int, bound: Bound, ids: torch.Tensor, positions: Any, mask: Any) -> None:
    """Raise if a pass is not over what comes behind the ``start`` tokens that are there.

    A mask that is too short Transformers would fill up with 0s, and so hide the new tokens.
    """
    reach = start + ids.shape[1]
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] < reach:
        raise _misplaced(bound, "attention_mask", f"{reach} entries in a row: for the {start} tokens that the cache holds, too", mask)
    if ids.shape[1] > 1 and mask is None and bound.is_before(start, ids, positions):
        raise _misplaced(bound, "position_ids", f"those behind the {start} tokens that the cache holds", positions)


def _misplaced(bound: Bound, name: str, expected: str, value: torch.Tensor) -> ArgumentValueError:
    got = f"{value.shape[1]}" if name == "attention_mask" else f"{value[0, :4].tolist()} for the first tokens of row 0"
    fix = "in a loop of your own, append to the mask that bind() returned and pass new tokens only"
    if not bound.is_fresh:
        fix = f"bind() the prompts anew before each generate(); {fix}"
    return ArgumentValueError(f"PagedCacheForTransformers: {name}", expected=expected, got=got, fix=fix)


def _left_out(model: torch.nn.Module, bound: Bound, start: int, ids: torch.Tensor, told: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the positions and the mask of a pass from ``start`` on, where the model would not find the right ones itself."""
    wanted = {"position_ids": bound.prompts.is_padded or (start and bound.sharing.own_positions), "attention_mask": bound.prompts.is_padded}
    taken = parameters_of(model)
    missing = [name for name, needed in wanted.items() if needed and told.get(name) is None and name in taken]
    if not missing:
        return {}
    positions = torch.from_numpy(bound.positions(0, start + ids.shape[1], len(ids))).to(ids.device)
    made = {"position_ids": positions[:, start:].clamp(min=0) + bound.sharing.first, "attention_mask": (positions >= 0).long()}
    return {name: made[name] for name in missing}
