"""Managers of several layer groups, driven with a memory that is really written: what attention and states would read is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kvdock.errors import IndexRangeError, OutOfBlocksError
from kvdock.layers import Buffer, KeepAll, KeepChunk, KeepState, KeepWindow, LayerGroup, Part, Retention
from kvdock.scheduler import BatchTables, CacheManager, CacheSequence, dense_table, token_table

MODELS: dict[str, list[tuple[Retention, int]]] = {
    "a window": [(KeepWindow(5), 2)],
    "full and a window": [(KeepAll(), 4), (KeepWindow(6), 2)],
    "full and a window with sinks": [(KeepAll(), 2), (KeepWindow(7, sinks=3), 2)],
    "windows and full of unlike blocks": [(KeepAll(), 6), (KeepWindow(5), 2), (KeepWindow(9), 3)],
    "full and chunks": [(KeepAll(), 2), (KeepChunk(8), 4)],
    "full and a state": [(KeepAll(), 4), (KeepState(), 1)],
    "full, a window and two states": [(KeepAll(), 4), (KeepWindow(4), 2), (KeepState(), 1), (KeepState(), 1)],
    "states alone": [(KeepState(), 1)],
}


def group(rule: Retention, block_size: int) -> LayerGroup:
    return LayerGroup(((0, 0),), (Part((Buffer("x", (1,), torch.float32),), rule),), rule, block_size)


def groups_of(name: str) -> list[LayerGroup]:
    return [group(rule, size) for rule, size in MODELS[name]]


@attrs.define(eq=False)
class Driven:
    """A sequence, and what the engine knows of it."""

    seq: CacheSequence
    ids: list[int]
    namespace: tuple[Any, ...]
    prompt: int = 0


class Engine:
    """Writes what each token of each group would hold: a number for all tokens up to it."""

    def __init__(self, name: str, num_blocks: int, *, prefix: str = "radix", null_block: bool = True, **how: Any) -> None:
        self.groups = groups_of(name)
        size = None if any(not each.retention.is_state for each in self.groups) else 4
        self.manager = CacheManager(
            num_blocks, size, prefix, groups=self.groups, null_block=null_block, clock=lambda: 0, state_interval=8, **how
        )
        widest = max(each.block_size for each in self.groups)
        self.memory: np.ndarray[Any, Any] = np.zeros((num_blocks, widest), dtype=np.int64)
        self.all: list[Driven] = []
        self.refused = self.computed = 0

    # What memory should hold.

    @staticmethod
    def content(group: int, ids: Sequence[int], namespace: tuple[Any, ...]) -> int:
        return hash((group, tuple(ids), namespace))

    def copy(self, pairs: Any) -> None:
        """Copy blocks, all at once, as `PagedKVCache.copy_blocks` does."""
        if len(pairs):
            assert len(np.unique(pairs[:, 1])) == len(pairs)
            self.memory[pairs[:, 1]] = self.memory[pairs[:, 0]]

    def check_readable(self, one: Driven, length: int) -> None:
        """What the next token reads, if ``length`` tokens are there."""
        for at, each in enumerate(self.groups):
            rule = each.retention
            if rule.is_state:
                if length:
                    (block,) = one.seq.block_table(at).tolist()
                    assert self.memory[block, 0] == self.content(at, one.ids[:length], one.namespace), f"the state behind {length} tokens"
                continue
            slots = one.seq.slot_mapping(0, one.seq.num_tokens, group=at)
            table = one.seq.block_table(at)
            for position in (position for span in rule.spans(length) for position in span):
                slot = int(slots[position])
                assert slot >= 0, f"token {position} of group {at} is gone"
                assert table[position // each.block_size] == slot // each.block_size
                found = self.memory[divmod(slot, each.block_size)]
                assert found == self.content(at, one.ids[: position + 1], one.namespace), f"token {position} of group {at}"

    def compute(self, one: Driven, stop: int) -> None:
        """Compute tokens up to ``stop``: read what they need, write them, and look at what each of them reads."""
        seq, start = one.seq, one.seq.computed
        self.check_readable(one, start)
        for at, each in enumerate(self.groups):
            if each.retention.is_state:
                (block,) = seq.block_table(at).tolist()
                if not start and self.manager.null_block is not None:
                    assert not self.memory[block].any(), "a state begins as zeros"
                if stop > start:
                    self.memory[block] = self.content(at, one.ids[:stop], one.namespace)
                continue
            slots = seq.slot_mapping(start, stop, group=at)
            assert (slots >= 0).all()
            for position, slot in zip(range(start, stop), slots.tolist(), strict=True):
                self.memory[divmod(slot, each.block_size)] = self.content(at, one.ids[: position + 1], one.namespace)
        for length in range(start + 1, stop + 1):
            if not any(each.retention.is_state for each in self.groups) or length == stop:
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
            assert self.facts() == before
            return None

    def facts(self) -> Any:
        rows = [(one.seq.num_tokens, one.seq.computed, one.seq.table_version, one.seq.num_known) for one in self.all]
        tables = [[one.seq.block_table(at).tolist() for at in range(len(self.groups))] for one in self.all]
        return rows, tables, self.manager.num_sequences, self.manager.available_size

    def begin(self, ids: list[int], namespace: tuple[Any, ...] = (), **how: Any) -> Driven | None:
        fit = self.manager.plan(ids, namespace, reserve=how.get("reserve", 0), at_most=how.get("at_most"))
        seq = self.tried(lambda: self.manager.begin(ids, namespace, **how))
        if "max_cached_len" not in how:
            assert fit.fits == (seq is not None)
        if seq is None:
            return None
        self.copy(seq.block_pairs)
        one = Driven(seq, list(ids), namespace, len(ids))
        self.all.append(one)
        self.check_readable(one, seq.cached_len)
        return one

    def step(self, one: Driven, n: int = 1) -> bool:
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

    def batch(self, chosen: list[Driven]) -> None:
        """Decode a token of each in one call, as tables show it."""
        chosen = [one for one in chosen if one.seq.computed == one.seq.num_tokens and len(one.ids) == one.seq.num_tokens]
        if not chosen:
            return
        seqs = [one.seq for one in chosen]
        pairs = self.tried(lambda: self.manager.extend(seqs, 1))
        if pairs is None:
            return
        self.copy(pairs)
        tables = BatchTables(self.manager, len(seqs), 64)
        tables.update(seqs)
        for at, each in enumerate(self.groups):
            wide = 1 if each.retention.is_state else 64
            shown, exported = tables.block_tables[at].numpy(), dense_table(seqs, width=wide, group=at)
            for row, seq in enumerate(seqs):
                table = seq.block_table(at)
                kept = table != 0
                assert (shown[row, : table.size][kept] == table[kept]).all()
                assert (exported[row, : table.size][kept] == table[kept]).all()
            if not each.retention.is_state:
                last = [int(seq.slot_mapping(seq.num_tokens - 1, seq.num_tokens, group=at)[0]) for seq in seqs]
                assert tables.slot_mappings[at].tolist() == last
                assert [row[seq.num_tokens - 1] for row, seq in zip(token_table(seqs, group=at).tolist(), seqs, strict=True)] == last
            else:
                assert set(tables.slot_mappings[at].tolist()) == {-1}
        for one in chosen:
            one.ids.append((one.seq.num_tokens * 5 + one.prompt) % 3)
            self.compute(one, one.seq.num_tokens)
        self.manager.commit(seqs, [one.ids[-1] for one in chosen], computed=[one.seq.num_tokens for one in chosen])

    def fork(self, one: Driven, tokens: int) -> None:
        least = one.seq.shortest
        try:
            fork = self.tried(lambda: self.manager.fork(one.seq, tokens))
        except IndexRangeError:
            assert not least <= tokens
            return
        if fork is not None:
            self.copy(fork.block_pairs)
            other = Driven(fork, one.ids[:], one.namespace, one.prompt)
            self.all.append(other)
            self.check_readable(other, fork.computed)

    def truncate(self, one: Driven, tokens: int) -> None:
        least = one.seq.shortest
        try:
            done = self.tried(lambda: (self.manager.truncate(one.seq, tokens), True))
        except IndexRangeError:
            assert not least <= tokens
            return
        if done is None:
            assert tokens < one.seq.computed, "what is not computed can be undone always"
            return
        del one.ids[tokens:]
        self.check_readable(one, one.seq.computed)

    def end(self, one: Driven, how: str) -> None:
        self.all.remove(one)
        if how == "abort":
            self.manager.abort(one.seq)
        else:
            self.manager.finish(one.seq, keep=how == "keep")

    def check(self) -> None:
        self.manager.check_integrity()
        for one in self.all:
            self.check_readable(one, one.seq.computed)
