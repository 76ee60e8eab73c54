"""The requests, batches and pins of two cache managers that are called alike, and what must be so after each call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from kvdock.errors import KVDockError, OutOfBlocksError
from kvdock.prefix import RadixPrefixCache
from kvdock.scheduler import (
    BatchTables,
    CacheManager,
    CacheSequence,
    Pin,
    SequenceBatch,
)
from kvdock.scheduler import ids as token_ids
from support_blocks import FREE, Contents, Path, Pool, chain

WHICH = st.integers(0, 11)
POLICIES = [{"policy": name} for name in ("lru", "lfu", "fifo", "priority")]
STEPS = [0]


@attrs.define(eq=False)
class Request:
    """A sequence of each manager, and what is known of it: the ids in ``written`` are those whose keys and values can be read back."""

    pair: tuple[CacheSequence, CacheSequence]
    namespace: tuple[object, ...]
    ids: list[int]
    computed: int
    written: list[int]
    prompt: int = 0
    is_forgotten: bool = False
    limit: int = 0
    was_promised: bool = False
    seen: tuple[int, list[int]] = (0, [])

    @property
    def seq(self) -> CacheSequence:
        return self.pair[0]


@attrs.define(eq=False)
class Rows:
    """A batch of each manager, and its rows; all their room is written."""

    pair: tuple[SequenceBatch, SequenceBatch]
    rows: list[Request]

    @property
    def batch(self) -> SequenceBatch:
        return self.pair[0]


@attrs.define(eq=False)
class Pinned:
    """A pin of each manager."""

    pair: tuple[Pin, Pin]
    path: Path
    end: float


class TwoManagers(RuleBasedStateMachine):
    """Sequences in a pool that is too small for them; rules are added to it."""

    @initialize(
        num_blocks=st.integers(3, 18),
        block_size=st.sampled_from([1, 2, 3, 4]),
        options=st.sampled_from([*POLICIES, *POLICIES[:1] * 3, {"prefix": "naive"}]),
        null_block=st.booleans(),
        chunk=st.sampled_from([1, 4, 128]),
    )
    def start(self, num_blocks: int, block_size: int, options: dict[str, str], null_block: bool, chunk: int) -> None:
        self.now = 0.0
        how: dict[str, Any] = {**options, "null_block": null_block, "clock": lambda: self.now}
        with patch.object(token_ids, "_CHUNK", chunk):  # few sequences here would be as long as the real one
            self.managers = CacheManager(num_blocks, block_size, **how), CacheManager(num_blocks, block_size, **how)
        self.size, self.num_blocks, self.null = block_size, num_blocks, int(null_block)
        self.pool = Pool(num_blocks, block_size)
        self.contents = [Contents(manager.prefix) for manager in self.managers]
        self.publisher: dict[Path, Request] = {}
        self.open: list[Request] = []
        self.closed: list[Request] = []
        self.batches: list[Rows] = []
        self.pins: list[Pinned] = []
        self.is_radix = isinstance(self.manager.prefix, RadixPrefixCache)
        self.tables = BatchTables(self.manager, 4, num_blocks, max_tokens=256) if null_block else None

    @property
    def manager(self) -> CacheManager:
        return self.managers[0]

    @property
    def all(self) -> list[Request]:
        return [*self.open, *(row for one in self.batches for row in one.rows)]

    def both(self, call: Callable[[CacheManager, int], Any]) -> tuple[Any, Any]:
        return call(self.managers[0], 0), call(self.managers[1], 1)

    def attempt(self, call: Callable[[CacheManager, int], Any]) -> tuple[Any, Any] | None:
        """The results of a call that may find too few blocks; then nothing has changed."""
        before = self.state()
        try:
            first = call(self.managers[0], 0)
        except OutOfBlocksError:
            with pytest.raises(OutOfBlocksError):
                call(self.managers[1], 1)
            assert self.state() == before
            return None
        return first, call(self.managers[1], 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def some(self, which: Sequence[int]) -> list[Request]:
        return list({id(one): one for one in (self.open[at % len(self.open)] for at in which)}.values())

    # What is held.

    def end_of(self, handle: Any) -> Path | None:
        """The prefix that a handle ends."""
        own = self.manager.prefix._checked(handle) if self.is_radix else None  # type: ignore[attr-defined]
        return self.contents[0].paths[int(own.node.blocks[own.position - own.node.start - 1])] if own and own.node else None

    def held(self, but: Request | None = None) -> set[Path]:
        """All prefixes of what sequences and pins have locked."""
        ends = [self.end_of(one.seq._handle) for one in self.all if one is not but] + [pin.path for pin in self.pins]
        return {(end[0], end[1][:n]) for end in ends if end for n in range(self.size, len(end[1]) + 1, self.size)}

    def taken_back(self, one: Request) -> set[Path]:
        """What goes with a sequence that is not kept: its own publications that nobody holds, and behind which nothing stays."""
        held, stays, gone = self.held(but=one), set(self.contents[0].paths.values()), set[Path]()
        for path in sorted(stays, key=lambda path: -len(path[1])):
            behind = any(other[0] == path[0] and other[1][: len(path[1])] == path[1] for other in stays if len(other[1]) > len(path[1]))
            if self.publisher[path] is one and path not in held and not behind:
                stays.remove(path)
                gone.add(path)
        return gone

    def read_events(self, committed: Iterable[Request] = ()) -> None:
        """Note who has published what was stored: the first of a batch that has computed it."""
        stored, others = self.contents[0].read(), self.contents[1].read()
        assert stored == others
        for namespace, ids in stored:
            owners = (one for one in committed if repr(one.namespace) == namespace and not one.is_forgotten)
            self.publisher[namespace, ids] = next(one for one in owners if tuple(one.ids[: one.computed][: len(ids)]) == ids)
        left = set(self.contents[0].paths.values())
        self.publisher = {path: one for path, one in self.publisher.items() if path in left}

    def was_cut(self, one: Request, n: int) -> None:
        one.ids, one.written, one.computed, one.prompt = one.ids[:n], one.written[:n], min(one.computed, n), 0
        assert (one.seq.num_tokens, one.seq.computed, one.seq.num_known) == (n, one.computed, len(one.ids))

    def drop(self, one: Request, call: Callable[[CacheManager, int], None]) -> None:
        """End a sequence that is not kept: exactly what it published and nobody uses goes."""
        gone = self.taken_back(one)
        before = set(self.publisher)
        self.both(call)
        self.read_events()
        assert before - set(self.publisher) == gone

    def state(self) -> list[object]:
        found: list[object] = []
        for at, manager in enumerate(self.managers):
            counts = manager.allocator.ref_counts(np.arange(self.num_blocks)).tolist()
            prefix = manager.prefix
            found += [counts, prefix.stats, prefix.size_info, prefix.num_locks, prefix.stored_blocks().tolist()]
            found += [manager.available_size, manager.num_sequences, manager.num_pins, manager._pool.promised]
            for one in self.all:
                seq, rows = one.pair[at], manager._rows
                facts = [int(getattr(rows, name)[seq._row]) for name in rows._INTEGERS]
                found.append([seq.block_table().tolist(), seq.tokens.tolist(), str(seq.tokens.dtype), seq.cached_len, facts])
            found += [[one.pair[at].length, one.pair[at].pads.tolist(), list(map(id, one.pair[at].sequences))] for one in self.batches]
        return found

    def refused(self, error: type[KVDockError], call: Callable[[CacheManager, int], object]) -> None:
        before = self.state()
        for at, manager in enumerate(self.managers):
            with pytest.raises(error):
                call(manager, at)
        assert self.state() == before

    # After each step.

    @invariant()
    def is_whole(self) -> None:
        STEPS[0] += 1
        self.both(lambda manager, _: manager.check_integrity())
        self.read_events()
        counts, counts2 = self.both(lambda manager, _: manager.allocator.ref_counts(np.arange(self.num_blocks)).tolist())
        assert counts == counts2
        self.pool.blocks[np.array(counts) == 0] = FREE
        paths, versions = self.contents[0].paths, set[int]()
        assert paths == self.contents[1].paths
        for one in self.all:
            table, whole = one.seq.block_table().tolist(), one.computed // self.size
            assert table == one.pair[1].block_table().tolist()
            assert len(table) == len(set(table)) == self.blocks_for(one.seq.num_tokens)
            assert 0 not in table or not self.null
            assert self.pool.slots[one.seq.slot_mapping(0, len(one.written))].tolist() == chain(one.namespace, one.written)
            assert (one.seq.tokens.tolist(), one.seq.num_known, one.seq.computed) == (one.ids, len(one.ids), one.computed)
            if self.is_radix and not one.is_forgotten:
                prefixes = [(repr(one.namespace), tuple(one.ids[: (at + 1) * self.size])) for at in range(whole)]
                assert [paths.get(block) for block in table[:whole]] == prefixes, "cached, and the sequence goes on with that"
            assert table == one.seen[1] or one.seq.table_version != one.seen[0]
            one.seen = one.seq.table_version, table
            versions.add(one.seq.table_version)
        assert len(versions) == len(self.all) == self.manager.num_sequences
        for block, (namespace, ids) in paths.items():
            assert self.pool.blocks[block].tolist() == chain(namespace, ids)[-self.size :]

    @invariant()
    def blocks_are_counted(self) -> None:
        self.read_events()
        allocator, size_info = self.manager.allocator, self.manager.prefix.size_info
        cached, held = set(self.contents[0].paths), self.held()
        own = {block for one in self.all for block in one.seq.block_table().tolist()} - cached
        assert allocator.num_used == len(cached) + len(own) + self.null
        assert size_info.protected_size == len(held) * self.size
        assert size_info.total_size == len(cached) * self.size
        promised = sum(int(self.manager._rows.promised[one.seq._row]) for one in self.all)
        evictable = len(cached) - len(held)
        assert self.manager.available_size == (allocator.num_free + evictable - promised) * self.size >= 0
        assert self.manager.num_pins == len(self.pins)
        assert held <= set(self.publisher), "what is pinned or shared stays"

    def teardown(self) -> None:
        """Where all is over, so are blocks and locks."""
        if hasattr(self, "managers"):
            self.batches.clear()
            gc.collect(0)
            for one in self.open:
                self.both(lambda manager, at, one=one: manager.finish(one.pair[at]))
            for pin in self.pins:
                self.both(lambda _, at, pin=pin: pin.pair[at].release())
            assert self.manager.available_size == (self.num_blocks - self.null) * self.size
            assert self.manager.prefix.num_locks == 0
            self.manager.check_integrity()
