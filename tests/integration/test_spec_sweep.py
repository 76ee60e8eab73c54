"""`KVSpec.from_hf_config` for every architecture of Transformers that decodes text: what its model really caches, or a refusal.

Each family is made tiny, asked for its spec, and run over a cache that records what it is handed (see recording.py).
What is not named here is right.
"""

from __future__ import annotations

import pytest
import transformers

from integration.architectures import GROUPS
from integration.sweep import NOT_RUN, REFUSED, RIGHT, UNVERIFIED, WRONG, architectures, summary
from kvdock.integrations.transformers.compat import CROPS_TO_LENGTH
from support_slow import every

LISTED_FOR = "5.24.0"
"""The version of Transformers whose architectures are listed."""

CROSS = "cross-attention, whose keys and values belong to another sequence"
KINDS = "layers of another kind: "
UNKNOWN = "settings of which kvdock does not know what they mean for the cache: "
KEEPS_NOTHING = "no setting use_cache"

REFUSED_FOR: dict[str, dict[str, str]] = {
    "causal": {
        KINDS: """
            axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text falcon_mamba glm_moe_dsa hy_v4 inkling2_loop_text
            inkling2_text inkling_text mamba nemotron_h recurrent_gemma zaya
            """,
        CROSS: "mllama prophetnet",
        KEEPS_NOTHING: "openai-gpt xlm",
        "num_attention_heads: expected an int, got None": "rwkv",
        f"{UNKNOWN}dim_head": "cpmant",
        f"{UNKNOWN}mamba_ngroups, n_mamba_heads": "zamba2",
        f"{UNKNOWN}v_head_dim": "mimo_v2_flash",
        f"{UNKNOWN}d_head, mem_len": "xlnet",
    },
    "sequence to sequence": {
        KINDS: "nemo_speechlm",
        CROSS: """
            bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
            pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 switch_transformers t5 umt5
            """,
    },
    "speech": {CROSS: "moonshine pop2piano seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5 whisper"},
    "image": {
        KINDS: """
            glm5_next hy_v4_vl inkling2 inkling2_loop inkling_mm_model mistral_large4 nemotron_h_omni unlimited_ocr
            """,
        CROSS: "florence2 mllama udop vision-encoder-decoder",
        KEEPS_NOTHING: "diffusion_gemma",
        f"{UNKNOWN}num_sliding_attention_heads": "step3p7",
    },
}
"""What is refused though its model runs, by group and by a part of the reason."""

TOO_LARGE = "it does not get small"
NO_CONFIGURATION = "StrictDataclassClassValidationError"
NO_KEYS = "only contain LinearAttention layers"

DOES_NOT_RUN: dict[str, dict[str, str]] = {
    "causal": {
        TOO_LARGE: "blt mamba2",
        NO_CONFIGURATION: "gemma4_assistant",
        NO_KEYS: "bailing_hybrid gemma4_unified_assistant",
        "must match the size": "dory",
        "uses cache of its own": "minimax",
        "TypeError": "qwen4_exp qwen4_exp_text",
        "axial_pos_embds": "reformer",
        "no attribute 'rnn_state'": "xlstm",
        "tie_weights_keys": "zamba",
    },
    "sequence to sequence": {"`encoder_hidden_states` must be given": "t5gemma", NO_CONFIGURATION: "t5gemma2"},
    "speech": {TOO_LARGE: "cohere_asr dia", NO_CONFIGURATION: "canary", "AttributeError": "moonshine_streaming"},
    "image": {
        TOO_LARGE: "evolla idefics pi0",
        NO_CONFIGURATION: "dots3_note t5gemma2",
        "decoder_inputs_embeds": "pix2struct pp_formulanet",
        "TypeError": "qwen4_exp",
    },
}
"""What no small model of runs, by group and by a part of the reason. No such architecture gets a spec."""

AT_LEAST = {"causal": 160, "sequence to sequence": 12, "speech": 10, "image": 78}
"""How many of each group are right."""


def reasons(of: dict[str, str], group: str) -> dict[str, str]:
    """Return the reason for each architecture of a list that the installed Transformers has."""
    return {name: reason for reason, names in of.items() for name in names.split() if name in GROUPS[group]}


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ != LISTED_FOR, reason="other versions have other architectures; the sample below runs there")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_every_architecture(group: str) -> None:
    found = {name: summary(group, name) for name in sorted(architectures(group))}
    assert {name: of.text for name, of in found.items() if of.verdict in (WRONG, UNVERIFIED)} == {}
    for verdict, lists in ((REFUSED, REFUSED_FOR), (NOT_RUN, DOES_NOT_RUN)):
        expected = reasons(lists[group], group)
        assert {name for name, of in found.items() if of.verdict == verdict} == set(expected), verdict
        for name, reason in expected.items():
            assert reason in found[name].text, name
    assert sum(of.verdict == RIGHT for of in found.values()) >= AT_LEAST[group]


SAMPLE = """
    jamba qwen3_next falcon_h1
    bart bloom deepseek_v3 falcon gemma2 gemma3_text gemma3n_text gpt2 gpt_bigcode gpt_neox llama llama4_text mistral
    mixtral mpt opt phi phi3 qwen2 qwen3 starcoder2 trocr whisper
    """


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", every(2, SAMPLE.split()))
def test_a_well_known_decoder_is_right(name: str) -> None:
    outcome = summary("causal", name)
    old = name == "deepseek_v3" and CROPS_TO_LENGTH  # before 5.16 what the latent expands to was cached: there is no spec then
    assert outcome.verdict == (REFUSED if old else RIGHT), outcome.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("group", "name", "reason"),
    [
        ("sequence to sequence", "bart", CROSS),
        ("sequence to sequence", "t5", CROSS),
        ("speech", "whisper", CROSS),
        ("causal", "openai-gpt", KEEPS_NOTHING),
        ("causal", "mamba", KINDS),
    ],
)
def test_what_a_spec_cannot_say_is_refused(group: str, name: str, reason: str) -> None:
    outcome = summary(group, name)
    assert outcome.verdict == REFUSED
    assert reason in outcome.text
    assert "Fix: build KVSpec(layers=...) by hand" in outcome.text
