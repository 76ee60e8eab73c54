"""Which prefix cache a `PagedCacheForTransformers` has, and that nobody else has it too."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch

import kvdock
from integration import zoo
from integration.prefixes import Watched, padded, text
from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, WrongThreadError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.prefix import FIFO, LFU, EvictionPolicy, NaivePrefixCache, RadixPrefixCache, factory

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}


def made(prefix: Any, *, num_blocks: int = 16, **options: Any) -> PagedCacheForTransformers:
    return PagedCacheForTransformers.for_model(zoo.model("llama-gqa"), zoo.conf(num_blocks=num_blocks), prefix, **options)


def run(cache: PagedCacheForTransformers, seed: int) -> int:
    """Generate and commit one of several texts; return how many of its 17 tokens were cached."""
    out = zoo.model("llama-gqa").generate(**cache.bind(**padded(text(17, seed))), do_sample=False, max_new_tokens=1)
    cached = cache.usage.cached_tokens
    cache.commit(out)
    return cached


def test_options_go_to_a_prefix_cache_by_name() -> None:
    cache = made("radix", policy="lfu")
    assert isinstance(cache.prefix, RadixPrefixCache)
    assert isinstance(cache.prefix.policy, LFU)
    assert isinstance(made("radix", policy=FIFO()).prefix.policy, FIFO)


def test_a_prefix_cache_that_is_made_is_used_itself() -> None:
    mine = kvdock.create_prefix_cache("radix", block_size=4, policy="fifo")
    events: list[Any] = []
    mine.subscribe(events.append)
    mine.hand_over()
    cache = made(mine)
    assert cache.prefix is mine
    assert [run(cache, 1), run(cache, 1)] == [0, 16]
    assert [event.tokens.tolist() for event in events] == [text(17)[:16]]
    assert mine.stats.hit_tokens == 16


class NewestFirst(EvictionPolicy):
    """Evicts what was stored last: a researcher's own."""

    name = "newest"

    def key(self, usage: Any) -> int:
        """Return the creation, the other way round. It never changes, as the queue needs."""
        return -int(usage.created)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("lru", {1, 3}), ("fifo", {2, 3}), ("lfu", {1, 3}), (NewestFirst(), {1, 2})],
    ids=["lru", "fifo", "lfu", "a policy of one's own"],
)
def test_the_policy_says_what_makes_room(policy: Any, kept: set[int]) -> None:
    """There is room for two of three texts beside the one that is computed; text 1 is used more than once."""
    cache = made("radix", num_blocks=13, policy=policy)
    for seed in (1, 1, 2, 1, 3):
        run(cache, seed)
    cache.reset()
    manager = cache.state.manager
    manager.abort(manager.begin(text(4 * 5, 9)))
    found = {seed for seed in (1, 2, 3) if cache.prefix.match_prefix(text(17, seed), record=False).handle.cached_len == 16}
    cache.prefix.hand_over()
    assert found == kept


