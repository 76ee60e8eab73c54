"""The pool and the batch that all layers of a cache share: the first layer of a step makes room for all, the last ends the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvdock.cache.paged import PagedKVCache
from kvdock.errors import ArgumentValueError, IndexRangeError, KVDockError, OutOfBlocksError
from kvdock.integrations.transformers.bound import Bound
from kvdock.integrations.transformers.lengths import Lengths
from kvdock.integrations.transformers.masks import Markers
from kvdock.integrations.transformers.reading import Pass, Reader
from kvdock.integrations.transformers.slots import SlotTensor, read, write
from kvdock.integrations.transformers.states import StateLayers
from kvdock.integrations.transformers.tables import StepTables
from kvdock.scheduler import CacheManager, SequenceBatch

__all__ = ["Captured", "PagedState"]


class Captured(Protocol):
    """What is known here of `kvdock.integrations.transformers.captured`."""

    def begin(self, begun: Pass, state: PagedState, told: dict[str, Any]) -> None:
        """Stand in for the model's layers in a pass that has just begun, if it can."""

    def end(self, begun: Pass) -> None:
        """Let the layers be called again, when a pass is over."""


class PagedState:
    """One batch of sequences in a pool that other states may share.

    A pool and its states belong to one thread at a time: whoever starts a step, until the step ends.

    Args:
        pool: where keys and values are.
        manager: who has which of its blocks; one for each pool.
        reader: whether and how a model's attention reads the pool.

    Attributes:
        reading: the pass that is under way, if its attention reads pages.
        group_of: the layer group of each layer.
        odd: why the last pass did not; "" if it did, or had nothing to read.
        captured: what stands in for the model's layers in passes of one token, or None.
        states: what layers keep beside the pool; nothing of most models.
        is_reserved: whether there is room for a pass that is under way and changes states.
    """

    def __init__(self, pool: PagedKVCache, manager: CacheManager, reader: Reader) -> None:
        self.pool, self.manager, self.reader = pool, manager, reader
        self.tables, self.markers = StepTables(pool.device, [group.block_size for group in pool.groups]), Markers(pool.device)
        self.states, self.is_reserved = StateLayers(), False
        self.group_of = [pool.group_of(layer) for layer in range(pool.num_layers)]
        self._lets_go = not all(group.retention.keeps_all for group in pool.groups)
        self.reading: Pass | None = None
        self.odd, self.is_decoding = "", False
        self.captured: Captured | None = None
        self.batch: SequenceBatch | None = None
        self.lengths = Lengths(pool.num_layers)
        self.bound: Bound | None = None
        self._slots = [SlotTensor(pool.device, group) for group in range(len(pool.groups))]

    @property
    def length(self) -> int:
        """Tokens of each row, padding included, with those of the current step."""
        return self.batch.length if self.batch else 0

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.batch.batch_size if self.batch else 0

    def fork(self) -> PagedState:
        """Return the same tokens in the same blocks, for another future."""
        self.check_whole("deepcopy")
        other = PagedState(self.pool, self.manager, self.reader)
        other.captured = self.captured
        with self.change():
            other.batch = self.batch and self.batch.fork()
        other.lengths.of = list(self.lengths.of)
        other.bound = self.bound and self.bound.fork()
        return other

    def begin_with(self, bound: Bound, batch: SequenceBatch) -> None:
        """Begin a batch, in an empty state, with what is cached of it.

        Args:
            bound: the batch.
            batch: its rows, of ``bound.past`` tokens.
        """
        self.batch, self.bound = batch, bound
        self.lengths.set(bound.past)
        pairs = [pair for seq in batch.sequences for pair in seq.block_pairs.tolist()]
        if pairs:
            self.copy_blocks(torch.tensor(pairs, device="cpu"))

    def forget_past(self) -> None:
        """Let a batch that just begins be computed from its first token."""
        self._truncate(0)
        self.states.clear()
        if self.bound:
            self.bound.past = 0

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Write one layer's new keys and values, ``[batch, heads, tokens, dim]``, behind those it has.

        Returns:
            how many tokens the layer had before.

        Raises:
            OutOfBlocksError: the pool has too few free blocks. Nothing was changed.
            ArgumentValueError: another batch size than that of the tokens already there, or more tokens than are left of a
                prompt that was bound. Nothing was changed.
        """
        start, tokens = self.lengths.of[layer], keys.shape[2]
        if not tokens:
            return start
        stop = start + tokens
        if stop > self.length:
            self._begin(keys.shape[0], tokens)
        try:
            write(self.pool, layer, keys, values, self._new_slots(start, stop)[self.group_of[layer]])
        except BaseException:
            self._take_back()
            raise
        if self.lengths.written(layer, stop):
            self._end()
        return start

    def step(self, rows: int, compute: Callable[[SequenceBatch], torch.Tensor]) -> torch.Tensor:
        """Take a step of one token of each row that is written in all layers at once; return what ``compute`` does.

        Args:
            rows: of the batch.
            compute: writes the last token of each row of the batch that it gets.

        Raises:
            OutOfBlocksError, ArgumentValueError: as `update`, and whatever ``compute`` raises. Nothing was changed.
        """
        self._begin(rows, 1)
        try:
            assert self.batch is not None  # noqa: S101 - there is room for it
            found = compute(self.batch)
        except BaseException:
            self._take_back()
            raise
        self.lengths.set(self.length)
        self._end()
        return found

    def _take_back(self) -> None:
        """Go back to before a step that failed, with layers that have written already: it is done by all layers or by none."""
        self.lengths.undo()
        self.states.tear(self.lengths.start)
        if self.length > self.lengths.start:
            self._truncate(self.lengths.start)

    def read(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of tokens ``start`` to ``stop - 1`` as new ``[batch, heads, tokens, dim]``, contiguous."""
        return read(self.pool, layer, self._slots_of(start, stop, self.group_of[layer]))

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens. Also the way on after a forward pass that failed in between.

        Raises:
            IndexRangeError: a layer has fewer; or a window has let go of what the next token needs. Nothing was changed.
            UnsupportedError: a layer's state cannot be taken back. Nothing was changed.
        """
        if length > (most := min(self.lengths.of)):
            raise IndexRangeError(
                "PagedCacheForTransformers: length", expected=f"at most the {most} tokens that every layer has", got=length
            )
        # Without tokens the batch goes too, so that the next pass may have another number of rows.
        if not length:
            self._drop()
            return
        self.states.check("truncate")
        self.states.check_cut(self.length - length)
        self.states.cut(self.length - length)
        self._truncate(length)
        if self.bound and length < self.bound.prompts.length:
            self.bound.close(f"one whose prompts were cut to {length} tokens since")
            if self.bound.is_fresh:
                self.bound.past = min(self.bound.past, length)

    def select(self, rows: npt.ArrayLike) -> None:
        """Make row ``rows[i]`` the new row i; see `SequenceBatch.select`."""
        self.check_whole("changing the batch")
        with self.change():
            if self.batch:
                self._select(self.batch, rows)
        if self.bound:
            self.bound.select(rows)

    def check_whole(self, what: str) -> None:
        """Raise if a step is under way, or has left states that fit to nothing."""
        self.lengths.check_whole(what)
        self.states.check(what)

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for a step before any state is changed: a pool that is full is noticed here.

        Raises:
            OutOfBlocksError, ArgumentValueError: as `update`. Nothing was changed.
        """
        self.check_whole("a step")
        with self.change():
            if len(pairs := self.grown(self._batch_of(rows), tokens, reserve=True)):
                self.copy_blocks(torch.from_numpy(pairs))
        self.is_reserved = True

    def unreserve(self, *, failed: bool) -> None:
        """End a pass that began with `reserve`: give back what it did not use; if it failed its states fit to nothing."""
        if failed and self.is_reserved:
            self.states.tear(max(self.lengths.of))
        self.is_reserved = False
        if self.batch:
            with self.change(keep=not failed):
                self.batch.truncate(self.batch.length)
            if self.lengths.is_whole:
                self.manager.hand_over()

    def _select(self, batch: SequenceBatch, rows: npt.ArrayLike) -> None:
        batch.select(rows)
        self.states.select(np.asarray(rows).tolist())

    def _begin(self, batch: int, tokens: int) -> None:
        """Start a step: make room in the table, and copy shared blocks that will be written, in all layers."""
        self.check_whole("a step")
        if self.bound:
            self.bound.check_first(tokens)
        # The manager stays with this thread until the last layer has written, see `_end`.
        with self.change(keep=True):
            grown = self._batch_of(batch)
            grown.written()
            start, pairs = grown.length, self.grown(grown, tokens)
            if self.bound:
                self.bound.begin(start, batch, tokens, grown.length)
            self.lengths.begin(start)
            self.tables.forget()
            # Blocks were replaced by copies, so the slots that were worked out before are those of the old ones.
            if len(pairs):
                self._forget_slots()
                self.copy_blocks(torch.from_numpy(pairs))

    def grown(self, batch: SequenceBatch, tokens: int, *, reserve: bool = False) -> npt.NDArray[np.int64]:
        """Make room, or reserve it for later; return the pairs of blocks to copy."""
        try:
            if reserve:
                return batch.reserve(tokens)
            # To the end of the blocks: steps of decoding ask the manager when they need one more, and not each time.
            pairs = batch.reserve(tokens, whole_blocks=True) if tokens > batch.room else None
            grown = batch.grow(tokens)
        except OutOfBlocksError as error:
            fix = "reset() copies of the cache, or make the pool larger: num_blocks or max_kv_memory_bytes"
            if self._lets_go:
                fix += "; with prefill_chunk_size in the GenerationConfig, windows let go of a long prompt as it is computed"
            raise OutOfBlocksError("PagedCacheForTransformers", expected=error.expected, got=error.got, fix=fix) from error
        return grown if pairs is None else pairs

    def settle(self) -> None:
        """Let windows go of what no later token reads, behind a pass: while one runs, its last layer has yet to attend."""
        if self._lets_go and self.batch and self.lengths.is_whole:
            self.batch.written()
            self.manager.hand_over()

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks in all layers. If that fails the table names blocks without content, so it is emptied."""
        try:
            self.pool.copy_blocks(pairs.to(self.pool.device))
        except BaseException:
            self._drop()
            raise

    def _new_slots(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the slots of tokens that layers write, int64 ``[batch, stop - start]``, of each group: one for all of its layers."""
        if start != self.tables.start or stop != self.tables.stop:
            assert self.batch is not None  # noqa: S101 - there are tokens
            self.tables.begin(self.batch, start, stop, attends=self.reading is not None)
        return self.tables.slots

    def _slots_of(self, start: int, stop: int, group: int) -> torch.Tensor:
        """Return a group's slots of tokens ``start`` to ``stop - 1``, int64 ``[batch, stop - start]``; -1 for padding."""
        assert self.batch is not None  # noqa: S101 - there are tokens
        return self._slots[group].upto(self.batch, stop)[:, start:]

    def _forget_slots(self) -> None:
        """Tokens may be elsewhere."""
        for slots in self._slots:
            slots.forget(0)

    def _end(self) -> None:
        """End a step: every layer has written."""
        if self.bound:
            self.bound.is_fresh = False
        self.manager.hand_over()

    def _batch_of(self, rows: int) -> SequenceBatch:
        """Return the batch with so many rows: an empty one, or one that just begins, by repeating its prompts."""
        if self.batch and rows == self.batch_size:
            return self.batch
        bound = self.bound if self.bound and self.bound.is_fresh else None
        if bound and self.batch:
            chosen = bound.repeated(rows)
            self._select(self.batch, chosen)
            bound.origin = bound.origin[chosen]
        elif self.length:
            raise ArgumentValueError(
                "PagedCacheForTransformers: batch size",
                expected=f"{self.batch_size}, as in the {self.length} tokens that the cache holds",
                got=rows,
                fix="reset() it first, or bring the rows in with batch_repeat_interleave() or batch_select_indices()",
            )
        else:
            self.batch = SequenceBatch.empty(self.manager, rows)
        self._forget_slots()
        return self.batch

    def _truncate(self, length: int) -> None:
        with self.change():
            if self.batch:
                try:
                    self.batch.truncate(length)
                except IndexRangeError as error:
                    fix = (
                        "reset() it and compute the prompt again; a larger pool keeps what windows let go for longer, keep_all=True always"
                    )
                    raise IndexRangeError("PagedCacheForTransformers: length", expected=error.expected, got=length, fix=fix) from error
        if self.bound:
            self.bound.seen.cut(length)
        self.lengths.set(length)

    def _drop(self) -> None:
        with self.change():
            if self.batch:
                self.batch.close()
        self.batch = self.bound = self.reading = None
        self.lengths.set(0)
        self.states.clear()

    @contextmanager
    def change(self, *, keep: bool = False) -> Iterator[None]:
        """Hand the manager over behind a change, when blocks may be others; ``keep`` it instead unless the change failed."""
        try:
            yield
        except BaseException:
            with suppress(KVDockError):  # what is wrong was said
                self.manager.hand_over()
            raise
        if not keep:
            self._forget_slots()
            self.manager.hand_over()
