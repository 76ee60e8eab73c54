"""LMCache behind a kvdock pool: what is computed is kept there too, and what a prompt finds there comes back before it begins.

`PoolConnector` is kvdock's pool in LMCache's interface to an engine's memory, and `LMCacheStore` connects a `CacheManager` with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

import kvdock
from kvdock.layers import KeepAll
from kvdock.prefix import PrefixEvent, Stored


class PoolConnector(GPUConnectorInterface):
    """A paged cache as LMCache sees it: chunks of tokens go in and out, ``[2, layers, tokens, heads * dim]``.

    ``blocks`` of a call are the ids of the blocks of the whole prefix, and ``first`` the first of them that may be written.
    """

    def __init__(self, cache: kvdock.PagedKVCache) -> None:
        self.layers = [tuple(cache.buffers(layer).values()) for layer in range(cache.num_layers)]
        shapes = {buffer.shape[1:] for layer in self.layers for buffer in layer}
        kinds = {group.retention for group in cache.groups}
        if len(shapes) > 1 or {*map(len, self.layers)} != {2} or kinds != {KeepAll()}:
            expected, got = "keys and values of one shape, of all tokens, in all layers", f"{sorted(map(tuple, shapes))}, {kinds}"
            raise kvdock.UnsupportedError("LMCache: cache", expected=expected, got=got, fix="serve this model without LMCache")
        self.block_size, self.num_heads, self.head_dim = shapes.pop()
        self.dtype = self.layers[0][0].dtype

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a chunk."""
        return torch.Size((2, len(self.layers), num_tokens, self.num_heads * self.head_dim))

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, *, blocks: torch.Tensor, **others: Any) -> None:
        """Copy tokens ``start`` to ``end - 1`` of a prefix out of the pool."""
        ids = blocks[start // self.block_size : end // self.block_size]
        for layer, buffers in enumerate(self.layers):
            for kind, buffer in enumerate(buffers):
                memory_obj.tensor[kind, layer].copy_(buffer[ids].reshape(end - start, -1))

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, *, blocks: torch.Tensor, first: int, **others: Any) -> None:
        """Copy them into the pool: into blocks that are nobody else's, since others may read those before."""
        begin = max(start // self.block_size, first)
        ids = blocks[begin : end // self.block_size]
        for layer, buffers in enumerate(self.layers):
            for kind, buffer in enumerate(buffers):
                chunk = memory_obj.tensor[kind, layer, begin * self.block_size - start :]
                buffer[ids] = chunk.view(-1, *buffer.shape[1:]).to(buffer.device)

    def batched_from_gpu(self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **where: Any) -> None:
        """Copy several chunks out of the pool."""
        for each in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*each, **where)

    def batched_to_gpu(self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **where: Any) -> None:
        """Copy several chunks into the pool."""
        for each in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*each, **where)


def engine_for(cache: kvdock.PagedKVCache, config: LMCacheEngineConfig, model: str) -> LMCacheEngine:
    """Return LMCache's engine for a cache; ``LMCacheEngineBuilder.destroy(model)`` ends it.

    Args:
        cache: all layers have keys and values of one shape.
        config: LMCache's. ``chunk_size`` is a multiple of the cache's block size.
        model: a name: chunks of another are never found.

    Raises:
        ArgumentValueError: another chunk size.
        UnsupportedError: another kind of cache.
    """
    connector = PoolConnector(cache)
    if config.chunk_size % connector.block_size:
        expected, fix = f"a multiple of the block size, {connector.block_size}", f"chunk_size={16 * connector.block_size}"
        raise kvdock.ArgumentValueError("LMCache: chunk_size", expected=expected, got=config.chunk_size, fix=fix)
    shape = len(connector.layers), 2, config.chunk_size, connector.num_heads, connector.head_dim
    metadata = LMCacheMetadata(model, 1, 1, 0, 0, connector.dtype, shape, role="worker", chunk_size=config.chunk_size)
    engine = LMCacheEngineBuilder.get_or_create(model, config, metadata, connector, _alone, _alone)
    engine.post_init()
    return engine


def _alone(value: Any, *ranks: int) -> Any:
    """Send to the other ranks, of which there is none."""
    return value


class LMCacheStore:
    """Keeps in LMCache what a manager publishes, and brings it back: `fetch` before a prompt begins, nothing else.

    Belongs to the manager's thread. Namespaces other than the empty one are left out, since LMCache would not tell them apart.

    Args:
        manager: nothing may be cached in it yet.
        engine: from `engine_for`, for the manager's cache.

    Raises:
        ArgumentValueError: something is cached already.
    """

    def __init__(self, manager: kvdock.CacheManager, engine: LMCacheEngine) -> None:
        if cached := manager.prefix.size_info.total_size:
            fix = "make the store before the first sequence, or call manager.reset()"
            raise kvdock.ArgumentValueError("LMCacheStore: manager", expected="nothing cached yet", got=f"{cached} tokens", fix=fix)
        self.manager, self.engine = manager, engine
        self.chunk_size = engine.config.chunk_size
        self._prefixes: dict[int, tuple[int | None, np.ndarray]] = {}  # the block before each block, and its tokens
        self.close = manager.prefix.subscribe(self._told)  # stops keeping

    def fetch(self, tokens: Sequence[int]) -> int:
        """Bring into the pool what LMCache has of a prompt behind what the pool has; return how many tokens that were.

        Nothing comes where the pool has no room for it.
        """
        size, have = self.manager.block_size, self.manager.plan(tokens).cached_len
        known = self.engine.lookup(list(tokens)) // size * size
        if known <= have:
            return 0
        try:
            sequence = self.manager.begin(tokens[:known])
        except kvdock.OutOfBlocksError:
            return 0
        try:
            computed = self._load(sequence)
        except BaseException:
            self.manager.abort(sequence)
            raise
        brought = computed - sequence.cached_len
        self.manager.commit(sequence, [], computed=computed)
        self.manager.finish(sequence)
        return brought

    def _load(self, sequence: Any) -> int:
        """Return up to where a sequence's blocks are filled now: a chunk may be gone since it was looked up."""
        have, tokens = sequence.cached_len, sequence.tokens.tolist()
        wanted = torch.arange(len(tokens)) >= have // self.chunk_size * self.chunk_size
        blocks = torch.from_numpy(sequence.block_table()).long()
        came = self.engine.retrieve(tokens, wanted, blocks=blocks, first=have // self.manager.block_size) | ~wanted
        return max(have, int(came.long().cumprod(0).sum()))

    def _told(self, event: PrefixEvent) -> None:
        """Observe the prefix cache. What it removes need not be forgotten: a block's next entry takes the place of the one before."""
        if not isinstance(event, Stored) or event.namespace:
            return
        ids, rows = event.blocks.tolist(), event.tokens.reshape(len(event.blocks), -1)
        self._prefixes.update(zip(ids, zip([event.parent, *ids], rows, strict=False), strict=True))
        path, block = [], ids[-1]
        while block is not None:
            path.append(block)
            block = self._prefixes[block][0]
        path.reverse()
        tokens = np.concatenate([self._prefixes[block][1] for block in path]).tolist()
        kept = self.engine.lookup(tokens)
        if kept < len(tokens) // self.chunk_size * self.chunk_size:
            self.engine.store(tokens, mask=torch.arange(len(tokens)) >= kept, blocks=torch.tensor(path))
