"""The batch that `PagedCacheForTransformers.bind` began: which row of the table is which prompt, and what is known of it."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import ArgumentValueError
from kvdock.integrations.transformers.checkpoints import Kept
from kvdock.integrations.transformers.prompts import Prompts
from kvdock.integrations.transformers.seen import Oddity, Seen
from kvdock.integrations.transformers.sharing import Sharing
from kvdock.integrations.transformers.states import StateLayers

__all__ = ["Bound"]

Rows = npt.NDArray[np.intp]


@attrs.define(eq=False)
class Bound:
    """A batch between `PagedCacheForTransformers.bind` and the next.

    Args:
        prompts: what was bound.
        past: tokens that each row of the table began with, padding included.
        epoch: how often everything was forgotten before.
        origin: for each row of the table its prompt; ``generate`` repeats rows for beams and for several results.
        sharing: what of it can be shared.
        hooks: what ran before and behind the parts of the model when it was bound; None if a call may change that.
        seen: what was seen to be computed.
        is_fresh: no step has ended yet.
        is_checked: the tokens of the first step do not begin with those that are cached, see `begins_anew`.
        steady: tokens of each row that no longer pass computed.
        is_reordered: rows went on from other rows, so that what was generated cannot be told from the output.
        closed: why nothing can be committed any more, or None.
        places: where states are to be kept, ascending, each with the numbers of prompts.
        kept: the states that are kept so far.
    """

    prompts: Prompts
    past: int
    epoch: int
    origin: Rows
    sharing: Sharing
    hooks: int | None
    seen: Seen = attrs.field(default=attrs.Factory(lambda self: Seen(self.past), takes_self=True))
    is_fresh: bool = True
    is_checked: bool = False
    is_reordered: bool = False
    steady: int = sys.maxsize
    closed: Oddity | None = None
    places: dict[int, list[int]] = attrs.Factory(dict)
    kept: Kept = attrs.Factory(dict)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were found, without padding."""
        return int(np.maximum(self.past - self.prompts.pads, 0).sum())

    def fork(self) -> Bound:
        """Return the same for a copy of the table."""
        return attrs.evolve(self, seen=self.seen.fork(), kept=dict(self.kept))

    def keep(self, place: int, states: StateLayers) -> None:
        """Keep the states that there are behind a pass which ended at one of the places."""
        for prompt in self.places[place]:
            self.kept[prompt, place] = states.row(int((self.origin == prompt).argmax()))

    def repeated(self, batch: int) -> Rows:
        """Return the rows to take for a first step with ``batch`` rows, each prompt equally often, one after another.

        Raises:
            ArgumentValueError: ``batch`` is no multiple of the number of prompts. Nothing was changed.
        """
        # One row of each prompt, in the order of the table: generate() repeats each beside itself.
        first = np.sort(np.unique(self.origin, return_index=True)[1])
        times, odd = divmod(batch, len(first))
        if odd:
            raise ArgumentValueError(
                "PagedCacheForTransformers: batch size",
                expected=f"a multiple of the {len(first)} prompts that were bound",
                got=batch,
                fix="bind() the prompts that are passed to generate()",
            )
        return np.repeat(first, times)

    def select(self, rows: npt.ArrayLike) -> None:
        """Note that row ``rows[i]`` is the new row i."""
        chosen = np.asarray(rows)
        self.is_reordered |= not np.array_equal(chosen, np.arange(len(self.origin)))
        self.origin = self.origin[chosen]
        self.seen.select(chosen)

    def close(self, why: str, fix: str = "") -> None:
        """Let nothing be committed any more.

        Args:
            why: what the batch is now.
            fix: what to do; to bind the prompts anew if empty.
        """
        self.closed = self.closed or Oddity(why, fix)

    def pads(self, batch: int) -> npt.NDArray[np.int64]:
        """Return the tokens of padding of each row, ``[batch]``.

        Raises:
            ArgumentValueError: see `repeated`.
        """
        prompts = self.origin if batch == len(self.origin) else self.origin[self.repeated(batch)]
        return self.prompts.pads[prompts]

    def positions(self, start: int, tokens: int, batch: int) -> npt.NDArray[np.int64]:
        """Return where the tokens of a pass are in their prompts, ``[batch, tokens]``; below 0 in padding.

        Raises:
            ArgumentValueError: see `repeated`.
        """
        places: npt.NDArray[np.int64] = np.arange(start, start + tokens) - self.pads(batch)[:, None]
        return places

    def is_as_bound(self, start: int, ids: torch.Tensor, positions: Any) -> bool:
        """Return whether a pass from ``start`` on has the positions of the prompts.

        Args:
            start: tokens before the first of the pass.
            ids: ``[rows, tokens]``.
            positions: ``[rows or 1, tokens]``, or planes of these; or None.
        """
        expected = self.positions(start, ids.shape[1], len(ids))
        if positions is None:
            return True
        return bool(((positions.detach().cpu().numpy() == expected + self.sharing.first) | (expected < 0)).all())

    def is_before(self, start: int, ids: torch.Tensor, positions: Any) -> bool:
        """Return whether a pass has positions that some of the first ``start`` tokens have."""
        first = self.positions(start, 1, len(ids))[:, 0] + self.sharing.first
        return isinstance(positions, torch.Tensor) and bool((positions[..., 0].cpu().numpy() < first).any())

    def begins_anew(self, ids: torch.Tensor, positions: Any, mask: Any) -> bool:
        """Return whether a first pass begins with the first token of the prompts, instead of behind what is cached.

        Args:
            ids: ``[rows, tokens]``.
            positions: ``[rows or 1, tokens]``, or planes of these; or None.
            mask: ``[rows, all tokens so far]``; or None.

        Raises:
            ArgumentValueError: it begins elsewhere. What is cached was computed for other positions.
        """
        self.is_checked = True
        fits = [start for start in (0, self.past) if self.is_as_bound(start, ids, positions)]
        starts = [start for start in fits if start or self._is_at(0, ids)]  # others with the first positions are a mistake
        if not starts:
            raise ArgumentValueError(
                "PagedCacheForTransformers: position_ids",
                expected=f"those of the prompts, from 0 or, behind the {self.past} tokens that are cached, from there on",
                got=f"{positions[..., :4].tolist()} for the first tokens",
                fix="leave position_ids out: they follow from the attention_mask",
            )
        if len(starts) == 1:
            return not starts[0]
        # Both places fit. A mask that is too short for the rest of a prompt fits a beginning only, if the tokens are those of one.
        if mask is not None and mask.shape[1] < self.past + ids.shape[1]:
            return self._is_at(0, ids)
        return self._is_at(0, ids) and (ids.shape[1] >= self.prompts.length or not self._is_at(self.past, ids))

    def _is_at(self, start: int, ids: torch.Tensor) -> bool:
        """Return whether tokens are those of the prompts from ``start`` on, as far as these go."""
        times, odd = divmod(len(ids), len(self.prompts.ids))
        expected = self.prompts.ids[:, start : start + ids.shape[1]]
        got = ids[:, : expected.shape[1]].detach().cpu().numpy()
        return not odd and np.array_equal(got, np.repeat(expected, times, axis=0))

    def begin(self, start: int, batch: int, tokens: int, stop: int) -> None:
        """Note a pass that begins to write behind ``start`` tokens, and what was seen of it."""
        self.seen.take(batch, tokens)
        if stop > self.sharing.limit:
            self.steady = min(self.steady, start)

    def check_first(self, tokens: int) -> None:
        """Check the number of tokens of a first step that nobody else has checked.

        Raises:
            ArgumentValueError: more than are left of the prompt: they would be put behind themselves.
        """
        left = self.prompts.length - self.past
        if self.is_fresh and self.past and not self.is_checked and tokens > left:
            raise ArgumentValueError(
                "PagedCacheForTransformers: first step",
                expected=f"at most the {left} tokens that are not cached",
                got=tokens,
                fix="call the model that the cache was made for: there a hook leaves out the others",
            )
