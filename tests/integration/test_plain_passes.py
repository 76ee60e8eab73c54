"""Only what was seen to be plain is stored: whatever else a pass is told, its keys and values are for nobody else.

Where something is cached already, such a pass is refused: what is cached was computed without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from integration import zoo
from integration.prefixes import CLOSE, Watched, padded, reusing, text
from integration.uncached import Uncached
from kvdock.errors import ArgumentValueError, UnsupportedError

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
PROMPT = padded(text(18))
IDS, MASK = PROMPT["input_ids"], PROMPT["attention_mask"]
HOLE = torch.where(torch.arange(18) == 5, 0, MASK)
CAUSAL = torch.ones(1, 1, 18, 18).tril().bool()
BOTH_WAYS = torch.zeros(1, 1, 18, 18)
SHIFTED = torch.arange(3, 21)[None]

ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mask with a hole": ("llama-gqa", {"attention_mask": HOLE}, "another attention_mask or other position_ids"),
    "a mask of four dimensions": (
        "llama-gqa",
        {"attention_mask": CAUSAL},
        r"an attention_mask that is not \[rows, tokens\] but \[1, 1, 18, 18\]",
    ),
    "a mask that shows later tokens": ("llama-gqa", {"attention_mask": BOTH_WAYS}, r"not \[rows, tokens\] but \[1, 1, 18, 18\]"),
    "masks in a dict": (
        "gemma3",
        {"attention_mask": {"full_attention": BOTH_WAYS, "sliding_attention": BOTH_WAYS}},
        r"not \[rows, tokens\] but dict",
    ),
    "other positions": ("llama-gqa", {"position_ids": SHIFTED}, "another attention_mask or other position_ids"),
    "kinds of tokens": ("gpt2", {"token_type_ids": torch.ones_like(IDS)}, "with token_type_ids, on which keys and values may depend"),
    "vectors": ("llama-gqa", {"inputs_embeds": torch.ones(1, 18, 32)}, "from something else than token ids|with inputs_embeds"),
    "lengths of packed texts": (
        "llama-gqa",
        {"cu_seq_lens_q": torch.tensor([0, 18]), "cu_seq_lens_k": torch.tensor([0, 18])},
        "with cu_seq_lens_q",
    ),
    "other places": ("llama-gqa", {"cache_position": torch.arange(2, 20)}, "another attention_mask or other position_ids"),
    "something new": ("llama-gqa", {"temperature_of_keys": 2.0}, "with temperature_of_keys, on which"),
    "causal or not": ("llama-gqa", {"is_causal": False}, "with is_causal"),
}


def told(case: str) -> tuple[str, dict[str, Any], str]:
    """Return the model, all arguments of a pass, and the reason."""
    name, odd, why = ODD[case]
    return name, {**({} if "inputs_embeds" in odd else {"input_ids": IDS}), **odd}, why


def forward(watched: Watched, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make one pass with the cache; return logits."""
    with torch.no_grad():
        logits: torch.Tensor = watched.model(*args, **kwargs, **{zoo.CACHE_KEYWORD: watched.cache}).logits
    return logits


