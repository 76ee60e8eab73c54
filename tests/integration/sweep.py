"""What `KVSpec.from_hf_config` says of an architecture, against what its model caches."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from integration.architectures import GROUPS, VARIANTS, config_of, decoder_of, known_settings
from integration.recording import TOKENS, Layer, Recorded, build_small, record
from kvdock import KVDockError, KVSpec
from kvdock.layers import ChunkedLayerSpec, HybridLayerSpec, LayerKind, LayerSpec, MLALayerSpec, SharedLayerSpec, StateLayerSpec

WRONG, RIGHT, UNVERIFIED, REFUSED, NOT_RUN = "wrong", "right", "a spec, but no model that runs", "refused", "no model that runs"

UNSEEN_WINDOWS = {"moshi", "qwen3_omni_moe_thinker", "kyutai_speech_to_text"}
"""Their masks let a query see every token at once; Transformers' cache drops what is behind the window from the next call on."""


@attrs.frozen
class Outcome:
    """What came of one configuration, or of all those of an architecture."""

    verdict: str
    text: str = ""


def architectures(group: str) -> dict[str, str]:
    """Return the types of a group's configurations, with the class of the model that is made of each."""
    return {kind: name if isinstance(name, str) else name[0] for kind, name in GROUPS[group].items()}


def described(config: Any) -> list[Layer] | str:
    """Return what a spec says of each layer, or the reason why there is none. Any other error goes through."""
    try:
        spec = KVSpec.from_hf_config(config, torch.float32)
    except KVDockError as error:
        return str(error)
    return [recorded_as(layer) for layer in spec.layers]


def recorded_as(layer: LayerKind) -> Layer:
    """Return what `Recording` sees of such a layer: Transformers' cache keeps chunks as windows, and latents as a key and a value."""
    match layer:
        case LayerSpec() | ChunkedLayerSpec():
            window = layer.window if isinstance(layer, LayerSpec) else layer.chunk
            return (layer.num_k_heads, layer.num_v_heads, layer.k_dim, layer.v_dim, window)
        case MLALayerSpec():
            return (1, 1, layer.kv_lora_rank, layer.rope_dim, None)
        case StateLayerSpec():
            return tuple((buffer.shape, buffer.dtype) for buffer in layer.buffers)
        case HybridLayerSpec():
            return tuple(entry for each in layer.of for entry in recorded_as(each) or ())
        case SharedLayerSpec():
            return None
    raise AssertionError(layer)


def described_default(model_type: str) -> list[Layer] | str:
    """Return what is said of the configuration that a family comes with."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as error:  # noqa: BLE001 - there are such
        return f"not even its own configuration is valid: {error}"
    return described(config)


def untried(said: list[Layer] | str, error: Exception) -> Outcome:
    """Return the outcome for what did not run."""
    return Outcome(NOT_RUN if isinstance(said, str) else UNVERIFIED, f"{said}; {type(error).__name__}: {error}")


def compare(said: list[Layer] | str, got: Recorded, model_type: str) -> Outcome:
    """Compare what a spec says with what was recorded."""
    if isinstance(said, str):
        return Outcome(REFUSED, said)
    if said != got.layers or got.more:
        return Outcome(WRONG, f"said {said}, cached {got.layers} and called {sorted(got.more)}")
    windows = {index: layer[4] or 0 for index, layer in enumerate(said) if layer and len(layer) >= 5}
    sees = {index: window or TOKENS for index, window in windows.items() if window < TOKENS}
    wrong = {index: got.sight[index] for index in sees if got.sight.get(index, sees[index]) != sees[index]}
    if wrong and model_type not in UNSEEN_WINDOWS:
        return Outcome(WRONG, f"said {said}, but the masks let a query see {wrong}")
    return Outcome(RIGHT)


def outcome_of(group: str, model_type: str, variant: str) -> Outcome:
    """Make a configuration, ask for its spec, run its model, and compare."""
    of = getattr(transformers, architectures(group)[model_type])
    try:
        config = config_of(group, model_type, of, variant)
    except Exception as error:  # noqa: BLE001 - small numbers may not be valid
        return untried(described_default(model_type), error)
    said = described(config)
    try:
        made = build_small(*decoder_of(of, config))
        got = record(made)
    except Exception as error:  # noqa: BLE001 - whatever a family does not like about the settings
        return untried(said, error)
    found = [compare(said, got, model_type), compare(described(made.config), got, model_type)]
    return next((outcome for outcome in found if outcome.verdict == WRONG), found[0])


def variants_of(group: str, model_type: str) -> list[str]:
    """Return the variants that change something for a family."""
    kind = CONFIG_MAPPING[model_type]
    try:
        known = known_settings(kind) | known_settings(type(kind().get_text_config(decoder=True)))
    except Exception:  # noqa: BLE001 - two parts that decode text, or no valid default
        return list(VARIANTS)
    return [name for name, changes in VARIANTS.items() if not changes or set(changes) & known]


def summary(group: str, model_type: str) -> Outcome:
    """Return the outcome of an architecture over all variants: wrong if one is, else right if one is, and so on."""
    found = [outcome_of(group, model_type, variant) for variant in variants_of(group, model_type)]
    return min(found, key=lambda outcome: (WRONG, RIGHT, UNVERIFIED, REFUSED, NOT_RUN).index(outcome.verdict))
