"""Decoding with everything in place: room for all tokens to come is made before, so that a step writes and reads the same addresses.

A step is then one graph for `torch.compile`, whatever the length. Nothing in it depends on a number that the host has::

    eager:      positions, slots and lengths of the next token are copied to where they were
    compiled:   the model, with writes to the pool and attention on pages
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import attrs
import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvdock.cache.paged import PagedKVCache
from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD
from kvdock.integrations.transformers.latent import absorbing, latents_problem, rope_of
from kvdock.integrations.transformers.masks import left_pads
from kvdock.integrations.transformers.reading import LAYER
from kvdock.integrations.transformers.slots import rows_for
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.switching import restore, switch
from kvdock.integrations.transformers.tables import sent
from kvdock.scheduler import SequenceBatch

__all__ = ["VIEW", "DecodingLayer", "PagedDecoding", "Place", "check_compiles", "check_in_place", "decoding_layers", "mask_of"]

_DECODING = "PagedCacheForTransformers.decoding"

VIEW = "kvdock_layer"
"""Argument of attention functions by which a layer reaches kvdock's."""


@attrs.frozen(eq=False)
class Place:
    """Where the steps of all layers of a group write and read: tensors that stay where they are.

    Args:
        pool: where keys and values are.
        block_table: int32 ``[rows, blocks]``, with room for all tokens.
        slots: where the new token of each row goes, ``[rows, 1]``; -1 for padding.
        lens: tokens of each row in its blocks, the new one included, ``[rows]``.
    """

    pool: PagedKVCache
    block_table: torch.Tensor
    slots: torch.Tensor
    lens: torch.Tensor


class _Tables:
    """What steps of a batch read, and what they are told.

    Args:
        pool: where keys and values are.
        block_tables: int32 ``[rows, blocks]``, with room for all tokens, of each layer group.
        starts: first token of each row that is seen, ``[rows]``.
    """

    def __init__(self, pool: PagedKVCache, block_tables: Sequence[torch.Tensor], starts: torch.Tensor) -> None:
        self.mask = mask_of(starts)
        self.values = torch.zeros(2 + len(block_tables), starts.numel(), 1, dtype=torch.int64, device=starts.device)
        self.positions, lens, *slots = self.values.unbind()
        self.places = [Place(pool, *each, lens.view(-1)) for each in zip(block_tables, slots, strict=True)]
        for tensor in (*block_tables, *slots, self.mask, self.positions, self.places[0].lens):
            torch._dynamo.mark_static_address(tensor)


def mask_of(starts: torch.Tensor) -> torch.Tensor:
    """Return the first token of each row that is seen, ``[rows]``, in a form that passes through a model untouched."""
    return starts.to(torch.int32).view(-1, 1, 1, 1)


class DecodingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the base does not annotate its __init_subclass__
    """One layer: it writes one token of each row, and hands itself over to attention.

    Args:
        place: shared by all layers of its group.
        index: which of the pool's layers this is.
        window: sliding window in tokens, or None.
    """

    is_compileable = True

    def __init__(self, place: Place, index: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.place, self.index, self.window = place, index, window
        self.is_sliding, self.is_initialized = window is not None, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values, ``[rows, heads, 1, dim]``; return them as they are."""
        place = self.place
        place.pool.update(self.index, rows_for(place.pool, key_states), rows_for(place.pool, value_states), place.slots)
        if "kwargs" in kwargs:
            kwargs["kwargs"][VIEW] = self
        else:  # Transformers before 5.24 passes no arguments on: without a compiler attention finds the layer on the keys
            setattr(key_states, LAYER, self)
        return key_states, value_states

    def attend(self, module: Any, query: torch.Tensor, mask: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        """Attend from one token of each row, ``[rows, Hq, 1, dim]``, to all that the row has.

        Args:
            module: the model's attention.
            query: the queries.
            mask: that of the tables.
            told: what else attention functions are told.

        Returns:
            ``[rows, 1, Hq, dim of the values]``.
        """
        rope, scale = rope_of(self.place.pool, self.index), told.get("scaling")
        if rope:
            return absorbing(module, query, rope, scale, lambda query, scale: self._attend(query, mask, scale, told))
        return self._attend(query, mask, scale, told)

    def _attend(self, query: torch.Tensor, mask: torch.Tensor, scale: float | None, told: dict[str, Any]) -> torch.Tensor:
        pool = self.place.pool
        out = query.new_empty((*query.shape[:2], pool.v_cache(self.index).shape[3]))
        pool.attend(
            self.index,
            query.squeeze(2),
            self.place.block_table,
            self.place.lens,
            scale=scale,
            window=self.window,
            softcap=told.get("softcap"),
            sinks=told.get("s_aux"),
            starts=mask.view(-1),
            out=out,
        )
        return out.unsqueeze(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the room of a row: a mask is there already."""
        return self.place.block_table.shape[1] * self.place.pool.k_cache(self.index).shape[1], 0

    def get_seq_length(self) -> int:
        """Return 0: the positions of a step are there already, and a number would be part of a graph."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: no length but that of the room."""
        return -1


def decoding_layers(places: Sequence[Place], group_of: Sequence[int], windows: Sequence[int | None]) -> list[Any]:
    """Return a layer for each of the pool's, with the place of its group and its window."""
    return [DecodingLayer(places[group_of[index]], index, window) for index, window in enumerate(windows)]


class PagedDecoding(Cache):
    """The cache of decoding steps, see `PagedCacheForTransformers.decoding`; a context manager.

    Args:
        state: the batch, with tokens.
        windows: sliding window of each layer, or None.
        new_tokens: steps to make room for.
        mask: of the tokens that are there, ``[rows, length]``, or None.

    Raises:
        ArgumentValueError: no tokens are there, or a mask that hides more than padding on the left.
        OutOfBlocksError: there is no room for so many. Nothing was changed.
        UnsupportedError: attention does not read pages in all layers; or Transformers before 5.24.
    """

    def __init__(self, state: PagedState, windows: tuple[int | None, ...], new_tokens: int, mask: torch.Tensor | None) -> None:
        self._paged, self._start, self._steps, self._most = state, state.length, 0, new_tokens
        _check(state)
        assert state.batch is not None  # noqa: S101 - there are tokens
        pads = left_pads(None if mask is None else mask.bool(), state.batch_size, state.length)
        if pads is None or (pads < state.batch.pads).any():
            expected = f"padding on the left only, [{state.batch_size}, {state.length}]"
            raise ArgumentValueError(f"{_DECODING}: attention_mask", expected=expected, got=None if mask is None else list(mask.shape))
        _reserve(state, state.batch, new_tokens)
        self._pads, self._device, self._groups = pads, state.pool.device, range(len(state.pool.groups))
        with torch.inference_mode(mode=False):
            block_tables = [sent(state.batch.block_table(group), self._device) for group in self._groups]
            self.tables = _Tables(state.pool, block_tables, sent(pads - state.batch.pads, self._device))
        super().__init__(layers=decoding_layers(self.tables.places, state.group_of, windows))

    def __enter__(self) -> Self:
        self._paged.is_decoding = True
        switch(config for config, _ in self._paged.reader.configs)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back the room that was not used. The cache goes on behind the steps that were made, without one that failed."""
        restore(config for config, _ in self._paged.reader.configs)
        self._paged.is_decoding = False
        self._paged.lengths.set(length := self._start + max(self._steps - (error is not None), 0))
        self._paged.truncate(length)
        self._paged.settle()

    def next(self) -> dict[str, Any]:
        """Show the next token of each row, and return the arguments of its pass, beside ``input_ids`` of shape ``[rows, 1]``.

        Raises:
            ArgumentValueError: all steps that there is room for were made.
        """
        batch, place = self._paged.batch, self._start + self._steps
        if self._steps == self._most or batch is None:
            raise ArgumentValueError(f"{_DECODING}: next", expected=f"at most {self._most} steps", got="one more", fix="make room for more")
        slots = [batch.slot_mapping(place, place + 1, group)[:, 0] for group in self._groups]
        self.tables.values.copy_(sent(np.stack([place - self._pads, place + 1 - batch.pads, *slots])[:, :, None], self._device))
        self._steps += 1
        return {"attention_mask": self.tables.mask, "position_ids": self.tables.positions, "use_cache": True, CACHE_KEYWORD: self}


def _reserve(state: PagedState, batch: SequenceBatch, tokens: int) -> None:
    """Make room for tokens to come, in blocks that are nobody else's."""
    with state.change():
        if len(pairs := state.grown(batch, tokens)):
            state.copy_blocks(torch.from_numpy(pairs))
    if state.bound:
        state.bound.close("one that went on in steps of decoding(), which are not watched")
        state.bound.is_fresh = False


def check_in_place(subject: str, state: PagedState, stored: Sequence[bool]) -> None:
    """Raise unless all layers of a model can write and read in place."""
    others = "layers that keep a state" if len(state.states) else "" if all(stored) else "layers that share another's keys"
    problem = next(filter(None, (state.reader.why, *state.reader.problems, others)), "")
    if problem := problem or latents_problem(state.pool, state.reader.model()):
        raise UnsupportedError(subject, expected="attention on pages in all layers", got=problem, fix="call generate() with the cache")


def check_compiles(subject: str) -> None:
    """Raise unless layers of this cache can be in a compiled graph."""
    if CACHE_KEYWORD != "cache":
        got, fix = "one before 5.24, which cannot hand over a layer to a compiled graph", "call generate() with the cache"
        raise UnsupportedError(subject, expected="Transformers 5.24 or newer", got=got, fix=fix)


def _check(state: PagedState) -> None:
    """Raise unless steps of a batch can be made."""
    check_compiles(_DECODING)
    state.lengths.check_whole("decoding")
    if not state.length or state.is_decoding:
        got = "a decoding that is not over" if state.is_decoding else "an empty cache"
        raise ArgumentValueError(_DECODING, expected="a cache with the tokens of a prompt", got=got, fix="compute the prompt first")