def by_position(model: Any, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Pass ids, mask and positions by position, as far as the model takes them so."""
    args: list[Any] = []
    for name in inspect.signature(model.forward).parameters:
        if name not in ("input_ids", "attention_mask", "position_ids"):
            break
        args.append(arguments.get(name))
    return args, {
        name: value for name, value in arguments.items() if name not in list(inspect.signature(model.forward).parameters)[: len(args)]
    }


@pytest.mark.parametrize("way", ["by name", "by position"])
@pytest.mark.parametrize("case", ODD)
def test_an_odd_pass_gives_what_it_gives_without_a_cache_and_is_not_stored(case: str, way: str) -> None:
    name, arguments, why = told(case)
    watched = Watched(name)
    uncached = Uncached(watched.model)
    watched.cache.bind(**PROMPT)
    args, kwargs = by_position(watched.model, arguments) if way == "by position" else ([], arguments)
    got = forward(watched, *args, **kwargs)
    with torch.no_grad():
        torch.testing.assert_close(got, uncached.model(**arguments, use_cache=False).logits, **CLOSE)
    with pytest.raises(ArgumentValueError, match=f"computed .*({why})"):
        watched.cache.commit(IDS)
    assert not watched.stored
    watched.same(PROMPT, do_sample=False, max_new_tokens=3)
    assert watched.cached == 0


@pytest.mark.parametrize("case", ODD)
def test_an_odd_pass_is_refused_where_something_is_cached(case: str) -> None:
    name, arguments, why = told(case)
    watched = Watched(name)
    uncached = Uncached(watched.model)
    watched.same(PROMPT, do_sample=False, max_new_tokens=6)
    watched.cache.bind(**PROMPT)
    assert watched.cached == 16
    with pytest.raises(ArgumentValueError, match=f"{why}|position_ids: expected those of the prompts"):
        forward(watched, **arguments)
    assert watched.cache.get_seq_length() == 16
    torch.testing.assert_close(forward(watched, IDS)[:, -1], uncached.logits(IDS)[:, -1], **CLOSE)
    watched.cache.commit(IDS)
    watched.check()


BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "kinds of tokens": ("gpt2", {"token_type_ids": torch.full_like(IDS, 7)}),
    "a mask": ("llama-gqa", {"attention_mask": HOLE}),
    "positions": ("llama-gqa", {"position_ids": SHIFTED}),
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("case", BESIDE)
def test_arguments_of_generate_beside_bind_are_noticed(case: str, cached: bool) -> None:
    name, beside = BESIDE[case]
    watched = Watched(name)
    if cached:
        watched.same(PROMPT, do_sample=False, max_new_tokens=6)
    call = {**watched.cache.bind(**PROMPT), **beside}
    if cached:
        with pytest.raises(ArgumentValueError, match=r"first pass: expected what was bound|position_ids: expected those of the prompts"):
            watched.model.generate(**call, **GREEDY)
    else:
        out = watched.model.generate(**call, **GREEDY)
        with pytest.raises(ArgumentValueError, match=r"computed with .*Fix: .*bind\(\)"):
            watched.cache.commit(out)
    watched.check()


ONE_BY_ONE: dict[str, Callable[[int], dict[str, Any]]] = {
    "positions": lambda at: {"position_ids": torch.tensor([[at + 3 * (at > 9)]])},
    "a mask": lambda at: {"attention_mask": torch.where(torch.arange(at + 1) == 4, 0, 1)[None]},
    "a mask of four dimensions": lambda at: {"attention_mask": (torch.arange(at + 1) != 4)[None, None, None]},
    "later only": lambda at: {"position_ids": torch.tensor([[0]])} if at == 17 else {},
}


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_loops_of_one_token_are_looked_at(case: str) -> None:
    watched = Watched("llama-gqa")
    watched.cache.bind(**PROMPT)
    for at, token in enumerate(text(18)):
        forward(watched, torch.tensor([[token]]), **ONE_BY_ONE[case](at))
    with pytest.raises(ArgumentValueError, match="attention_mask"):
        watched.cache.commit(IDS)
    assert not watched.stored


def test_a_plain_loop_of_one_token_is_stored() -> None:
    watched = Watched("llama-gqa")
    uncached = Uncached(watched.model)
    for cached in (0, 16):
        watched.cache.bind(**PROMPT)
        assert watched.cached == cached
        for at in range(cached, 18):
            got = forward(watched, IDS[:, at : at + 1], attention_mask=MASK[:, : at + 1], position_ids=torch.tensor([[at]]))
        torch.testing.assert_close(got[:, -1], uncached.logits(IDS)[:, -1], **CLOSE)
        watched.cache.commit(IDS)
        watched.check()
    assert watched.stored_texts() == [text(18)[:16]]


def test_other_tokens_than_were_computed_are_not_stored() -> None:
    """A loop by hand may feed what it likes; what is named at the commit must be that."""
    watched = Watched("llama-gqa")
    watched.cache.bind(**PROMPT)
    forward(watched, torch.cat([IDS[:, :9], IDS[:, 9:].flip(1)], dim=1))
    with pytest.raises(ArgumentValueError, match="the tokens that were computed, got another for token 9 of row 0"):
        watched.cache.commit(IDS)
    assert not watched.stored


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_a_mask_by_position_over_padded_rows(name: str) -> None:
    watched = Watched(name)
    uncached, batch = Uncached(watched.model), padded(text(18), text(10, 2))
    for cached in (0, 24):
        watched.cache.bind(**batch)
        assert watched.cached == cached
        args, kwargs = by_position(watched.model, batch)
        kwargs |= {} if name == "llama-gqa" else {"attention_mask": batch["attention_mask"]}
        got = forward(watched, *args, **kwargs)[:, -1]
        torch.testing.assert_close(got, uncached.logits(batch["input_ids"], batch["attention_mask"])[:, -1], **CLOSE)
        watched.cache.commit(batch["input_ids"])
        watched.check()


def test_a_mask_over_what_is_new_only_is_refused_with_advice_that_helps() -> None:
    """Binding anew would not: the mask of a loop by hand is too short, and the prompts have just been bound."""
    watched = Watched("llama-gqa")
    watched.same(PROMPT, do_sample=False, max_new_tokens=6)
    watched.cache.bind(**PROMPT)
    for _ in range(2):
        with pytest.raises(ArgumentValueError, match="attention_mask: expected 18 entries in a row") as caught:
            forward(watched, IDS[:, 16:], attention_mask=MASK[:, 16:])
        assert caught.value.fix == "in a loop of your own, append to the mask that bind() returned and pass new tokens only"
    forward(watched, IDS[:, 16:], attention_mask=MASK)
    with pytest.raises(ArgumentValueError, match="attention_mask: expected 19 entries in a row") as caught:
        forward(watched, IDS[:, :1], attention_mask=MASK[:, :1])
    assert caught.value.fix.startswith("bind() the prompts anew before each generate(); in a loop of your own")


@pytest.mark.parametrize(
    ("way", "fix"),
    [
        (
            {"token_type_ids": torch.ones_like(IDS)},
            "pass nothing beside what bind() returns, or make a cache without prefix= for such calls",
        ),
        ({"attention_mask": HOLE}, "leave out what bind() does not return, or do not commit"),
    ],
    ids=["an argument", "a mask"],
)
def test_what_cannot_be_committed_is_not_mended_by_binding_anew(way: dict[str, Any], fix: str) -> None:
    watched = Watched("gpt2")
    watched.cache.bind(**PROMPT)
    forward(watched, IDS, **way)
    with pytest.raises(ArgumentValueError) as caught:
        watched.cache.commit(IDS)
    assert caught.value.fix == fix


def test_the_cache_by_position_is_watched_too() -> None:
    watched = Watched("llama-gqa")
    watched.cache.bind(**PROMPT)
    with torch.no_grad():
        watched.model(IDS, MASK, None, watched.cache)
    watched.cache.commit(IDS)
    watched.check()
    assert watched.stored_texts() == [text(18)[:16]]


def test_what_changes_only_what_is_returned_is_plain() -> None:
    watched = Watched("llama-gqa")
    watched.cache.bind(**PROMPT)
    forward(
        watched, IDS, output_hidden_states=True, output_attentions=False, return_dict=True, logits_to_keep=1, use_cache=True, labels=None
    )
    watched.cache.commit(IDS)
    watched.check()


@pytest.mark.parametrize("more", [1, 2, 5])
def test_a_rank_that_ends_early_commits_what_it_returned(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With synced_gpus it feeds its last token again until all ranks are done."""
    watched = Watched("llama-gqa")
    uncached, left = Uncached(watched.model), more

    def others_go_on(self: Any, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        nonlocal left
        left -= bool(this_peer_finished)
        return not this_peer_finished or left >= 0

    monkeypatch.setattr(type(watched.model), "_has_unfinished_sequences", others_go_on)
    out = watched.model.generate(**watched.cache.bind(**PROMPT), **GREEDY, synced_gpus=True)
    monkeypatch.undo()
    assert (out.sequences.shape[1], watched.cache.get_seq_length()) == (24, 23 + more)
    uncached.assert_same(PROMPT, out)
    watched.cache.commit(out)
    assert watched.stored_texts() == [out.sequences[0].tolist()], "all 24: the last was computed, too"
    watched.check()
    watched.generate(padded([*out.sequences[0].tolist(), 5]), do_sample=False, max_new_tokens=2)
    assert watched.cached == 24


class CountsFromOne(transformers.LlamaForCausalLM):
    """A model whose first position is 1, as PaliGemma's is."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Count from 1."""
        made = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**made, "position_ids": made["position_ids"] + 1}


def test_a_model_that_counts_from_one_shares() -> None:
    torch.manual_seed(11)
    watched = Watched("from one", model=zoo.randomise(CountsFromOne(zoo.model("llama-gqa").config).eval()))
    uncached, batch = Uncached(watched.model, first=1), padded(text(18), text(10, 2))
    assert watched.cache._reuse.sharing.first == 1
    for cached in (0, 24):
        got = watched.model.generate(**watched.cache.bind(**batch), **GREEDY)
        assert watched.cached == cached
        uncached.assert_same(batch, got)
        watched.cache.commit(got)
    watched.cache.bind(**batch)
    got = forward(watched, batch["input_ids"])[:, -1]
    torch.testing.assert_close(got, uncached.logits(batch["input_ids"], batch["attention_mask"])[:, -1], **CLOSE)
    watched.cache.commit(batch["input_ids"])
    stored = watched.cache.state.pool.k_cache(0)[watched.paths()[0]].flatten(0, 1)
    dynamic = zoo.dynamic(watched.model)
    with torch.no_grad():
        tokens = [token for block in watched.paths()[0] for token in watched.stored[block][2]]
        positions = torch.arange(1, len(tokens) + 1)[None]
        uncached.model(input_ids=torch.tensor([tokens]), position_ids=positions, **{zoo.CACHE_KEYWORD: dynamic})
    torch.testing.assert_close(stored, dynamic.layers[0].keys[0].transpose(0, 1), **CLOSE)


def test_a_prompt_that_is_read_both_ways_is_refused_and_works_without_a_prefix_cache() -> None:
    """PaliGemma's text layers are not causal: without padding each token of a prompt sees all others."""
    config = transformers.PaliGemmaConfig(
        text_config={**zoo.SMALL, "model_type": "gemma"},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "projection_dim": 32,
        },
        image_token_index=55,
        projection_dim=32,
    )
    torch.manual_seed(1)
    made = zoo.randomise(transformers.PaliGemmaForConditionalGeneration(config).eval())
    with pytest.raises(UnsupportedError, match=r"do not depend on later tokens.*got others when other tokens followed"):
        reusing(made)
    got = made.generate(**zoo.paged(made).bind(**PROMPT), **GREEDY)
    assert torch.equal(got.sequences, made.generate(**PROMPT, **GREEDY).sequences)
