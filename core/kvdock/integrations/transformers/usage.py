"""How much a cache holds."""

from __future__ import annotations

from contextlib import suppress

import attrs

from kvdock.errors import KVDockError
from kvdock.integrations.transformers.state import PagedState

__all__ = ["CacheUsage", "usage_of"]


@attrs.frozen
class CacheUsage:
    """What a cache holds, and what its pool has.

    Args:
        tokens: tokens of all rows.
        blocks: distinct blocks that hold them; rows share what they have in common.
        bytes: bytes of those blocks, in all layers, keys and values.
        pool_blocks_used: blocks that this cache, its copies, and the prefix cache hold together.
        pool_blocks: blocks of the pool.
        pool_bytes: bytes of the pool.
        prompt_tokens: tokens of the prompts of the last `PagedCacheForTransformers.bind`, without padding; 0 without a prefix cache.
        cached_tokens: tokens of those that were found in the prefix cache.
        state_bytes: bytes of the states of this cache, which are beside the pool; 0 of models without.
        kept_state_bytes: bytes of the states that are kept behind prefixes, beside the pool.
    """

    tokens: int
    blocks: int
    bytes: int
    pool_blocks_used: int
    pool_blocks: int
    pool_bytes: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    state_bytes: int = 0
    kept_state_bytes: int = 0


def usage_of(state: PagedState, kept_state_bytes: int) -> CacheUsage:
    """Return what a batch holds now, and its pool: without what was dropped, unless another thread is in a step."""
    with suppress(KVDockError):
        state.manager.available_size  # noqa: B018 - the manager ends what is over at any call
        if state.lengths.is_whole:
            state.manager.hand_over()
    pool, bound = state.pool, state.bound
    blocks = state.batch.num_blocks if state.batch else 0
    return CacheUsage(
        tokens=state.batch_size * state.length,
        blocks=blocks,
        bytes=pool.nbytes // pool.num_blocks * blocks,
        pool_blocks_used=state.manager.blocks_used,
        pool_blocks=pool.num_blocks,
        pool_bytes=pool.nbytes,
        prompt_tokens=bound.prompts.tokens if bound else 0,
        cached_tokens=bound.cached_tokens if bound else 0,
        state_bytes=state.states.nbytes,
        kept_state_bytes=kept_state_bytes,
    )
