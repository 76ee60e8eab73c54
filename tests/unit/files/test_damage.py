"""Files that are cut, changed, of something else or made to hurt: each is refused, says why, and changes nothing."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import kvdock
from kvdock.errors import FileAccessError, FileContentError, KVDockError
from kvdock.files import container, load_pool, load_prefix, save_pool, save_prefix
from support_files import CANARY, compute, pool, snapshot

IDS = list(range(9))


@functools.cache
def good() -> bytes:
    """Return a small file of two blocks."""
    cache, manager = pool(num_blocks=4)
    compute(cache, manager, IDS, ("a",))
    with tempfile.TemporaryDirectory() as folder:
        save_prefix(Path(folder) / "f", manager, cache, IDS, ("a",), model="m")
        return (Path(folder) / "f").read_bytes()


TARGET = pool(num_blocks=4)


def refused(path: Path, kind: type[KVDockError] = FileContentError) -> str:
    """Load a file, which must be refused with nothing changed; return what was said."""
    cache, manager = TARGET
    with pytest.raises(kind) as caught:
        load_prefix(path, manager, cache, model="m")
    assert manager.blocks_used == 0
    assert manager.prefix.stats.lookups == 0
    assert caught.value.fix
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def loads(data: bytes, path: Path) -> None:
    """Check that a file is loaded all the same."""
    path.write_bytes(data)
    cache, manager = pool(num_blocks=4)
    assert load_prefix(path, manager, cache, model="m").num_tokens == 8


def lengths() -> tuple[int, int]:
    """Return where the header of the good file ends, and its length."""
    return 8 + int.from_bytes(good()[:8], "little"), len(good())


def test_cut_anywhere(tmp_path: Path) -> None:
    path, (header, whole) = tmp_path / "f", lengths()
    loads(good(), path)
    for length in [*range(40), *range(40, header, 97), *range(header - 3, whole, 41), *range(whole - 9, whole)]:
        path.write_bytes(good()[:length])
        refused(path)


@pytest.mark.slow
def test_cut_at_every_place(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for length in range(len(good())):
        path.write_bytes(good()[:length])
        refused(path)
    assert all((each == CANARY).all() for each in snapshot(TARGET[0]))


@pytest.mark.parametrize("more", [1, 8, 4096])
def test_longer_than_it_was(tmp_path: Path, more: int) -> None:
    (tmp_path / "f").write_bytes(good() + bytes(more))
    refused(tmp_path / "f")


def flipped(bit: int) -> bytes:
    data = bytearray(good())
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def harmless(bit: int) -> bool:
    """Whether a bit is in what nobody reads: the spaces that the header is filled up with may become other white space."""
    return flipped(bit)[bit // 8] in b" \t\r\n" and good()[bit // 8] in b" \t\r\n"


def check_flips(bits: list[int], path: Path) -> None:
    for bit in bits:
        path.write_bytes(flipped(bit))
        if harmless(bit):
            continue
        refused(path)


def test_flipped_bits(tmp_path: Path) -> None:
    draw = random.Random(1)  # noqa: S311 - the same bits each time
    check_flips(draw.sample(range(8 * len(good())), 100) + list(range(64)), tmp_path / "f")
    assert all((each == CANARY).all() for each in snapshot(TARGET[0]))


@pytest.mark.slow
def test_every_byte_with_a_flipped_bit(tmp_path: Path) -> None:
    draw = random.Random(2)  # noqa: S311 - the same bits each time
    check_flips([8 * byte + draw.randrange(8) for byte in range(len(good()))], tmp_path / "f")


def forged(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None], version: str = "1") -> None:
    """Write the good file with other contents and the right checksums, as somebody would who means harm."""
    path.write_bytes(good())
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["header"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
    sums = dict(header["tensors"])
    change(header, tensors)
    if header.get("tensors") == sums:
        header["tensors"] = {name: container.digest_of(each) if each.is_contiguous() else "" for name, each in tensors.items()}
    said = [version, "9.9", json.dumps(header)]
    metadata = dict(zip(container._KEYS, [*said, container._header_digest(said)], strict=True))
    safetensors.torch.save_file(tensors, path, metadata)


def set_header(**values: Any) -> Callable[[dict[str, Any], Any], None]:
    return lambda header, tensors: header.update(values)


def without(name: str) -> Callable[[dict[str, Any], Any], None]:
    return lambda header, tensors: header.pop(name)


def set_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, dict[str, torch.Tensor]], None]:
    return lambda header, tensors: tensors.update({name: make(tensors[name])})


def group(**values: Any) -> Callable[[dict[str, Any], Any], None]:
    return lambda header, tensors: header["groups"][0].update(values)


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(100), [])

FORGED: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], None], str]] = {
    "another model": (set_header(model="n"), "model: expected 'm', got 'n'"),
    "no model": (without("model"), "model: expected 'm', got None"),
    "another rank": (set_header(rank=[2, 0]), "rank: expected 1, got 2"),
    "a rank that is no list": (set_header(rank={}), "rank: "),
    "another block size": (set_header(block_size=8), "block_size: expected 4, got 8"),
    "a block size that is a float": (set_header(block_size=4.0), r"block_size: expected 4, got 4\.0"),
    "another dtype": (set_header(dtype="torch.bfloat16"), "dtype: expected 'torch.float16', got 'torch.bfloat16'"),
    "another order": (set_header(order="HND"), "order: expected 'block, token.*got 'HND'"),
    "no groups": (set_header(groups=[]), r"groups: expected \[.*got \[\]"),
    "another rule": (group(keeps="KeepWindow(window=4)"), r"groups: expected 'KeepAll\(\)', got 'KeepWindow"),
    "blocks of another size in a group": (group(block_size=2), "groups: expected 4, got 2"),
    "another layer": (lambda header, tensors: header["groups"][0]["buffers"][0].__setitem__(0, 7), "groups: expected 0, got 7"),
    "more in a group": (group(more=1), "groups: expected nothing more, got more"),
    "a kind that is none": (set_header(kind="cache"), "kind: expected prefix, got 'cache'.*name the file"),
    "a kind that is no text": (set_header(kind=["pool"]), "kind: "),
    "a pool": (set_header(kind="pool"), "kind: expected prefix, got 'pool'.*call load_pool"),
    "a part": (set_header(kind="part"), "kind: "),
    "no checksums": (set_header(tensors=None), "each with a checksum"),
    "a checksum too few": (lambda header, tensors: header["tensors"].pop("tokens"), "each with a checksum"),
    "a checksum of something else": (
        lambda header, tensors: header["tensors"].update(tokens="0" * 64),
        "tokens: contents with their checksum",
    ),
    "a checksum that is no text": (lambda header, tensors: header["tensors"].update(tokens=None), "tokens: contents with their checksum"),
    "namespaces that are none": (set_header(namespaces=7), "list of namespaces"),
    "no namespace": (set_header(namespaces=[]), "namespaces that are named"),
    "another namespace": (set_header(namespaces=[["b"]]), "names: that of block 0"),
    "a namespace of something else": (set_header(namespaces=[[1.5]]), "namespaces: expected lists"),
    "bytes that are none": (set_header(namespaces=[[{"bytes": "xy"}]]), "hexadecimal"),
    "bytes that are a number": (set_header(namespaces=[[{"bytes": 3}]]), "hexadecimal"),
    "a deep namespace": (set_header(namespaces=[DEEP]), "32 levels"),
    "parts that are none": (set_header(parts=5), "parts, each"),
    "parts without numbers": (set_header(parts={"number": "12345678"}), "parts, each"),
    "parts that do not grow": (set_header(parts={"number": "12345678", "starts": [0, 0], "headers": [""]}), "parts, each"),
    "parts elsewhere": (set_header(parts={"number": "../../ab", "starts": [0, 2], "headers": [""]}), "parts, each"),
    "parts that are not there": (set_header(parts={"number": "12345678", "starts": [0, 2], "headers": [""]}), "No such file"),
    "one tensor more": (lambda header, tensors: tensors.update(more=torch.zeros(1)), "tensors, each"),
    "one tensor fewer": (lambda header, tensors: tensors.pop("layers.1.v"), "tensors, each"),
    "contents in another dtype": (set_tensor("layers.0.k", lambda each: each.int()), r"layers.0.k: I16 \[2, 4, 2, 8\], got I32"),
    "contents in another shape": (set_tensor("layers.0.k", lambda each: each.flatten(1)), r"layers.0.k: .*got I16 \[2, 64\]"),
    "contents of fewer blocks": (set_tensor("layers.0.k", lambda each: each[:1].clone()), r"layers.0.k: .*got I16 \[1"),
    "tokens in another dtype": (set_tensor("tokens", lambda each: each.int()), "tokens: I64"),
    "tokens of other blocks": (set_tensor("tokens", lambda each: each.reshape(4, 2)), r"tokens: I64 \['any', 4\]"),
    "other tokens": (set_tensor("tokens", lambda each: each + 1), "names: that of block 0"),
    "other names": (set_tensor("names", lambda each: each ^ 1), "names: that of block 0"),
    "short names": (set_tensor("names", lambda each: each[:, :31].clone()), "names: U8"),
    "no blocks": (
        lambda header, tensors: tensors.update({name: each[:0].clone() for name, each in tensors.items()}),
        "at least one block",
    ),
    "no prefix": (set_tensor("ends", lambda each: each[:0].clone()), "at least one block and one prefix"),
    "two prefixes": (set_tensor("ends", lambda each: torch.tensor([1, 0])), "expected one prefix, got 2"),
    "an end beyond": (set_tensor("ends", lambda each: each + 5), "ends: blocks of the file"),
    "an end before": (set_tensor("ends", lambda each: each - 9), "ends: blocks of the file"),
    "an end twice": (set_tensor("ends", lambda each: each.repeat(2)), "ends: each once"),
    "a parent of its own": (set_tensor("parents", lambda each: torch.tensor([-1, 1])), "blocks before their children"),
    "a parent that comes later": (set_tensor("parents", lambda each: torch.tensor([1, -1])), "blocks before their children"),
    "a root of no namespace": (set_tensor("parents", lambda each: torch.tensor([-9, 0])), "namespaces that are named"),
    "another parent": (set_tensor("parents", lambda each: torch.tensor([-1, -1])), "names: that of block 1"),
    "kept twice": (set_tensor("kept.0", lambda each: each + 1), "kept: 0 or 1"),
    "not kept": (
        lambda header, tensors: tensors.update(
            {"kept.0": torch.tensor([[0], [1]], dtype=torch.uint8)}
            | {n: t[:1].clone() for n, t in tensors.items() if n.startswith("layers")}
        ),
        "kept: all that the next token reads",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_with_right_checksums(tmp_path: Path, name: str) -> None:
    change, said = FORGED[name]
    forged(tmp_path / "f", change)
    kind = FileAccessError if "No such file" in said else FileContentError
    assert re.search(said, refused(tmp_path / "f", kind))


def test_a_file_that_is_forged_into_itself_is_loaded(tmp_path: Path) -> None:
    forged(tmp_path / "f", lambda header, tensors: None)
    loads((tmp_path / "f").read_bytes(), tmp_path / "f")


@pytest.mark.parametrize("version", ["2", "0", "", "1.0", "x" * 1000])
def test_another_version_is_named(tmp_path: Path, version: str) -> None:
    forged(tmp_path / "f", lambda header, tensors: None, version=version)
    said = refused(tmp_path / "f")
    assert f"expected version '1' of the format, got version '{version[:40]}', written by kvdock '9.9'" in said
    assert len(said) < 500


@pytest.mark.parametrize("text", ["[1]", "7", "not json", "[" * 100_000, "1" * 10_000])
def test_a_header_that_is_none(tmp_path: Path, text: str) -> None:
    said = ["1", "0", text]
    metadata = dict(zip(container._KEYS, [*said, container._header_digest(said)], strict=True))
    safetensors.torch.save_file({"tokens": torch.zeros(1)}, tmp_path / "f", metadata)
    assert "a header in JSON" in refused(tmp_path / "f")


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for data in (b"", b"hello", b"\x80\x04\x95pickle......", os.urandom(500), b"PK\x03\x04" + bytes(100)):
        path.write_bytes(data)
        assert "a whole safetensors file" in refused(path)
    safetensors.torch.save_file({"a": torch.zeros(3)}, path)
    assert "expected a file of kvdock's" in refused(path)
    safetensors.torch.save_file({"a": torch.zeros(3)}, path, {"kvdock.files": "1"})
    assert "expected a file of kvdock's" in refused(path)


@pytest.mark.parametrize("length", [2**24 + 1, 2**40, 2**63, 2**64 - 1])
def test_hostile_lengths_take_no_memory(tmp_path: Path, length: int) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(min(length + 8, 2**25))  # without blocks on the disk
    tracemalloc.start()
    said = refused(tmp_path / "f")
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "which end within the header" in said or "a header of at most" in said
    assert taken < 2**20


def test_hostile_sizes_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    def tensor(shape: list[int], offsets: list[int]) -> dict[str, Any]:
        return {"dtype": "I64", "shape": shape, "data_offsets": offsets}

    for shape, offsets in (
        ([2**40, 4], [0, 2**45]),
        ([2**62, 2**62], [0, 64]),
        ([2, 4], [64, 0]),
        ([2, 4], [0, 2**64]),
        ([-2, 4], [0, 64]),
    ):
        header = json.dumps({"tokens": tensor(shape, offsets)}).encode()
        (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        refused(tmp_path / "f")


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none", FileAccessError)
    assert "Is a directory" in refused(tmp_path, FileAccessError)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe, a device" in refused(tmp_path / "pipe", FileAccessError)
    assert "a pipe, a device" in refused(Path("/dev/zero"), FileAccessError)
    with pytest.raises(OSError, match="No such file") as caught:
        load_prefix(tmp_path / "none", TARGET[1], TARGET[0])
    assert caught.value.errno == 2
    assert isinstance(caught.value.__cause__, OSError)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Save a pool in parts; return them."""
    cache, manager = pool()
    compute(cache, manager, list(range(40)))
    save_pool(tmp_path / "p.st", manager, cache, max_file_bytes=1500)
    found = sorted(tmp_path.glob("p.*-of-*.st"))
    assert len(found) > 3
    return found


