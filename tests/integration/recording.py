"""What a model really caches: recorded while it runs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutput

from kvdock.integrations.transformers.compat import CACHE_KEYWORD

TOKENS = 12

Layer = tuple[Any, ...] | None
"""Heads of keys and of values, elements of a key and of a value, window; then shapes of a state; None for nothing."""

STATE, BOTH, NOTHING = (
    getattr(cache_utils, name, None) for name in ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "DummyLayer")
)
"""Layers of newer versions that keep a state, keys and values and a state, or nothing."""


class Recording(DynamicCache):
    """Transformers' own cache, which remembers what it was handed."""

    def __init__(self, config: Any = None) -> None:
        self.seen: dict[int, list[tuple[Any, ...]]] = {}
        self.more: set[str] = set()
        super().__init__(config=config)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        shapes = (key_states.shape, value_states.shape)
        self.seen.setdefault(layer_idx, []).append((*(s[1] for s in shapes), *(s[-1] for s in shapes)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("update_"):  # of recurrences, convolutions, indexers
            self.more.add(name)
        return super().__getattribute__(name)

    def layer(self, index: int) -> Layer | str:
        """Return what a layer caches, or what is strange about it."""
        of, seen = self.layers[index], self.seen.get(index, [])
        if NOTHING is not None and type(of) is NOTHING and not seen:
            return None
        keeps_keys, keeps_state = type(of) in (DynamicLayer, DynamicSlidingWindowLayer, BOTH), type(of) in (STATE, BOTH)
        if not (keeps_keys or keeps_state) or len(seen) != keeps_keys:
            return f"{type(of).__name__}, updated with {seen}"
        keys = (*seen[0], getattr(of, "sliding_window", None)) if keeps_keys else ()
        return (*keys, *(states_of(of) if keeps_state else ()))


def states_of(layer: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of what a layer keeps of a sequence as a state, without the batch."""
    states = [state for of in (layer.conv_states, layer.recurrent_states) for state in of.values() if state is not None]
    return tuple((tuple(state.shape[1:]), state.dtype) for state in states)


@attrs.frozen
class Recorded:
    """What a model cached, by layer; how far each layer saw, by the masks that its attention got; other state that it kept."""

    layers: list[Layer | str]
    sight: dict[int, int]
    more: set[str]


_SIGHT: dict[int, int] = {}


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Attend, and note how many keys a query sees at most."""
    if attention_mask is not None and not getattr(module, "is_cross_attention", False):
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > -1e4
        _SIGHT[getattr(module, "layer_idx", -1)] = int(visible.sum(-1).max())
    taken = {name: of for name, of in kwargs.items() if name not in ("position_bias", "softcap")}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **taken)


AttentionInterface.register("recording", _attention)
AttentionMaskInterface.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def build(of: Any, config: Any) -> Any:
    """Make a model with random weights, whose attention notes its masks where the model has no attention of its own."""
    torch.manual_seed(0)
    try:
        return of._from_config(copy.deepcopy(config), attn_implementation="recording").eval()
    except (ValueError, KeyError):
        return of._from_config(copy.deepcopy(config), attn_implementation="eager").eval()


def build_small(of: Any, config: Any) -> Any:
    """Make a model, unless it is too large: parts whose size no common setting reaches."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in build(of, config).parameters())
    if size > 100_000_000:
        raise MemoryError(f"it does not get small: {size} weights")
    return build(of, config)


def caches(config: Any) -> Iterator[Recording]:
    """Yield the caches to try: Transformers' own for a configuration, then one that takes any number of layers."""
    with contextlib.suppress(KeyError):  # it lists layers that only caches of the model's own know
        yield Recording(config)
    yield Recording()


@dataclasses.dataclass
class Encoded(BaseModelOutput):
    """What an encoder gives, with what some decoders ask of theirs."""

    router_logits: Any = None
    attention_mask: Any = None


INPUTS: dict[str, Callable[[torch.Tensor, Any], dict[str, Any]]] = {
    "kyutai_speech_to_text": lambda ids, config: {"input_ids": ids[..., None].expand(-1, -1, config.num_codebooks + 1)},
    "musicgen_decoder": lambda ids, config: {"input_ids": ids.expand(config.num_codebooks, -1)},
    "musicgen_melody_decoder": lambda ids, config: {"input_ids": ids.expand(config.num_codebooks, -1)},
    "voxtral_realtime_text": lambda ids, config: {"input_ids": ids, "t_cond": torch.zeros(1, config.hidden_size)},
}
"""What single families read, by the type of their configuration."""


def inputs_of(made: Any) -> dict[str, Any]:
    """Return what a model reads."""
    ids = torch.arange(3, 3 + TOKENS)[None]
    if not (made.config.is_encoder_decoder or made.config.get_text_config(decoder=True).is_encoder_decoder):
        return INPUTS.get(made.config.model_type, lambda ids, config: {"input_ids": ids})(ids, made.config)
    size = getattr(made.config.get_text_config(encoder=True), "hidden_size", 32)
    return {"decoder_input_ids": ids, "encoder_outputs": Encoded(last_hidden_state=torch.zeros(1, 7, size))}


def record(made: Any) -> Recorded:
    """Run some tokens through a model, and return what it caches."""
    inputs = inputs_of(made)
    for cache in caches(made.config):
        _SIGHT.clear()
        whole = EncoderDecoderCache(cache, DynamicCache()) if "encoder_outputs" in inputs else cache
        try:
            with torch.no_grad():
                made(**inputs, use_cache=True, **{CACHE_KEYWORD: whole})
            break
        except IndexError as error:  # the configuration counts the encoder's layers
            last = error
    else:
        raise last
    layers = [cache.layer(index) for index in range(len(cache.layers))]
    states = {"update_conv_state", "update_recurrent_state"} if any(type(layer) in (STATE, BOTH) for layer in cache.layers) else set()
    return Recorded(layers, dict(_SIGHT), cache.more - states)
