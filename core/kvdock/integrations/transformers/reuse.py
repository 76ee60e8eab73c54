"""Beginning the rows of a batch with what is cached of them.

::

    row 0:   - - - - - - - - a b c d | e f        padding, cached, to compute
    row 1:   p q r s t u v w x y z a | b c d e    more of it may be cached: all rows go on at one place
             0 .................. past
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvdock.errors import OutOfBlocksError
from kvdock.integrations.transformers.checkpoints import Checkpoints
from kvdock.integrations.transformers.prompts import Prompts
from kvdock.integrations.transformers.sharing import Sharing
from kvdock.integrations.transformers.states import StateLayers
from kvdock.scheduler import CacheManager, CacheSequence, SequenceBatch

__all__ = ["Beginning", "PrefixReuse"]


@attrs.frozen(eq=False)
class Beginning:
    """What a batch begins with.

    Args:
        batch: its rows, with what is cached of them.
        states: the states of each there, if it has any.
        places: where states of it are to be kept, each with the numbers of prompts.
    """

    batch: SequenceBatch
    states: list[StateLayers]
    places: dict[int, list[int]]


class PrefixReuse:
    """What bound batches of a pool have in common.

    Args:
        manager: who has which blocks of the pool.
        generation: the model's ``GenerationConfig``, which names the token ids that end a sequence and that pad it; or None.
        sharing: what of a batch can be shared.
        checkpoints: states behind prefixes; None where a model keeps none.

    Attributes:
        epoch: how often everything was forgotten.
    """

    def __init__(self, manager: CacheManager, generation: Any, sharing: Sharing, checkpoints: Checkpoints | None) -> None:
        self.manager = manager
        self.checkpoints = checkpoints
        self.generation = generation
        self.sharing = sharing
        self.epoch = 0

    def begin(self, prompts: Prompts) -> Beginning:
        """Find the longest past that all rows of a batch have, and begin them behind it. At least one token is left to compute.

        Raises:
            OutOfBlocksError: there is no room for the prompts. Nothing was changed, and nothing counted as found.
        """
        manager, pads = self.manager, prompts.pads.tolist()
        # All rows of a batch go on at one place: behind padding, or where what the row has found is enough to go on.
        can_go_on = np.ones(prompts.length if prompts.length <= self.sharing.limit else 1, dtype=np.bool_)
        for row, pad in enumerate(pads):
            if self._shares(prompts, row):
                manager.fetch(prompts.row(row), prompts.namespace)
            of_row = can_go_on[pad + 1 :]
            of_row &= manager.can_go_on(prompts.row(row), prompts.namespace)[1 : of_row.size + 1] if self._shares(prompts, row) else False
        places = np.flatnonzero(can_go_on).tolist()
        past = places[-1] if self.checkpoints is None else self._with_states(prompts, places)
        self._check_room(prompts, past)
        rows: list[CacheSequence] = []
        try:
            for row, pad in enumerate(pads):
                rows.append(self._begin_row(prompts, row, cached := max(past - pad, 0)))
                if rows[row].num_tokens > cached:
                    manager.truncate(rows[row], cached)
        except BaseException:
            for seq in rows:
                manager.abort(seq)
            raise
        hidden = [pad if self._shares(prompts, row) else min(pad, past) for row, pad in enumerate(pads)]
        batch = SequenceBatch(manager, rows, length=past, pads=hidden)
        return Beginning(batch, *self._states(prompts, past))

    def _with_states(self, prompts: Prompts, can_go_on: list[int]) -> int:
        """Return the last of places where all rows can go on with their tokens at which there are states of all, too."""
        assert self.checkpoints is not None  # noqa: S101 - the caller looked
        places = set(can_go_on)
        for row, pad in enumerate(prompts.pads.tolist()):
            places &= {pad + length for length in self.checkpoints.lengths(prompts.row(row), prompts.namespace)}
        return max(places, default=0)

    def _states(self, prompts: Prompts, past: int) -> tuple[list[StateLayers], dict[int, list[int]]]:
        """Return the states that rows begin with, and where others are to be kept."""
        if self.checkpoints is None:
            return [], {}
        pads, shared = prompts.pads.tolist(), [self._shares(prompts, row) for row in range(len(prompts.pads))]
        found = [self.manager.plan(prompts.row(row), prompts.namespace).cached_len if shared[row] else 0 for row in range(len(pads))]
        begun = [self.checkpoints.find(prompts.row(row)[: past - pad], prompts.namespace) for row, pad in enumerate(pads)] if past else []
        places = self.checkpoints.places(prompts, found, past) if self.manager.prefix.can_store else {}
        return begun, {place: kept for place, rows in places.items() if (kept := [row for row in rows if self._shares(prompts, row)])}

    def forget(self) -> None:
        """Forget all prefixes; their blocks are free then, but for those that batches hold."""
        self.manager.reset(keep_open=True)
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self.epoch += 1

    def _shares(self, prompts: Prompts, row: int) -> bool:
        """Return whether a row can be shared: not without tokens, and not behind padding that its model counts as tokens."""
        return prompts.pads[row] < prompts.length and bool(self.sharing.padded or not prompts.pads[row])

    def _begin_row(self, prompts: Prompts, row: int, cached: int) -> CacheSequence:
        if not self._shares(prompts, row):
            return self.manager.open_empty(prompts.namespace)
        # Several groups begin behind whole blocks of all of them, and are cut back from there.
        most = prompts.length if self.manager.lets_go and cached else cached
        return self.manager.begin(prompts.row(row), prompts.namespace, at_most=0, max_cached_len=most)

    def _check_room(self, prompts: Prompts, past: int) -> None:
        """Raise if prompts do not fit behind their past, before anything counts as found; windows may let go of most of a long one."""
        if self.manager.lets_go:
            return
        size = self.manager.block_size
        tokens = prompts.length - prompts.pads
        needed = int((-(-tokens // size) - np.maximum(past - prompts.pads, 0) // size).sum())
        if needed * size > self.manager.available_size:
            raise OutOfBlocksError(
                "PagedCacheForTransformers.bind: input_ids",
                expected=f"at most {self.manager.available_size // size} blocks to compute, those that are free or evictable",
                got=f"{needed}",
                fix="reset() copies of the cache, bind fewer or shorter prompts, or make the pool larger",
            )