def not_loaded(path: Path, said: str, kind: type[KVDockError] = FileContentError) -> None:
    cache, manager = pool()
    with pytest.raises(kind, match=said):
        load_pool(path, manager, cache)
    assert manager.blocks_used == 0
    assert all((each == CANARY).all() for each in snapshot(cache))


def test_parts_that_are_gone_changed_exchanged_or_of_another_save(parts: list[Path], tmp_path: Path) -> None:
    path, first, second = tmp_path / "p.st", parts[0].read_bytes(), parts[1].read_bytes()
    parts[1].unlink()
    not_loaded(path, "No such file", FileAccessError)
    parts[1].write_bytes(first)
    not_loaded(path, "expected part 2 of p.st, got another file")
    changed = bytearray(second)
    changed[-1] ^= 1
    parts[1].write_bytes(changed)
    not_loaded(path, "layers.*: contents with their checksum")
    parts[1].write_bytes(second[:-1])
    not_loaded(path, "a whole safetensors file")
    not_loaded(parts[0], "kind: expected pool, got 'part'")
    parts[1].write_bytes(second)
    cache, manager = pool()
    assert load_pool(path, manager, cache).num_tokens == 40


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.bfloat16}, "dtype: expected 'torch.bfloat16', got 'torch.float16'"),
    "block size": ({"block_size": 8}, "block_size: expected 8, got 4"),
    "layers": ({"kind": "unlike"}, "groups: "),
    "kind of layers": ({"kind": "latents"}, "groups: "),
    "rule": ({"kind": "only windows"}, "groups: expected 'KeepWindow"),
    "rank": ({"rank": kvdock.RankInfo("cpu", tp_size=2, tp_rank=1)}, "rank: expected 2, got 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_that_is_another(tmp_path: Path, name: str) -> None:
    how, said = OTHERS[name]
    (tmp_path / "f").write_bytes(good())
    cache, manager = pool(**how)
    with pytest.raises(FileContentError, match=said):
        load_prefix(tmp_path / "f", manager, cache, model="m")
    assert manager.blocks_used == 0


def test_the_namespace_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(good())
    cache, manager = pool()
    with pytest.raises(FileContentError, match=r"one prefix, in namespace \('b',\), got 1, in \('a',\)"):
        load_prefix(tmp_path / "f", manager, cache, namespace=("b",), model="m")
    assert load_prefix(tmp_path / "f", manager, cache, namespace=("a",), model="m").num_loaded == 8
