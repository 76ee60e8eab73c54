"""`create_prefix_cache`: names, options, plugins; the naive cache; hand_over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError, PluginError, StaleHandleError, WrongThreadError
from kvdock.plugins.registry import Registry
from kvdock.prefix import LFU, NaivePrefixCache, RadixPrefixCache, SizeInfo, create_prefix_cache
from opskit import active
from support_descriptors import in_thread
from support_plugins import QUIET, module


class Ours(NaivePrefixCache):
    """A plugin's."""


Bring = Callable[..., None]


@pytest.fixture
def bring() -> Iterator[Bring]:
    """Register plugins that bring these prefix caches, by name, in a runtime that is the process's for the test."""
    registry = Registry(QUIET)

    def register(plugin: str, **caches: Any) -> None:
        registry.register(module(plugin, kvdock_prefix_caches=lambda: caches, KVDOCK_API=kvdock.plugin.KVDOCK_API), plugin)

    with active(kvdock.Runtime(registry)):
        yield register


def test_by_name_and_with_options() -> None:
    assert isinstance(create_prefix_cache(), RadixPrefixCache)
    assert create_prefix_cache().block_size == 16
    assert isinstance(create_prefix_cache("naive", block_size=3), NaivePrefixCache)
    made = kvdock.create_prefix_cache("radix", block_size=512, policy=LFU())
    assert isinstance(made, RadixPrefixCache)
    assert (made.block_size, made.policy.name) == (512, "lfu")


@pytest.mark.parametrize("bad", [0, -1, 513, 1.5, "16", None, True])
@pytest.mark.parametrize("name", ["radix", "naive"])
def test_block_sizes_are_1_to_512(name: str, bad: Any) -> None:
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match="block_size"):
        create_prefix_cache(name, block_size=bad)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nonsense": 1}, ArgumentTypeError, "nonsense"),
        ({"policy": "mru"}, ArgumentValueError, r"'lru', 'lfu', 'fifo', 'priority', got 'mru'"),
        ({"policy": LFU}, ArgumentTypeError, "policy"),
        ({"policy": None}, ArgumentTypeError, "policy"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        create_prefix_cache("radix", **options)
    with pytest.raises(ArgumentTypeError):
        create_prefix_cache("naive", **options)


def test_an_unknown_name_lists_the_known_ones(bring: Bring) -> None:
    bring("acme", theirs=Ours)
    with pytest.raises(ArgumentValueError, match="one of naive, radix, theirs, got 'tree'"):
        create_prefix_cache("tree")


@pytest.mark.parametrize("bad", [None, 3, b"radix", RadixPrefixCache, ["radix"]])
def test_a_name_is_text(bad: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="name"):
        create_prefix_cache(bad)


def test_a_plugins_cache_is_made_with_its_options(bring: Bring) -> None:
    bring("acme", theirs=Ours)
    assert isinstance(create_prefix_cache("theirs", block_size=4), Ours)
    with pytest.raises(ArgumentTypeError, match="policy"):
        create_prefix_cache("theirs", policy="lru")


def test_one_name_of_two_plugins_is_an_error_that_names_both(bring: Bring) -> None:
    bring("zeta", theirs=Ours)
    bring("acme", theirs=Ours)
    with pytest.raises(ArgumentValueError, match=r"'theirs' from acme, zeta.*KVDOCK_BACKENDS_DENY"):
        create_prefix_cache("theirs")


def test_a_plugin_cannot_take_a_built_in_name(bring: Bring) -> None:
    bring("acme", radix=Ours)
    assert isinstance(create_prefix_cache("radix"), RadixPrefixCache)


def test_what_a_plugins_class_makes_must_be_a_prefix_cache(bring: Bring) -> None:
    bring("acme", theirs=lambda block_size: object())
    with pytest.raises(PluginError, match="theirs"):
        create_prefix_cache("theirs")


@pytest.mark.parametrize("error", [OSError("no shared memory"), TypeError("no block size"), KeyError("size"), SystemExit(4)])
def test_what_a_plugins_class_raises_names_it(bring: Bring, error: BaseException) -> None:
    def make(block_size: int) -> Any:
        raise error

    bring("acme", theirs=make)
    with pytest.raises(PluginError, match=f"prefix cache 'theirs': expected a PrefixCache, got {type(error).__name__}: ") as caught:
        create_prefix_cache("theirs")
    assert caught.value.__cause__ is error


def test_a_naive_cache_stores_nothing_and_checks_everything() -> None:
    cache = NaivePrefixCache(2)
    made = cache.insert_prefix([1, 2, 3], [4], ("a",))
    assert (made.cached_len, made.handle.cached_len, made.blocks.tolist()) == (0, 0, [])
    found = cache.match_prefix([1, 2], ("a",))
    assert (found.handle.cached_len, found.blocks.size, cache.size_info) == (0, 0, SizeInfo(0, 0))
    assert (cache.stats.lookups, cache.stats.lookup_tokens, cache.stats.hit_tokens) == (1, 2, 0)
    assert cache.evict(0).dtype == np.int32
    with pytest.raises(OutOfBlocksError):
        cache.evict(1)
    for bad in ([4, 5], [], [-2]):
        with pytest.raises(ArgumentValueError):
            cache.insert_prefix([1, 2], bad)
    cache.lock_handle(found.handle)
    assert cache.num_locks == 1
    cache.lock_handle(found.handle, unlock=True)
    with pytest.raises(StaleHandleError):
        cache.lock_handle(found.handle, unlock=True)
    with pytest.raises(StaleHandleError):
        cache.lock_handle(RadixPrefixCache(2).match_prefix([1]).handle)
    cache.lock_handle(made.handle)
    assert cache.reset().size == cache.num_locks == 0
    with pytest.raises(StaleHandleError):
        cache.lock_handle(made.handle)
    cache.check_integrity()
    assert cache.stored_blocks().size == 0


@pytest.mark.parametrize("make", [RadixPrefixCache, NaivePrefixCache])
def test_a_cache_belongs_to_one_thread_until_it_is_handed_over(make: Callable[..., Any]) -> None:
    cache = make(1)
    cache.match_prefix([1])
    with pytest.raises(WrongThreadError, match=r"MainThread.*Fix: .*hand_over"):
        in_thread(cache.match_prefix, [1])
    cache.hand_over()
    assert in_thread(cache.match_prefix, [1]).handle.cached_len == 0
    cache.match_prefix([1])  # that thread has ended
    cache.hand_over()
    assert in_thread(lambda: (cache.match_prefix([1]), cache.hand_over())) is not None
    cache.evict(0)
