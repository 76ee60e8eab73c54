"""Histories of files that are damaged, and of saves and loads that end early: refused with nothing changed, or right."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

import kvdock
from kvdock.errors import FileAccessError, FileContentError, OutOfBlocksError
from kvdock.files import load_pool, loading, save_pool
from support_faults import Faults, InjectedError, Interrupted
from support_files import KINDS, cached, compute, pool

__all__ = ["Folder", "broken_disk", "damage", "file_history", "full_disk"]

_CHILD: list[Any] = []


def prompts_of(version: int) -> list[list[int]]:
    """Return the prompts that a version of a pool has computed: any two versions have none in common."""
    return [[100 * version + number] * 10 + list(range(6 + number)) for number in range(3)]


def made(kind: str, version: int, **how: Any) -> Any:
    """Return a cache and its manager, with the prompts of a version."""
    cache, manager = pool(kind, **how)
    for prompt in prompts_of(version):
        compute(cache, manager, prompt)
    return cache, manager


def whole_blocks(manager: kvdock.CacheManager, prompt: list[int]) -> int:
    """Return how much of a prompt can be shared."""
    return len(prompt) // manager.block_size * manager.block_size


def save_for_ever(path: str, kind: str, most: int, channel: Any) -> None:
    """Save version 1, then 2, 1, 2 ... until somebody kills the process: run in one of its own."""
    pools = [made(kind, version) for version in (1, 2)]
    channel.send("ready")
    while True:
        for cache, manager in pools:
            save_pool(path, manager, cache, max_file_bytes=most)


def saver(*arguments: Any) -> Any:
    """Start a process that saves for ever; it is forked from one that has imported all that it needs."""
    if not _CHILD:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support_fault_files"])
        _CHILD.append(context)
    ours, theirs = _CHILD[0].Pipe()
    process = _CHILD[0].Process(target=save_for_ever, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(120), "the process does not come up"
    assert ours.recv() == "ready"
    return process


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Let no file become longer than so many bytes, as a disk does that is full: the kernel refuses to write them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextlib.contextmanager
def broken_disk(faults: Faults) -> Iterator[None]:
    """Let one of the calls that write names or wait for the device fail."""
    name, left = faults.chance.choice(["os.replace", "os.fsync", "os.mkdir"]), [faults.chance.randrange(4)]
    real = {"os.replace": os.replace, "os.fsync": os.fsync, "os.mkdir": os.mkdir}[name]
    kind = f"a disk fails in {name}"

    def call(*args: Any, **how: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            faults.note(kind)
            raise OSError(errno.EIO, "Input/output error")
        return real(*args, **how)

    with mock.patch(name, call):
        yield


def damage(faults: Faults, path: Path, parts: list[Path]) -> str:
    """Damage one of a save's files; return what was done."""
    chance, victim = faults.chance, faults.chance.choice([path, *parts])
    data = victim.read_bytes()
    kinds = ["a file is cut", "a byte of a file is changed", "a sector of a file is zero", "bytes follow a file"]
    kind = chance.choice([*kinds, *["two shards are swapped", "a shard is missing"] * (len(parts) > 1)])
    at = chance.randrange(len(data))
    if kind == "a file is cut":
        victim.write_bytes(data[:at])
    elif kind == "a byte of a file is changed":
        victim.write_bytes(data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :])
    elif kind == "a sector of a file is zero":
        at -= at % 512
        victim.write_bytes(data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :])
    elif kind == "bytes follow a file":
        victim.write_bytes(data + chance.randbytes(chance.randint(1, 600)))
    elif kind == "two shards are swapped":
        one, other = chance.sample(parts, 2)
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
    else:
        chance.choice(parts).unlink()
    faults.note(kind)
    return kind


