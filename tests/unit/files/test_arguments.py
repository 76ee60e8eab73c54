"""What callers of the four functions pass: each wrong thing has its error, at once, and nothing is written or loaded for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, FileAccessError, WrongThreadError
from kvdock.files import Loaded, load_pool, load_prefix, save_pool, save_prefix
from kvdock.files.api import load_any
from support_files import cached, compute, pool

A = list(range(16))


def calls(path: Any, **how: Any) -> list[tuple[str, Callable[[], object]]]:
    """Return each function with a pool of its own that has ``A``, and what an error says first."""
    cache, manager = pool()
    compute(cache, manager, A)
    return [
        ("save_prefix", lambda: save_prefix(path, manager, cache, A, **how)),
        ("save_pool", lambda: save_pool(path, manager, cache, **how)),
        ("load_prefix", lambda: load_prefix(path, manager, cache, **how)),
        ("load_pool", lambda: load_pool(path, manager, cache, **how)),
        ("load", lambda: load_any(path, manager, cache, **how)),
    ]


class Bytes(os.PathLike[bytes]):
    """A path of bytes, which other functions of Python's take."""

    def __fspath__(self) -> bytes:
        return b"file"

    def __repr__(self) -> str:
        return "Bytes()"


@pytest.mark.parametrize("path", [None, 7, b"file", ["file"], True, "", Bytes()])
def test_what_is_no_path(path: Any) -> None:
    for name, call in calls(path):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        assert str(caught.value) == f"{name}: path: expected a path, got {path!r}"


@pytest.mark.parametrize("path", ["a\0b", "\0", ".", "/", "./", Path(), Path("/"), Path("x\0")])
def test_a_path_that_names_no_file(path: Any) -> None:
    for name, call in calls(path):
        with pytest.raises(ArgumentValueError) as caught:
            call()
        wanted = f"{name}: path: expected the name of a file, got {os.fspath(path)!r}. Fix: name a file in a folder, without a zero byte"
        assert str(caught.value) == wanted


@pytest.mark.parametrize("progress", [7, "told", [], 0])
def test_a_progress_that_cannot_be_called(tmp_path: Path, progress: Any) -> None:
    for name, call in calls(tmp_path / "f", progress=progress):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        assert str(caught.value) == f"{name}: progress: expected a function of two numbers, or None, got {progress!r}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [None, 3, b"m", ("m",)])
def test_a_model_that_is_no_text(tmp_path: Path, model: Any) -> None:
    for name, call in calls(tmp_path / "f", model=model):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        fix = "pass a text that names the weights, such as a repository and its revision"
        assert str(caught.value) == f"{name}: model: expected a str, got {model!r}. Fix: {fix}"


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "1", None])
def test_a_size_that_is_none(tmp_path: Path, most: Any) -> None:
    kind = ArgumentValueError if type(most) is int else ArgumentTypeError
    said = f"at least 1, got {most!r}" if type(most) is int else f"an int of at least 1, got {most!r}"
    for name, call in calls(tmp_path / "f", max_file_bytes=most)[:2]:
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value) == f"{name}: max_file_bytes: expected {said}"
    assert list(tmp_path.iterdir()) == []


def test_a_size_may_be_numpys(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    assert save_pool(tmp_path / "f", manager, cache, max_file_bytes=np.int32(1)).num_files == 5  # type: ignore[arg-type] # taken all the same


@pytest.mark.parametrize("place", ["manager", "cache"])
def test_no_manager_and_no_cache(tmp_path: Path, place: str) -> None:
    cache, manager = pool()
    spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_positions=16, dtype=torch.float16)
    static = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(max_batch_size=1), kvdock.RankInfo("cpu"))
    fix = ". Fix: pass what create_cache made of a PagedKVCacheConfig"
    for wrong in (None, static, "x"):
        given: dict[str, Any] = {"manager": manager, "cache": cache, place: wrong}
        what = "a CacheManager" if place == "manager" else "a cache in blocks, such as a PagedKVCache"
        for call in (save_pool, load_pool, load_prefix, load_any):
            with pytest.raises(ArgumentTypeError) as caught:
                call(tmp_path / "f", **given)  # type: ignore[operator] # of several signatures
            name = "load" if call is load_any else call.__name__  # type: ignore[attr-defined] # a function
            assert str(caught.value) == f"{name}: {place}: expected {what}, got {repr(wrong)[:80]}{fix if place == 'cache' else ''}"


