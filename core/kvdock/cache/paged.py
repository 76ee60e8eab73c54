"""A cache in blocks: any token may go into any slot, so sequences of any length share one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from kvdock.cache.blocks import block_store
from kvdock.cache.given import given_blocks, given_layers
from kvdock.cache.grouped import GroupedCache
from kvdock.cache.grouping import PLACE, group_numbers, grouping
from kvdock.cache.interface import OpSource, active_name, check_layer, require_backend
from kvdock.cache.memory import allocated, fresh
from kvdock.cache.paged_options import Given, PagedConfig
from kvdock.cache.pinned import HostPages, host_pages
from kvdock.cache.pool import PagedPool, RankLayer, Store, group_layers, sources
from kvdock.cache.routes import Routes
from kvdock.errors import ArgumentTypeError, UnsupportedError
from kvdock.ops.api import BlockPairs, output_pair, pairs_tensor
from kvdock.ops.dispatcher import active_dispatcher
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = ["PagedKVCache"]


class PagedKVCache(GroupedCache):
    """A pool of blocks. Which token goes to which slot is the caller's to say.

    A slot is ``block_id * block_size + offset``, the same in every layer of a group, for keys and for values. There may be more slots
    than int32 counts: what comes in int64 reaches them. Layers that all keep keys and values by one rule are one group. Others are in
    several, and each of these has slots of its own: see `groups` and `group_of`. It copies as `Cache` says.

    Args:
        spec: what the layers need.
        config: what the user chose.
        rank: device, and which share of the heads.
        ops: where its ops come from.
        tensors: memory to lie in, see `from_tensors`; by default its own.

    Raises:
        ArgumentValueError: heads and ranks do not divide, bytes of groups cannot agree, a layout that these layers do not have, or more
            bytes than an address space has.
        CapacityError: the budget is too small, or the device has not as much memory.
        UnsupportedError: a dtype that no cache holds yet.
        BackendError: no backend can be chosen for the device.
    """

    _written_by = "paged_caching_"

    def __init__(self, spec: KVSpec, config: PagedConfig, rank: RankInfo, ops: OpSource, tensors: Given | None = None) -> None:
        self.spec, self.config, self.rank = spec, config, rank
        self._dtype = config.cache_dtype or spec.dtype
        if self._dtype != spec.dtype:
            raise UnsupportedError(
                "PagedKVCacheConfig: cache_dtype",
                expected=f"{spec.dtype}, the model's own",
                got=f"{self._dtype}: only a quantised cache may differ, and those are not there yet",
                fix="leave cache_dtype out, and give the KVSpec the dtype",
            )
        self._grouping = grouping(spec, config, rank, is_one_memory=isinstance(tensors, torch.Tensor))
        self._sources, self._numbers = sources(spec), group_numbers(self.groups)
        self._num_blocks = config.blocks_for(self._grouping.plan.block_bytes, len(self._numbers), self.groups)
        # Kept, since a cache stays with the backend that it was made under, whichever is active later.
        self._named = active_name()
        # Before memory is taken, which would be of no use without a backend.
        require_backend(ops, self._written_by, rank.device, self._named)
        self._host_pages = host_pages(ops, config.pinned_for, rank.device, is_given=tensors is not None)
        self._store = self._given(tensors) if tensors is not None else self._taken()
        if self._host_pages is not None:
            self._host_pages.lock(self)
        self._bind(ops)

    @classmethod
    def from_tensors(
        cls, spec: KVSpec, config: PagedConfig, rank: RankInfo, tensors: Given, *, ops: OpSource | None = None
    ) -> PagedKVCache:
        """Make a cache in memory that the caller owns, such as an engine's pools.

        The memory stays the caller's: kvdock keeps references to the tensors, and neither zeroes nor frees anything. A masked read
        of what was never written yields what is there; zero it first if that may be NaN. `reset` zeroes the cache's places. A deep
        copy of the cache has memory of its own.

        Args:
            spec: what the layers need.
            config: what the user chose; its ``num_blocks``, or the number that fits into its budget, is how many blocks there are.
            rank: device, and which share of the heads.
            tensors: one contiguous ``uint8`` tensor for everything, in one dim or ``[num_blocks, block_bytes]``, at a multiple of 16
                bytes: ``plan_blocks(..., in_one_memory=True)`` says how large. Or, for layers of one kind and one rule, for each layer
                ``(k, v)`` or its latents, ``[num_blocks, block_size, heads, dim]``, with a block's bytes together; None for a layer that
                shares another's. Of two pools of all layers pass ``zip(k_pool, v_pool)``.
            ops: where its ops come from; default is the process's runtime.

        Returns:
            A cache of the class that `create_cache` would make.

        Raises:
            ArgumentTypeError, ArgumentValueError: another dtype, shape, device, order or alignment than is needed, or tensors that share
                bytes; says which, and what is needed.
            UnsupportedError: tensors by layer for layers of several kinds or rules.
        """
        for name, value, kind in (("spec", spec, KVSpec), ("config", config, PagedConfig), ("rank", rank, RankInfo)):
            if not isinstance(value, kind):
                raise ArgumentTypeError(f"PagedKVCache.from_tensors: {name}", expected=f"a {kind.__name__}", got=repr(value)[:80])
        return cast("PagedKVCache", config.build_on(tensors, spec, rank, ops if ops is not None else active_dispatcher()))

    def _taken(self) -> Store:
        """Take the memory."""
        config, plan, device = self.config, self._grouping.plan, self.rank.device
        subject, nbytes = type(config).__name__, self._num_blocks * plan.block_bytes
        if self._grouping.use is not None:
            return allocated(subject, nbytes, device, self._allocate)
        shape, alignment = (self._num_blocks, plan.block_bytes), max(config.alignment, PLACE)
        memory = allocated(subject, nbytes, device, lambda: self._take(shape, torch.uint8, device, alignment))
        return block_store(self._grouping, memory, config.head_layout, alignment)

    def _given(self, tensors: Given) -> Store:
        """View given memory."""
        config, device = self.config, torch.empty(0, device=self.rank.device).device  # with its index
        if isinstance(tensors, torch.Tensor):
            return given_blocks(tensors, self._grouping, self._num_blocks, config, device)
        return given_layers(tensors, self._grouping, self._sources, self._num_blocks, config, device)

    def _allocate(self) -> Store:
        """Take the memory: one storage for keys and one for values, for each group of equal layers; and the views of each layer."""
        pools: list[PagedPool] = []
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, members in group_layers(self._rank_layers()).items():
            k_pool, v_pool = (
                self._pool(len(members), heads, dim) for heads, dim in ((layer.num_k_heads, layer.k_dim), (layer.num_v_heads, layer.v_dim))
            )
            pools += k_pool, v_pool
            views.update(zip(members, zip(k_pool.layers, v_pool.layers, strict=True), strict=True))
        named = {index: {"k": k, "v": v} for index, (k, v) in views.items()}
        return Store(tuple(pools), named, views, tuple((k.whole, v.whole) for k, v in zip(pools[::2], pools[1::2], strict=True)))

    def _rank_layers(self) -> dict[int, RankLayer]:
        """Return what the rank holds of each layer that keeps something."""
        (group,) = self._grouping.plan.groups
        found = {}
        for (index, _), part in zip(group.members, group.parts, strict=True):
            (k_heads, k_dim), (v_heads, v_dim) = (buffer.shape for buffer in part.buffers)
            found[index] = RankLayer(k_heads, v_heads, k_dim, v_dim)
        return found

    def _pool(self, num_layers: int, heads: int, dim: int) -> PagedPool:
        config, sizes = self.config, (num_layers, self._num_blocks, self.config.block_size, heads, dim)
        where = (self._dtype, self.rank.device, self._grouping.layout, config.head_layout, config.alignment)
        return PagedPool.allocate(*sizes, *where, self._take)

    @property
    def _take(self) -> Callable[..., torch.Tensor]:
        return fresh if self._host_pages is None else self._host_pages.take

    def _bind(self, ops: OpSource) -> None:
        """Fix each layer's pools in the ops, so that a call no longer reads them."""
        self._views = [self._store.pairs[index] for index in self._sources]
        self._write = [ops.op("paged_caching_").bind(*pair, named=self._named) for pair in self._views]
        self._read = [ops.op("gather_paged").bind(*pair, named=self._named) for pair in self._views]
        self._attend = [ops.op("paged_attention").bind(*pair, named=self._named) for pair in self._views]
        self._bind_copies(ops)

    def _bind_copies(self, ops: OpSource) -> None:
        """Fix what copies blocks: of all layers at once where these lie together, see `Store`."""
        self._routes = Routes(ops)
        self._copy = [ops.op("copy_blocks_").bind(*each, named=self._named) for each in self._store.copied]

    @property
    def host_pages(self) -> HostPages | None:
        """The page-locked memory of a cache that was made with ``pinned_for``: how much of it is locked, and how to wait for the rest."""
        return self._host_pages

    @property
    def backend_name(self) -> str | None:
        """The backend that it was made under, by `kvdock.use_backend`; None where each call chooses as usual."""
        return self._named

    @property
    def device(self) -> torch.device:
        """Device that holds it."""
        return self._store.pools[0].memory.device

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
        """Copy whole blocks, all that is in them: one launch where all layers lie in one memory, or one for each group of equal layers.

        Args:
            block_pairs: ``[N, 2]`` (src, dst) block ids: a tensor, a numpy array or a list.

        Raises:
            KVDockError: as `kvdock.ops.copy_blocks_`; nothing was written.
        """
        pairs = pairs_tensor(block_pairs)
        for copy in self._copy:
            copy(pairs)

    def swap_blocks(self, dst: PagedKVCache, block_pairs: BlockPairs, *, group: int = 0) -> None:
        """Copy whole blocks to another cache of the same layers, such as one in host memory: all layers of a group.

        Layouts, alignment and numbers of blocks may differ. It is a launch for keys and one for values of each group of equal layers,
        or two for all layers in one memory; where orders of heads or gaps differ, one for all buffers that lie at whole steps from one
        another in both memories, or one for each. It is ordered as `kvdock.ops.swap_blocks_` says; `kvdock.cache.swapping` does it aside.

        Args:
            dst: the cache to copy to, on the same device, or one of the two in host memory.
            block_pairs: ``[N, 2]`` (src, dst): blocks of this cache, and where they go in ``dst``.
            group: number of the group of layers that the blocks belong to.

        Raises:
            ArgumentTypeError, ArgumentValueError: ``dst`` keeps something else, or is this cache.
            IndexRangeError: no such group.
            KVDockError: as `kvdock.ops.swap_blocks_`; nothing was written.
        """
        self._routes.swap(self, dst, block_pairs, group)

    def __repr__(self) -> str:
        sizes = ", ".join(str(group.block_size) for group in self.groups)
        shape = f"{self.num_layers} layers, {self.num_blocks} blocks of {sizes}"
        return f"{type(self).__name__}({shape}, {self.dtype}, {self.nbytes} bytes on {self.device})"
