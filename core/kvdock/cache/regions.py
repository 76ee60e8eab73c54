"""Where a cache lies, in numbers: what a transport registers once, to compute the bytes of any block from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch

from kvdock.cache.pool import Store
from kvdock.ops.geometry import extent

__all__ = ["MemoryRegion", "Place", "bytes_of", "regions_of"]


@attrs.frozen
class Place:
    """A buffer of a layer in a region. A block of it is one run of ``nbytes`` bytes.

    Args:
        layer: the layer that keeps it.
        name: of the buffer, such as ``"k"``.
        group: number of the layer's group, whose block table has the ids.
        offset: bytes from the beginning of the region to block 0 of it.
        block_stride: bytes from one block to the next.
        shape: of one block: ``(block_size, ...)``, of a state its shape.
        strides: of one block, in bytes.
        dtype: of its elements.
    """

    layer: int
    name: str
    group: int
    offset: int
    block_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * self.dtype.itemsize

    def block(self, block_id: int) -> range:
        """Return the bytes of a block, counted from the beginning of the region."""
        begin = self.offset + block_id * self.block_stride
        return range(begin, begin + self.nbytes)


@attrs.frozen
class MemoryRegion:
    """One stretch of memory that a cache lies in, as long as the cache is.

    Args:
        device: where.
        address: of its first byte.
        nbytes: bytes; in an engine's memory some between may be nobody's or somebody else's.
        num_blocks: blocks of each place.
        places: what is where.
    """

    device: torch.device
    address: int
    nbytes: int
    num_blocks: int
    places: tuple[Place, ...]


def regions_of(store: Store, groups: Mapping[int, Mapping[str, int]], num_blocks: int) -> tuple[MemoryRegion, ...]:
    """Return the regions of a store; what lies in one storage is one. ``groups`` has the group of each layer's buffers."""
    return tuple(_region(memories, store, groups, num_blocks) for memories in _by_storage(store))


def bytes_of(store: Store) -> tuple[torch.Tensor, ...]:
    """Return the bytes of each region that `regions_of` returns, uint8 ``[nbytes]``: views of the memory."""
    found = []
    for memories in _by_storage(store):
        begin, end = _bounds(memories)
        storage = memories[0].untyped_storage()
        view = torch.empty(0, dtype=torch.uint8, device=memories[0].device)
        found.append(view.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,)))
    return tuple(found)


def _by_storage(store: Store) -> Collection[list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for pool in store.pools:
        found.setdefault(pool.memory.untyped_storage().data_ptr(), []).append(pool.memory)
    return found.values()


def _bounds(memories: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one behind the last."""
    return min(each.data_ptr() for each in memories), max(each.data_ptr() + extent(each) for each in memories)


def _region(memories: Sequence[torch.Tensor], store: Store, groups: Mapping[int, Mapping[str, int]], num_blocks: int) -> MemoryRegion:
    storage = memories[0].untyped_storage().data_ptr()
    begin, end = _bounds(memories)
    places = tuple(
        Place(layer, name, groups[layer][name], view.data_ptr() - begin, *_steps(view))
        for layer, found in store.named.items()
        for name, view in found.items()
        if view.untyped_storage().data_ptr() == storage
    )
    return MemoryRegion(memories[0].device, begin, end - begin, num_blocks, places)


def _steps(view: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    block, *strides = (stride * view.itemsize for stride in view.stride())
    return block, tuple(view.shape[1:]), tuple(strides), view.dtype
