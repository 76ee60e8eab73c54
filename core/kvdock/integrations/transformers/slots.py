"""The slots of a batch's tokens, on the device, and what is written to them and read from them."""

from __future__ import annotations

import torch

from kvdock.cache.mla import MLAKVCache
from kvdock.cache.paged import PagedKVCache
from kvdock.scheduler import SequenceBatch

__all__ = ["SlotTensor", "inner", "read", "rows_for", "write"]


class SlotTensor:
    """Slots of all tokens of a batch, for what gathers them: built once and extended step by step.

    A step costs its new tokens; building the whole mapping again in each layer would cost more than the reading.

    Args:
        device: where the slots are needed.
        group: of which layer group.
    """

    def __init__(self, device: torch.device, group: int) -> None:
        self._group = group
        self._buffer = torch.empty((0, 0), dtype=torch.int64, device=device)
        self._valid = 0

    def upto(self, batch: SequenceBatch, stop: int) -> torch.Tensor:
        """Return the slots of the first ``stop`` tokens, int64 ``[batch, stop]``; a view, good until the batch changes."""
        if stop > self._valid:
            self._extend(batch, stop)
        return self._buffer[:, :stop]

    def forget(self, start: int) -> None:
        """Tokens from ``start`` on may have moved."""
        self._valid = min(self._valid, start)

    def _extend(self, batch: SequenceBatch, stop: int) -> None:
        """Fill in what is missing of the first ``stop`` tokens, in a larger buffer where the old one is too small."""
        if self._buffer.shape[0] != batch.batch_size or stop > self._buffer.shape[1]:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty((batch.batch_size, 2 * stop), dtype=torch.int64, device=self._buffer.device)
            self._valid = 0
        self._buffer[:, self._valid : stop] = torch.from_numpy(batch.slot_mapping(self._valid, stop, self._group))
        self._valid = stop


def write(pool: PagedKVCache, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values, ``[batch, heads, tokens, dim]``, to slots ``[batch, tokens]``; nothing where a slot is -1."""
    if torch.is_grad_enabled():
        keys, values = keys.detach(), values.detach()
    if isinstance(pool, MLAKVCache):
        pool.update(layer, rows_for(pool, keys), rows_for(pool, values), slots)
    else:  # written out, as this is called for each layer of each step
        pool.update(layer, inner(keys.transpose(1, 2)), inner(values.transpose(1, 2)), slots)


def read(pool: PagedKVCache, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values in slots ``[batch, tokens]`` as new ``[batch, heads, tokens, dim]``, contiguous; 0 where a slot is -1."""
    if isinstance(pool, MLAKVCache):
        with torch.no_grad():
            latents, rotary = pool.gather(layer, slots)
        return latents.unsqueeze(1), rotary.unsqueeze(1)
    keys, values = (_buffer(cache, *slots.shape) for cache in (pool.k_cache(layer), pool.v_cache(layer)))
    with torch.no_grad():
        pool.gather(layer, slots, out=(keys.transpose(1, 2), values.transpose(1, 2)))
    return keys, values


def rows_for(pool: PagedKVCache, states: torch.Tensor) -> torch.Tensor:
    """View ``[batch, heads, tokens, dim]`` as a pool writes it, elements of a head side by side.

    Returns:
        ``[batch, tokens, heads, dim]``; for latents, which have one head, ``[batch, tokens, dim]``.
    """
    return inner(states.squeeze(1) if isinstance(pool, MLAKVCache) else states.transpose(1, 2))


def inner(states: torch.Tensor) -> torch.Tensor:
    """Return states whose elements of a head lie side by side, as ops want them."""
    return states if states.stride(-1) == 1 or states.shape[-1] == 1 else states.contiguous()


def _buffer(cache: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Allocate ``[batch, heads, tokens, dim]`` for what lies in a pool's ``[blocks, block_size, heads, dim]``."""
    return torch.empty((batch, cache.shape[2], tokens, cache.shape[3]), dtype=cache.dtype, device=cache.device)
