"""Prefix reuse in forward passes by hand, and in those that do not fit to what is cached.

Keys and values are right for others only if their tokens had the positions, and saw the tokens, that they have in their prompts.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import CLOSE, Watched, longer, padded, text
from kvdock.errors import ArgumentValueError

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
BATCH = padded(text(20), text(12, 2))
"""Padding 0 and 8: two blocks of 4."""


def positions_of(mask: torch.Tensor, fill: int) -> torch.Tensor:
    """Make positions as callers do, with a number of their choice in padding."""
    return (mask.cumsum(dim=-1) - 1).masked_fill(mask == 0, fill)


def forward(watched: Watched, ids: torch.Tensor, **told: torch.Tensor) -> torch.Tensor:
    """Make one pass with the cache; return logits."""
    with torch.no_grad():
        logits: torch.Tensor = watched.model(input_ids=ids, **told, **{zoo.CACHE_KEYWORD: watched.cache}).logits
    return logits


TOLD: dict[str, dict[str, torch.Tensor]] = {
    "nothing": {},
    "the mask": {"attention_mask": BATCH["attention_mask"]},
    "positions": {"position_ids": positions_of(BATCH["attention_mask"], 0)},
    "both, padding at 0": {"attention_mask": BATCH["attention_mask"], "position_ids": positions_of(BATCH["attention_mask"], 0)},
    "both, padding at 1": {"attention_mask": BATCH["attention_mask"], "position_ids": positions_of(BATCH["attention_mask"], 1)},
}


@pytest.mark.parametrize(
    ("name", "told"),
    [*itertools.product(("llama-gqa", "gpt2", "mistral-window"), TOLD), ("bloom", "nothing"), ("bloom", "the mask")],  # without positions
)
def test_padded_rows_by_hand_give_what_generate_gives(name: str, told: str) -> None:
    """Most models count padding as tokens when nobody names positions: keys of row 1 would be turned by 8 too much."""
    watched = Watched(name)
    expected = watched.without(BATCH, **GREEDY).logits[0]
    for cached in (0, 16 + 8):
        watched.cache.bind(**BATCH)
        assert watched.cached == cached
        logits = forward(watched, BATCH["input_ids"], **TOLD[told])
        assert (logits.shape[1], watched.cache.get_seq_length()) == (4 if cached else 20, 20)
        torch.testing.assert_close(logits[:, -1], expected, **CLOSE)
        watched.cache.commit(BATCH["input_ids"])
        assert watched.stored_texts() == sorted([text(20), text(12, 2)])
        watched.check()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_a_loop_by_hand_over_padded_rows_needs_no_more_than_tokens(name: str, told: bool) -> None:
    watched = Watched(name)
    expected = watched.without(BATCH, **GREEDY).sequences
    for cached in (0, 24):
        ids, mask = BATCH["input_ids"], BATCH["attention_mask"]
        watched.cache.bind(**BATCH)
        assert watched.cached == cached
        new = ids
        for _ in range(6):
            new = forward(watched, new, **({"attention_mask": mask} if told else {}))[:, -1].argmax(dim=-1, keepdim=True)
            ids, mask = torch.cat([ids, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)
        assert torch.equal(ids, expected)
        watched.cache.commit(ids)
        assert watched.stored_texts() == sorted([expected[0, :24].tolist(), expected[1, 8:24].tolist()])
        watched.check()


def test_only_the_rest_of_padded_rows_by_hand() -> None:
    watched = Watched("llama-gqa")
    expected = watched.same(BATCH, **GREEDY).logits[0]
    for told in ({}, {"position_ids": positions_of(BATCH["attention_mask"], 0)[:, 16:]}, {"attention_mask": BATCH["attention_mask"]}):
        watched.cache.bind(**BATCH)
        torch.testing.assert_close(forward(watched, BATCH["input_ids"][:, 16:], **told)[:, -1], expected, **CLOSE)
        watched.check()


def test_rows_without_padding_are_passed_on_as_they_are() -> None:
    watched = Watched("llama-gqa")
    seen: list[Any] = []
    handle = watched.model.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    watched.cache.bind(**padded(text(18)))
    forward(watched, torch.tensor([text(18)]))
    watched.cache.bind(**BATCH)
    forward(watched, BATCH["input_ids"])
    handle.remove()
    assert [kwargs["position_ids"] is None for kwargs in seen] == [True, False]
    assert seen[1]["position_ids"].tolist() == [list(range(20)), [0] * 8 + list(range(12))]
    assert torch.equal(seen[1]["attention_mask"], BATCH["attention_mask"])


def test_positions_of_ones_own_are_refused_where_something_is_cached() -> None:
    """What is cached was computed for the prompt's own."""
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    watched.same(inputs, **GREEDY)
    watched.cache.bind(**inputs)
    for ids in (inputs["input_ids"], inputs["input_ids"][:, 16:]):
        with pytest.raises(
            ArgumentValueError, match=r"position_ids: expected those of the prompts, from 0 or, behind the 16 tokens .*\[\[3, "
        ):
            forward(watched, ids, position_ids=torch.arange(3, 3 + ids.shape[1])[None])
        assert watched.cache.get_seq_length() == 16
    forward(watched, inputs["input_ids"])
    watched.cache.commit(inputs["input_ids"])
    watched.check()


