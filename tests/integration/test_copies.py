"""Copies of a cache: `copy.deepcopy` is Transformers' way to go on from one prefix several times."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import Watched, longer, padded, reusing, text
from integration.uncached import Uncached
from kvdock.errors import UnsupportedError

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}

WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "in a module": lambda cache: copy.deepcopy(holding(cache)).cache,
    "in a list": lambda cache: copy.deepcopy([cache, cache])[1],
}


def holding(cache: Any) -> torch.nn.Module:
    """Make a module with a cache."""
    module = torch.nn.Linear(2, 2)
    module.cache = cache
    return module


def content(cache: Any) -> list[torch.Tensor]:
    """Return all keys and values that a cache reads."""
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("prefix", [None, "naive", "radix"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_goes_on_and_the_original_stays_as_it_was(way: str, prefix: str | None) -> None:
    """18 tokens in blocks of 4: the last block is half full, and both write into it."""
    made = zoo.build("Llama", {})
    uncached, inputs = Uncached(made), padded(text(18), text(15, 2))
    cache = reusing(made, prefix=prefix) if prefix else zoo.paged(made)
    first = made.generate(**cache.bind(**inputs), **GREEDY).sequences
    before = content(cache)
    other = WAYS[way](cache)
    assert all(torch.equal(left, right) for left, right in zip(content(other), before, strict=True))
    turns = []
    for tokens in ((5, 9), (33, 34)):
        turn = longer(first, *tokens)
        turn["attention_mask"][:, :18] = inputs["attention_mask"]
        turns.append(turn)
    uncached.assert_same(turns[0], made.generate(**turns[0], **{zoo.CACHE_KEYWORD: other}, **GREEDY))
    assert all(torch.equal(left, right) for left, right in zip(content(cache), before, strict=True))
    other.truncate(20)
    uncached.assert_same(turns[1], made.generate(**turns[1], **{zoo.CACHE_KEYWORD: cache}, **GREEDY))
    assert other.get_seq_length() == 20
    cache.state.manager.check_integrity()


def test_a_copy_of_a_batch_commits_for_itself() -> None:
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    first = watched.model.generate(**watched.cache.bind(**inputs), **GREEDY).sequences
    other = watched.copy()
    turn = longer(first, 5, 9)
    second = watched.model.generate(**turn, **{zoo.CACHE_KEYWORD: other}, **GREEDY).sequences
    other.commit(second)
    watched.check()
    watched.cache.commit(first)
    watched.check()
    assert watched.stored_texts() == [second[0, :28].tolist()]


@pytest.mark.parametrize("prefix", [None, "radix"])
def test_a_cache_cannot_be_pickled(prefix: str | None) -> None:
    made = zoo.model("llama-gqa")
    cache = reusing(made, prefix=prefix) if prefix else zoo.paged(made)
    with pytest.raises(
        UnsupportedError, match=r"a copy in this process, by copy.deepcopy, got a request to pickle it. Fix: pickle the token"
    ):
        pickle.dumps(cache)
