"""Which blocks to save: those that sequences need to go on behind prefixes, each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.files.forest import Forest, cached_places
from kvdock.files.holder import Holder
from kvdock.files.namespaces import check_depth
from kvdock.prefix.inputs import namespace_key
from kvdock.prefix.interface import BlockIds, Namespace, StoredPrefix
from kvdock.prefix.names import NAME_BYTES, block_names

__all__ = ["Gathered", "gathered", "with_checkpoints"]


@attrs.frozen(eq=False)
class Gathered:
    """What is to be saved.

    Args:
        forest: the blocks.
        sources: of each layer group, what `Holder.take` takes for each block, int32 as ``forest.kept``; -1 for what is not saved.
    """

    forest: Forest
    sources: tuple[BlockIds, ...]


class _Growing:
    """A forest that grows: prefixes share what they begin with."""

    def __init__(self, widths: Iterable[int], block_size: int) -> None:
        self.block_size = block_size
        self.namespaces: dict[object, tuple[int, Namespace]] = {}
        self.places: dict[tuple[int, bytes], int] = {}
        self.tokens: list[npt.NDArray[np.int64]] = []
        self.parents: list[int] = []
        self.names: list[bytes] = []
        self.ends: dict[int, None] = {}
        self.widths = tuple(widths)
        self.sources: list[list[BlockIds]] = [[] for _ in self.widths]

    def add(self, ids: npt.NDArray[np.int64], namespace: Namespace) -> npt.NDArray[np.int64]:
        """Return the blocks of a prefix; those that are not there yet are added."""
        check_depth("save: namespace", namespace)
        number, _ = self.namespaces.setdefault(namespace_key("save: namespace", namespace), (len(self.namespaces), namespace))
        at, path = -1 - number, list[int]()
        for block in ids.reshape(-1, self.block_size):
            key = at, block.tobytes()
            if key not in self.places:
                self._append(key, block, namespace)
            at = self.places[key]
            path.append(at)
        self.ends[at] = None
        return np.array(path)

    def _append(self, key: tuple[int, bytes], block: npt.NDArray[np.int64], namespace: Namespace) -> None:
        parent = key[0]
        self.places[key] = len(self.parents)
        self.tokens.append(block)
        self.parents.append(parent)
        self.names += block_names(block, self.block_size, namespace, parent=self.names[parent] if parent >= 0 else None)
        for width, sources in zip(self.widths, self.sources, strict=True):
            sources.append(np.full(width, -1, dtype=np.int32))

    def finish(self) -> Gathered:
        """Return what there is."""
        sources = tuple(np.array(each, dtype=np.int32).reshape(-1, width) for each, width in zip(self.sources, self.widths, strict=True))
        names = np.frombuffer(b"".join(self.names), dtype=np.uint8).reshape(-1, NAME_BYTES)
        forest = Forest(
            np.array(self.tokens, dtype=np.int64).reshape(-1, self.block_size),
            np.array(self.parents, dtype=np.int64),
            names,
            np.array(list(self.ends), dtype=np.int64),
            tuple(each >= 0 for each in sources),
            tuple(namespace for _, namespace in self.namespaces.values()),
        )
        return Gathered(forest, sources)


def gathered(holder: Holder, prefixes: Iterable[StoredPrefix]) -> Gathered:
    """Collect the blocks of prefixes, each as far as every layer group can go on behind it."""
    size = holder.manager.block_size
    growing = _Growing((group.width(size) for group in holder.groups), size)
    for tokens, namespace in prefixes:
        length, tables = holder.match(tokens, namespace)
        if not length:
            continue
        path = growing.add(tokens[:length].astype(np.int64), namespace)
        for group, table, width, sources in zip(holder.groups, tables, growing.widths, growing.sources, strict=True):
            for place in cached_places(group, length, size).tolist():
                sources[path[place // width]][place % width] = table[place]
    return growing.finish()


def with_checkpoints(holder: Holder, prefixes: Iterable[StoredPrefix]) -> Iterator[StoredPrefix]:
    """Yield prefixes, and before each, of layers with states, the shorter ones that end at a checkpoint: others may begin so, too."""
    has_states = any(group.retention.is_state for group in holder.groups)
    for prefix in prefixes:
        found = [prefix]
        while has_states and (length := holder.cached(found[-1].tokens, prefix.namespace)):
            found[-1] = StoredPrefix(found[-1].tokens[:length], prefix.namespace)
            found.append(StoredPrefix(found[-1].tokens[:-1], prefix.namespace))
        yield from reversed(found)
