"""The two functions that Transformers calls in passes that read pages: for a mask, and for attention."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.decoding import VIEW, DecodingLayer
from kvdock.integrations.transformers.latent import absorbing, expanding, problem_of, too_many
from kvdock.integrations.transformers.layer import PagedLayer
from kvdock.integrations.transformers.masks import ODD, Mask
from kvdock.integrations.transformers.passes import current_pass
from kvdock.integrations.transformers.reading import LAYER, Check, Pass
from kvdock.integrations.transformers.switching import former_attention, former_mask, register
from kvdock.integrations.transformers.untraced import untraced

__all__ = ["attend", "make_mask"]

_HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "use_cache", "cache", "past_key_values", "past_key_value", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "num_items_in_batch"),
        *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_embeddings"),
    )
)
"""Arguments of attention functions that are read here, or change nothing that attention gives."""

_CLOSE = 1e-3
"""How far results may be apart in a trial, as a part of their length; more where a dtype is coarser."""


@untraced
def make_mask(**arguments: Any) -> Any:
    """Return what stands for a mask in a pass of this thread that reads pages; else the mask, as the model would have it."""
    begun = current_pass()
    if begun is not None:
        if begun.reader.check is not None:
            begun.reader.check.configs[id(arguments["config"])] = arguments["config"]
        marker = begun.mask_for(arguments)
        if marker is not None:
            return marker
    return former_mask(arguments["config"])(**arguments)


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **told: Any) -> Any:
    """Attend to what the layer that returned ``key`` has on pages; without one, as the model would have it.

    Args:
        module: the model's attention.
        query: ``[batch, Hq, tokens, dim]``.
        key: ``[batch, Hk, tokens, dim]``, new tokens only.
        value: the same.
        attention_mask: what `make_mask` returned, or a mask.
        told: what else attention functions are told.

    Returns:
        ``[batch, tokens, Hq, dim]``, and attention weights where the model's own attention has served the call.

    Raises:
        UnsupportedError: other keys than those that the cache returned, or keys of another pass.
    """
    view = told.get(VIEW)
    if view is not None:
        return view.attend(module, query, attention_mask, told), None
    return _attend(module, query, key, value, attention_mask, told)


@untraced
def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, told: dict[str, Any]) -> Any:
    layer: PagedLayer | DecodingLayer | None = getattr(key, LAYER, None)
    if isinstance(layer, DecodingLayer):
        return layer.attend(module, query, attention_mask, told), None
    begun = layer.state.reading if layer is not None else current_pass()
    if layer is None and begun is not None:
        layer = _expanded(module, begun)
    if begun is None or layer is None:
        _check_foreign(begun, layer, attention_mask)
        return former_attention(module)(module, query, key, value, attention_mask, **told)
    begun.unread = None
    mask = begun.mask_of(attention_mask)
    problem = _problem(module, layer, query, mask, told)
    if begun.reader.check is not None:
        return _tried(begun.reader.check, module, query, key, layer, mask, attention_mask, problem, told)
    if layer.rope and not problem:
        problem = too_many(module, query)
    if problem or mask is None:
        if not any(layer.state.reader.problems):  # of layers that never read pages the reason is known
            layer.state.odd = problem
        return _gathered(module, query, key, layer, mask, attention_mask, told)
    return _paged(module, query, layer, mask, told), None


def _expanded(module: Any, begun: Pass) -> PagedLayer | None:
    """Return the layer whose latents a module has expanded, so that the keys are others than those which name it; None if none has."""
    layer = begun.unread
    return layer if isinstance(layer, PagedLayer) and layer.rope and expanding(module) else None


def _problem(module: Any, layer: PagedLayer, query: torch.Tensor, mask: Mask | None, told: dict[str, Any]) -> str:
    """Return why a call cannot be served on pages, or ""."""
    if mask is None:
        return "a mask that is not plain"
    if not mask.is_settled:
        mask.settle(layer.pads)
    window = mask.window
    if window == ODD or window != (layer.window or window) or told.get("sliding_window") not in (None, window):
        return "a mask that is not plain"
    tables = layer.state.tables
    if query.shape[0] != mask.pads.size or query.shape[2] != tables.count or layer.get_seq_length() != tables.stop:
        return "other queries than new tokens"
    if told.get("dropout") or told.get("is_causal") is False:
        return "dropout, or attention that is not causal"
    if not told.keys() <= _HARMLESS:
        others = [name for name, value in told.items() if value is not None and name not in _HARMLESS]
        if others:
            return f"arguments that are not known: {', '.join(others)}"
    return problem_of(module, query, layer.rope) if layer.rope else ""


def _paged(module: Any, query: torch.Tensor, layer: PagedLayer, mask: Mask, told: dict[str, Any]) -> torch.Tensor:
    def attend(query: torch.Tensor, scale: float | None) -> torch.Tensor:
        return layer.attend(query, mask.starts, mask.window, scale, told.get("softcap"), told.get("s_aux"))

    scale = told.get("scaling")
    return absorbing(module, query, layer.rope, scale, attend) if layer.rope else attend(query, scale)


def _gathered(
    module: Any, query: torch.Tensor, key: torch.Tensor, layer: PagedLayer, mask: Mask | None, given: Any, told: dict[str, Any]
) -> Any:
    """Return what the model's own attention gives on gathered keys and values."""
    keys, values = layer.gathered(key.shape[2])
    expand = expanding(module) if layer.rope else None
    if expand is not None:
        keys, values = expand(keys, values)
    made = given if mask is None else former_mask(mask.arguments["config"])(**mask.arguments)
    return former_attention(module)(module, query, keys, values, made, **told)


def _tried(
    check: Check,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    layer: PagedLayer,
    mask: Mask | None,
    given: Any,
    problem: str,
    told: dict[str, Any],
) -> Any:
    """Return what the model's own attention gives, and note whether pages give the same."""
    check.configs[id(module.config)] = module.config
    found = _gathered(module, query, key, layer, mask, given, told)
    if not problem and mask is not None:
        expected, got = found[0].float(), _paged(module, query, layer, mask, told).float()
        limit = max(_CLOSE, 8 * torch.finfo(query.dtype).eps)
        if expected.shape != got.shape or not bool((got - expected).norm() <= limit * expected.norm()):
            problem = "an attention that gives something else"
    check.note(layer.index, problem)
    return found


def _check_foreign(begun: Pass | None, layer: PagedLayer | None, mask: Any) -> None:
    """Raise where keys, or a mask, of a pass that reads pages would be taken for whole ones."""
    if begun is not None:
        begun.check_read()
    is_ours = isinstance(mask, torch.Tensor) and mask.dtype == torch.int32
    if layer is not None or is_ours:
        raise UnsupportedError(
            "PagedCacheForTransformers: attention",
            expected="keys that the cache returned in this pass",
            got="those of another pass" if layer is not None else "others, with a mask for those",
            fix="make the cache with attention='gather'",
        )


register(attend, make_mask)
