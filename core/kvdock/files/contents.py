"""Blocks of a cache as integers of their elements' size, in one order whatever the layout: bits arrive as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.bits import as_bits, bits_dtype
from kvdock.cache.grouped import GroupedCache
from kvdock.cache.memory import allocated
from kvdock.layers.groups import LayerGroup
from kvdock.layers.interface import Buffer

__all__ = ["Content", "contents_of", "put", "taken"]


@attrs.frozen
class Content:
    """A buffer of a layer.

    Args:
        group: the number of its layer group.
        layer: the layer.
        buffer: what it keeps of a token.
        block_size: tokens in a block.
    """

    group: int
    layer: int
    buffer: Buffer
    block_size: int

    @property
    def name(self) -> str:
        """What a file calls it."""
        return f"layers.{self.layer}.{self.buffer.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block."""
        return (self.block_size, *self.buffer.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.buffer.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The integers that a file has."""
        return bits_dtype(self.buffer.dtype.itemsize)


def contents_of(groups: Sequence[LayerGroup]) -> tuple[Content, ...]:
    """Return all buffers of layer groups; what shares another layer's is not there again."""

    def found() -> Iterator[Content]:
        for number, group in enumerate(groups):
            for (layer, _), part in zip(group.members, group.parts, strict=True):
                for buffer in part.buffers:
                    yield Content(number, layer, buffer, group.block_size)

    return tuple(found())


def _bits(cache: GroupedCache, content: Content) -> torch.Tensor:
    view = cache.buffers(content.layer)[content.buffer.name]
    return as_bits(view).view(view.shape[0], *content.shape)


def taken(cache: GroupedCache, content: Content, blocks: npt.NDArray[np.int32]) -> torch.Tensor:
    """Return blocks of a buffer in the memory of the host, ``[len(blocks), *content.shape]``.

    Raises:
        CapacityError: there is not as much memory.
    """
    index = torch.from_numpy(blocks.astype(np.int64)).to(cache.device)
    nbytes = content.nbytes * blocks.size
    return allocated("kvdock.files", nbytes, cache.device, lambda: _bits(cache, content).index_select(0, index).cpu().contiguous())


def put(cache: GroupedCache, content: Content, blocks: Sequence[int] | npt.NDArray[np.int32], rows: torch.Tensor) -> None:
    """Write rows of the host's memory, as `taken` returns them, into blocks of a buffer."""
    index = torch.from_numpy(np.asarray(blocks, dtype=np.int64)).to(cache.device)
    with torch.no_grad():
        _bits(cache, content).index_copy_(0, index, rows.to(cache.device))
