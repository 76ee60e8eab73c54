"""One memory for all layers, block by block, whatever they keep: blocks are of one size, and any may belong to any group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from kvdock.cache.grouping import PLACE, Grouping, places_in, used_parts
from kvdock.cache.memory import aligned, fresh
from kvdock.cache.pool import Pool, Store
from kvdock.layers.groups import LayerGroup
from kvdock.layers.interface import Buffer
from kvdock.layout import HeadLayout

__all__ = ["BlockPool", "block_store"]


@attrs.frozen(eq=False)
class BlockPool(Pool):
    """A memory of blocks, ``[num_blocks, block_bytes]``, and everybody's views of it.

    Args:
        named: of each layer that keeps something, its buffers by name: ``[num_blocks, block_size, ...]``, a state ``[num_blocks, ...]``.
        pairs: of each layer that attention reads, keys and values.
        halves: the blocks as two caches that share no byte, since blocks are copied in two at once.
        is_given: whether somebody else owns the memory, and perhaps more around it.
    """

    named: Mapping[int, Mapping[str, torch.Tensor]]
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    halves: tuple[torch.Tensor, torch.Tensor]
    is_given: bool = False

    def _copied(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_given:
            return super()._copied(memo)
        memory = fresh(self.memory.shape, self.memory.dtype, self.memory.device, self.alignment).copy_(self.memory)
        memo[id(self.memory)] = memory
        return memory


def block_store(grouping: Grouping, memory: torch.Tensor, head_layout: HeadLayout, alignment: int, *, is_given: bool = False) -> Store:
    """View a memory of blocks as the layers' buffers.

    Args:
        grouping: what is where.
        memory: ``[num_blocks, block_bytes]`` uint8, dense, at a multiple of 16 bytes.
        head_layout: order of what has heads in a block.
        alignment: bytes that the address of a copy is to be a multiple of.
        is_given: whether somebody else owns it.
    """
    roots: dict[torch.dtype, torch.Tensor] = {}
    named: dict[int, dict[str, torch.Tensor]] = {}
    for group in grouping.plan.groups:
        for layer, _, buffer, begin, _ in places_in(group):
            root = roots.setdefault(buffer.dtype, memory.view(buffer.dtype))  # one: torch.compile is given it for all views of a dtype
            named.setdefault(layer, {})[buffer.name] = _view(root, memory, group, buffer, begin, head_layout)
    pairs = {layer: use.attended(named[layer], part) for layer, (part, use) in used_parts(grouping.plan.groups).items()}
    halves = _halves(memory)
    return Store((BlockPool(memory, named, pairs, halves, is_given, alignment=alignment),), named, pairs, (halves,))


def _view(root: torch.Tensor, memory: torch.Tensor, group: LayerGroup, buffer: Buffer, begin: int, head_layout: HeadLayout) -> torch.Tensor:
    """Return the view of a buffer; ``begin`` is where it begins in a block."""
    size, (num_blocks, block_bytes) = buffer.dtype.itemsize, memory.shape
    shape: Sequence[int] = buffer.shape if group.retention.is_state else (group.block_size, *buffer.shape)
    swapped = head_layout is HeadLayout.HND and len(shape) == 3 and not group.retention.is_state
    order = (shape[1], shape[0], shape[2]) if swapped else shape
    dense = torch.empty(order, device="meta").stride()
    strides = (dense[1], dense[0], dense[2]) if swapped else dense
    return root.as_strided((num_blocks, *shape), (block_bytes // size, *strides), root.storage_offset() + begin // size)


def _halves(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all bytes of all blocks as two caches of one row a block, the second at a multiple of 16 bytes if a block has so many."""
    nbytes = memory.shape[1]
    half = aligned(nbytes // 2, PLACE) if nbytes > PLACE else nbytes // 2
    blocks = memory[:, None, None]
    return blocks[..., :half], blocks[..., half:]
