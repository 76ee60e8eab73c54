"""What a cache in blocks says of its memory: which layers share a block table, what each keeps, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from kvdock.cache.grouping import Grouping
from kvdock.cache.interface import Cache, check_layer
from kvdock.cache.paged_options import PagedConfig
from kvdock.cache.pool import Store
from kvdock.cache.regions import MemoryRegion, bytes_of, regions_of
from kvdock.errors import ArgumentValueError
from kvdock.layers.groups import LayerGroup
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = ["GroupedCache"]


class GroupedCache(Cache):
    """A cache whose layers form groups, each with a block table and slots of its own."""

    spec: KVSpec
    config: PagedConfig
    _named: str | None
    rank: RankInfo
    _grouping: Grouping
    _store: Store
    _num_blocks: int
    _sources: list[int]
    _numbers: dict[int, dict[str, int]]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.spec.layers)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the same for every layer. Each may belong to any group, to one at a time."""
        return self._num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool: all layers, and what is unused in blocks."""
        return sum(pool.memory.nbytes for pool in self._store.pools)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups. In a group's blocks a slot is ``block_id * block_size + offset``, with the group's `LayerGroup.block_size`."""
        return self._grouping.plan.groups

    @property
    def block_size(self) -> int:
        """Tokens in a block, where there is one group.

        Raises:
            ArgumentValueError: there are several: each has a block table of its own, and perhaps blocks of other sizes.
        """
        if len(self.groups) > 1:
            got = f"{len(self.groups)} groups, of blocks of {', '.join(str(group.block_size) for group in self.groups)}"
            fix = "ask groups[i].block_size, with i from group_of(layer); or set keep_all=True, for one table of all keys and values"
            raise ArgumentValueError(f"{type(self).__name__}.block_size", expected="one group", got=got, fix=fix)
        return self.groups[0].block_size

    def group_of(self, layer: int, buffer: str | None = None) -> int:
        """Return the number of the group whose slots a layer's buffers go by; a layer that shares another's has that one's.

        Args:
            layer: 0 to ``num_layers - 1``.
            buffer: which buffer of it, such as ``"k"``; not needed where all are in one group.

        Raises:
            IndexRangeError: no such layer.
            ArgumentValueError: no such buffer; or none is named, and they are in several groups.
        """
        found = self._numbers[self._source(layer)]
        if buffer is None and len(set(found.values())) == 1:
            return next(iter(found.values()))
        if buffer not in found:
            expected = f"one of {', '.join(map(repr, found))}"
            fix = "name the buffer: a layer of several kinds has parts in several groups"
            raise ArgumentValueError(f"{type(self).__name__}.group_of: buffer", expected=expected, got=repr(buffer), fix=fix)
        return found[buffer]

    def buffers(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return what a layer keeps, by name: ``[num_blocks, block_size, ...]``, and of a state ``[num_blocks, ...]``.

        They are views of the cache's memory, always the same; what shares another layer's has that one's.

        Raises:
            IndexRangeError: no such layer.
        """
        return MappingProxyType(self._store.named[self._source(layer)])

    def state(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the states that a layer keeps, by name, ``[num_blocks, *shape]``: that of a sequence is at its block's number.

        Nothing zeroes the state of a block that another sequence had: zero it, or write all of it, before it is read.

        Raises:
            IndexRangeError: no such layer.
            ArgumentValueError: it keeps none.
        """
        found = {
            name: self.buffers(layer)[name]
            for name, group in self._numbers[self._source(layer)].items()
            if self.groups[group].retention.is_state
        }
        if not found:
            raise ArgumentValueError(
                f"{type(self).__name__}.state: layer",
                expected="one that keeps a state",
                got=self._described(layer),
                fix="ask buffers(layer)",
            )
        return MappingProxyType(found)

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """Return where the cache lies: what a transport registers, and how it finds the bytes of a block. It stays so for its life."""
        return regions_of(self._store, self._numbers, self._num_blocks)

    def region_bytes(self) -> tuple[torch.Tensor, ...]:
        """Return the bytes of each of `memory_regions`, uint8 ``[nbytes]``: views of the memory, for who copies by offsets."""
        return bytes_of(self._store)

    def reset(self) -> None:
        """Zero the memory. Views handed out before remain valid."""
        for pool in self._store.pools:
            pool.memory.zero_()

    def _source(self, layer: int) -> int:
        return self._sources[check_layer(type(self).__name__, layer, len(self._sources))]

    def _described(self, layer: int) -> str:
        return f"layer {layer}, which keeps {', '.join(self._numbers[self._source(layer)])}"
