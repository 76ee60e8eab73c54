"""What a model hands to its cache: measured by running one token through it.

A configuration does not tell. Models with latent attention cache every head's keys and values in one version of
Transformers and the latent in the next; under tensor parallelism each rank has its share of the heads; layers may share
another layer's keys and values, or differ in heads and dims.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD, DUMMY_LAYER
from kvdock.integrations.transformers.latent import latent_layers_of
from kvdock.integrations.transformers.states import BOTH, STATES, named
from kvdock.layers.groups import LayerGroup
from kvdock.layers.interface import Buffer, Part
from kvdock.layers.retention import KeepState
from kvdock.spec import KVSpec, LayerSpec, MLALayerSpec

__all__ = ["Measurement", "has_states", "input_device", "measure", "run_tokens"]

_STORED: tuple[type, ...] = (DynamicLayer, DynamicSlidingWindowLayer, *BOTH)

_WITHOUT_WINDOW: dict[type, Any] = {DynamicSlidingWindowLayer: DynamicLayer, BOTH[1]: BOTH[0]}


def _states(layer: Any) -> dict[str, int]:
    """Return how many states a layer keeps, as an argument of its class."""
    return {"number_of_states": layer.number_of_states} if type(layer) in STATES else {}


@attrs.frozen
class Measurement:
    """What one token left in Transformers' own cache.

    Args:
        spec: the layers that store keys and values, in order; latents where all of them store those.
        windows: their sliding windows in tokens; None for full attention.
        stored: for each layer of the model, whether it is one of those.
        states: for each layer of the model, how many states it keeps. Layers with neither store nothing.
        state_group: the layers with states, counted by themselves, and what one row has there.
        device: where the keys and values are.
    """

    spec: KVSpec
    windows: tuple[int | None, ...]
    stored: tuple[bool, ...]
    states: tuple[int, ...]
    state_group: LayerGroup
    device: torch.device


def measure(model: Any) -> Measurement:
    """Run one token through a model, and return what it caches.

    Args:
        model: a ``PreTrainedModel`` that generates; its forward hooks see the call.

    Raises:
        UnsupportedError: it keeps more than states, and keys and values of one dtype on one device; the text says what.
    """
    every: list[Any] = run_tokens(model, [[0]]).layers
    stored = tuple(type(layer) in _STORED for layer in every)
    layers = [layer for layer, real in zip(every, stored, strict=True) if real]
    for index, layer in enumerate(layers):
        if not (layer.is_initialized and layer.keys is not None and layer.keys.shape[2] == 1):
            raise _refusal(model, "every layer to cache one position for one token", f"a layer that does not: {index}")
    spec = KVSpec(_layer_specs(layers, _keep_latents(model, every)), _max_positions(model), _only(model, layers, "dtype"))
    states = tuple(layer.number_of_states if type(layer) in STATES else 0 for layer in every)
    empty = [
        index
        for index, (number, layer) in enumerate(zip(states, every, strict=True))
        if number and not sum(state.nbytes for state in named(layer).values())
    ]
    if empty:
        raise _refusal(model, "layers that keep their states in the cache", f"a layer that keeps them elsewhere: {empty[0]}")
    kept = [layer for number, layer in zip(states, every, strict=True) if number]
    return Measurement(spec, tuple(map(_window_of, layers)), stored, states, _group_of(kept), _only(model, layers, "device"))


def _group_of(layers: Sequence[Any]) -> LayerGroup:
    """Return layers with states as a layer group."""
    parts = [
        Part(tuple(Buffer(name, state.shape[1:], state.dtype) for name, state in named(layer).items()), KeepState()) for layer in layers
    ]
    return LayerGroup(tuple((at, 0) for at in range(len(parts))), tuple(parts), KeepState(), 1)


def _empty_cache(model: Any) -> DynamicCache:
    """Return Transformers' own cache for a model, refusing what is more than keys, values and states."""
    text = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise _refusal(model, "a decoder-only model", "one with cross-attention, whose cache has a second part")
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise _refusal(model, "a model that takes Transformers' DynamicCache", "one that brings its own kind of cache")
    try:
        cache = DynamicCache(config=model.config)
    except KeyError as error:
        raise _refusal(model, "layers with keys and values", f"a layer of type {error.args[0]!r}") from error
    strange = {type(layer).__name__ for layer in cache.layers if type(layer) not in (*_STORED, *STATES, DUMMY_LAYER)}
    if strange:
        raise _refusal(model, "layers that keep keys, values and states", f"layers that keep more: {', '.join(sorted(strange))}")
    if cache.layers and not any(type(layer) in _STORED for layer in cache.layers):
        names = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise _refusal(model, "a layer with keys and values, which are what a pool pages", f"none but {names}")
    return cache


