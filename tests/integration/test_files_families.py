"""Files of models of several families: what another cache finds is what a pass over all tokens gives, in batches with padding too."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import Watched, reusing
from integration.uncached import Uncached
from kvdock import HeadLayout, KVCacheLayout, PagedKVCacheConfig
from kvdock.errors import WrongThreadError
from kvdock.integrations.transformers import PagedCacheForTransformers

FAMILIES = ["mistral-window", "gemma3", "gpt-oss", "llama4-chunked", "deepseek-v3", "gemma3n-shared"]
NEW = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_loaded_is_what_the_model_computes(tmp_path: Path, name: str) -> None:
    first, second = Watched(name), Watched(name)
    inputs = zoo.prompt(37)
    out = first.generate(inputs, **NEW)
    saved = first.cache.save(tmp_path / "p", max_file_bytes=4000)
    assert second.cache.load(tmp_path / "p").num_tokens == saved.num_tokens
    second.check()
    longer = {"input_ids": out.sequences, "attention_mask": torch.ones_like(out.sequences)}
    second.same(longer, **NEW)
    assert second.cache.usage.cached_tokens > 0


@pytest.mark.slow
def test_rows_with_padding_find_what_was_loaded(tmp_path: Path) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(29, 21, 25)
    cache, other = reusing(model), reusing(model)
    cache.commit(model.generate(**cache.bind(**inputs), **NEW))
    assert cache.save(tmp_path / "p").num_prefixes == 3
    other.load(tmp_path / "p")
    out = model.generate(**other.bind(**inputs), **NEW)
    assert other.usage.cached_tokens > 0
    expected, _ = Uncached(model).generate(inputs, 5)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", [KVCacheLayout.LAYER_FIRST, KVCacheLayout.PAGE_FIRST])
@pytest.mark.parametrize("heads", [HeadLayout.NHD, HeadLayout.HND])
def test_into_another_order(tmp_path: Path, layout: KVCacheLayout, heads: HeadLayout) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(13)
    cache = reusing(model)
    out = model.generate(**cache.bind(**inputs), **NEW)
    cache.commit(out)
    cache.save(tmp_path / "p")
    conf = PagedKVCacheConfig(num_blocks=32, block_size=4, layout=layout, head_layout=heads)
    other = PagedCacheForTransformers.for_model(model, conf, prefix="radix")
    other.load(tmp_path / "p")
    assert torch.equal(model.generate(**other.bind(**inputs), **NEW), out)
    assert other.usage.cached_tokens == 12


def test_copies_of_a_cache_share_what_one_has_loaded(tmp_path: Path) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(13)
    cache = reusing(model)
    out = model.generate(**cache.bind(**inputs), **NEW)
    cache.commit(out)
    cache.save(tmp_path / "p")
    one = reusing(model)
    other = copy.deepcopy(one)
    one.load(tmp_path / "p")
    assert torch.equal(model.generate(**other.bind(**inputs), **NEW), out)
    assert other.usage.cached_tokens == 12
    one.forget_prefixes()
    one.load(tmp_path / "p")
    model.generate(**other.bind(**inputs), **NEW)
    assert other.usage.cached_tokens == 12, "loaded again, behind a reset"


def test_another_thread_may_load_between_calls_and_not_within_a_save(tmp_path: Path) -> None:
    model, inputs = zoo.model("llama-gqa"), zoo.prompt(13)
    cache, errors = reusing(model), list[Any]()
    cache.commit(model.generate(**cache.bind(**inputs), **NEW))

    def load() -> None:
        try:
            errors.append(cache.load(tmp_path / "p").num_loaded)
        except WrongThreadError as error:
            errors.append(type(error))

    def in_a_thread(*_: Any) -> None:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()

    cache.save(tmp_path / "p")
    in_a_thread()
    assert errors == [0], "all of it is cached"
    cache.save(tmp_path / "p", progress=in_a_thread)
    assert set(errors[1:]) == {WrongThreadError}
    assert cache.load(tmp_path / "p").num_loaded == 0
