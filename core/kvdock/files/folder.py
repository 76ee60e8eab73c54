"""Putting files in place, whole or not at all.

::

    pool.safetensors                                 the file; of several parts the one that names them, put in place last
    pool.1f0c9a2e-00001-of-00002.safetensors         parts, each save's with a number of its own
    .pool.safetensors.1f0c9a2e.kvdock-unfinished/    what is being written; of a process that died the next save removes it

The name of a file stands for all of one save or all of the one before, whenever the process or the machine stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kvdock.files.container import io_error

__all__ = ["Unfinished", "part_name"]

_SUFFIX = ".kvdock-unfinished"


def part_name(path: Path, number: str, part: int, count: int) -> str:
    """Return the name of part ``part`` of ``count`` of a save with a number."""
    return f"{path.stem}.{number}-{part + 1:05}-of-{count:05}{path.suffix}"


class Unfinished:
    """A folder beside a file, in which the file is written; removed at the end in any case.

    Args:
        path: the file that is to be saved.

    Attributes:
        number: of the save: 8 hexadecimal digits.

    Raises:
        FileAccessError: the folder of the file is not there, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = secrets.token_hex(4)
        self._folder = path.with_name(f".{path.name}.{self.number}{_SUFFIX}")

    def __enter__(self) -> Unfinished:
        try:
            if self.path.is_dir():
                raise IsADirectoryError(f"{self.path} is a folder")
            with _locked(self.path.parent) as is_alone:
                if is_alone:
                    self._remove_abandoned()
                self._folder.mkdir(0o700)  # what is written in it gets its own mode only at the end
                self._lock = os.open(self._folder, os.O_RDONLY)
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise io_error(self.path, error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def file(self, name: str) -> Path:
        """Return where to write a file that is to have a name."""
        return self._folder / name

    def publish(self, parts: list[str]) -> None:
        """Put parts in place, then the file itself, and remove the parts of saves before.

        Raises:
            FileAccessError: a file cannot be put there. Those of the save before are as they were, or all of this one are in place.
        """
        folder, done = self.path.parent, list[Path]()
        try:
            with _locked(folder) as is_alone:
                for name in parts:
                    os.replace(self.file(name), folder / name)
                    done.append(folder / name)
                _sync(folder)  # the parts first: the file must never name what is not there
                os.replace(self.file(self.path.name), self.path)
                done.clear()
                _sync(folder)
                if is_alone:
                    self._remove_parts()
        except OSError as error:
            raise io_error(self.path, error) from error
        finally:
            for each in done:
                each.unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        """Remove what processes have left that died while they saved to this path."""
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
        for folder in [each for each in self.path.parent.iterdir() if pattern.fullmatch(each.name) and not each.is_symlink()]:
            # Another process may remove it first, it may be somebody else's, and it need be no folder.
            with contextlib.suppress(OSError), _locked(folder, wait=False) as is_alone:
                if is_alone:
                    shutil.rmtree(folder, ignore_errors=True)

    def _remove_parts(self) -> None:
        """Remove parts of other saves to this path."""
        stem, suffix = re.escape(self.path.stem), re.escape(self.path.suffix)
        pattern = re.compile(rf"{stem}\.(?!{self.number})[0-9a-f]{{8}}-\d{{5}}-of-\d{{5}}{suffix}")
        for each in [each for each in self.path.parent.iterdir() if pattern.fullmatch(each.name)]:
            with contextlib.suppress(OSError):  # the save is in place: what cannot be removed is no reason to say that it is not
                each.unlink()


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Keep other processes from a folder's lock, and say whether that was possible: some file systems have no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Wait until the device has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