def has_states(model: Any) -> bool:
    """Whether layers of a model, whose cache was measured, keep states."""
    return any(type(layer) in STATES for layer in _empty_cache(model).layers)


def run_tokens(model: Any, ids: list[list[int]], cache: DynamicCache | None = None, *, keep_all: bool = False, **told: Any) -> DynamicCache:
    """Run tokens through a model; return Transformers' own cache with what it stored.

    Args:
        model: a ``PreTrainedModel``.
        ids: ``[rows, tokens]``.
        cache: with what is there already; by default an empty one.
        keep_all: keep what windows no longer see, too.
        told: other arguments of the model, as lists; a mask of 1s if there is none.

    Raises:
        UnsupportedError: it keeps more than keys, values and states, or puts them into another cache.
    """
    if cache is None:
        cache = _empty_cache(model)
        if keep_all:
            cache.layers = [_WITHOUT_WINDOW.get(type(layer), type(layer))(**_states(layer)) for layer in cache.layers]
    inputs = {name: torch.tensor(value, device=input_device(model)) for name, value in {"input_ids": ids, **told}.items()}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    try:
        with torch.no_grad():
            output = model(**inputs, use_cache=True, **{CACHE_KEYWORD: cache})
    except Exception as error:
        error.add_note(f"kvdock ran tokens {ids} through {type(model).__name__} to measure what it caches, with {CACHE_KEYWORD}={cache}")
        raise
    returned = getattr(output, CACHE_KEYWORD, None)
    if returned is not None and returned is not cache:
        raise _refusal(model, "a model that uses the cache it is given", f"one that wraps it in {type(returned).__name__}")
    return cache


def input_device(model: Any) -> torch.device:
    """Return where a model takes its inputs; weights that accelerate has put elsewhere are on "meta" meanwhile, and it moves inputs."""
    device: torch.device = model.device
    return torch.device("cpu") if device == torch.device("meta") else device


def _keep_latents(model: Any, every: Sequence[Any]) -> bool:
    """Return whether all layers that store anything store latents, which one pool holds and heads of their own another."""
    latent = latent_layers_of(model)
    stored = {index for index, layer in enumerate(every) if type(layer) in _STORED}
    return bool(stored) and stored <= latent and all(every[index].keys.shape[1] == every[index].values.shape[1] == 1 for index in stored)


def _layer_specs(layers: Sequence[Any], keep_latents: bool) -> Sequence[LayerSpec | MLALayerSpec]:
    """Describe layers by what they stored, ``[1, heads, 1, dim]`` each: of latents one head each, the latent and the rotary part."""
    shapes = [(layer, *layer.keys.shape[1::2], *layer.values.shape[1::2]) for layer in layers]
    if keep_latents:
        return [MLALayerSpec(rank, rope) for _, _, rank, _, rope in shapes]
    return [LayerSpec(k_heads, v_heads, k_dim, v_dim, _window_of(layer)) for layer, k_heads, k_dim, v_heads, v_dim in shapes]


def _window_of(layer: Any) -> int | None:
    found: int | None = getattr(layer, "sliding_window", None)
    return found


def _max_positions(model: Any) -> int:
    """Return the longest sequence that a model was made for; models without position embeddings name none."""
    value = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else sys.maxsize


def _only(model: Any, layers: Sequence[Any], what: str) -> Any:
    """Return the dtype or device that all keys and values have."""
    found = {getattr(tensor, what) for layer in layers for tensor in (layer.keys, layer.values)}
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found))) or "no layer that stores any"
        raise _refusal(model, f"keys and values of one {what}", names)
    return found.pop()


def _refusal(model: Any, expected: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"PagedCacheForTransformers: {type(model).__name__}", expected=expected, got=got, fix="use Transformers' own cache for this model"
    )
