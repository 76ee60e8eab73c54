"""One process, several devices: a static cache whose heads are split over them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from kvdock.cache.interface import OpSource
from kvdock.cache.memory import allocated
from kvdock.cache.static import StaticKVCache, StaticKVCacheConfig
from kvdock.errors import ArgumentTypeError, ArgumentValueError, DroppedCacheError, IndexRangeError
from kvdock.ops.dispatcher import active_dispatcher
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec, check_int

__all__ = ["ShardedKVCache"]


class ShardedKVCache:
    """The keys and values of one sequence, its heads split evenly over several devices.

    Each shard is a `StaticKVCache` of one row. The memory is released by `drop`, or at the end of a ``with`` block.

    Threads may share it as they may share torch tensors; `drop` must not run while another thread uses it.

    Its copies are made of copies of its shards (see `Cache`): ``copy.deepcopy`` returns one with memory of its own; `copy.copy`
    one that shares the memory, and is dropped by itself; pickling raises `UnsupportedError`. A copy of a dropped one is dropped.
    """

    def __init__(self, shards: Sequence[StaticKVCache]) -> None:
        self._shards: tuple[StaticKVCache, ...] | None = tuple(shards)

    @classmethod
    def create(cls, spec: KVSpec, max_len: int, devices: Sequence[str | torch.device], *, ops: OpSource | None = None) -> Self:
        """Allocate one shard on each device.

        Args:
            spec: what the layers need; heads must divide over the devices.
            max_len: positions, in tokens; at most ``spec.max_positions``.
            devices: one device for each shard; the same one may occur more than once.
            ops: where its ops come from; default is the process's runtime.

        Raises:
            ArgumentValueError: no devices, heads that do not divide, more positions than the model supports, or more bytes than
                an address space has.
            CapacityError: a device has not as much memory. No shard is left.
            BackendError: no backend can be chosen for a device.
        """
        check_int("ShardedKVCache.create: max_len", max_len, 1)
        if max_len > spec.max_positions:
            raise ArgumentValueError(
                "ShardedKVCache.create: max_len", expected=f"at most {spec.max_positions}, the model's max_positions", got=max_len
            )
        if isinstance(devices, (str, torch.device)) or not devices:
            raise ArgumentValueError(
                "ShardedKVCache.create: devices", expected='a list of devices, such as ["cpu", "cpu"]', got=repr(devices)
            )
        source = ops if ops is not None else active_dispatcher()
        config = StaticKVCacheConfig(max_batch_size=1, max_cache_len=max_len)
        ranks = [RankInfo(device, tp_size=len(devices), tp_rank=i) for i, device in enumerate(devices)]
        device = ranks[0].device  # of the first; each shard's error says what it asked for, and where
        return cls(allocated("ShardedKVCache", 0, device, lambda: [StaticKVCache(spec, config, rank, source) for rank in ranks]))

    @property
    def shards(self) -> tuple[StaticKVCache, ...]:
        """One cache per device.

        Raises:
            DroppedCacheError: the cache was dropped.
        """
        if self._shards is None:
            raise DroppedCacheError(
                "ShardedKVCache",
                expected="a live cache",
                got="one whose memory was released by drop()",
                fix="create or duplicate another one",
            )
        return self._shards

    @property
    def max_len(self) -> int:
        """Positions, in tokens."""
        return self.shards[0].max_cache_len

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.shards[0].num_layers

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each shard."""
        return tuple(shard.device for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    def k_cache(self, shard: int, layer: int) -> torch.Tensor:
        """Return a shard's keys of a layer, ``[1, Hk / shards, max_len, Dk]``."""
        return self._shard(shard).k_cache(layer)

    def v_cache(self, shard: int, layer: int) -> torch.Tensor:
        """Return a shard's values of a layer, ``[1, Hv / shards, max_len, Dv]``."""
        return self._shard(shard).v_cache(layer)

    def update(
        self, shard: int, layer: int, k: torch.Tensor, v: torch.Tensor, cache_lengths: int | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions of one shard. See `StaticKVCache.update`."""
        return self._shard(shard).update(layer, k, v, cache_lengths)

    def _shard(self, index: int) -> StaticKVCache:
        shards = self.shards
        if isinstance(index, bool) or not isinstance(index, int):
            expected = f"an int from 0 to {len(shards) - 1}"
            raise ArgumentTypeError("ShardedKVCache: shard", expected=expected, got=repr(index), fix="pass a plain int")
        if not 0 <= index < len(shards):
            raise IndexRangeError(
                "ShardedKVCache: shard", expected=f"0 to {len(shards) - 1}", got=index, fix="count shards from 0, in the order of devices"
            )
        return shards[index]

    def duplicate(self, seq_len: int) -> Self:
        """Return a cache of the same size and devices that holds the first ``seq_len`` tokens of this one, and zeros after.

        It keeps the backend that this one was made with, as a deep copy does.

        Args:
            seq_len: tokens to copy, 0 to ``max_len``.

        Raises:
            IndexRangeError: ``seq_len`` is past the length.
            DroppedCacheError: the cache was dropped.
        """
        if check_int("ShardedKVCache.duplicate: seq_len", seq_len, 0) > self.max_len:
            raise IndexRangeError(
                "ShardedKVCache.duplicate: seq_len",
                expected=f"0 to {self.max_len}, the length of the cache",
                got=seq_len,
                fix="ask for no more tokens than the cache has positions",
            )
        twin = allocated("ShardedKVCache.duplicate", self.nbytes, self.devices[0], lambda: copy.deepcopy(self))
        for shard in twin.shards:
            for layer in range(twin.num_layers):
                shard.k_cache(layer)[:, :, seq_len:].zero_()
                shard.v_cache(layer)[:, :, seq_len:].zero_()
        return twin

    def reset(self) -> None:
        """Zero the memory of every shard."""
        for shard in self.shards:
            shard.reset()

    def drop(self) -> None:
        """Release the memory. Dropping twice is fine; any other use afterwards raises `DroppedCacheError`."""
        self._shards = None

    def __enter__(self) -> Self:
        _ = self.shards  # a dropped cache raises
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drop()
