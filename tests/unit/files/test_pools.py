"""Whole pools: which prefixes come back, in which order, and what happens where there is less room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, FileContentError, UnsupportedError
from kvdock.files import Loaded, load_pool, load_prefix, save_pool, save_prefix
from kvdock.files.api import load_any
from kvdock.prefix import NaivePrefixCache, RadixPrefixCache
from support_files import KINDS, cached, compute, pool

A, B, C = (list(range(start, start + 16)) for start in (0, 100, 200))


def order(manager: kvdock.CacheManager) -> list[tuple[list[int], Any]]:
    return [(tokens.tolist(), namespace) for tokens, namespace in manager.prefix.stored_prefixes()]


def test_prefixes_are_listed_by_their_last_use_and_to_where_a_use_ended() -> None:
    prefix = RadixPrefixCache(2)
    prefix.insert_prefix([1, 2, 3, 4, 5, 6], [0, 1, 2])
    prefix.insert_prefix([1, 2, 7, 8], [0, 3])
    prefix.insert_prefix([9, 9], [4], ("a",))
    assert [(each.tolist(), space) for each, space in prefix.stored_prefixes()] == [
        ([9, 9], ("a",)),
        ([1, 2, 7, 8], ()),
        ([1, 2, 3, 4, 5, 6], ()),
    ]
    prefix.match_prefix([1, 2, 3, 4])
    prefix.match_prefix([1, 2])
    assert [each.tolist() for each, _ in prefix.stored_prefixes()] == [[1, 2], [1, 2, 3, 4], [9, 9], [1, 2, 7, 8], [1, 2, 3, 4, 5, 6]]
    prefix.insert_prefix([2**40, 1], [5])
    prefix.match_prefix([1, 2, 3, 4, 5, 6])
    found = list(prefix.stored_prefixes())
    assert [each.tolist() for each, _ in found] == [[1, 2, 3, 4, 5, 6], [2**40, 1], [9, 9], [1, 2, 7, 8]]
    assert all(each.dtype == np.int64 for each, _ in found)
    assert list(RadixPrefixCache(2).stored_prefixes()) == list(NaivePrefixCache(2).stored_prefixes()) == []


def test_the_order_of_use_comes_back(tmp_path: Path) -> None:
    cache, manager = pool()
    for ids in (A, B, C, [*A[:8], *B], A):
        compute(cache, manager, ids)
    compute(cache, manager, A, ("tenant",))
    found = save_pool(tmp_path / "p", manager, cache)
    assert (found.num_prefixes, found.num_tokens) == (5, 80)
    other, others = pool()
    assert load_pool(tmp_path / "p", others, other) == Loaded(5, 5, 80, 80)
    assert order(others) == order(manager)
    for left in (76, 72, 40, 8):
        manager.prefix.evict((manager.prefix.size_info.total_size - left) // 4)
        others.prefix.evict((others.prefix.size_info.total_size - left) // 4)
        assert order(others) == order(manager)


@pytest.mark.parametrize("room", [0, 3, 4, 7, 9, 13, 22])
def test_as_many_as_fit_those_that_were_used_last(tmp_path: Path, room: int) -> None:
    cache, manager = pool()
    for ids in (A, B, [*A[:8], *B[:8]], C):
        compute(cache, manager, ids)
    save_pool(tmp_path / "p", manager, cache)
    other, others = pool(num_blocks=32)
    held = compute(other, others, list(range(1000, 1000 + 4 * (32 - room))), finish=False)
    found = load_pool(tmp_path / "p", others, other)
    fits = [cached(other, others, ids) for ids in (C, [*A[:8], *B[:8]], B, A)]
    wanted, left, there = [], room, set[tuple[int, ...]]()
    for ids in (C, [*A[:8], *B[:8]], B, A):
        new = {tuple(ids[: at + 4]) for at in range(0, 16, 4)} - there
        wanted.append(len(new) <= left)
        if wanted[-1]:
            left -= len(new)
            there |= new
    assert [have == 16 for have in fits] == wanted
    assert found == Loaded(sum(wanted), 4, 4 * len(there), 4 * len(there))
    assert others.prefix.stats.evictions == 0
    others.finish(held)
    others.check_integrity()


def test_what_is_cached_counts_as_there_and_nothing_of_it_goes(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    compute(cache, manager, B)
    save_pool(tmp_path / "p", manager, cache)
    other, others = pool(num_blocks=9)
    compute(other, others, B)
    compute(other, others, A[:8])
    assert load_pool(tmp_path / "p", others, other) == Loaded(2, 2, 32, 8)
    others.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [40, pytest.param(60, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.slow)])
def test_pools_of_all_kinds_with_little_room(tmp_path: Path, kind: str, num_blocks: int) -> None:
    cache, manager = pool(kind, num_blocks=400)
    prompts = [list(range(start, start + 60)) for start in (0, 100, 200)]
    prompts.append([*prompts[1][:40], *range(500, 540)])
    for ids in prompts:
        compute(cache, manager, ids)
    save_pool(tmp_path / "p", manager, cache, max_file_bytes=5000)
    other, others = pool(kind, num_blocks=num_blocks)
    found = load_pool(tmp_path / "p", others, other)
    have = [cached(other, others, ids) for ids in prompts]
    whole = [cached(cache, manager, ids) for ids in prompts]
    assert found.num_prefixes >= sum(each > 0 for each in have) - 1
    assert num_blocks < 400 or have == whole
    others.check_integrity()
    assert others.num_sequences == 0


def test_promised_room_is_not_taken(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    save_pool(tmp_path / "p", manager, cache)
    other, others = pool(num_blocks=8)
    seq = others.begin([1, 2, 3, 4], reserve=16)
    assert load_pool(tmp_path / "p", others, other).num_prefixes == 0
    others.finish(seq)
    assert load_pool(tmp_path / "p", others, other).num_prefixes == 1


def test_what_is_not_committed_is_not_saved(tmp_path: Path) -> None:
    cache, manager = pool()
    seq = compute(cache, manager, A, finish=False)
    manager.extend(seq, 9)
    manager.commit(seq, list(range(9)), computed=20)
    assert save_pool(tmp_path / "p", manager, cache).num_tokens == 20
    assert save_prefix(tmp_path / "q", manager, cache, [*A, *range(9)]).num_tokens == 20


def test_a_prefix_and_a_pool_are_told_apart(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    save_pool(tmp_path / "pool", manager, cache)
    save_prefix(tmp_path / "prefix", manager, cache, A)
    with pytest.raises(FileContentError, match=r"kind: expected pool, got 'prefix'\. Fix: call load_prefix"):
        load_pool(tmp_path / "prefix", manager, cache)
    for name in ("pool", "prefix"):
        other, others = pool()
        assert load_any(tmp_path / name, others, other) == Loaded(1, 1, 16, 16)


class Listless(RadixPrefixCache):
    stored_prefixes = kvdock.prefix.PrefixCache.stored_prefixes


def test_a_prefix_cache_that_lists_nothing(tmp_path: Path) -> None:
    cache, manager = pool(prefix=Listless(4))
    compute(cache, manager, A)
    with pytest.raises(UnsupportedError, match=r"Listless.stored_prefixes: .*Fix: "):
        save_pool(tmp_path / "p", manager, cache)
    save_prefix(tmp_path / "p", manager, cache, A)
    other, others = pool(prefix=Listless(4))
    assert load_prefix(tmp_path / "p", others, other).num_loaded == 16


def test_where_nothing_is_ever_found(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    save_prefix(tmp_path / "p", manager, cache, A)
    other, others = pool(prefix="naive")
    for call in (save_pool, load_prefix):
        with pytest.raises(UnsupportedError, match=f"{call.__name__}: manager: expected a prefix cache that stores"):
            call(tmp_path / "p", others, other)  # type: ignore[operator] # of two signatures
    empty, of_empty = pool()
    with pytest.raises(ArgumentValueError, match="save_pool: manager: expected one that has cached something"):
        save_pool(tmp_path / "q", of_empty, empty)


def test_bad_arguments(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    path: Any = tmp_path / "p"
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ArgumentTypeError, "save_prefix: path: expected a path, got 7", lambda: save_prefix(7, manager, cache, A)),  # type: ignore[arg-type] # wrong on purpose
        (ArgumentTypeError, "path: expected a path, got ''", lambda: save_pool("", manager, cache)),
        (ArgumentTypeError, "save_pool: model: expected a str, got None", lambda: save_pool(path, manager, cache, model=None)),  # type: ignore[arg-type] # wrong on purpose
        (ArgumentTypeError, "manager: expected a CacheManager", lambda: save_pool(path, cache, manager)),  # type: ignore[arg-type] # wrong on purpose
        (ArgumentTypeError, "cache: expected a cache in blocks", lambda: load_pool(path, manager, manager)),  # type: ignore[arg-type] # wrong on purpose
        (ArgumentValueError, "max_file_bytes: expected at least 1, got 0", lambda: save_pool(path, manager, cache, max_file_bytes=0)),
        (ArgumentTypeError, "tokens: expected integers", lambda: save_prefix(path, manager, cache, [1.5])),
        (ArgumentValueError, "tokens: expected one dimension", lambda: save_prefix(path, manager, cache, [A])),
        (ArgumentTypeError, "namespace: expected a tuple", lambda: save_prefix(path, manager, cache, A, "a")),  # type: ignore[arg-type] # wrong on purpose
        (ArgumentTypeError, "namespace: expected a tuple", lambda: load_prefix(path, manager, cache, namespace="a")),  # type: ignore[arg-type] # wrong on purpose
        (ArgumentValueError, "at least a block of 4 tokens that are cached, got 3", lambda: save_prefix(path, manager, cache, A[:3])),
        (ArgumentValueError, "got 16 tokens, of which none are", lambda: save_prefix(path, manager, cache, B)),
        (ArgumentValueError, "got 0 tokens", lambda: save_prefix(path, manager, cache, [])),
        (
            ArgumentValueError,
            "manager: expected the manager of this cache, with blocks of 4 tokens, got one with blocks of 8",
            lambda: save_pool(path, kvdock.CacheManager(64, 8), cache),
        ),
        (ArgumentValueError, "manager: expected at most the 64 blocks", lambda: save_pool(path, kvdock.CacheManager(65, 4), cache)),
    ]
    for kind, said, call in wrong:
        with pytest.raises(kind, match=said):
            call()
    assert list(tmp_path.iterdir()) == []
    assert (manager.num_sequences, manager.blocks_used) == (0, 4)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    cache, manager = pool()
    compute(cache, manager, A)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (save_pool, load_pool):
        with pytest.raises(UnsupportedError, match=r"kvdock.files: expected safetensors.*Fix: pip install 'kvdock\[files\]'"):
            call(tmp_path / "p", manager, cache)  # type: ignore[operator] # of two signatures
    assert list(tmp_path.iterdir()) == []
