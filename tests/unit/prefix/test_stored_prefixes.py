"""Which prefixes a radix tree lists: those that uses ended with, beside a list of all uses."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.prefix import RadixPrefixCache
from support_slow import examples

SIZE = 2
CALLS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), max_size=12), st.sampled_from([(), ("a",)])), max_size=14)


@settings(max_examples=examples(150), deadline=None)
@given(calls=CALLS, policy=st.sampled_from(["lru", "lfu", "fifo"]), evicted=st.integers(0, 6))
def test_any_calls(calls: Any, policy: str, evicted: int) -> None:
    cache, uses, stored, free = RadixPrefixCache(SIZE, policy), list[tuple[Any, Any]](), set[tuple[Any, Any]](), iter(range(1000))
    for is_insertion, ids, namespace in calls:
        whole = tuple(ids[: len(ids) // SIZE * SIZE])
        if is_insertion:
            cache.insert_prefix(whole, [next(free) for _ in range(len(whole) // SIZE)], namespace)
            stored |= {(namespace, whole[:end]) for end in range(SIZE, len(whole) + 1, SIZE)}
            found = len(whole)
        else:
            found = cache.match_prefix(ids, namespace).handle.cached_len
        if found:
            uses.append((namespace, whole[:found]))
    listed = [(namespace, tuple(tokens.tolist())) for tokens, namespace in cache.stored_prefixes()]
    if policy == "lru":
        wanted: list[tuple[Any, Any]] = []
        for space, ids in reversed(uses):  # a use of a prefix of what was used later is none by itself
            if not any(space == other and longer[: len(ids)] == ids for other, longer in wanted):
                wanted.append((space, ids))
        assert listed == wanted
    covered = {(space, ids[:end]) for space, ids in listed for end in range(SIZE, len(ids) + 1, SIZE)}
    assert covered == stored, "by what is listed all can be found"
    cache.evict(min(evicted, len(stored)))
    rest = {(space, tuple(ids.tolist())[:end]) for ids, space in cache.stored_prefixes() for end in range(SIZE, len(ids) + 1, SIZE)}
    assert len(rest) == len(stored) - min(evicted, len(stored))
    assert all(cache.match_prefix(ids, space, record=False).handle.cached_len == len(ids) for space, ids in rest)
