"""Which keys and values of a model may be shared: measured, and not by its name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import Watched, padded, reusing, text
from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.sharing import Sharing, sharing_of

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}

ROPES: dict[str, tuple[dict[str, Any], int]] = {
    "longrope": (
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 24},
        96,
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 24),
}


def stretching(kind: str) -> Watched:
    """Watch a model whose keys change with the length from 24 tokens on."""
    parameters, positions = ROPES[kind]
    changes = {"rope_parameters": {**parameters, "rope_theta": 10000.0}, "max_position_embeddings": positions}
    return Watched("llama-gqa", model=zoo.build("Llama", changes))


@pytest.mark.parametrize("kind", ROPES)
def test_keys_that_change_with_the_length_are_shared_below_it_only(kind: str) -> None:
    watched = stretching(kind)
    assert sharing_of(watched.model) == Sharing(limit=23)
    watched.same(padded(text(12)), **GREEDY)
    watched.same(padded([*text(12), 5, 6]), **GREEDY)
    assert watched.cached == 12
    stored = dict(watched.stored)
    for rows in ([[*text(12), *text(28, 2)]], [text(40)], [text(12), text(24, 2)]):
        watched.generate(padded(*rows), **GREEDY)
        assert watched.cached == 0
    assert watched.stored == stored, "nothing that a longer pass computed"
    watched.same(padded(text(12)), **GREEDY)
    assert watched.cached == 8
    watched.check()


@pytest.mark.parametrize("kind", ROPES)
def test_of_what_grows_beyond_that_length_the_tokens_before_are_stored(kind: str) -> None:
    watched = stretching(kind)
    out = watched.generate(padded(text(18)), do_sample=False, max_new_tokens=14, min_new_tokens=14).sequences
    assert watched.cache.get_seq_length() == 31
    assert watched.stored_texts() == [out[0, :20].tolist()], "whole blocks of the 23 before the first longer pass"
    watched.check()


@pytest.mark.parametrize(
    "parameters", [{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {"rope_type": "default"}]
)
def test_other_embeddings_set_no_length(parameters: dict[str, Any]) -> None:
    assert sharing_of(zoo.build("Llama", {"rope_parameters": {**parameters, "rope_theta": 10000.0}})) == Sharing(
        limit=sys.maxsize, padded=True
    )
    assert sharing_of(zoo.model("gpt2")) == Sharing(limit=sys.maxsize, padded=True)


def test_layers_of_one_model_may_have_different_embeddings() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    full = {**ROPES["longrope"][0], "rope_theta": 10000.0}
    changes = {**zoo.MODELS["gemma3"][1], "rope_parameters": {"sliding_attention": plain, "full_attention": full}}
    assert sharing_of(zoo.build("Gemma3", changes)) == Sharing(limit=23)
    assert sharing_of(zoo.model("gemma3")) == Sharing(limit=sys.maxsize, padded=True)


COUNTS_PADDING = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "is_decoder": True, "is_encoder_decoder": False}


def test_a_model_that_counts_padding_shares_rows_without() -> None:
    """Bart's decoder takes no positions and counts from the first token of the row, padding or not."""
    watched = Watched("bart", model=zoo.build("Bart", COUNTS_PADDING))
    assert sharing_of(watched.model) == Sharing(padded=False)
    batch = padded(text(20), text(12))
    for cached in (0, 8):
        watched.same(batch, **GREEDY)
        assert watched.cached == cached, "row 0 finds as much as row 1 has padding"
    assert watched.stored_texts() == [watched.without(batch, **GREEDY).sequences[0, :24].tolist()], "row 0 has no padding"
    watched.same(padded(text(12)), **GREEDY)
    assert watched.cached == 8
    watched.same(padded(text(20), text(20)), **GREEDY)
    assert watched.cached == 16 + 16


@pytest.mark.parametrize("name", [name for name in zoo.MODELS if name != "bloom"])
def test_models_that_are_told_positions_share_padded_rows(name: str) -> None:
    assert sharing_of(zoo.model(name, "eager" if name in zoo.EAGER_ONLY else "sdpa")) == Sharing()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    assert sharing_of(zoo.build("Llama", {"num_hidden_layers": 8}).to(dtype)) == Sharing()


def test_a_model_whose_tokens_see_later_ones_shares_nothing() -> None:
    """As in models that read a prompt in both directions: one prompt's keys are wrong for another."""
    made = zoo.build("Llama", {})
    made.model.layers[0].register_forward_hook(lambda module, args, output: output + output.mean(dim=1, keepdim=True))
    with pytest.raises(
        UnsupportedError, match=r"do not depend on later tokens, .*got others when other tokens followed. Fix: .*without prefix="
    ):
        reusing(made)
    assert not made._forward_pre_hooks, "it was left as it is"
    assert torch.equal(made.generate(**zoo.paged(made).bind(**padded(text(9))), **GREEDY), made.generate(**padded(text(9)), **GREEDY)), (
        "without prefix reuse it can be used"
    )


def test_dropout_is_named_as_what_it_may_be() -> None:
    made = zoo.build("GPT2", {"num_key_value_heads": None, "head_dim": None}).train()
    with pytest.raises(UnsupportedError, match=r"Fix: call model.eval\(\) if it drops out at random"):
        reusing(made)
    assert reusing(made.eval()).prefix is not None
