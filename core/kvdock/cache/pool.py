"""The memory of a paged cache: pools for groups of equal layers, in any layout, and views of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import attrs
import torch

from kvdock.cache.memory import aligned, allocated, fresh
from kvdock.errors import UnsupportedError
from kvdock.layers.interface import LayerKind
from kvdock.layers.shared import SharedLayerSpec
from kvdock.layout import HeadLayout, KVCacheLayout
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = [
    "LatentPool",
    "PagedPool",
    "Pool",
    "RankLayer",
    "Store",
    "block_bytes",
    "group_layers",
    "rank_layers",
    "sources",
]


@attrs.frozen
class RankLayer:
    """One layer as a rank holds it: its share of the heads. It has no value heads where values are the first elements of the keys."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def elements(self) -> int:
        """Elements that one token takes, keys and values."""
        return self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


def rank_layers(spec: KVSpec, rank: RankInfo) -> dict[int, RankLayer]:
    """Return what a rank holds of each layer that keeps keys and values of its own.

    Raises:
        ArgumentValueError: heads and ranks do not divide.
        UnsupportedError: a layer keeps something else.
    """
    own = {index: layer for index, layer in enumerate(spec.layers) if not isinstance(layer, SharedLayerSpec)}
    return {index: _rank_layer(layer, index, rank, spec.dtype) for index, layer in own.items()}


def sources(spec: KVSpec) -> list[int]:
    """Return for each layer which layer's keys and values it reads: its own, or those that it shares."""
    return [layer.of if isinstance(layer, SharedLayerSpec) else index for index, layer in enumerate(spec.layers)]


def _rank_layer(layer: LayerKind, index: int, rank: RankInfo, dtype: torch.dtype) -> RankLayer:
    buffers = [buffer for part in layer.parts(rank.head_range, dtype) for buffer in part.buffers]
    if [buffer.name for buffer in buffers] != ["k", "v"]:
        keeps = ", ".join(f"{buffer.name} {list(buffer.shape)}" for buffer in buffers)
        raise UnsupportedError(
            f"KVSpec: layers[{index}]",
            expected="a layer that keeps keys and values, such as a LayerSpec",
            got=f"{layer!r}, which keeps {keeps}",
            fix="make a cache that holds several kinds, with a PagedKVCacheConfig",
        )
    (k_heads, k_dim), (v_heads, v_dim) = buffers[0].shape, buffers[1].shape
    return RankLayer(k_heads, v_heads, k_dim, v_dim)


