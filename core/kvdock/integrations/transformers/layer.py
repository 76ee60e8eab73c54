"""What one attention layer sees of the cache."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.gradient import refuse_backward
from kvdock.integrations.transformers.latent import rope_of
from kvdock.integrations.transformers.slots import inner
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.untraced import untraced

__all__ = ["PagedLayer"]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the base does not annotate its __init_subclass__
    """One layer of a `PagedCacheForTransformers`.

    It writes into the pool. In a pass that reads pages it returns the new tokens, on which kvdock's attention finds it; else those
    that Transformers' own layer would return: all of them, or with a sliding window those that the window reaches. What a window
    has left behind is there as long as nobody wants its room, so that `crop` can go back to it.

    Args:
        state: the pool and the table, shared with the other layers.
        index: which of the pool's layers this is.
        window: sliding window in tokens, or None.

    Attributes:
        rope: where the pool has latents, the elements of the rotary part; else 0.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, state: PagedState, index: int, window: int | None) -> None:  # not the base's: it assigns what are properties here
        self.state = state
        self.index = index
        self.window = window
        self.is_sliding = window is not None
        self.rope, self._group = rope_of(state.pool, index), state.group_of[index]
        self._value_dim = state.pool.v_cache(index).shape[3]

    def __repr__(self) -> str:
        return f"PagedLayer(index={self.index}, window={self.window}, length={self.get_seq_length()})"

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # the base assigns it
        """Whether the layer holds any token."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # the base assigns it
        """The keys that later tokens read, gathered anew as ``[batch, heads, tokens, dim]``; None without tokens."""
        return self._content()[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]  # the base assigns it
        """Their values, gathered anew as ``[batch, heads, tokens, dim]``; None without tokens."""
        return self._content()[1]

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.state.pool.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values in the pool."""
        return self.state.pool.dtype

    @property
    def pads(self) -> npt.NDArray[np.intp]:
        """Tokens of padding that have no blocks, of each row, ``[batch]``."""
        return self.state.batch.pads if self.state.batch else np.zeros(0, dtype=np.intp)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is there from the start."""

    @untraced
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return them; where attention does not read pages behind those that are visible from the first of them.

        Args:
            key_states: ``[batch, heads, tokens, dim]``.
            value_states: the same, with heads and dim of the values.
            args: what else this version of Transformers passes; not used.
            kwargs: the same.

        Raises:
            OutOfBlocksError: the pool has too few free blocks. Nothing was changed, in no layer.
        """
        state = self.state
        start = state.update(self.index, key_states, value_states)
        if state.reading is not None:
            state.reading.hand_over(self, key_states)
            return key_states, value_states
        # The new tokens are all there are, so they need not be gathered from the pool.
        if start == 0:
            return key_states, value_states
        keys, values = self._gather(start, key_states.shape[2])
        return refuse_backward(key_states, keys), refuse_backward(value_states, values)

    def attend(
        self,
        query: torch.Tensor,
        starts: torch.Tensor | None,
        window: int | None,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from the new tokens to all that the layer has.

        Args:
            query: ``[batch, Hq, tokens, dim]``.
            starts: first place of each row that is seen, ``[batch]``; None for the first of all.
            window: keys that a query sees at most, or None.
            scale: what scores are multiplied by; None for the square root of 1 / dim.
            softcap: cap of the scores, or None.
            sinks: ``[Hq]``, a logit of each head that has no value, or None.

        Returns:
            ``[batch, tokens, Hq, dim of the values]``.
        """
        batch, heads, tokens, _ = query.shape
        tables = self.state.tables
        out = query.new_empty((batch, tokens, heads, self._value_dim))
        self.state.pool.attend(
            self.index,
            inner(query.squeeze(2) if tokens == 1 else query.transpose(1, 2).flatten(0, 1)),
            tables.block_tables[self._group],
            tables.lens,
            cu_query_lens=tables.cu_query_lens,
            max_query_len=tokens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            starts=starts,
            out=out.view(-1, heads, self._value_dim),
        )
        return out

    def gathered(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `update` would have returned for the last ``tokens`` if attention did not read pages."""
        return self._gather(self.get_seq_length() - tokens, tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens the next `update` returns for so many new ones, and which is the first."""
        return self._visible(self.get_seq_length(), query_length)

    def get_seq_length(self) -> int:
        """Return the number of tokens that this layer holds."""
        return self.state.lengths.of[self.index]

    def get_max_length(self) -> int:
        """Return the window as Transformers' own layers do, or -1: no length but the pool's."""
        return -1 if self.window is None else self.window

    def reset(self) -> NoReturn:
        """Refuse, as all methods do that change the table of all layers: they are the cache's."""
        raise self._not_alone("reset")

    def crop(self, *args: Any) -> NoReturn:
        """Refuse; see `reset`."""
        raise self._not_alone("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        """Refuse; see `reset`."""
        raise self._not_alone("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse; see `reset`."""
        raise self._not_alone("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refuse; see `reset`."""
        raise self._not_alone("batch_select_indices")

    def offload(self) -> NoReturn:
        """Refuse: the pool stays where it is."""
        raise self._not_alone("offload")

    def prefetch(self) -> NoReturn:
        """Refuse: the pool stays where it is."""
        raise self._not_alone("prefetch")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self._not_alone("__deepcopy__")

    def _visible(self, start: int, tokens: int) -> tuple[int, int]:
        """Return number and first of the tokens that ``tokens`` new ones behind ``start`` see, themselves included."""
        offset = 0 if self.window is None else max(start - self.window + 1, 0)
        return start + tokens - offset, offset

    def _gather(self, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``tokens`` behind ``start`` see, gathered as ``[batch, heads, tokens, dim]``."""
        length, offset = self._visible(start, tokens)
        return self.state.read(self.index, offset, offset + length)

    def _content(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        length = self.get_seq_length()
        return self.state.read(self.index, self._visible(length, 0)[1], length) if length else (None, None)

    def _not_alone(self, method: str) -> UnsupportedError:
        """Make the error for a change of one layer only."""
        return UnsupportedError(
            f"PagedLayer.{method}",
            expected="a call on the whole cache",
            got=f"one on layer {self.index}",
            fix=f"call cache.{method}: all layers share one table",
        )
