"""The way of blocks out of files: all of a file is verified before anything of it is written, and written before it can be found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import FileContentError
from kvdock.files.container import Container
from kvdock.files.contents import Content, put
from kvdock.files.description import check_fits
from kvdock.files.folder import part_name
from kvdock.files.forest import INTEGERS, Forest, cached_places, needed_blocks
from kvdock.files.holder import Holder
from kvdock.files.interface import Meter, Progress
from kvdock.files.namespaces import from_json
from kvdock.prefix.names import NAME_BYTES
from kvdock.scheduler.cached import cached_blocks, note_only_needed

__all__ = ["Reading", "load_path", "opened"]

_KINDS = {"prefix": "load_prefix", "pool": "load_pool"}


@attrs.frozen(eq=False)
class Reading:
    """A file that is verified.

    Args:
        forest: its blocks.
        contents: the buffers of the cache, and of its file.
        starts: the first block of each part, and the number of all.
        tensors: of each part, what it has by name.
        meter: who is told of progress.
    """

    forest: Forest
    contents: tuple[Content, ...]
    starts: npt.NDArray[np.int64]
    tensors: tuple[dict[str, torch.Tensor], ...]
    meter: Meter


def opened(path: Path, kind: str, holder: Holder, expected: dict[str, Any], progress: Progress | None) -> Reading:
    """Open a file, and verify all of it.

    Raises:
        FileAccessError: it or a part is not there, or cannot be read.
        FileContentError: it is damaged, or of something else.
    """
    main = Container(path)
    if main.header.get("kind") != kind:
        got = main.header.get("kind")
        fix = f"call {_KINDS[got]}" if isinstance(got, str) and got in _KINDS else "name the file that was saved"
        raise FileContentError(f"{path}: kind", expected=kind, got=repr(got)[:40], fix=fix)
    check_fits(path, main.header, expected)
    contents, groups = holder.contents, holder.groups
    files, starts = _files(main)
    integers = {*INTEGERS, *(f"kept.{group}" for group in range(len(groups)))}
    main.check_names(integers | ({content.name for content in contents} if files == [main] else set()))
    arrays = _integers(main, expected["block_size"], [group.width(expected["block_size"]) for group in groups])
    if starts[-1] not in (None, len(arrays["tokens"])):
        raise _odd(path, f"parts of {len(arrays['tokens'])} blocks", f"parts of {starts[-1]}")
    bounds = np.array([*starts[:-1], len(arrays["tokens"])])
    kept = [arrays[f"kept.{group}"].numpy() for group in range(len(groups))]
    tensors = tuple(_contents(file, contents, kept, *each, main) for file, each in zip(files, pairwise(bounds.tolist()), strict=True))
    # Verified once and copied once.
    meter = Meter(progress, 2 * sum(each.nbytes for part in (arrays, *tensors) for each in part.values()))
    for file, part in ((main, arrays), *zip(files, tensors, strict=True)):
        for name, tensor in part.items():
            file.verify(name, tensor, meter)
    namespaces = main.header.get("namespaces")
    if not isinstance(namespaces, list):
        raise _odd(path, "a list of namespaces", repr(namespaces)[:80])
    forest = Forest.read(
        path, {name: array.numpy() for name, array in arrays.items()}, [from_json(path, each) for each in namespaces], groups
    )
    for end in forest.ends.tolist():
        forest.check_kept(path, forest.path(end), groups)
    return Reading(forest, contents, bounds, tensors, meter)


def _files(main: Container) -> tuple[list[Container], list[int | None]]:
    """Return the files with contents, and the first block of each; last how many blocks there are, None where that is not said."""
    parts = main.header.get("parts")
    if parts is None:
        return [main], [0, None]
    try:
        number, starts, digests = str(parts["number"]), list(parts["starts"]), list(parts["headers"])
        is_right = len(starts) == len(digests) + 1 and starts[0] == 0 and all(type(at) is int for at in starts)
        is_right = is_right and all(one < other for one, other in pairwise(starts)) and len(number) == 8 and number.isalnum()
    except (KeyError, TypeError, IndexError) as error:
        raise _odd(main.path, "parts, each with its first block", repr(parts)[:80]) from error
    if not is_right:
        raise _odd(main.path, "parts, each with its first block", repr(parts)[:80])
    files = [Container(main.path.with_name(part_name(main.path, number, at, len(digests)))) for at in range(len(digests))]
    for at, (file, digest) in enumerate(zip(files, digests, strict=True)):
        if file.digest != digest:
            raise _odd(file.path, f"part {at + 1} of {main.path.name}", "another file, perhaps of another save")
    return files, starts


def _integers(main: Container, block_size: int, widths: list[int]) -> dict[str, torch.Tensor]:
    """Return the arrays of a file, whose dtypes and shapes are right."""
    tokens = main.tensor("tokens", torch.int64, (None, block_size))
    count = len(tokens)
    found = {
        "tokens": tokens,
        "parents": main.tensor("parents", torch.int64, (count,)),
        "names": main.tensor("names", torch.uint8, (count, NAME_BYTES)),
        "ends": main.tensor("ends", torch.int64, (None,)),
    }
    for group, width in enumerate(widths):
        found[f"kept.{group}"] = main.tensor(f"kept.{group}", torch.uint8, (count, width))
    return found


def _contents(
    file: Container, contents: tuple[Content, ...], kept: list[npt.NDArray[Any]], start: int, stop: int, main: Container
) -> dict[str, torch.Tensor]:
    """Return the contents of a part, whose dtypes and shapes are right."""
    if file is not main:
        file.check_names({content.name for content in contents})
    counts = [int(np.count_nonzero(each[start:stop])) for each in kept]
    return {content.name: file.tensor(content.name, content.dtype, (counts[content.group], *content.shape)) for content in contents}


def load_path(reading: Reading, rows: tuple[npt.NDArray[np.int64], ...], holder: Holder, end: int) -> int:
    """Load the prefix that ends with a block, whole or not at all; return how many of its tokens were read, and not found.

    Args:
        reading: the file.
        rows: where blocks are in it, `Forest.rows`.
        holder: gets the blocks.
        end: the last block.

    Raises:
        OutOfBlocksError: there is no room, whatever is evicted.
    """
    forest, manager, size = reading.forest, holder.manager, holder.manager.block_size
    path = forest.path(end)
    tokens, namespace = forest.tokens[path].reshape(-1), forest.namespace(path)
    if holder.cached(tokens, namespace) == tokens.size:
        return 0
    before, _ = cached_blocks(manager, tokens, namespace)
    # As a prompt with a token more, the first chunk of which ends where this does: that is where states are kept.
    seq = manager.begin(np.append(tokens, tokens[:1]), namespace, at_most=tokens.size - before)
    try:
        cached = seq.cached_len
        for group, of in enumerate(holder.cache.groups):
            width = of.width(size)
            places, blocks = cached_places(of, tokens.size, size), seq.block_table(group)[needed_blocks(of, tokens.size)]
            missing = places >= cached // size * width
            units = path[places[missing] // width]
            _copy(reading, holder, group, units, rows[group][units, places[missing] % width], blocks[missing])
        if forest.ends.size == 1:
            reading.meter.finish()  # before it can be found: what a progress raises leaves no trace
        if holder.beside is not None:
            holder.beside.put(tokens, namespace, _states(reading, len(rows) - 1, end, int(rows[-1][end, 0])))
        note_only_needed(manager, seq, tokens.size)
        manager.commit(seq, (), computed=tokens.size)
    except BaseException:
        manager.abort(seq)
        raise
    manager.finish(seq)
    return int(tokens.size - cached)


def _copy(
    reading: Reading, holder: Holder, group: int, units: npt.NDArray[Any], rows: npt.NDArray[Any], blocks: npt.NDArray[np.int32]
) -> None:
    """Copy blocks of a group into the cache."""
    for mine, content, found in _found(reading, group, units, rows):
        put(holder.cache, content, blocks[mine], found)


def _states(reading: Reading, group: int, unit: int, row: int) -> dict[str, torch.Tensor]:
    """Return the states behind a block."""
    found = _found(reading, group, np.array([unit]), np.array([row]))
    return {content.name: tensor[0, 0].view(content.buffer.dtype) for _, content, tensor in found}


def _found(
    reading: Reading, group: int, units: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> Iterator[tuple[npt.NDArray[np.bool_], Content, torch.Tensor]]:
    """Yield contents of blocks of a group, in memory of their own, and which of the blocks these are: those of one part of the file."""
    parts = np.searchsorted(reading.starts, units, side="right") - 1
    for part in np.unique(parts).tolist():
        mine = parts == part
        before = int(np.count_nonzero(reading.forest.kept[group][: reading.starts[part]]))
        index = torch.from_numpy(rows[mine] - before)
        for content in reading.contents:
            if content.group == group:
                found = reading.tensors[part][content.name].index_select(0, index)
                yield mine, content, found
                reading.meter.add(found.nbytes)


def _odd(path: object, expected: str, got: str) -> FileContentError:
    return FileContentError(f"{path}", expected=expected, got=got, fix="save it anew: a file that was cut or changed cannot be repaired")
