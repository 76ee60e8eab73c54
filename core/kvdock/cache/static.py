"""A cache of fixed rows: one contiguous stretch for each sequence of a batch."""

from __future__ import annotations

from typing import Self

import attrs
import torch

from kvdock.cache.interface import Cache, CacheConfig, OpSource, active_name, check_layer, require_backend
from kvdock.cache.memory import allocated, check_bytes
from kvdock.cache.pool import RankLayer, block_bytes, rank_layers, sources
from kvdock.interface import HOST
from kvdock.ops.api import host_int
from kvdock.ops.index_values import check_lengths
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec, check_int

__all__ = ["StaticKVCache", "StaticKVCacheConfig"]


@attrs.frozen
class StaticKVCacheConfig(CacheConfig):
    """What the user chooses about a static cache.

    Args:
        max_batch_size: rows.
        max_cache_len: positions of a row, in tokens; None or 0 means as many as the model supports, which is also the
            most it can have.
    """

    max_batch_size: int = 1
    max_cache_len: int | None = None

    def __attrs_post_init__(self) -> None:
        check_int("StaticKVCacheConfig: max_batch_size", self.max_batch_size, 1)
        if self.max_cache_len is not None:
            check_int("StaticKVCacheConfig: max_cache_len", self.max_cache_len, 0)

    def unique_copy(self) -> Self:
        """Return an equal configuration that is a distinct object."""
        return attrs.evolve(self)

    def build(self, spec: KVSpec, rank: RankInfo, ops: OpSource) -> StaticKVCache:
        """Make a `StaticKVCache`."""
        return StaticKVCache(spec, self, rank, ops)


class StaticKVCache(Cache):
    """``max_batch_size`` rows of ``max_cache_len`` positions per layer. How full each row is, is the caller's to say.

    It copies as `Cache` says.

    Args:
        spec: what the layers need.
        config: what the user chose.
        rank: device, and which share of the heads.
        ops: where its ops come from.

    Raises:
        ArgumentValueError: heads and ranks do not divide, or more bytes than an address space has.
        CapacityError: the device has not as much memory.
        UnsupportedError: a kind of layer that this cache does not hold.
        BackendError: no backend can be chosen for the device.
    """

    def __init__(self, spec: KVSpec, config: StaticKVCacheConfig, rank: RankInfo, ops: OpSource) -> None:
        self.spec, self.config, self.rank = spec, config, rank
        layers = rank_layers(spec, rank)
        self.max_cache_len = min(config.max_cache_len or spec.max_positions, spec.max_positions)
        nbytes = config.max_batch_size * block_bytes(layers.values(), self.max_cache_len, spec.dtype)
        made_of = f"{config.max_batch_size} rows of {self.max_cache_len} tokens in {len(layers)} layers"
        check_bytes(type(config).__name__, nbytes, made_of)
        named = active_name()
        require_backend(ops, "static_update_", rank.device, named)
        own = allocated(
            type(config).__name__, nbytes, rank.device, lambda: {index: self._allocate(layer) for index, layer in layers.items()}
        )
        self._views = [own[index] for index in sources(spec)]
        self._write = [ops.op("static_update_").bind(*pair, named=named) for pair in self._views]

    def _allocate(self, layer: RankLayer) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length = self.config.max_batch_size, self.max_cache_len
        with torch.inference_mode(False):  # a cache made while inferring must be writable afterwards too
            return (
                torch.zeros((rows, layer.num_k_heads, length, layer.k_dim), dtype=self.spec.dtype, device=self.rank.device),
                torch.zeros((rows, layer.num_v_heads, length, layer.v_dim), dtype=self.spec.dtype, device=self.rank.device),
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._views)

    @property
    def max_batch_size(self) -> int:
        """Rows."""
        return self.config.max_batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache: all layers, keys and values."""
        return sum(tensor.nbytes for pair in {id(pair): pair for pair in self._views}.values() for tensor in pair)

    @property
    def device(self) -> torch.device:
        """Device that holds it."""
        return self._views[0][0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        return self.spec.dtype

    def k_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's keys, ``[max_batch_size, Hk, max_cache_len, Dk]``."""
        return self._views[check_layer("StaticKVCache", layer, len(self._views))][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's values, ``[max_batch_size, Hv, max_cache_len, Dv]``."""
        return self._views[check_layer("StaticKVCache", layer, len(self._views))][1]

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor, cache_lengths: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions behind what each row holds, and return all of it.

        Args:
            layer: 0 to ``num_layers - 1``.
            k: ``[B, Hk, s, Dk]``, this rank's heads, for the first ``B <= max_batch_size`` rows.
            v: ``[B, Hv, s, Dv]``.
            cache_lengths: positions already taken: an int, or a tensor ``[]``, ``[1]`` or ``[B]`` on the cache's device.

        Returns:
            ``(k, v)``: views ``[B, heads, longest length after the write, dim]``. With lengths in a tensor that is on a device,
            or traced, and so not read, the views reach to ``max_cache_len``.

        Raises:
            IndexRangeError: no such layer; or lengths that the host can read are negative or do not fit. Lengths on a
                device that do not fit leave their row as it was.
            KVDockError: as `kvdock.ops.static_update_`; nothing was written.
        """
        k_cache, v_cache = self._views[check_layer("StaticKVCache", layer, len(self._views))]
        cache_lengths = host_int(cache_lengths)
        k_cache, v_cache = self._write[layer](k, v, cache_lengths) or (k_cache, v_cache)  # what is traced returns views of its own
        rows, _, new, _ = k.shape
        longest = self._longest(cache_lengths, new)
        return k_cache[:rows, :, :longest], v_cache[:rows, :, :longest]

    def _longest(self, lengths: int | torch.Tensor, new: int) -> int:
        """Return the longest length after a write, or the whole cache where it cannot be known without waiting, or is not there yet.

        The op does nothing for no new positions, nor does it check lengths then; but the views must not reach too far.
        """
        if isinstance(lengths, torch.Tensor) and (lengths.device != HOST or torch.compiler.is_compiling()):
            return self.max_cache_len
        values = [lengths] if isinstance(lengths, int) else lengths.flatten().tolist()
        if new == 0:
            check_lengths("static_update_", values, new, self.max_cache_len)
        return (max(values) if values else 0) + new  # written so that torch.compile can trace it

    def reset(self) -> None:
        """Zero the memory."""
        for pair in self._views:
            for tensor in pair:
                tensor.zero_()

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers, {self.max_batch_size} rows of {self.max_cache_len}"
        return f"StaticKVCache({shape}, {self.dtype}, {self.nbytes} bytes on {self.device})"