CHOICES: dict[str, tuple[Any, dict[str, Any], type[KVDockError], str]] = {
    "no name": (3, {}, ArgumentTypeError, "for_model: prefix: expected a name or a PrefixCache, got 3"),
    "a class": (RadixPrefixCache, {}, ArgumentTypeError, "expected a name or a PrefixCache, got <class"),
    "another block size": (RadixPrefixCache(8), {}, ArgumentValueError, "an empty prefix cache in blocks of 4, got one in blocks of 8"),
    "options beside one": (RadixPrefixCache(4), {"policy": "lru"}, ArgumentTypeError, "no options beside a prefix cache .*got policy"),
    "options without one": (None, {"policy": "lru"}, ArgumentTypeError, "for_model: expected no options and no tiers .*got policy"),
    "an option it does not take": ("naive", {"policy": "lru"}, ArgumentTypeError, "'naive': expected options that its class takes"),
    "a policy that nobody has": ("radix", {"policy": "best"}, ArgumentValueError, "policy: expected one of 'lru'.*got 'best'"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_cannot_be_chosen(case: str) -> None:
    prefix, options, error, match = CHOICES[case]
    with pytest.raises(error, match=match):
        made(prefix, **options)


def test_one_with_something_in_it_cannot_be_chosen() -> None:
    mine = RadixPrefixCache(4)
    mine.insert_prefix(range(4), [0])
    with pytest.raises(ArgumentValueError, match="expected an empty prefix cache in blocks of 4, got one in blocks of 4 with 4 tokens"):
        made(mine)
    naive = NaivePrefixCache(4)
    naive.lock_handle(naive.match_prefix([1]).handle)
    with pytest.raises(ArgumentValueError, match="expected an empty prefix cache"):
        made(naive)


def test_a_pool_with_more_slots_than_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "MAX_SLOTS", 64)
    assert made("radix", num_blocks=16).prefix is not None
    with pytest.raises(ArgumentValueError, match=r"num_blocks: expected at most 16: .* slots, got 17"):
        made("radix", num_blocks=17)


def test_two_caches_cannot_have_one_prefix_cache() -> None:
    """The second would read its own blocks for what the first stored in its pool."""
    mine = RadixPrefixCache(4)
    first, second = made(mine), made(mine)
    run(first, 1)
    with pytest.raises(ArgumentValueError, match=r"prefix: expected the 0 tokens that were stored here, got 16. Fix: let nobody else"):
        run(second, 1)
    assert second.usage.tokens == 0
    assert run(first, 1) == 16


@pytest.mark.parametrize("call", ["evict", "reset", "insert"])
def test_what_others_change_in_a_prefix_cache_is_noticed(call: str) -> None:
    cache = made("radix")
    run(cache, 1)
    cache.reset()
    prefix = cache.prefix
    got = {"evict": lambda: prefix.evict(4), "reset": prefix.reset, "insert": lambda: prefix.insert_prefix(range(4), [10])}[call]
    got()
    prefix.hand_over()
    for method in (lambda: cache.bind(**padded(text(17))), cache.reset, cache.forget_prefixes):
        with pytest.raises(ArgumentValueError, match=r"the 16 tokens that were stored here, got \d+. Fix: .*each manager has its own"):
            method()


def test_looking_into_it_is_not_changing_it() -> None:
    cache = made("radix")
    run(cache, 1)
    found = cache.prefix.match_prefix(text(10))
    cache.prefix.lock_handle(found.handle)
    assert found.handle.cached_len == 8
    cache.prefix.lock_handle(found.handle, unlock=True)
    cache.prefix.hand_over()
    assert run(cache, 1) == 16


def test_locks_are_not_lost_while_another_thread_has_the_prefix_cache() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), **GREEDY)
    other = copy.deepcopy(watched.cache)
    watched.model.generate(**other.bind(**padded(text(18))), **GREEDY)
    stay, has = threading.Event(), threading.Event()

    def look() -> None:
        watched.prefix.match_prefix([1])
        has.set()
        stay.wait()

    thread = threading.Thread(target=look)
    thread.start()
    has.wait()
    del other
    gc.collect()
    for _ in range(3):
        with pytest.raises(WrongThreadError):
            watched.cache.bind(**padded(text(18)))
    stay.set()
    thread.join()
    assert watched.prefix.num_locks == 2, "the batch's, and that of the copy that was dropped"
    watched.cache.reset()
    assert watched.prefix.num_locks == 0
    assert watched.prefix.size_info.evictable_size == 20
    watched.check()


def test_what_was_computed_before_everything_was_forgotten_is_not_stored() -> None:
    """The weights may have changed; neither the batch nor a copy of it brings the old keys back."""
    watched = Watched("llama-gqa")
    out = watched.generate(padded(text(18)), commit=False, **GREEDY)
    other = watched.copy()
    watched.cache.forget_prefixes()
    for cache in (watched.cache, other):
        with pytest.raises(ArgumentValueError, match=r"commit: .*got one from before forget_prefixes\(\), perhaps of other weights"):
            cache.commit(out)
    assert (watched.stored, watched.cache.get_seq_length(), other.get_seq_length()) == ({}, 23, 23)
    watched.same(padded(text(18)), **GREEDY)
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 16


def test_new_weights_after_forgetting() -> None:
    watched = Watched("llama", model=zoo.build("Llama", {}))
    watched.same(padded(text(18)), **GREEDY)
    with torch.no_grad():
        watched.model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    watched.cache.forget_prefixes()
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 0
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 16
