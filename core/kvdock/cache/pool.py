"""The memory of a paged cache: pools for groups of equal layers, in any layout, and views of them."""

from __future__ import annotations

import copy
import ctypes
import mmap
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self, TypeVar

import attrs
import torch

from kvdock.errors import ArgumentValueError, CapacityError, KVDockError, UnsupportedError
from kvdock.interface import HOST
from kvdock.layers.interface import LayerKind
from kvdock.layers.latent import MLALayerSpec
from kvdock.layers.shared import SharedLayerSpec
from kvdock.layout import HeadLayout, KVCacheLayout
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = [
    "LatentPool",
    "PagedPool",
    "RankLayer",
    "allocated",
    "block_bytes",
    "check_bytes",
    "group_layers",
    "latent_layers",
    "rank_layers",
    "sources",
]

T = TypeVar("T")


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
            fix="keep such layers in a cache of their own; pools that hold several kinds are not there yet",
        )
    (k_heads, k_dim), (v_heads, v_dim) = buffers[0].shape, buffers[1].shape
    return RankLayer(k_heads, v_heads, k_dim, v_dim)


def latent_layers(spec: KVSpec) -> dict[int, RankLayer]:
    """Return what any rank holds of each layer that keeps latents of its own: all of it.

    Raises:
        UnsupportedError: a layer keeps something else.
    """
    found = dict[int, RankLayer]()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer, MLALayerSpec):
            found[index] = RankLayer(1, 0, layer.kv_lora_rank + layer.rope_dim, layer.kv_lora_rank)
        elif not isinstance(layer, SharedLayerSpec):
            fix = "keep such layers in a cache of their own: this one holds latents"
            raise UnsupportedError(f"KVSpec: layers[{index}]", expected="an MLALayerSpec", got=repr(layer), fix=fix)
    return found


def block_bytes(layers: Collection[RankLayer], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of ``block_size`` tokens over all layers, keys and values."""
    return sum(layer.elements for layer in layers) * block_size * dtype.itemsize


_MOST_BYTES = 2**56
"""What a program can address on the processors there are, with page tables of five levels."""


def check_bytes(subject: str, nbytes: int, made_of: str) -> None:
    """Refuse a cache that no machine could hold, before a device is touched; torch says what this one cannot.

    Raises:
        ArgumentValueError: more bytes than an address space has.
    """
    if nbytes > _MOST_BYTES:
        raise ArgumentValueError(
            subject,
            expected=f"at most {_MOST_BYTES} bytes, an address space",
            got=f"{nbytes} bytes: {made_of}",
            fix="ask for a smaller cache",
        )


def allocated(subject: str, nbytes: int, device: torch.device, make: Callable[[], T]) -> T:
    """Return what ``make`` allocates. When it raises, all that it had made is let go at once, whoever keeps the error.

    Args:
        subject: what is made, for the error.
        nbytes: how many bytes it takes.
        device: where.
        make: makes it, and keeps it in variables of its own until it returns.

    Raises:
        CapacityError: the device has not as much memory.
    """
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, KVDockError) or not _is_about_memory(error):
            raise
        said = str(error).partition("\n")[0][:200]
    raise CapacityError(
        subject,
        expected=f"{nbytes} bytes of memory on {device}",
        got=f"fewer: {said}",
        fix="ask for a smaller cache, or free memory on the device first",
    )


def _is_about_memory(error: Exception) -> bool:
    """Whether a device refused memory. That of the host has no class of errors for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def group_layers(layers: Mapping[int, RankLayer]) -> dict[RankLayer, list[int]]:
    """Return the indices of equal layers: each group shares a pool."""
    groups: dict[RankLayer, list[int]] = {}
    for index, layer in layers.items():
        groups.setdefault(layer, []).append(index)
    return groups


def _in_large_pages(memory: torch.Tensor) -> torch.Tensor:
    """Ask for large pages for host memory that nobody has touched yet, as numpy does, and return it: decoding looks up fewer addresses.

    Where the system has none, all stays as it is.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if memory.device == HOST and advice is not None:
        first, last = -(-memory.data_ptr() // mmap.PAGESIZE), (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE), advice)
    return memory


@attrs.frozen(eq=False)
class PagedPool:
    """One storage with the keys, or the values, of a group of equal layers.

    Args:
        memory: the storage in its memory order.
        layers: one view per layer, ``[num_blocks, block_size, heads, dim]``.
        whole: all layers as one cache whose blocks hold every layer's block, ``[num_blocks, layers, 1, rest]`` or with
            dims swapped; copying a block of it copies that block of every layer.
    """

    memory: torch.Tensor
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
    ) -> PagedPool:
        """Allocate zeroed memory and the views of it."""
        inner = (block_size, heads, dim) if head_layout is HeadLayout.NHD else (heads, block_size, dim)
        outer = (num_layers, num_blocks) if layout is KVCacheLayout.LAYER_FIRST else (num_blocks, num_layers)
        with torch.inference_mode(False):  # a cache made while inferring must be writable afterwards too
            memory = _in_large_pages(torch.empty((*outer, *inner), dtype=dtype, device=device)).zero_()
        by_layer = memory if layout is KVCacheLayout.LAYER_FIRST else memory.transpose(0, 1)
        if head_layout is HeadLayout.HND:
            by_layer = by_layer.transpose(2, 3)
        blocks = memory.flatten(2).unsqueeze(2)
        whole = blocks.transpose(0, 1) if layout is KVCacheLayout.LAYER_FIRST else blocks
        return cls(memory, tuple(by_layer.unbind(0)), whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the memory once, and view the copy alike. torch copies views one by one on some devices."""
        nbytes, device = self.memory.nbytes, self.memory.device
        memory = allocated("a copy of a cache", nbytes, device, lambda: copy.deepcopy(self.memory, memo))
        views = attrs.astuple(self, recurse=False)[1:]
        return type(self)(memory, *(_moved(each, memory, memo) for each in views))


def _moved(views: Any, memory: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return a view of other memory like one, or several like several."""
    if isinstance(views, tuple):
        return tuple(_moved(view, memory, memo) for view in views)
    memo[id(views)] = new = memory.as_strided(views.shape, views.stride(), views.storage_offset())
    return new


@attrs.frozen(eq=False)
class LatentPool(PagedPool):
    """One storage with the latents of a group of equal layers.

    Args:
        values: of each layer the first elements of its rows, ``[num_blocks, block_size, 1, rank]``.
        halves: ``whole`` as two caches that share no byte, since blocks are copied in two at once.
    """

    values: tuple[torch.Tensor, ...]
    halves: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, pool: PagedPool, rank: int) -> Self:
        """Return a pool whose values are in its keys."""
        dim = 1 if len(pool.layers) > 1 else 3  # by layers each half is one range of memory, where layers are outermost
        half, size = pool.whole.shape[dim] // 2, pool.whole.shape[dim]
        halves = tuple(pool.whole.narrow(dim, begin, end - begin) for begin, end in ((0, half), (half, size)))
        return cls(pool.memory, pool.layers, pool.whole, tuple(layer[..., :rank] for layer in pool.layers), halves)