def test_what_is_left_of_a_prompt_is_not_taken_for_its_beginning() -> None:
    """What is cached would be thrown away, and these tokens computed as if nothing were before them."""
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    watched.same(inputs, **GREEDY)
    watched.cache.bind(**inputs)
    with pytest.raises(ArgumentValueError, match="position_ids: expected those of the prompts"):
        forward(watched, inputs["input_ids"][:, 16:], position_ids=torch.arange(2)[None])
    assert watched.cache.get_seq_length() == 16
    watched.check()


def test_positions_of_ones_own_are_the_callers_business_where_nothing_is_cached() -> None:
    watched = Watched("gpt2")
    inputs, positions = padded(text(18)), torch.arange(5, 23)[None]
    watched.cache.bind(**inputs)
    logits = forward(watched, inputs["input_ids"], position_ids=positions)
    with torch.no_grad():
        torch.testing.assert_close(logits, watched.model(**inputs, position_ids=positions).logits, **CLOSE)
    with pytest.raises(ArgumentValueError, match="computed with another attention_mask or other position_ids than its prompts have"):
        watched.cache.commit(inputs["input_ids"])
    assert not watched.stored
    watched.same(inputs, **GREEDY)


def test_a_mask_of_ones_own_cannot_be_committed() -> None:
    """Tokens that were hidden left no trace in the keys of those behind."""
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    other = inputs["attention_mask"].clone()
    other[0, 3:6] = 0
    bound = watched.cache.bind(**inputs)
    out = watched.model.generate(**{**bound, "attention_mask": other}, **GREEDY)
    with pytest.raises(ArgumentValueError, match="another attention_mask"):
        watched.cache.commit(out)
    assert not watched.stored
    watched.check()


def test_a_later_turn_that_hides_tokens_cannot_be_committed() -> None:
    """It goes on as it would without prefix reuse; only others must not find it."""
    watched = Watched("llama-gqa")
    first = watched.generate(padded(text(18), text(18, 2)), commit=False, **GREEDY).sequences
    turn = longer(first, 0, 5, 9)
    turn["attention_mask"][1, 24] = 0
    out = watched.model.generate(**turn, **{zoo.CACHE_KEYWORD: watched.cache}, **GREEDY)
    assert torch.equal(out, watched.model.generate(**turn, **GREEDY))
    with pytest.raises(ArgumentValueError, match="another attention_mask"):
        watched.cache.commit(out)
    watched.check()


def test_tokens_that_came_as_vectors_cannot_be_committed() -> None:
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    watched.cache.bind(**inputs)
    with torch.no_grad():
        vectors = watched.model.get_input_embeddings()(inputs["input_ids"]) + 1
        watched.model(inputs_embeds=vectors, **{zoo.CACHE_KEYWORD: watched.cache})
    with pytest.raises(ArgumentValueError, match="got one that was computed from something else than token ids"):
        watched.cache.commit(inputs["input_ids"])
    assert not watched.stored


@pytest.mark.parametrize("rows", [[text(18)], [text(18), text(10, 2)]], ids=["one", "padded"])
def test_one_bind_is_for_one_generate(rows: list[list[int]]) -> None:
    """A second one would put the prompt behind what the first generated, silently."""
    watched = Watched("llama-gqa")
    bound = watched.cache.bind(**padded(*rows))
    out = watched.model.generate(**bound, **GREEDY)
    with pytest.raises(ArgumentValueError, match=r"(attention_mask|position_ids): expected .*Fix: bind\(\) the prompts anew"):
        watched.model.generate(**bound, **GREEDY)
    assert watched.cache.get_seq_length() == 23
    watched.cache.commit(out)
    watched.check()
    watched.same(padded(*rows), **GREEDY)
    assert watched.cached == 16 + 8 * (len(rows) - 1)


@pytest.mark.parametrize("way", ["generate", "prompt lookup", "by hand"])
@pytest.mark.parametrize("keep", [4, 6, 15, 16])
def test_what_was_found_may_be_cut_before_it_is_used(keep: int, way: str) -> None:
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    expected = watched.same(inputs, **GREEDY)
    bound = watched.cache.bind(**inputs)
    watched.cache.truncate(keep)
    assert watched.cached == keep
    if way == "by hand":
        torch.testing.assert_close(forward(watched, inputs["input_ids"])[:, -1], expected.logits[0], **CLOSE)
        assert watched.cache.get_seq_length() == 18
    else:
        out = watched.model.generate(**bound, **GREEDY, **({"prompt_lookup_num_tokens": 3} if way == "prompt lookup" else {}))
        assert torch.equal(out, expected.sequences)
        with pytest.raises(ArgumentValueError, match=f"whose prompts were cut to {keep} tokens"):
            watched.cache.commit(out)
    watched.check()


def test_rows_may_be_chosen_before_anything_is_there() -> None:
    watched = Watched("llama-gqa")
    three = padded(text(20), text(12, 2), text(16, 3))
    watched.cache.bind(**three)
    watched.cache.batch_select_indices(torch.tensor([1, 0]))
    swapped = BATCH["input_ids"].flip(0)
    logits = forward(watched, swapped)
    torch.testing.assert_close(logits[:, -1], watched.without(BATCH, **GREEDY).logits[0].flip(0), **CLOSE)
    watched.cache.commit(three["input_ids"])
    assert watched.stored_texts() == sorted([text(20), text(12, 2)])
    watched.check()
