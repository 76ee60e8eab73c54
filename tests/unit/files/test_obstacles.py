"""What lies in the way of a save, and what a progress raises at any moment: neither may leave half of anything, or keep others out."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import kvdock
from kvdock.errors import ArgumentValueError, FileAccessError, UnsupportedError
from kvdock.files import Loaded, container, load_pool, load_prefix, save_pool, save_prefix
from kvdock.files.folder import Unfinished
from support_files import cached, compute, pool, snapshot

A, B, C = list(range(16)), list(range(100, 116)), list(range(200, 212))


def saved(path: Path, **how: Any) -> Path:
    cache, manager = pool()
    compute(cache, manager, A)
    save_pool(path, manager, cache, **how)
    return path


def nested(depth: int) -> tuple[Any, ...]:
    """Return a tuple in so many tuples."""
    made: tuple[Any, ...] = ("a",)
    for _ in range(depth):
        made = (made,)
    return made


class StopError(Exception):
    """What a progress raises."""


class Stops:
    """A progress that raises at some call."""

    def __init__(self, at: int) -> None:
        self.left, self.told = at, list[tuple[int, int]]()

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))
        self.left -= 1
        if self.left < 0:
            raise StopError


def test_whenever_a_progress_raises_nothing_was_saved(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    quiet = Stops(1000)
    save_prefix(tmp_path / "f", manager, cache, A[:4], max_file_bytes=500, progress=quiet)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert len(quiet.told) > 3
    for at in range(len(quiet.told)):
        with pytest.raises(StopError):
            save_prefix(tmp_path / "f", manager, cache, A, max_file_bytes=500, progress=Stops(at))
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_whenever_a_progress_raises_no_prefix_was_loaded(tmp_path: Path) -> None:
    cache, manager = pool("windows")
    compute(cache, manager, A)
    save_prefix(tmp_path / "f", manager, cache, A)
    quiet = Stops(1000)
    load_prefix(tmp_path / "f", *pool("windows")[::-1], progress=quiet)
    other, others = pool("windows")
    for at in range(len(quiet.told)):
        with pytest.raises(StopError):
            load_prefix(tmp_path / "f", others, other, progress=Stops(at))
        assert (others.blocks_used, others.num_sequences, cached(other, others, A)) == (0, 0, 0), f"at {quiet.told[at]}"
    others.check_integrity()
    done, total = quiet.told[-1]
    assert done == total
    load_prefix(tmp_path / "f", others, other)
    assert cached(other, others, A) == 12, "its blocks have 12 tokens"


def test_prefixes_of_a_pool_that_are_whole_stay_when_a_progress_raises(tmp_path: Path) -> None:
    cache, manager = pool()
    for ids in (A, B, C):
        compute(cache, manager, ids)
    save_pool(tmp_path / "f", manager, cache)
    quiet = Stops(1000)
    load_pool(tmp_path / "f", *pool()[::-1], progress=quiet)
    seen = set()
    for at in range(len(quiet.told)):
        other, others = pool()
        with pytest.raises(StopError):
            load_pool(tmp_path / "f", others, other, progress=Stops(at))
        found = [cached(other, others, ids) for ids in (C, B, A)]
        assert found in ([0, 0, 0], [12, 0, 0], [12, 16, 0], [12, 16, 16])
        assert (others.num_sequences, others.blocks_used) == (0, sum(found) // 4)
        others.check_integrity()
        seen.add(tuple(found))
    assert len(seen) == 4, "those that were used last came first, each of them whole"


def test_a_file_with_the_name_of_an_abandoned_folder_keeps_nobody_from_saving(tmp_path: Path) -> None:
    strange = tmp_path / ".f.0123abcd.kvdock-unfinished"
    strange.write_bytes(b"mine")
    assert cached_of(saved(tmp_path / "f")) == 16
    assert strange.read_bytes() == b"mine"


def cached_of(path: Path) -> int:
    cache, manager = pool()
    load_pool(path, manager, cache)
    return cached(cache, manager, A)


def test_an_unfinished_folder_that_vanishes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ends its save just then."""
    gone, real = tmp_path / ".f.0123abcd.kvdock-unfinished", Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([*real(folder), gone]))
    path = saved(tmp_path / "f")
    monkeypatch.undo()
    assert cached_of(path) == 16


def test_an_unfinished_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, real = tmp_path / ".f.0123abcd.kvdock-unfinished", os.open
    theirs.mkdir()

    def denied(path: Any, *how: Any) -> int:
        if Path(path) == theirs:
            raise PermissionError(13, "Permission denied")
        return real(path, *how)

    monkeypatch.setattr(os, "open", denied)
    assert cached_of(saved(tmp_path / "f")) == 16
    assert theirs.exists()


