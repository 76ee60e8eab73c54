"""What the op means, element by element. Slow, and for tests only."""

from __future__ import annotations

import torch

__all__ = ["rope_caching_"]


def rope_caching_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token whose slot and position are in range."""
    num_blocks, block_size = k_cache.shape[:2]
    for token, (slot, position) in enumerate(zip(slot_mapping.tolist(), positions.tolist(), strict=True)):
        if 0 <= slot < num_blocks * block_size and 0 <= position < cos.shape[0]:
            block, place = divmod(slot, block_size)
            v_cache[block, place] = v[token]
            for head in range(k.shape[1]):
                for pair in range(cos.shape[1]):
                    _rotate(k_cache[block, place, head], k[token, head].float(), pair, cos[position, pair], sin[position, pair])


def _rotate(to: torch.Tensor, key: torch.Tensor, pair: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = key.shape[0] // 2
    to[pair] = key[pair] * cos - key[half + pair] * sin
    to[half + pair] = key[half + pair] * cos + key[pair] * sin
