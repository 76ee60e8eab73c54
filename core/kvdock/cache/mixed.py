"""A paged cache of layers of any kinds and rules, in one memory of blocks."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.cache.grouping import used_parts
from kvdock.cache.interface import OpSource, check_layer
from kvdock.cache.paged import PagedKVCache
from kvdock.cache.uses import Use
from kvdock.errors import ArgumentValueError

__all__ = ["MixedKVCache"]


class MixedKVCache(PagedKVCache):
    """A pool of equally large blocks that layers of any kinds share: keys and values, latents, states, bytes in somebody's format.

    It is a `PagedKVCache`: blocks, copies and budgets are as there. Layers form groups by their rules of retention, and a block belongs
    to one group at a time; what `update`, `gather` and `attend` take as slots or as a block table is that of the layer's group. They
    serve layers with keys and values, or with latents: of these `update` takes ``kv_c`` and ``k_pe``, and `gather` returns them, as in
    `kvdock.MLAKVCache`. What no op knows is in `PagedKVCache.buffers`, and states in `PagedKVCache.state`, for the model to read and
    write. `create_cache` makes it of a `PagedKVCacheConfig` where one pool by layers would not do.
    """

    _written_by = "copy_blocks_"

    def _bind(self, ops: OpSource) -> None:
        """Fix the memory of each layer that an op knows."""
        uses = {
            layer: kind(self._store.pairs[layer], ops, self._named) for layer, (_, kind) in used_parts(self._grouping.plan.groups).items()
        }
        self._uses: list[Use | None] = [uses.get(index) for index in self._sources]
        self._bind_copies(ops)

    def _used(self, layer: int) -> Use:
        if layer.__class__ is int and 0 <= layer < len(self._uses) and (use := self._uses[layer]) is not None:
            return use
        check_layer(type(self).__name__, layer, len(self._uses))
        expected, fix = "one with keys and values, or latents", "ask buffers(layer), or state(layer), for what it keeps"
        raise ArgumentValueError(f"{type(self).__name__}: layer", expected=expected, got=self._described(layer), fix=fix)

    def k_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's keys, ``[num_blocks, block_size, Hk, Dk]`` with the size of its group's blocks; of latents the rows."""
        return self._used(layer).pair[0]

    def v_cache(self, layer: int) -> torch.Tensor:
        """Return a layer's values, ``[num_blocks, block_size, Hv, Dv]``; of latents the first elements of the rows."""
        return self._used(layer).pair[1]

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values, or the latents and rotary parts, of new tokens. See `PagedKVCache.update`, `MLAKVCache.update`.

        Args:
            layer: 0 to ``num_layers - 1``.
            k: keys; of a layer with latents ``kv_c``.
            v: values; of a layer with latents ``k_pe``.
            slot_mapping: slots of the layer's group.

        Raises:
            IndexRangeError: no such layer; or, on host memory, a slot out of range.
            ArgumentValueError: the layer has neither.
            KVDockError: as the op; nothing was written.
        """
        return self._used(layer).write(k, v, slot_mapping)

    def gather(
        self, layer: int, slot_mapping: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read keys and values, or latents and rotary parts, at slots of the layer's group. See `PagedKVCache.gather`."""
        return self._used(layer).read(slot_mapping, out)

    def attend(self, layer: int, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attend by the block table of the layer's group. See `PagedKVCache.attend`; to latents as `MLAKVCache.attend`, with a scale."""
        return self._used(layer).attend(q, block_table, seq_lens, options)