def block_bytes(layers: Collection[RankLayer], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of ``block_size`` tokens over all layers, keys and values."""
    return sum(layer.elements for layer in layers) * block_size * dtype.itemsize


def group_layers(layers: Mapping[int, RankLayer]) -> dict[RankLayer, list[int]]:
    """Return the indices of equal layers: each group shares a pool."""
    groups: dict[RankLayer, list[int]] = {}
    for index, layer in layers.items():
        groups.setdefault(layer, []).append(index)
    return groups


@attrs.frozen(eq=False)
class Pool:
    """One memory, and views of it. A deep copy has memory of its own, and the same views of that.

    Args:
        memory: the memory.
        alignment: bytes that its address is a multiple of.
    """

    memory: torch.Tensor
    alignment: int = attrs.field(default=1, kw_only=True)

    def _copied(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy of the memory; views of it that are copied too, by whoever has them, become views of the copy."""
        memory = copy.deepcopy(self.memory, memo)
        if memory.data_ptr() % self.alignment:
            memory = fresh(memory.shape, memory.dtype, memory.device, self.alignment).copy_(memory)
            memo[id(self.memory)] = memory
        return memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the memory once, and view the copy alike. torch copies views one by one on some devices."""
        memory = allocated("a copy of a cache", self.memory.nbytes, self.memory.device, lambda: self._copied(memo))
        move = _Move(self.memory, memory, memo)
        return attrs.evolve(self, memory=memory, **{name: move.to_copy(getattr(self, name)) for name in _views_of(type(self))})


@attrs.frozen(eq=False)
class _Move:
    """Makes views of a copy like views of the original, and notes them as their copies."""

    old: torch.Tensor
    new: torch.Tensor
    memo: dict[int, Any]
    roots: dict[torch.dtype, torch.Tensor] = attrs.field(factory=dict)
    done: dict[int, torch.Tensor] = attrs.field(factory=dict)

    def to_copy(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.to_copy(each) for each in value)
        if isinstance(value, Mapping):
            return {key: self.to_copy(each) for key, each in value.items()}
        return self._view(value) if isinstance(value, torch.Tensor) else value

    def _view(self, view: torch.Tensor) -> torch.Tensor:
        if id(view) in self.done:
            return self.done[id(view)]  # two names of one view stay so
        root = self.roots.setdefault(view.dtype, self.new if view.dtype == self.new.dtype else self.new.view(view.dtype))
        behind = (view.storage_offset() * view.itemsize - self.old.storage_offset() * self.old.itemsize) // view.itemsize
        self.memo[id(view)] = self.done[id(view)] = new = root.as_strided(view.shape, view.stride(), root.storage_offset() + behind)
        return new


def _views_of(kind: type[Pool]) -> list[str]:
    return [field.name for field in attrs.fields(kind) if field.name not in ("memory", "alignment")]


@attrs.frozen(eq=False)
class PagedPool(Pool):
    """One storage with the keys, or the values, of a group of equal layers.

    Args:
        memory: the storage in its memory order.
        layers: one view per layer, ``[num_blocks, block_size, heads, dim]``.
        whole: all layers as one cache whose blocks hold every layer's block, ``[num_blocks, layers, 1, rest]`` or with
            dims swapped; copying a block of it copies that block of every layer.
    """

    layers: tuple[torch.Tensor, ...]
    whole: torch.Tensor

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: KVCacheLayout,
        head_layout: HeadLayout,
        alignment: int = 1,
        take: Callable[..., torch.Tensor] = fresh,
    ) -> PagedPool:
        """Allocate zeroed memory and the views of it. What lies together of a block is padded to multiples of ``alignment`` bytes."""
        inner = (block_size, heads, dim) if head_layout is HeadLayout.NHD else (heads, block_size, dim)
        first = layout is KVCacheLayout.LAYER_FIRST
        outer, each = ((num_layers, num_blocks), inner) if first else ((num_blocks,), (num_layers, *inner))
        run = math.prod(each)
        padded = aligned(run * dtype.itemsize, alignment) // dtype.itemsize if alignment > dtype.itemsize else run
        if padded == run:
            memory = used = take((*outer, *each), dtype, device, alignment)
            blocks = memory.flatten(2).unsqueeze(2)
        else:
            memory = take((*outer, padded), dtype, device, alignment)
            used = memory[..., :run].view(*outer, *each)
            blocks = memory.unsqueeze(2) if first else memory[:, None, None]
        by_layer = used if first else used.transpose(0, 1)
        if head_layout is HeadLayout.HND:
            by_layer = by_layer.transpose(2, 3)
        return cls(memory, tuple(by_layer.unbind(0)), blocks.transpose(0, 1) if first else blocks, alignment=alignment)

    @staticmethod
    def block_bytes(num_layers: int, nbytes: int, layout: KVCacheLayout, alignment: int) -> int:
        """Return the bytes of a block of so many layers, each with ``nbytes`` of it."""
        first = layout is KVCacheLayout.LAYER_FIRST
        return aligned(nbytes, alignment) * num_layers if first else aligned(nbytes * num_layers, alignment)


@attrs.frozen(eq=False)
class LatentPool(PagedPool):
    """One storage with the latents of a group of equal layers.

    Args:
        rows: of each layer its rows without the dim of their one head, ``[num_blocks, block_size, rank + rope]``.
        values: of each layer the first elements of its rows, ``[num_blocks, block_size, 1, rank]``.
        halves: ``whole`` as two caches that share no byte, since blocks are copied in two at once.
    """

    rows: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    halves: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, pool: PagedPool, rank: int) -> Self:
        """Return a pool whose values are in its keys."""
        dim = 1 if pool.whole.shape[1] > 1 else 3  # by layers each half is one range of memory, where layers are outermost
        half, size = pool.whole.shape[dim] // 2, pool.whole.shape[dim]
        halves = pool.whole.narrow(dim, 0, half), pool.whole.narrow(dim, half, size - half)
        rows, values = ([layer.squeeze(2) for layer in pool.layers], [layer[..., :rank] for layer in pool.layers])
        return cls(pool.memory, pool.layers, pool.whole, tuple(rows), tuple(values), halves, alignment=pool.alignment)


@attrs.frozen(eq=False)
class Store:
    """The memory of a cache in blocks, whoever owns it. Pools come first, so that a deep copy copies them before views of them.

    Args:
        pools: the pools; zeroing the memory of all zeroes the cache.
        named: of each layer that keeps something, its buffers by name, ``[num_blocks, ...]``.
        pairs: of each layer that attention reads, what it takes as keys and values, ``[num_blocks, block_size, heads, dim]``.
        copied: what `copy_blocks_` takes, two tensors a call: together all blocks.
    """

    pools: tuple[Pool, ...]
    named: Mapping[int, Mapping[str, torch.Tensor]]
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    copied: tuple[tuple[torch.Tensor, torch.Tensor], ...]
