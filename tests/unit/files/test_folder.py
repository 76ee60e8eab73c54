"""A save that ends early leaves what was there before, and nothing under the name of a file: killed, a full disk, no permission."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvdock.errors import FileAccessError
from kvdock.files import load_pool, load_prefix, save_pool, save_prefix
from kvdock.files.folder import Unfinished
from support_files import cached, compute, pool
from support_isolated import answer

TESTS = str(Path(__file__).parents[2])
IDS = list(range(60))


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def saved(folder: Path, ids: list[int] = IDS, **how: Any) -> Path:
    cache, manager = pool()
    compute(cache, manager, ids)
    save_pool(folder / "p.st", manager, cache, **how)
    return folder / "p.st"


def loaded(path: Path, ids: list[int] = IDS) -> int:
    cache, manager = pool()
    load_pool(path, manager, cache)
    return cached(cache, manager, ids)


SAVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support_files import compute, pool
from kvdock.files import save_pool
cache, manager = pool()
compute(cache, manager, list(range(100, 150)))
def progress(done, total):
    if done >= total * float(sys.argv[3]):
        print("there", flush=True)
        time.sleep(60)
save_pool(sys.argv[2], manager, cache, max_file_bytes=int(sys.argv[4]), progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("most", [10**9, 1000])
@pytest.mark.parametrize("at", ["0.3", "1"])
def test_a_process_that_is_killed_while_it_saves(tmp_path: Path, at: str, most: int) -> None:
    path = saved(tmp_path, max_file_bytes=2000)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with subprocess.Popen([sys.executable, "-c", SAVER, TESTS, str(path), at, str(most)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        left = set(names(tmp_path)) - set(before)
        assert len(left) == 1
        assert left.pop().endswith(".kvdock-unfinished")
        saved(tmp_path, max_file_bytes=2000)  # another process saves meanwhile, and leaves what that one writes
        assert len([name for name in names(tmp_path) if name.endswith("unfinished")]) == 1
        before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()} == before
    assert loaded(path) == 60
    saved(tmp_path)
    assert names(tmp_path) == ["p.st"], "the next save removes it"
    assert loaded(path) == 60


FULL = """
import json, resource, signal, sys
sys.path.insert(0, sys.argv[1])
from support_files import compute, pool
from kvdock.errors import FileAccessError
from kvdock.files import save_pool
cache, manager = pool()
compute(cache, manager, list(range(100, 150)))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), int(sys.argv[4])))
try:
    save_pool(sys.argv[2], manager, cache, max_file_bytes=int(sys.argv[3]))
except FileAccessError as error:
    print(json.dumps([error.errno, str(error), repr(error.__cause__)]))
manager.check_integrity()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("most", "limit"), [(10**9, 3000), (10**9, 0), (1000, 1500), (4000, 2000)])
def test_a_disk_that_is_full(tmp_path: Path, most: int, limit: int) -> None:
    path = saved(tmp_path, max_file_bytes=2000)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    number, said, cause = answer(FULL, TESTS, str(path), str(most), str(limit))
    assert number == errno.EFBIG
    assert "File too large" in said
    assert "Fix: free space there" in said
    assert "SafetensorError" in cause or "OSError" in cause
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert loaded(path) == 60


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_a_file_that_cannot_be_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    path = saved(tmp_path, max_file_bytes=2000)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    real, calls = os.replace, list[int]()

    def replace(source: Any, target: Any) -> None:
        calls.append(0)
        if len(calls) > fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(FileAccessError, match=r"No space left.*Fix: free space") as caught:
        saved(tmp_path, list(range(200, 248)), max_file_bytes=2000)
    assert caught.value.errno == errno.ENOSPC
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert loaded(path) == 60


def test_parts_of_the_save_before_go_and_others_stay(tmp_path: Path) -> None:
    strange = [
        "p.00000000-00001-of-00002.other",
        "p.st.old",
        "q.00000000-00001-of-00002.st",
        "p.0000000-00001-of-00002.st",
        ".p.st.x.kvdock-unfinished",
    ]
    for name in strange:
        (tmp_path / name).touch()
    saved(tmp_path, max_file_bytes=2000)
    first = set(names(tmp_path))
    saved(tmp_path, max_file_bytes=2000)
    second = set(names(tmp_path))
    assert first & second == {"p.st", *strange}
    assert len(first) == len(second) > 5 + len(strange) - 3
    saved(tmp_path)
    assert set(names(tmp_path)) == {"p.st", *strange}
    assert loaded(tmp_path / "p.st") == 60


def test_what_was_abandoned_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    abandoned = tmp_path / ".p.st.0123abcd.kvdock-unfinished"
    abandoned.mkdir()
    (abandoned / "p.st").write_bytes(b"half")
    of_another = tmp_path / ".q.st.0123abcd.kvdock-unfinished"
    of_another.mkdir()
    with Unfinished(tmp_path / "p.st") as other:
        other.file("x").write_bytes(b"x")
        saved(tmp_path)
        assert not abandoned.exists()
        assert of_another.exists()
        assert other.file("x").exists()
    assert names(tmp_path) == [of_another.name, "p.st"]


def test_a_link_in_the_place_of_an_abandoned_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "dear").mkdir()
    (tmp_path / "dear" / "file").touch()
    (tmp_path / ".p.st.0123abcd.kvdock-unfinished").symlink_to(tmp_path / "dear")
    saved(tmp_path)
    assert (tmp_path / "dear" / "file").exists()


def test_saves_at_the_same_time_leave_one_of_them_whole(tmp_path: Path) -> None:
    pools = []
    for start in (0, 1000, 2000):
        made = pool()
        compute(*made, list(range(start, start + 48)))
        made[1].hand_over()
        pools.append(made)
    threads = [
        threading.Thread(target=save_pool, args=(tmp_path / "p.st", manager, cache), kwargs={"max_file_bytes": 1500})
        for cache, manager in pools
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = [loaded(tmp_path / "p.st", list(range(start, start + 48))) for start in (0, 1000, 2000)]
    assert sorted(found) == [0, 0, 48]
    assert len({name.split("-")[0] for name in names(tmp_path)}) == 2, "the file and its parts"


def test_files_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    saved(tmp_path, max_file_bytes=2000)
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_places_where_nothing_can_be_saved(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, IDS)
    for path, said in ((tmp_path / "none" / "p", "No such file"), (tmp_path, "is a folder"), (Path("/proc/p"), "Fix: ")):
        with pytest.raises(FileAccessError, match=said) as caught:
            save_prefix(path, manager, cache, IDS)
        assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    saved(tmp_path, max_file_bytes=2000)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    parts = len(names(tmp_path))
    path = saved(tmp_path, max_file_bytes=2000)
    assert len(names(tmp_path)) == 2 * parts - 1, "nobody can tell whose the others are"
    assert loaded(path) == 60


def test_the_file_that_is_loaded_may_be_saved_again(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, IDS)
    save_prefix(tmp_path / "p", manager, cache, IDS)
    other, others = pool()
    load_prefix(tmp_path / "p", others, other, progress=lambda done, total: save_prefix(tmp_path / "p", manager, cache, IDS[:8]))
    assert cached(other, others, IDS) == 60
    load_prefix(tmp_path / "p", others, other)
