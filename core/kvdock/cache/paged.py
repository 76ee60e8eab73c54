"""A cache in blocks: any token may go into any slot, so sequences of any length share one pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, cast

import attrs
import torch

from kvdock.cache.interface import Cache, CacheConfig, OpSource, active_name, check_layer, require_backend
from kvdock.cache.pool import PagedPool, RankLayer, allocated, block_bytes, check_bytes, group_layers, rank_layers, sources
from kvdock.errors import ArgumentTypeError, ArgumentValueError, CapacityError, UnsupportedError
from kvdock.layout import HeadLayout, KVCacheLayout
from kvdock.ops.api import BlockPairs, output_pair, pairs_tensor
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec, check_cache_dtype, check_int

__all__ = ["PagedConfig", "PagedKVCache"]


@attrs.frozen
class PagedConfig(CacheConfig):
    """The fields of a `kvdock.PagedKVCacheConfig`, which says what they mean, and what follows from them."""

    max_kv_memory_bytes: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    cache_dtype: torch.dtype | None = None
    layout: KVCacheLayout = KVCacheLayout.LAYER_FIRST
    head_layout: HeadLayout = HeadLayout.NHD

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
            if not isinstance(getattr(self, name), kind):
                raise ArgumentTypeError(f"PagedKVCacheConfig: {name}", expected=f"one of {list(kind)}", got=repr(getattr(self, name)))

    def unique_copy(self) -> Self:
        """Return an equal configuration that is a distinct object."""
        return attrs.evolve(self)

    def blocks_for(self, per_block: int, num_layers: int) -> int:
        """Return how many blocks the pool has.

        Args:
            per_block: bytes of a block, all layers.
            num_layers: how many those are, for errors.

        Raises:
            ArgumentValueError: more bytes than an address space has.
            CapacityError: the budget holds no block, or fewer than ``num_blocks``; says how many bytes are needed.
        """
        needed = (self.num_blocks or 1) * per_block
        if self.max_kv_memory_bytes is not None and needed > self.max_kv_memory_bytes:
            raise CapacityError(
                "PagedKVCacheConfig: max_kv_memory_bytes",
                expected=f"at least {needed} bytes: {self.num_blocks or 1} block(s) of {self.block_size} tokens in {num_layers} layers",
                got=self.max_kv_memory_bytes,
                fix="raise the budget, or choose a smaller block_size or fewer num_blocks",
            )
        num_blocks = self.num_blocks or int(self.max_kv_memory_bytes or 0) // per_block
        check_bytes(type(self).__name__, num_blocks * per_block, f"{num_blocks} blocks of {self.block_size} tokens in {num_layers} layers")
        return num_blocks


class PagedKVCache(Cache):
    """A pool of blocks per layer. Which token goes to which slot is the caller's to say.

    A slot is ``block_id * block_size + offset``, the same in every layer, for keys and for values. There may be more slots than
    int32 counts: what comes in int64 reaches them. It copies as `Cache` says.

    Args:
        spec: what the layers need.
        config: what the user chose.
        rank: device, and which share of the heads.
        ops: where its ops come from.

    Raises:
        ArgumentValueError: heads and ranks do not divide, or more bytes than an address space has.
        CapacityError: the budget is too small, or the device has not as much memory.
        UnsupportedError: a kind of layer that this cache does not hold.
        BackendError: no backend can be chosen for the device.
    """

    _written_by = "paged_caching_"
    _rank_layers = staticmethod(rank_layers)

    def __init__(self, spec: KVSpec, config: PagedConfig, rank: RankInfo, ops: OpSource) -> None:
        self.spec, self.config, self.rank = spec, config, rank
        layers = self._rank_layers(spec, rank)
        self._dtype = config.cache_dtype or spec.dtype
        if self._dtype != spec.dtype:
            raise UnsupportedError(
                "PagedKVCacheConfig: cache_dtype",
                expected=f"{spec.dtype}, the model's own",
                got=f"{self._dtype}: only a quantised cache may differ, and those are not there yet",
            )
        per_block = block_bytes(layers.values(), config.block_size, self._dtype)
        self._num_blocks = config.blocks_for(per_block, len(layers))
        # Kept, since a cache stays with the backend that it was made under, whichever is active later.
        self._named = active_name()
        # Before memory is taken, which would be of no use without a backend.
        require_backend(ops, self._written_by, rank.device, self._named)
        nbytes = self._num_blocks * per_block
        self._groups, self._views = allocated(type(config).__name__, nbytes, rank.device, lambda: self._allocate(layers))
        self._bind(ops)

    def _allocate(self, layers: Mapping[int, RankLayer]) -> tuple[list[tuple[PagedPool, ...]], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Take the memory: one storage for keys and one for values, for each group of equal layers; and the views of each layer.

        A layer that shares another's has the same views.
        """
        config, device = self.config, self.rank.device
        groups: list[tuple[PagedPool, ...]] = []
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, members in group_layers(layers).items():
            k_pool, v_pool = (
                PagedPool.allocate(
                    len(members), self._num_blocks, config.block_size, heads, dim, self._dtype, device, config.layout, config.head_layout
                )
                for heads, dim in ((layer.num_k_heads, layer.k_dim), (layer.num_v_heads, layer.v_dim))
            )
            groups.append((k_pool, v_pool))
            views.update(zip(members, zip(k_pool.layers, v_pool.layers, strict=True), strict=True))
        return groups, [views[index] for index in sources(self.spec)]

    def _bind(self, ops: OpSource) -> None:
        """Fix each layer's pools in the ops, so that a call no longer reads them."""
        self._write = [ops.op("paged_caching_").bind(*pair, named=self._named) for pair in self._views]
        self._read = [ops.op("gather_paged").bind(*pair, named=self._named) for pair in self._views]
        self._attend = [ops.op("paged_attention").bind(*pair, named=self._named) for pair in self._views]
        # By group and not by layer: `whole` has the block of every layer as one block.
        self._copy = [ops.op("copy_blocks_").bind(k.whole, v.whole, named=self._named) for k, v in self._groups]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._views)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the same for every layer."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.config.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool: all layers, keys and values."""
        return sum(pool.memory.nbytes for pair in self._groups for pool in pair)

    @property
    def device(self) -> torch.device:
        """Device that holds it."""
        return self._views[0][0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        return self._dtype

    def k_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's keys, ``[num_blocks, block_size, Hk, Dk]``; a permuted view for other memory orders."""
        return self._views[check_layer(type(self).__name__, layer, len(self._views))][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's values, ``[num_blocks, block_size, Hv, Dv]``."""
        return self._views[check_layer(type(self).__name__, layer, len(self._views))][1]

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens.

        Args:
            layer: 0 to ``num_layers - 1``.
            k: ``[T, Hk, Dk]`` or ``[B, S, Hk, Dk]``, this rank's heads, any strides but an innermost of 1.
            v: ``[T, Hv, Dv]`` or ``[B, S, Hv, Dv]``.
            slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; negative means padding.

        Returns:
            This layer's ``(k_cache, v_cache)``, ``[num_blocks, block_size, heads, dim]``.

        Raises:
            IndexRangeError: no such layer; or, on host memory, a slot out of range.
            KVDockError: as `kvdock.ops.paged_caching_`; nothing was written.
        """
        # Written out, as this is called for each layer of each step: only a wrong index goes through the function that explains it.
        if layer.__class__ is not int or layer < 0 or layer >= len(self._views):
            check_layer(type(self).__name__, layer, len(self._views))
        return self._write[layer](k, v, slot_mapping, None, None) or self._views[layer]  # None, but what is traced returns views of its own

    def gather(
        self, layer: int, slot_mapping: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read keys and values at given slots.

        Args:
            layer: 0 to ``num_layers - 1``.
            slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; a negative slot reads as zeros.
            out: where to put ``[..., Hk, Dk]`` and ``[..., Hv, Dv]``; by default new tensors.

        Returns:
            ``(k, v)``.

        Raises:
            KVDockError: as `kvdock.ops.gather_paged`.
        """
        if layer.__class__ is not int or layer < 0 or layer >= len(self._views):
            check_layer(type(self).__name__, layer, len(self._views))
        k_out, v_out = (None, None) if out is None else output_pair(out)
        return cast(tuple[torch.Tensor, torch.Tensor], self._read[layer](slot_mapping, None, None, k_out, v_out))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        cu_query_lens: torch.Tensor | None = None,
        max_query_len: int = 1,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from new tokens, which are written already, to the keys and values of their sequences.

        Args:
            layer: 0 to ``num_layers - 1``.
            q: ``[N, Hq, Dk]``, the last tokens of each sequence.
            block_table: ``[B, W]`` int32.
            seq_lens: ``[B]`` int32 or int64.
            cu_query_lens: ``[B + 1]``, sums of how many queries each sequence has; by default one each.
            max_query_len: most queries of one sequence.
            scale: as of `kvdock.ops.paged_attention`, as all that follow.
            window: keys that a query sees at most.
            softcap: cap of the scores.
            sinks: ``[Hq]``.
            starts: ``[B]``.
            out: ``[N, Hq, Dv]``; by default a new tensor.

        Returns:
            ``[N, Hq, Dv]``.

        Raises:
            KVDockError: as `kvdock.ops.paged_attention`.
        """
        if layer.__class__ is not int or layer < 0 or layer >= len(self._views):
            check_layer(type(self).__name__, layer, len(self._views))
        found = self._attend[layer](
            *(q, block_table, seq_lens, cu_query_lens, starts, sinks, None, None, max_query_len, scale, True, window, softcap, out, None)
        )
        return cast(torch.Tensor, found)

    def copy_blocks(self, block_pairs: BlockPairs) -> None:
        """Copy whole blocks in every layer, keys and values: one launch for each group of equal layers.

        Args:
            block_pairs: ``[N, 2]`` (src, dst) block ids: a tensor, a numpy array or a list.

        Raises:
            KVDockError: as `kvdock.ops.copy_blocks_`; nothing was written.
        """
        pairs = pairs_tensor(block_pairs)
        for copy in self._copy:
            copy(pairs)

    def reset(self) -> None:
        """Zero the memory."""
        for pair in self._groups:
            for pool in pair:
                pool.memory.zero_()

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers, {self.num_blocks} blocks of {self.block_size}"
        return f"{type(self).__name__}({shape}, {self.dtype}, {self.nbytes} bytes on {self.device})"