def test_the_manager_of_another_cache(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    save_pool(tmp_path / "f", manager, cache)
    fix = "Fix: make it with CacheManager(cache.num_blocks, groups=cache.groups)"
    _, larger = pool(num_blocks=65)
    _, coarser = pool(block_size=8)
    windows, _ = pool("windows")
    sizes = ", ".join(str(group.block_size) for group in windows.groups)
    wanted = [
        (larger, cache, f"load_pool: manager: expected at most the 64 blocks of the cache, got 65. {fix}"),
        (
            coarser,
            cache,
            f"load_pool: manager: expected the manager of this cache, with blocks of 4 tokens, got one with blocks of 8 tokens. {fix}",
        ),
        (
            manager,
            windows,
            f"load_pool: manager: expected the manager of this cache, with blocks of {sizes} tokens, "
            f"got one with blocks of 4 tokens. {fix}",
        ),
    ]
    for wrong, of, said in wanted:
        with pytest.raises(ArgumentValueError) as caught:
            load_pool(tmp_path / "f", wrong, of)
        assert str(caught.value) == said


@pytest.mark.parametrize("call", [0, 1, 2, 3, 4])
def test_another_thread_is_refused(tmp_path: Path, call: int) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    (save_pool if call in (1, 3, 4) else lambda *args: save_prefix(*args, A))(tmp_path / "f", manager, cache)
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            calls_here[call]()
        except WrongThreadError as error:
            caught.append(error)

    calls_here: list[Callable[[], object]] = [
        lambda: save_prefix(tmp_path / "g", manager, cache, A),
        lambda: save_pool(tmp_path / "g", manager, cache),
        lambda: load_prefix(tmp_path / "f", manager, cache),
        lambda: load_pool(tmp_path / "f", manager, cache),
        lambda: load_any(tmp_path / "f", manager, cache),
    ]
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert [str(error).split(", got one")[0] for error in caught] == ["RadixPrefixCache: expected calls from thread 'MainThread' only"]
    assert [each.name for each in tmp_path.iterdir()] == ["f"]
    calls_here[call]()
    manager.check_integrity()


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint64), lambda ids: range(len(ids))])
def test_tokens_of_any_kind(tmp_path: Path, kind: Callable[[list[int]], Any]) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    assert save_prefix(tmp_path / "f", manager, cache, kind(A)).num_tokens == 16
    other, others = pool()
    assert load_prefix(tmp_path / "f", others, other) == Loaded(1, 1, 16, 16)
    assert cached(other, others, A) == 16


@pytest.mark.parametrize(("length", "tokens"), [(4, 4), (5, 4), (7, 4), (8, 8), (15, 12), (16, 16), (19, 16)])
def test_tokens_behind_the_last_whole_block_are_not_saved(tmp_path: Path, length: int, tokens: int) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    assert save_prefix(tmp_path / "f", manager, cache, list(range(length))).num_tokens == tokens
    other, others = pool()
    assert load_prefix(tmp_path / "f", others, other) == Loaded(1, 1, tokens, tokens)
    assert (cached(other, others, A), others.blocks_used) == (tokens, tokens // 4)


def test_a_name_that_is_too_long_for_the_system(tmp_path: Path) -> None:
    for name, call in calls(tmp_path / ("x" * 300)):
        with pytest.raises(FileAccessError, match="File name too long") as caught:
            call()
        assert caught.value.errno == 36, name
    assert list(tmp_path.iterdir()) == []
