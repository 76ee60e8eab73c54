"""What `KVSpec.from_hf_config` says of an architecture, against what its model caches."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from integration.architectures import GROUPS, TOKENS, VARIANTS, Layer, Recorded, build, config_of, decoder_of, known_settings, record
from kvdock import KVDockError, KVSpec, LayerSpec

RIGHT, REFUSED, WRONG, UNTRIED = "right", "refused", "wrong", "not run"

UNSEEN_WINDOWS = {"moshi", "qwen3_omni_moe_thinker"}
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
    layers = [layer for layer in spec.layers if isinstance(layer, LayerSpec)]
    return [(layer.num_k_heads, layer.num_v_heads, layer.k_dim, layer.v_dim, layer.window) for layer in layers]


def compare(said: list[Layer] | str, got: Recorded, model_type: str) -> Outcome:
    """Compare what a spec says with what was recorded."""
    if isinstance(said, str):
        return Outcome(REFUSED, said)
    if said != got.layers or got.more:
        return Outcome(WRONG, f"said {said}, cached {got.layers} and called {sorted(got.more)}")
    sees = {index: layer[4] or TOKENS for index, layer in enumerate(said) if (layer[4] or 0) < TOKENS}
    wrong = {index: got.sight[index] for index in sees if got.sight.get(index, sees[index]) != sees[index]}
    if wrong and model_type not in UNSEEN_WINDOWS:
        return Outcome(WRONG, f"said {said}, but the masks let a query see {wrong}")
    return Outcome(RIGHT)


def outcome_of(group: str, model_type: str, variant: str) -> Outcome:
    """Make a configuration, ask for its spec, run its model, and compare."""
    said: list[Layer] | str | None = None
    try:
        of = getattr(transformers, architectures(group)[model_type])
        config = config_of(group, model_type, of, variant)
        said = described(config)
        kind, text = decoder_of(of, config)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in build(kind, text).parameters())
        if size > 100_000_000:
            raise MemoryError(f"it does not get small: {size} weights")
        made = build(kind, text)
        got = record(made)
    except Exception as error:  # noqa: BLE001 - whatever a family does not like about the settings
        return Outcome(UNTRIED, f"{'a spec' if isinstance(said, list) else said}; {type(error).__name__}: {error}")
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
    """Return the outcome of an architecture over all variants: wrong if one is, else right if one is, else refused."""
    found = [outcome_of(group, model_type, variant) for variant in variants_of(group, model_type)]
    for verdict in (WRONG, RIGHT, REFUSED):
        for outcome in found:
            if outcome.verdict == verdict:
                return outcome
    return found[0]
