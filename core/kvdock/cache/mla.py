"""A paged cache of latents (MLA): one row for each token, which all heads of all ranks share."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.cache.interface import OpSource, check_layer
from kvdock.cache.paged import PagedKVCache
from kvdock.cache.pool import LatentPool, RankLayer, Store, group_layers
from kvdock.cache.uses import check_latent_scale
from kvdock.ops.api import new_latents, output_pair

__all__ = ["MLAKVCache"]


class MLAKVCache(PagedKVCache):
    """A pool of blocks per layer whose rows are a latent and, behind it, the rotary part: ``rank + rope`` elements for each token.

    It is a `PagedKVCache` of one key head, whose values are the first ``rank`` elements of the keys: attention over it is in the absorbed
    form. Blocks, slots, layouts, copies and budgets are as there; the order of heads in a block means nothing. It is not split over
    ranks: each holds the latents, and has its share of the query heads. `create_cache` makes it of a `PagedKVCacheConfig` where all
    layers are `MLALayerSpec`; arguments and errors are those of `PagedKVCache`.
    """

    _written_by = "mla_caching_"

    def _rank_layers(self) -> dict[int, RankLayer]:
        (group,) = self._grouping.plan.groups
        rows = {index: part.buffers[0] for (index, _), part in zip(group.members, group.parts, strict=True)}
        return {index: RankLayer(1, 0, row.shape[0], row.values) for index, row in rows.items()}

    def _allocate(self) -> Store:
        """Take the memory: one storage for each group of equal layers; and the views of each layer."""
        pools: list[LatentPool] = []
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        named: dict[int, dict[str, torch.Tensor]] = {}
        for layer, members in group_layers(self._rank_layers()).items():
            pool = LatentPool.of(self._pool(len(members), layer.num_k_heads, layer.k_dim), layer.v_dim)
            pools.append(pool)
            views.update(zip(members, zip(pool.layers, pool.values, strict=True), strict=True))
            named.update((index, {"kv": rows}) for index, rows in zip(members, pool.rows, strict=True))
        return Store(tuple(pools), named, views, tuple(pool.halves for pool in pools))

    def _bind(self, ops: OpSource) -> None:
        """Fix each layer's pool in the ops."""
        self._views = [self._store.pairs[index] for index in self._sources]
        self._write = [ops.op("mla_caching_").bind(pool, named=self._named) for pool, _ in self._views]
        self._read = [ops.op("mla_gather").bind(pool, named=self._named) for pool, _ in self._views]
        self._attend = [ops.op("paged_attention").bind(*pair, named=self._named) for pair in self._views]
        self._bind_copies(ops)

    def kv_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's rows, ``[num_blocks, block_size, 1, rank + rope]``. `k_cache` returns the same, and `v_cache` the latents."""
        return self.k_cache(layer)

    def update(self, layer: int, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the latents of new tokens, and their rotary parts.

        Args:
            layer: 0 to ``num_layers - 1``.
            kv_c: ``[T, rank]`` or ``[B, S, rank]``, any strides but an innermost of 1.
            k_pe: ``[T, rope]`` or ``[B, S, rope]``, with strides of its own.
            slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; negative means padding.

        Returns:
            What attention reads as keys, ``[num_blocks, block_size, 1, rank + rope]``, and as values, ``[..., 1, rank]``: views of
            one memory.

        Raises:
            IndexRangeError: no such layer; or, on host memory, a slot out of range.
            KVDockError: as `kvdock.ops.mla_caching_`; nothing was written.
        """
        if layer.__class__ is not int or layer < 0 or layer >= len(self._views):
            check_layer(type(self).__name__, layer, len(self._views))
        written = self._write[layer](kv_c, k_pe, slot_mapping, None)
        if written is None:
            return self._views[layer]
        return written[0], written[0][..., : self._rank(layer)]  # what is traced returns a view of its own

    def _rank(self, layer: int) -> int:
        return self._views[layer][1].shape[3]

    def gather(
        self, layer: int, slot_mapping: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read latents and rotary parts at given slots.

        Args:
            layer: 0 to ``num_layers - 1``.
            slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; a negative slot reads as zeros.
            out: where to put ``[..., rank]`` and ``[..., rope]``; by default new tensors.

        Returns:
            ``(kv_c, k_pe)``.

        Raises:
            KVDockError: as `kvdock.ops.mla_gather`.
        """
        pool = self.kv_cache(layer)
        kv_c, k_pe = new_latents(pool, slot_mapping, self._rank(layer)) if out is None else output_pair(out, "mla_gather")
        self._read[layer](slot_mapping, None, kv_c, k_pe)
        return kv_c, k_pe

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend from new tokens, which are written already, to the latents of their sequences: in the absorbed form.

        A query head is its part without rotation times the head's up-projection of keys, and its rotary part behind that. What comes
        back is to be multiplied by the head's up-projection of values.

        Args:
            layer: 0 to ``num_layers - 1``.
            q: ``[N, Hq, rank + rope]``, the last tokens of each sequence.
            block_table: ``[B, W]`` int32.
            seq_lens: ``[B]`` int32 or int64.
            scale: what scores are multiplied by. It must be given: it goes by the heads that the latents expand to.
            options: as of `PagedKVCache.attend`.

        Returns:
            ``[N, Hq, rank]``.

        Raises:
            ArgumentValueError: no scale.
            KVDockError: as `kvdock.ops.paged_attention`.
        """
        check_latent_scale(scale)
        return super().attend(layer, q, block_table, seq_lens, scale=scale, **options)
