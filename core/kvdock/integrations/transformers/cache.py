"""What ``generate`` sees."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import attrs
import numpy as np
import torch
from transformers.cache_utils import Cache

import kvdock
from kvdock.cache.paged import PagedKVCacheConfig
from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD, CROPS_TO_LENGTH, DUMMY_LAYER
from kvdock.integrations.transformers.layer import PagedLayer
from kvdock.integrations.transformers.measure import measure
from kvdock.integrations.transformers.state import PagedState
from kvdock.rank import RankInfo
from kvdock.scheduler import BlockAllocator

__all__ = ["CacheUsage", "PagedCacheForTransformers"]


@attrs.frozen
class CacheUsage:
    """What a cache holds, and what its pool has.

    Args:
        tokens: tokens of all rows.
        blocks: distinct blocks that hold them; rows share what they have in common.
        bytes: bytes of those blocks, in all layers, keys and values.
        pool_blocks_used: blocks that this cache and its copies hold together.
        pool_blocks: blocks of the pool.
        pool_bytes: bytes of the pool.
    """

    tokens: int
    blocks: int
    bytes: int
    pool_blocks_used: int
    pool_blocks: int
    pool_bytes: int


class PagedCacheForTransformers(Cache):
    """A Transformers cache whose keys and values are in the blocks of one pool.

    It gives the tokens that ``DynamicCache`` gives, in greedy decoding, sampling, beam search, assisted decoding and
    chunked prefill, and takes blocks as sequences grow. Make one with `for_model`. It can be used by one ``generate`` call
    after another: `reset` it for a new conversation, or keep it and pass the longer prompt. `copy.deepcopy` shares
    the blocks, and each copy writes into its own.

    Threads: a pool, with all the caches in it, belongs to one thread at a time. Between forward passes another thread may
    go on; a forward pass in another thread at the same time is refused with `WrongThreadError`.
    """

    def __init__(self, state: PagedState, windows: tuple[int | None, ...], stored: tuple[bool, ...]) -> None:
        self.state = state
        self._windows = windows
        self._stored = stored
        paged = iter(PagedLayer(state, index, window) for index, window in enumerate(windows))
        super().__init__(layers=[next(paged) if real else DUMMY_LAYER() for real in stored])

    def __repr__(self) -> str:
        table, pool = self.state.table, self.state.allocator
        return f"PagedCacheForTransformers(layers={len(self)}, batch_size={table.batch_size}, length={table.length}, pool={pool})"

    @classmethod
    def for_model(cls, model: Any, conf: PagedKVCacheConfig, prefix: str | None = None) -> PagedCacheForTransformers:
        """Make a cache for a model, with a pool on its device.

        One token is run through the model, to measure what it hands to a cache.

        Args:
            model: a decoder-only ``PreTrainedModel``.
            conf: size of the pool and of its blocks. ``num_blocks`` blocks hold ``num_blocks * block_size`` tokens of all rows together.
            prefix: how prefixes are reused; only None today.

        Raises:
            UnsupportedError: ``prefix`` is not None, or the model keeps something else than keys and values of one dtype on one
                device (linear attention, convolutions, cross-attention, layers on several devices, ...).
            CapacityError: the memory in ``conf`` holds not even one block.
        """
        if prefix is not None:
            raise UnsupportedError(
                "PagedCacheForTransformers.for_model: prefix",
                expected="None",
                got=repr(prefix),
                fix="reuse of prefixes comes with kvdock's prefix caches; until then reuse a cache with copy.deepcopy(cache)",
            )
        found = measure(model)
        pool = kvdock.create_cache(found.spec, conf, RankInfo(found.device))
        state = PagedState(pool, BlockAllocator(pool.num_blocks))
        return cls(state, found.windows, found.stored)

    def bind(self, **inputs: Any) -> dict[str, Any]:
        """Return the arguments of a ``generate`` or ``forward`` call together with this cache.

        The keyword for a cache is ``cache`` from Transformers 5.24 on and ``past_key_values`` before; this takes the right one.

        Raises:
            ArgumentValueError: the cache already holds the whole prompt, so that there is no token to compute. Transformers
                itself would feed the prompt a second time.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        held = self.get_seq_length()
        if ids is not None and held and ids.shape[1] <= held and (mask is None or mask.shape[1] == ids.shape[1]):
            raise ArgumentValueError(
                "PagedCacheForTransformers.bind: input_ids",
                expected=f"more than the {held} tokens that the cache holds",
                got=f"{ids.shape[1]} tokens in all",
                fix=f"keep at least one token to compute: cache.truncate({ids.shape[1] - 1}); or cache.reset() for another text",
            )
        return {**inputs, CACHE_KEYWORD: self}

    @property
    def usage(self) -> CacheUsage:
        """What this cache holds now."""
        pool, table, allocator = self.state.pool, self.state.table, self.state.allocator
        blocks = table.num_blocks
        return CacheUsage(
            tokens=table.batch_size * table.length,
            blocks=blocks,
            bytes=pool.nbytes // pool.num_blocks * blocks,
            pool_blocks_used=allocator.num_used,
            pool_blocks=pool.num_blocks,
            pool_bytes=pool.nbytes,
        )

    @property
    def batch_size(self) -> int:
        """Rows of the sequences that the cache holds, or -1 without any."""
        return self.state.table.batch_size if self.state.table.length else -1

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row, and release the blocks behind them.

        Raises:
            IndexRangeError: there are fewer. Nothing was changed.
        """
        self.state.truncate(length)

    def crop(self, tokens_to_remove: SupportsIndex) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, as the installed version of Transformers means it.

        Args:
            tokens_to_remove: zero or negative; before Transformers 5.16 a positive number is the length to keep.

        Raises:
            ArgumentValueError: it is positive, from Transformers 5.16 on. Nothing was changed.
        """
        length, change = self.state.table.length, operator.index(tokens_to_remove)  # some versions pass a tensor
        if change <= 0:
            self.truncate(max(length + change, 0))
        elif CROPS_TO_LENGTH:
            self.truncate(min(length, change))
        else:
            raise ArgumentValueError(
                "PagedCacheForTransformers.crop: tokens_to_remove",
                expected="zero or a negative number of tokens",
                got=change,
                fix=f"crop({-change}) to remove so many, truncate({change}) to keep so many",
            )

    def reset(self) -> None:
        """Release all blocks. The cache is empty then, for a batch of any size."""
        self.state.truncate(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``beam_idx[i]`` the new row i; rows that go on from one share its blocks.

        Raises:
            IndexRangeError: a row that does not exist. Nothing was changed.
        """
        if self.state.table.length:
            self.state.select(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; the copies share its blocks."""
        if self.state.table.length:
            self.state.select(np.repeat(np.arange(self.state.table.batch_size), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some rows.

        Args:
            indices: row numbers, or a mask of booleans over the rows; one dimension.
        """
        if self.state.table.length:
            self.state.select(np.arange(self.state.table.batch_size)[indices.cpu().numpy()])

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCacheForTransformers:
        """Return a cache that goes on from here in the same pool. No key or value is copied before one of the two writes."""
        copied = type(self)(self.state.fork(), self._windows, self._stored)
        memo[id(self)] = copied
        return copied