def test_a_folder_with_the_name_of_a_part_keeps_nobody_from_saving(tmp_path: Path) -> None:
    path = saved(tmp_path / "f.st", max_file_bytes=500)
    (tmp_path / "f.01234567-00001-of-00002.st").mkdir()
    saved(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["f.01234567-00001-of-00002.st", "f.st"], "the parts are gone"
    assert cached_of(path) == 16


def test_what_is_being_written_is_for_its_owner_only(tmp_path: Path) -> None:
    seen: set[tuple[str, int]] = set()

    def look(done: int, total: int) -> None:
        seen.update((each.suffix, stat.S_IMODE(each.stat().st_mode)) for each in tmp_path.iterdir())

    before = os.umask(0)
    try:
        saved(tmp_path / "f", progress=look)
    finally:
        os.umask(before)
    assert seen == {(".kvdock-unfinished", 0o700)}, "nobody else comes to the files in it, whatever their mode is meanwhile"


def test_a_folder_that_vanishes_while_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def remove(done: int, total: int) -> None:
        for each in folder.iterdir():
            each.rmdir()
        if folder.exists():
            folder.rmdir()

    cache, manager = pool()
    compute(cache, manager, A)
    with pytest.raises(FileAccessError, match=r"No such file or directory.*Fix: check the path and its permissions") as caught:
        save_pool(folder / "f", manager, cache, progress=lambda *at: remove(*at) if folder.exists() else None)
    assert caught.value.__cause__ is not None
    assert list(tmp_path.iterdir()) == []
    manager.check_integrity()


@pytest.mark.parametrize(("depth", "fits"), [(0, True), (32, True), (33, False), (60, False)])
def test_a_namespace_that_could_not_be_loaded_is_not_saved(tmp_path: Path, depth: int, *, fits: bool) -> None:
    namespace = nested(depth)
    cache, manager = pool()
    compute(cache, manager, A, namespace)
    if fits:
        save_prefix(tmp_path / "f", manager, cache, A, namespace)
        other, others = pool()
        assert load_prefix(tmp_path / "f", others, other, namespace=namespace) == Loaded(1, 1, 16, 16)
        assert (cached(other, others, A, namespace), cached(other, others, A)) == (16, 0)
        return
    for call in (lambda: save_prefix(tmp_path / "f", manager, cache, A, namespace), lambda: save_pool(tmp_path / "f", manager, cache)):
        with pytest.raises(ArgumentValueError) as caught:
            call()
        assert str(caught.value) == "save: namespace: expected tuples of at most 32 levels, got more. Fix: name it by a flat tuple"
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_could_not_be_loaded_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "f", model="m" * 3000)
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    monkeypatch.setattr(container, "_MOST_HEADER", length)
    saved(path, model="m" * 3000)
    monkeypatch.setattr(container, "_MOST_HEADER", length - 8)
    with pytest.raises(UnsupportedError) as caught:
        saved(path, model="m" * 3000)
    fix = "Fix: save fewer namespaces, or larger parts, and a short model="
    assert str(caught.value).split(": ", 1)[1] == f"expected a header of at most {length - 8} bytes, got {length}. {fix}"
    assert path.read_bytes()[:8] == before[:8]
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_an_unfinished_save_leaves_nothing_whatever_is_raised(tmp_path: Path) -> None:
    def fail(folder: Unfinished) -> None:
        with folder:
            folder.file("f").write_bytes(b"half")
            raise StopError

    with pytest.raises(StopError):
        fail(Unfinished(tmp_path / "f"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [0, 1, 3])
def test_a_pool_in_use_without_room_is_left_as_it_is(tmp_path: Path, free: int) -> None:
    cache, manager = pool()
    compute(cache, manager, A)
    save_prefix(tmp_path / "f", manager, cache, A)
    save_pool(tmp_path / "g", manager, cache)
    other, others = pool(num_blocks=4 + free)
    held = compute(other, others, B, finish=False)
    before = snapshot(other)
    with pytest.raises(kvdock.OutOfBlocksError):
        load_prefix(tmp_path / "f", others, other)
    assert load_pool(tmp_path / "g", others, other) == Loaded(0, 1, 0, 0)
    assert all(bool((one == two).all()) for one, two in zip(before, snapshot(other), strict=True))
    assert (held.is_open, others.num_sequences, others.blocks_used) == (True, 1, 4)
    others.finish(held)
    others.check_integrity()
    assert cached(other, others, B) == 16
