"""One safetensors file, with a header and checksums. Files come from outside: nothing is believed, and nothing is taken before it fits.

::

    8 bytes, the header's length | the header: tensors and metadata | tensors
    metadata:  kvdock.files  version of this format           header  JSON: what is saved, the SHA-256 of each tensor, see below
               kvdock        version of kvdock that wrote it  sha256  of the three before
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvdock.errors import FileAccessError, FileContentError, UnsupportedError
from kvdock.files.interface import Meter

__all__ = ["VERSION", "Container", "digest_of", "io_error", "library", "write"]

VERSION = "1"
"""Of the format. Another one is refused by its name."""

_MOST_HEADER = 2**24
_KEYS = ("kvdock.files", "kvdock", "header", "sha256")
_DTYPES = {torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.complex128: "C128"}
_SAVE_ANEW = "save it anew: a file that was cut or changed cannot be repaired"


def library() -> Any:
    """Return the safetensors library.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError("kvdock.files", expected="safetensors", got=str(error), fix="pip install 'kvdock[files]'") from error
    return safetensors


def io_error(path: object, error: Exception) -> FileAccessError:
    """Return the error for what the system, or the library below it, says of a file; to be raised from that."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free space there, or save to another place" if is_full else "check the path and its permissions"
    made = FileAccessError(f"{path}", expected="a file that can be read and written", got=str(error), fix=fix)
    made.errno = number
    return made


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a contiguous tensor of integers on the host, in hexadecimal."""
    return hashlib.sha256(tensor.reshape(-1).numpy().data).hexdigest()


def write(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> str:
    """Write a file, and wait until the device has it; return the digest of its header.

    Raises:
        FileAccessError: the file cannot be written.
        UnsupportedError: the header is longer than one that is read.
    """
    found = library()
    text = json.dumps({**header, "tensors": {name: digest_of(tensor) for name, tensor in tensors.items()}})
    parts = [VERSION, _kvdock_version(), text]
    digest = _header_digest(parts)
    try:
        found.torch.save_file(dict(tensors), path, dict(zip(_KEYS, [*parts, digest], strict=True)))
        with path.open("rb+") as file:
            os.fchmod(file.fileno(), 0o600)  # prompts can be read from it
            length = int.from_bytes(file.read(8), "little")
            os.fsync(file.fileno())
    except (OSError, found.SafetensorError) as error:
        raise io_error(path, error) from error
    if length > _MOST_HEADER:
        expected, fix = f"a header of at most {_MOST_HEADER} bytes", "save fewer namespaces, or larger parts, and a short model="
        raise UnsupportedError(f"{path}", expected=expected, got=length, fix=fix)
    return digest


def _kvdock_version() -> str:
    try:
        return metadata.version("kvdock")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "unknown"


def _header_digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


class Container:
    """A file that is open for reading, of which the header is whole. Its tensors are read when they are asked for.

    Args:
        path: where it is.

    Attributes:
        header: what was saved.
        digest: of the header.

    Raises:
        FileAccessError: it is not there, or cannot be read.
        FileContentError: it is none of kvdock's, is cut, has a damaged header, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = library()
        try:
            _check_length(path)
            self._file = found.safe_open(path, framework="pt", device="cpu")
            said = self._file.metadata() or {}
            self._names = set(self._file.keys())
        except OSError as error:
            raise error if isinstance(error, FileAccessError) else io_error(path, error) from error
        except found.SafetensorError as error:
            raise _damaged(path, "a whole safetensors file", str(error)) from error
        _check_version(path, said)
        *parts, self.digest = (str(said[key]) for key in _KEYS)
        if _header_digest(parts) != self.digest:
            raise _damaged(path, "a header with its checksum", "another")
        self.header = _parsed(path, parts[2])

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def check_names(self, names: set[str]) -> None:
        """Raise unless these are the tensors of the file, and each has a checksum."""
        sums = self.header.get("tensors")
        if self._names != names or not isinstance(sums, dict) or set(sums) != names:
            odd = sorted(self._names ^ names)[:3]
            raise _damaged(self.path, f"{len(names)} tensors, each with a checksum", f"others: {', '.join(odd)}" if odd else "none")

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> torch.Tensor:
        """Return a tensor that lies in the file until it is read.

        Args:
            name: which; `check_names` has found it.
            dtype: that it must have.
            shape: that it must have; None for any size.
        """
        found = self._file.get_slice(name)
        sizes = tuple(found.get_shape())
        fits = len(sizes) == len(shape) and all(want is None or size == want for size, want in zip(sizes, shape, strict=True))
        if found.get_dtype() != _DTYPES[dtype] or not fits:
            wanted = f"{_DTYPES[dtype]} {['any' if size is None else size for size in shape]}"
            raise _damaged(self.path, f"{name}: {wanted}", f"{found.get_dtype()} {list(sizes)}")
        made: torch.Tensor = self._file.get_tensor(name)
        return made

    def verify(self, name: str, tensor: torch.Tensor, meter: Meter) -> None:
        """Raise unless a tensor has its checksum. Reads all of it."""
        if digest_of(tensor) != self.header["tensors"][name]:
            raise _damaged(self.path, f"{name}: contents with their checksum", "others")
        meter.add(tensor.nbytes)


def _check_length(path: Path) -> None:
    """Raise unless this is a file, and long enough for the header that it says it has."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not be waited for
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileAccessError(f"{path}", expected="a file", got="a pipe, a device or the like", fix="name the file that was saved")
        begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > status.st_size - 8:
        raise _damaged(path, "a whole safetensors file", f"{status.st_size} bytes, which end within the header")
    if length > _MOST_HEADER:
        raise _damaged(path, f"a header of at most {_MOST_HEADER} bytes", f"{length}")


def _check_version(path: Path, said: Mapping[str, str]) -> None:
    """Raise unless metadata is that of a file of this version."""
    version = said.get(_KEYS[0])
    if version is not None and version != VERSION:
        got = f"version {version[:40]!r}, written by kvdock {said.get('kvdock', 'unknown')[:40]!r}"
        raise FileContentError(
            f"{path}", expected=f"version {VERSION!r} of the format", got=got, fix="load it with that kvdock, or save it anew with this one"
        )
    if set(said) != set(_KEYS):
        fix = "name a file that kvdock.files saved"
        raise FileContentError(f"{path}", expected="a file of kvdock's", got="a safetensors file without its header", fix=fix)


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "a header in JSON", str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "a header in JSON", text[:40])
    return found


def _damaged(path: object, expected: str, got: str) -> FileContentError:
    return FileContentError(f"{path}", expected=expected, got=got, fix=_SAVE_ANEW)
