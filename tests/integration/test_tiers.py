"""A prompt that was evicted is answered from host memory, with the tokens of a pass without any cache."""

from __future__ import annotations

from typing import Any

import pytest

import kvdock
from integration import zoo
from integration.prefixes import assert_same, padded, text
from kvdock.errors import ArgumentTypeError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.scheduler import NumberTier

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}


class Asked:
    """A model with a small pool, and host memory behind it."""

    def __init__(self, name: str, nbytes: int = 1 << 20, num_blocks: int = 24) -> None:
        self.model = zoo.model(name, "eager" if name in zoo.EAGER_ONLY else "sdpa")
        self.tier = kvdock.HostTier(nbytes)
        conf = kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=4)
        self.cache = PagedCacheForTransformers.for_model(self.model, conf, prefix="radix", tiers=[self.tier])

    @property
    def manager(self) -> Any:
        return self.cache.state.manager

    def ask(self, *rows: list[int]) -> int:
        """Generate with and without the cache, compare, and return how many tokens were cached."""
        inputs = padded(*rows)
        how = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
        out = self.model.generate(**self.cache.bind(**inputs), **how)
        self.cache.commit(out)
        assert_same(self.model.generate(**inputs, **how), out, greedy=True)
        self.manager.check_integrity()
        return int(self.cache.usage.cached_tokens)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_a_question_asked_again_is_answered_from_host_memory(name: str) -> None:
    asked = Asked(name, num_blocks=24 if name == "llama-gqa" else 32)
    first = asked.ask(text(30))
    for other in (1, 2, 3, 4):
        asked.ask(text(30, other))
    before = asked.manager.tier_usage[0].loaded
    assert first == 0
    assert asked.ask(text(30)) == 28
    assert asked.manager.tier_usage[0].loaded > before
    assert asked.manager.tier_usage[0].lost == 0


def test_a_batch_goes_on_where_all_rows_can_with_what_came_back() -> None:
    asked = Asked("llama-gqa", num_blocks=40)
    asked.ask(text(30), text(26, 1))
    for other in (2, 3, 4, 5):
        asked.ask(text(30, other), text(28, other + 10))
    assert asked.ask(text(30), text(26, 1)) > 40
    assert asked.manager.tier_usage[0].loaded > 5


def test_tiers_come_with_a_prefix_cache() -> None:
    conf = kvdock.PagedKVCacheConfig(num_blocks=24, block_size=4)
    with pytest.raises(ArgumentTypeError, match="expected no options and no tiers without prefix=, got tiers"):
        PagedCacheForTransformers.for_model(zoo.model("llama-gqa", "sdpa"), conf, tiers=[NumberTier(4)])
