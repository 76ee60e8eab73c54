"""One file: what is written is read by anybody's safetensors, what the system says comes through, and checksums are those of the bytes."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from kvdock.errors import FileAccessError, FileContentError
from kvdock.files.container import VERSION, Container, digest_of, io_error, write
from kvdock.files.interface import Meter
from kvdock.files.saving import _starts

TENSORS = {
    "a": torch.arange(6, dtype=torch.int16).reshape(2, 3),
    "b": torch.tensor([[1, 255]], dtype=torch.uint8),
    "none": torch.empty((0, 4), dtype=torch.int64),
}


def test_anybody_can_read_it(tmp_path: Path) -> None:
    digest = write(tmp_path / "f", TENSORS, {"kind": "test", "odd": ["ü", 1]})
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        said = file.metadata()
        assert {name: file.get_tensor(name).tolist() for name in TENSORS} == {name: each.tolist() for name, each in TENSORS.items()}
    assert said["kvdock.files"] == VERSION
    assert said["sha256"] == digest == hashlib.sha256("\0".join((VERSION, said["kvdock"], said["header"])).encode()).hexdigest()
    header = json.loads(said["header"])
    assert (header["kind"], header["odd"]) == ("test", ["ü", 1])
    for name, tensor in TENSORS.items():
        assert header["tensors"][name] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest() == digest_of(tensor)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    digest = write(tmp_path / "f", TENSORS, {"kind": "test"})
    found = Container(tmp_path / "f")
    assert (found.digest, found.header["kind"], found.nbytes) == (digest, "test", (tmp_path / "f").stat().st_size)
    found.check_names(set(TENSORS))
    told: list[tuple[int, int]] = []
    meter = Meter(lambda *at: told.append(at), 14)
    for name, tensor in TENSORS.items():
        back = found.tensor(name, tensor.dtype, (None, *tensor.shape[1:]))
        assert torch.equal(back, tensor)
        found.verify(name, back, meter)
    assert told == [(12, 14), (14, 14)], "nothing of what is empty"


@pytest.mark.parametrize(
    ("dtype", "shape", "said"),
    [
        (torch.int32, (2, 3), r"a: I32 \[2, 3\], got I16 \[2, 3\]"),
        (torch.int16, (3, 2), r"a: I16 \[3, 2\], got I16 \[2, 3\]"),
        (torch.int16, (None, 2), r"a: I16 \['any', 2\], got I16 \[2, 3\]"),
        (torch.int16, (6,), r"a: I16 \[6\], got"),
        (torch.int16, (2, 3, 1), r"a: I16 \[2, 3, 1\], got"),
    ],
)
def test_another_dtype_or_shape(tmp_path: Path, dtype: torch.dtype, shape: Any, said: str) -> None:
    write(tmp_path / "f", TENSORS, {})
    with pytest.raises(FileContentError, match=said):
        Container(tmp_path / "f").tensor("a", dtype, shape)


@pytest.mark.parametrize(
    ("names", "said"), [({"a", "b"}, "others: none"), ({"a", "b", "none", "z"}, "others: z"), (set(), "others: a, b, none")]
)
def test_other_tensors(tmp_path: Path, names: set[str], said: str) -> None:
    write(tmp_path / "f", TENSORS, {})
    with pytest.raises(FileContentError, match=said):
        Container(tmp_path / "f").check_names(names)


def test_contents_that_are_not_those_of_the_checksum(tmp_path: Path) -> None:
    write(tmp_path / "f", TENSORS, {})
    found = Container(tmp_path / "f")
    with pytest.raises(FileContentError, match=r"a: contents with their checksum, got others.*Fix: save it anew"):
        found.verify("a", TENSORS["a"] + 1, Meter(None, 0))


@pytest.mark.parametrize(
    ("error", "number", "fix"),
    [
        (OSError(errno.ENOSPC, "No space left"), errno.ENOSPC, "free space"),
        (OSError(errno.EDQUOT, "Quota"), errno.EDQUOT, "free space"),
        (OSError(errno.EACCES, "Permission denied"), errno.EACCES, "permissions"),
        (safetensors.SafetensorError("I/O error: No space left on device (os error 28)"), errno.ENOSPC, "free space"),
        (FileNotFoundError("No such file or directory: f"), None, "check the path"),
    ],
)
def test_what_the_system_says_comes_through(error: Exception, number: int | None, fix: str) -> None:
    found = io_error("f", error)
    assert isinstance(found, FileAccessError)
    assert isinstance(found, OSError)
    assert found.errno == number
    assert fix in str(found)
    assert str(error) in str(found), "not only a number"


def test_a_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="No such file") as caught:
        write(tmp_path / "none" / "f", TENSORS, {})
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("counts", "most", "starts"),
    [
        ([1, 1, 1, 1], 20, [0, 2, 4]),
        ([1, 1, 1, 1], 39, [0, 3, 4]),
        ([1, 1, 1, 1], 40, [0, 4]),
        ([1, 1, 1, 1], 1, [0, 1, 2, 3, 4]),
        ([3, 0, 0, 1, 2], 30, [0, 3, 5]),
        ([0, 0, 5, 0], 10, [0, 2, 3, 4]),
        ([7], 1, [0, 1]),
    ],
)
def test_parts_have_as_many_blocks_as_fit_and_at_least_one(counts: list[int], most: int, starts: list[int]) -> None:
    import numpy as np

    from kvdock.files.contents import Content
    from kvdock.layers import Buffer

    kept = np.arange(8) < np.array(counts)[:, None]
    content = Content(0, 0, Buffer("k", (10,), torch.uint8), 1)
    found = list(_starts((kept,), (content,), most))
    assert found == starts
    for start, stop in itertools.pairwise(found):
        assert stop - start == 1 or 10 * sum(counts[start:stop]) <= most
