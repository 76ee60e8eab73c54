"""The fields of a configuration of a cache in blocks, and how many blocks follow from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Self

import attrs
import torch

from kvdock.cache.interface import Cache, CacheConfig, OpSource
from kvdock.cache.memory import check_bytes
from kvdock.errors import ArgumentTypeError, ArgumentValueError, CapacityError
from kvdock.layers.groups import LayerGroup
from kvdock.layout import HeadLayout, KVCacheLayout
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec, check_cache_dtype, check_int, device_of

__all__ = ["Given", "PagedConfig"]

Given = torch.Tensor | Iterable[object]
"""Memory that an engine owns: one ``uint8`` tensor, or for each layer its tensors."""

_MOST_ALIGNMENT = 2**30
"""Bytes: the largest pages that there are."""


def _to_device(value: object) -> torch.device | None:
    return None if value is None else device_of("PagedKVCacheConfig: pinned_for", value)


@attrs.frozen
class PagedConfig(CacheConfig):
    """The fields of a `kvdock.PagedKVCacheConfig`, which says what they mean, and what follows from them."""

    max_kv_memory_bytes: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    cache_dtype: torch.dtype | None = None
    layout: KVCacheLayout | None = None
    head_layout: HeadLayout = HeadLayout.NHD
    alignment: int = 1
    keep_all: bool = False
    pinned_for: torch.device | None = attrs.field(default=None, converter=_to_device)

    def __attrs_post_init__(self) -> None:
        check_int("PagedKVCacheConfig: block_size", self.block_size, 1)
        for name in ("max_kv_memory_bytes", "num_blocks"):
            if getattr(self, name) is not None:
                check_int(f"PagedKVCacheConfig: {name}", getattr(self, name), 1)
        if self.max_kv_memory_bytes is None and self.num_blocks is None:
            raise ArgumentValueError(
                "PagedKVCacheConfig", expected="max_kv_memory_bytes or num_blocks", got="neither", fix="say how large the pool may be"
            )
        if self.cache_dtype is not None:
            check_cache_dtype("PagedKVCacheConfig: cache_dtype", self.cache_dtype)
        for name, kind in (("layout", KVCacheLayout), ("head_layout", HeadLayout)):
            if not isinstance(getattr(self, name), kind) and (name, getattr(self, name)) != ("layout", None):
                raise ArgumentTypeError(f"PagedKVCacheConfig: {name}", expected=f"one of {list(kind)}", got=repr(getattr(self, name)))
        if not isinstance(self.keep_all, bool):
            raise ArgumentTypeError("PagedKVCacheConfig: keep_all", expected="True or False", got=repr(self.keep_all))
        alignment = check_int("PagedKVCacheConfig: alignment", self.alignment, 1)
        if alignment & (alignment - 1) or alignment > _MOST_ALIGNMENT:
            expected, fix = f"a power of two up to {_MOST_ALIGNMENT}, in bytes", "name what a transport or a device asks for, such as 4096"
            raise ArgumentValueError("PagedKVCacheConfig: alignment", expected=expected, got=alignment, fix=fix)

    def unique_copy(self) -> Self:
        """Return an equal configuration that is a distinct object."""
        return attrs.evolve(self)

    def blocks_for(self, per_block: int, num_layers: int, groups: Sequence[LayerGroup] = ()) -> int:
        """Return how many blocks the pool has.

        Args:
            per_block: bytes of a block, all layers.
            num_layers: how many those are, for errors.
            groups: the layer groups, for errors too.

        Raises:
            ArgumentValueError: more bytes than an address space has.
            CapacityError: the budget holds no block, or fewer than ``num_blocks``; says how many bytes are needed.
        """
        tokens = " or ".join(map(str, sorted({group.block_size for group in groups} or {self.block_size})))
        needed = (self.num_blocks or 1) * per_block
        if self.max_kv_memory_bytes is not None and needed > self.max_kv_memory_bytes:
            raise CapacityError(
                "PagedKVCacheConfig: max_kv_memory_bytes",
                expected=f"at least {needed} bytes: {self.num_blocks or 1} block(s) of {tokens} tokens in {num_layers} layers",
                got=self.max_kv_memory_bytes,
                fix="raise the budget, or choose a smaller block_size or fewer num_blocks",
            )
        num_blocks = self.num_blocks or int(self.max_kv_memory_bytes or 0) // per_block
        check_bytes(type(self).__name__, num_blocks * per_block, f"{num_blocks} blocks of {tokens} tokens in {num_layers} layers")
        return num_blocks

    @abstractmethod
    def build_on(self, tensors: Given | None, spec: KVSpec, rank: RankInfo, ops: OpSource) -> Cache:
        """Make the cache that this configures, in memory of its own or in given tensors; called by `PagedKVCache.from_tensors`."""
