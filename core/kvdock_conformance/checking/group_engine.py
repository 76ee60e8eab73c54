"""An engine on a manager of several layer groups, with a memory that is really written: what attention and states would read is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import IndexRangeError, OutOfBlocksError
from kvdock.layers import Buffer, KeepAll, KeepChunk, KeepState, KeepWindow, LayerGroup, Part, Retention
from kvdock.prefix import PrefixCache
from kvdock.scheduler import CacheManager, CacheSequence
from kvdock_conformance.checking.failure import NonconformanceError

__all__ = ["GROUPED", "GroupEngine", "Request", "group_of", "must_be", "unit_of"]

GROUPED: Mapping[str, Sequence[tuple[Retention, int]]] = MappingProxyType(
    {
        "a window": [(KeepWindow(5), 2)],
        "full and a window": [(KeepAll(), 4), (KeepWindow(6), 2)],
        "full and a window with sinks": [(KeepAll(), 2), (KeepWindow(7, sinks=3), 2)],
        "windows and full of unlike blocks": [(KeepAll(), 6), (KeepWindow(5), 2), (KeepWindow(9), 3)],
        "full and a window shorter than a unit": [(KeepAll(), 8), (KeepWindow(3), 2)],
        "full and chunks": [(KeepAll(), 2), (KeepChunk(8), 4)],
        "full and a state": [(KeepAll(), 4), (KeepState(), 1)],
        "full, a window and two states": [(KeepAll(), 4), (KeepWindow(4), 2), (KeepState(), 1), (KeepState(), 1)],
        "states alone": [(KeepState(), 1)],
    }
)
"""Layer groups of models by name: what each keeps, and tokens in a block of it."""


def group_of(rule: Retention, block_size: int) -> LayerGroup:
    """Return a layer group of one layer."""
    return LayerGroup(((0, 0),), (Part((Buffer("x", (1,), torch.float32),), rule),), rule, block_size)


def unit_of(name: str) -> int:
    """Return how many tokens blocks of all groups of a model end together in; 4 where all keep states."""
    return int(np.lcm.reduce([size for rule, size in GROUPED[name] if not rule.is_state] or [4]))


def must_be(what: str, expected: object, got: object) -> None:
    """Compare two values; raises NonconformanceError."""
    if expected != got:
        raise NonconformanceError(what, expected=expected, got=got)


@attrs.define(eq=False)
class Request:
    """A sequence, and what the engine knows of it: its token ids, its namespace, and tokens of its prompt."""

    seq: CacheSequence
    ids: list[int]
    namespace: tuple[Any, ...]
    prompt: int = 0


class GroupEngine:
    """Writes what each token of each group would hold: a number for all tokens up to it.

    What is not as it should be raises NonconformanceError, wherever it is noticed.

    Args:
        name: of a model in `GROUPED`.
        num_blocks: blocks of the pool.
        prefix: a prefix cache, or its name.
        null_block: whether block 0 is never handed out.

    Attributes:
        told: what was decided, call by call.
        refused: calls that were.
        computed: tokens.
    """

    def __init__(self, name: str, num_blocks: int, *, prefix: str | PrefixCache = "radix", null_block: bool = True) -> None:
        self.groups = [group_of(rule, size) for rule, size in GROUPED[name]]
        size = None if any(not each.retention.is_state for each in self.groups) else unit_of(name)
        how: dict[str, Any] = {"null_block": null_block, "clock": lambda: 0, "state_interval": 8}
        self.manager = CacheManager(num_blocks, size, prefix, groups=self.groups, **how)
        widest = max(each.block_size for each in self.groups)
        self.memory: npt.NDArray[np.int64] = np.zeros((num_blocks, widest), dtype=np.int64)
        self.all: list[Request] = []
        self.told: list[Any] = []
        self.refused = self.computed = 0

    # What memory should hold.

    @staticmethod
    def content(group: int, ids: Sequence[int], namespace: tuple[Any, ...]) -> int:
        """Return what the last of some tokens leaves in a group's memory."""
        return hash((group, tuple(ids), namespace))

    def copy(self, pairs: npt.NDArray[np.int64]) -> None:
        """Copy blocks, all at once, as `PagedKVCache.copy_blocks` does."""
        if len(pairs):
            must_be("blocks to copy into, each once", len(pairs), len(np.unique(pairs[:, 1])))
            must_be("the least of the blocks to copy", 0, min(0, int(pairs.min())))
            self.memory[pairs[:, 1]] = self.memory[pairs[:, 0]]

    def check_readable(self, one: Request, length: int) -> None:
        """Look at what the next token reads, if ``length`` tokens are there."""
        for at, each in enumerate(self.groups):
            if each.retention.is_state:
                if length:
                    (block,) = one.seq.block_table(at).tolist()
                    expected = self.content(at, one.ids[:length], one.namespace)
                    must_be(f"group {at}: the state behind {length} tokens", expected, int(self.memory[block, 0]))
            else:
                self._check_tokens(one, length, at)

    def _check_tokens(self, one: Request, length: int, at: int) -> None:
        size, slots, table = self.groups[at].block_size, one.seq.slot_mapping(0, one.seq.num_tokens, group=at), one.seq.block_table(at)
        for position in (position for span in self.groups[at].retention.spans(length) for position in span):
            slot = int(slots[position])
            if slot < 0:
                raise NonconformanceError(f"group {at}: the slot of token {position}, of {length}", expected="one", got="none: it is gone")
            must_be(f"group {at}: the block of token {position}", int(table[position // size]), slot // size)
            expected = self.content(at, one.ids[: position + 1], one.namespace)
            must_be(f"group {at}: what token {position} left", expected, int(self.memory[divmod(slot, size)]))

    def compute(self, one: Request, stop: int) -> None:
        """Compute tokens up to ``stop``: read what they need, write them, and look at what each of them reads."""
        start = one.seq.computed
        self.check_readable(one, start)
        for at, each in enumerate(self.groups):
            if each.retention.is_state:
                (block,) = one.seq.block_table(at).tolist()
                if not start and self.manager.null_block is not None:
                    must_be(f"group {at}: numbers in a state at the beginning", 0, int(np.count_nonzero(self.memory[block])))
                if stop > start:
                    self.memory[block] = self.content(at, one.ids[:stop], one.namespace)
                continue
            slots = one.seq.slot_mapping(start, stop, group=at).tolist()
            for position, slot in zip(range(start, stop), slots, strict=True):
                must_be(f"group {at}: whether token {position} has a slot to be written to", True, slot >= 0)
                self.memory[divmod(slot, each.block_size)] = self.content(at, one.ids[: position + 1], one.namespace)
        has_states = any(each.retention.is_state for each in self.groups)
        for length in [stop] if has_states else range(start + 1, stop + 1):
            self.check_readable(one, length)
        self.computed += stop - start

    # What an engine does.

    def tried(self, call: Callable[[], Any]) -> Any:
        """Make a call that may be refused; then nothing has changed."""
        before = self.facts()
        try:
            return call()
        except OutOfBlocksError:
            self.refused += 1
            must_be("sequences after a call that was refused", before, self.facts())
            return None

    def facts(self) -> Any:
        """Return what the manager says of itself and of each sequence."""
        rows = [(one.seq.num_tokens, one.seq.computed, one.seq.table_version, one.seq.num_known, one.seq.cached_len) for one in self.all]
        tables = [[one.seq.block_table(at).tolist() for at in range(len(self.groups))] for one in self.all]
        return rows, tables, self.manager.num_sequences, self.manager.available_size

    def begin(self, ids: list[int], namespace: tuple[Any, ...] = (), **how: Any) -> Request | None:
        """Begin a sequence; None where that is refused, as `plan` must have said."""
        fit = self.manager.plan(ids, namespace, reserve=how.get("reserve", 0), at_most=how.get("at_most"))
        seq = self.tried(lambda: self.manager.begin(ids, namespace, **how))
        if "max_cached_len" not in how:
            must_be("whether a prompt fits, as planned", fit.fits, seq is not None)
        if seq is None:
            return None
        self.copy(seq.block_pairs)
        one = Request(seq, list(ids), namespace, len(ids))
        self.all.append(one)
        self.check_readable(one, seq.cached_len)
        return one

    def step(self, one: Request, n: int = 1) -> bool:
        """Compute the room that there is, or make room for more and compute that."""
        seq = one.seq
        if seq.computed == seq.num_tokens:
            made = self.tried(lambda: self.manager.extend(seq, n))
            if made is None:
                return False
            self.copy(made[1])
        stop = seq.num_tokens
        more = [(stop * 7 + one.prompt) % 3 for _ in range(len(one.ids), stop)]
        one.ids += more
        self.compute(one, stop)
        self.manager.commit(seq, more, computed=stop)
        return True

    def batch(self, chosen: Sequence[Request]) -> None:
        """Decode a token of each of those that wait for one, in one call."""
        chosen = [one for one in chosen if one.seq.computed == one.seq.num_tokens == len(one.ids)]
        seqs = [one.seq for one in chosen]
        pairs = self.tried(lambda: self.manager.extend(seqs, 1)) if seqs else None
        if pairs is None:
            return
        self.copy(pairs)
        self.look_at(seqs)
        for one in chosen:
            one.ids.append((one.seq.num_tokens * 5 + one.prompt) % 3)
            self.compute(one, one.seq.num_tokens)
        self.manager.commit(seqs, [one.ids[-1] for one in chosen], computed=[one.seq.num_tokens for one in chosen])

    def look_at(self, seqs: Sequence[CacheSequence]) -> None:
        """Look at a batch that is about to be computed; there is nothing more to see here."""

    def draft(self, one: Request, *, is_undone: bool) -> None:
        """Make room for four tokens of one that waits for one, and give it up; or leave it for a later step, or for a cut."""
        if one.seq.computed == one.seq.num_tokens == len(one.ids):
            made = self.tried(lambda: self.manager.extend(one.seq, 4))
            if made is not None:
                self.copy(made[1])
                if is_undone:
                    self.truncate(one, one.seq.computed)

    def fork(self, one: Request, tokens: int) -> None:
        """Fork a sequence; refused is what cannot be gone on with."""
        least = one.seq.shortest
        try:
            fork = self.tried(lambda: self.manager.fork(one.seq, tokens))
        except IndexRangeError:
            must_be("whether as many tokens as a sequence says could be forked", False, least <= tokens)
            return
        if fork is not None:
            self.copy(fork.block_pairs)
            other = Request(fork, one.ids[:], one.namespace, one.prompt)
            self.all.append(other)
            self.check_readable(other, fork.computed)

    def truncate(self, one: Request, tokens: int) -> None:
        """Cut a sequence; refused is what cannot be gone on with, and never what is not computed."""
        least = one.seq.shortest

        def truncate() -> bool:
            self.manager.truncate(one.seq, tokens)
            return True

        try:
            done = self.tried(truncate)
        except IndexRangeError:
            must_be("whether as many tokens as a sequence says could be kept", False, least <= tokens)
            return
        if done is None:
            must_be("whether computed tokens were to be undone", True, tokens < one.seq.computed)
            return
        del one.ids[tokens:]
        self.check_readable(one, one.seq.computed)

    def end(self, one: Request, how: str) -> None:
        """End a sequence: keep what it published, drop it, or abort."""
        self.all.remove(one)
        if how == "abort":
            self.manager.abort(one.seq)
        else:
            self.manager.finish(one.seq, keep=how == "keep")

    def check(self) -> None:
        """Prove that everything is whole, and note what was decided."""
        self.manager.check_integrity()
        must_be("tokens for which there is room beyond what is promised, where fewer than none", 0, min(self.manager.available_size, 0))
        for one in self.all:
            self.check_readable(one, one.seq.computed)
        self.told.append((self.facts(), self.manager.prefix.stored_blocks().tolist()))