@attrs.define(eq=False)
class Folder:
    """A folder with one file of a pool, and who saves to it and loads from it.

    Args:
        faults: what is injected.
        folder: where.
        kind: of layers, see `KINDS`.
        version: of the save that is whole there.
    """

    faults: Faults
    folder: Path
    kind: str
    version: int = 0

    @property
    def path(self) -> Path:
        return self.folder / "p.st"

    def parts(self) -> list[Path]:
        return sorted(self.folder.glob("p.????????-*-of-*.st"))

    def most(self) -> int:
        """Draw how large a file may be: all in one, or in several."""
        return self.faults.chance.choice([1500, 3000, 10**9])

    def save(self, version: int, **how: Any) -> None:
        """Save a version."""
        cache, manager = made(self.kind, version)
        try:
            save_pool(self.path, manager, cache, max_file_bytes=self.most(), **how)
            self.version = version
        finally:
            manager.check_integrity()

    def found(self, folder: Path | None = None, **how: Any) -> int:
        """Load into a new pool; return the version that came, all of it and as it was computed."""
        cache, manager = pool(self.kind)
        load_pool((folder or self.folder) / "p.st", manager, cache, **how)
        versions = [version for version in range(5) if cached(cache, manager, prompts_of(version)[0])]
        assert len(versions) == 1
        for prompt in prompts_of(versions[0]):
            assert cached(cache, manager, prompt) == whole_blocks(manager, prompt)
        manager.check_integrity()
        return versions[0]

    def check(self) -> None:
        """See that the save that was whole is whole, and that nothing else has the name of a file."""
        assert self.found() == self.version
        strange = [each.name for each in self.folder.iterdir() if each != self.path and each not in self.parts()]
        assert not strange, strange

    # What may happen.

    def damaged(self) -> None:
        """Load a copy that is damaged, into a pool that has something."""
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name) / "copy"
            shutil.copytree(self.folder, copy)
            kind = damage(self.faults, copy / "p.st", sorted(copy.glob("p.????????-*.st")))
            cache, manager = made(self.kind, 4)
            before = manager.blocks_used, manager.prefix.size_info
            try:
                load_pool(copy / "p.st", manager, cache)
            except (FileContentError, FileAccessError):
                assert (manager.blocks_used, manager.prefix.size_info) == before
                self.faults.note(kind, "refused")
            else:
                assert self.found(copy) == self.version
                self.faults.note(kind, "not read, and right")
            self.check_pool(cache, manager)

    def check_pool(self, cache: Any, manager: Any) -> None:
        """See that a pool has what it had, and nothing wrong."""
        manager.check_integrity()
        for version in (self.version, 4):
            for prompt in prompts_of(version):
                there = cached(cache, manager, prompt)
                assert version != 4 or there == whole_blocks(manager, prompt)

    def fails_to_save(self) -> None:
        """Save on a disk that is full or broken, or with a caller who raises in the middle."""
        chance, before = self.faults.chance, {each.name: each.read_bytes() for each in self.folder.iterdir()}
        kind, version = chance.choice(["full", "broken", "raises", "interrupted"]), chance.choice([1, 2, 3])
        at, how = chance.random(), dict[str, Any]()

        def progress(done: int, total: int) -> None:
            if done >= at * total:
                self.faults.note("a save is interrupted")
                raise Interrupted if kind == "interrupted" else InjectedError

        disk: Callable[[], Any] = contextlib.nullcontext
        if kind == "full":
            disk = lambda: full_disk(chance.randrange(3000))  # noqa: E731 - drawn once it is entered
        elif kind == "broken":
            disk = lambda: broken_disk(self.faults)  # noqa: E731 - as above
        else:
            how["progress"] = progress
        whole = self.version
        try:
            with disk():
                self.save(version, **how)
        except FileAccessError as error:
            number = error.errno
            assert (kind, number) in [("full", errno.EFBIG), ("broken", errno.EIO)]
            if kind == "full":
                self.faults.note("a disk is full")
        except (Interrupted, InjectedError):
            assert how
        else:
            self.check()  # the disk had room enough, or the call that was to fail did not come
            return
        now = {each.name: each.read_bytes() for each in self.folder.iterdir()}
        self.version = self.found()
        assert now == before if self.version == whole != version else self.version in (whole, version)
        self.check()

    def fails_to_load(self) -> None:
        """Interrupt a load anywhere: prefixes are there whole, or not at all."""
        chance, (cache, manager) = self.faults.chance, made(self.kind, 4)
        at, left = chance.random(), [chance.randrange(12)]

        def progress(done: int, total: int) -> None:
            if done >= at * total:
                self.faults.note("a load is interrupted")
                raise Interrupted

        def put(*args: Any) -> None:
            left[0] -= 1
            if left[0] == -1:
                self.faults.note("a load fails while it copies")
                raise InjectedError
            real(*args)

        real, raises = loading.put, chance.random() < 0.5
        with contextlib.suppress(Interrupted, InjectedError), mock.patch.object(loading, "put", put if raises else real):
            load_pool(self.path, manager, cache, progress=None if raises else progress)
        assert manager.num_sequences == 0
        self.check_pool(cache, manager)

    def too_small(self) -> None:
        """Load into a pool without room for it."""
        cache, manager = pool(self.kind, num_blocks=self.faults.chance.choice([4, 9, 30]))
        self.faults.note("a pool has no room for all of a file")
        with contextlib.suppress(OutOfBlocksError):
            load_pool(self.path, manager, cache)
        manager.check_integrity()
        for prompt in prompts_of(self.version):
            cached(cache, manager, prompt)

    def killed(self) -> None:
        """Kill a process that saves again and again, at any moment."""
        process = saver(str(self.path), self.kind, self.most())
        time.sleep(self.faults.chance.random() * 0.2)
        process.kill()
        process.join(60)
        self.faults.note("a process that saves is killed")
        before, left = self.version, [each.name for each in self.folder.iterdir() if each.name.endswith(".kvdock-unfinished")]
        self.version = self.found()
        assert self.version in (1, 2, before)
        assert len(left) <= 1
        state = "the file before was whole" if left else "a new file was whole"
        self.faults.note("a process that saves is killed", state)
        self.save(3)  # removes what the process has left
        self.check()


def file_history(faults: Faults, steps: int = 12) -> None:
    """Save, damage, load and kill in any order, in one folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(faults, Path(name), faults.chance.choice(list(KINDS)))
        folder.save(faults.chance.choice([1, 2, 3]))
        folder.check()
        kinds = [folder.damaged, folder.fails_to_save, folder.fails_to_load] * 4 + [folder.too_small]
        for _ in range(steps):
            faults.chance.choice(kinds)()
        folder.killed()
