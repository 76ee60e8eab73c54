"""The way of blocks into files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvdock.files.container import write
from kvdock.files.contents import Content
from kvdock.files.folder import Unfinished, part_name
from kvdock.files.gather import Gathered
from kvdock.files.holder import Holder
from kvdock.files.interface import Meter, Progress, Saved
from kvdock.files.namespaces import to_json

__all__ = ["save"]


def save(path: Path, holder: Holder, found: Gathered, header: dict[str, Any], max_file_bytes: int, progress: Progress | None) -> Saved:
    """Write what was gathered to one file, or to parts of at most ``max_file_bytes`` of contents and the file that names them.

    Raises:
        FileAccessError: a file cannot be written; what was there before is as it was, or the new one is there, whole.
        CapacityError: the host has no memory for a part.
    """
    forest, contents = found.forest, holder.contents
    integers = {name: torch.from_numpy(np.array(array)) for name, array in forest.arrays().items()}
    header = {**header, "namespaces": [to_json(namespace) for namespace in forest.namespaces], "parts": None}
    starts = list(_starts(forest.kept, contents, max_file_bytes))
    sizes = [sum(int(kept.sum()) for kept in [forest.kept[content.group]]) * content.nbytes for content in contents]
    meter = Meter(progress, sum(sizes) + sum(tensor.nbytes for tensor in integers.values()))
    with Unfinished(path) as folder:
        names = [part_name(path, folder.number, at, len(starts) - 1) for at in range(len(starts) - 1)]
        if len(names) == 1:
            names = []
            integers |= _taken(holder, found, 0, len(forest), meter)
        else:
            digests = []
            for at, (start, stop) in enumerate(pairwise(starts)):
                of_part = {"kind": "part", "number": folder.number, "part": at}
                digests.append(write(folder.file(names[at]), _taken(holder, found, start, stop, meter), of_part))
            header["parts"] = {"number": folder.number, "starts": starts, "headers": digests}
        write(folder.file(path.name), integers, header)
        nbytes = sum(folder.file(name).stat().st_size for name in [*names, path.name])
        meter.finish()  # before anything is in place: what a progress raises leaves no trace
        folder.publish(names)
    return Saved(forest.ends.size, forest.tokens.size, nbytes, len(names) + 1)


def _starts(kept: tuple[Any, ...], contents: tuple[Content, ...], most: int) -> Iterator[int]:
    """Yield the first block of each part, and the number of all: each part has as many as fit, at least one."""
    of_group = np.array([sum(each.nbytes for each in contents if each.group == group) for group in range(len(kept))], dtype=np.int64)
    nbytes = sum(each.sum(axis=1) * size for each, size in zip(kept, of_group, strict=True))
    size = 0
    yield 0
    for at, each in enumerate(nbytes.tolist()):
        if at and size + each > most:
            yield at
            size = 0
        size += each
    yield len(nbytes)


def _taken(holder: Holder, found: Gathered, start: int, stop: int, meter: Meter) -> dict[str, torch.Tensor]:
    """Return the contents of blocks ``start`` to ``stop - 1``."""
    made = {}
    for content in holder.contents:
        sources = found.sources[content.group][start:stop]
        made[content.name] = tensor = holder.take(content, sources[sources >= 0])
        meter.add(tensor.nbytes)
    return made
