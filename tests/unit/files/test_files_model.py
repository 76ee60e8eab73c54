"""Two pools that save and load at random, beside sequences that run and prefixes that are evicted: contents stay those of the tokens."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kvdock.errors import ArgumentValueError, FileAccessError, FileContentError, OutOfBlocksError
from kvdock.files import load_pool, load_prefix, save_pool, save_prefix
from support_files import cached, compute, pool
from support_slow import examples

TEXTS = st.tuples(st.sampled_from([(), ("a",), (1,)]), st.lists(st.integers(0, 1), min_size=1, max_size=70))
SIDES = st.integers(0, 1)


class Files(RuleBasedStateMachine):
    """What each file holds is known from what was cached when it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.pools: list[Any] = []
        self.running: list[tuple[int, Any, Any]] = []
        self.texts: list[Any] = []
        self.saved: dict[str, list[tuple[Any, int]]] = {}

    @initialize(
        kind=st.sampled_from(["equal", "windows", "sinks", "chunks", "both", "states", "states and windows"]),
        num_blocks=st.sampled_from([70, 300]),
    )
    def make(self, kind: str, num_blocks: int) -> None:
        self.pools = [pool(kind, num_blocks=num_blocks), pool(kind, num_blocks=300)]

    @rule(side=SIDES, text=TEXTS, finish=st.booleans())
    def compute(self, side: int, text: Any, finish: bool) -> None:
        namespace, ids = text
        try:
            seq = compute(*self.pools[side], ids, namespace, finish=finish)
        except OutOfBlocksError:
            return
        self.texts.append(text)
        if not finish:
            self.running.append((side, seq, text))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        side, seq, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pools[side][1].finish(seq)

    @rule(side=SIDES, share=st.integers(1, 4))
    def evict(self, side: int, share: int) -> None:
        """Make room, by a sequence that takes it and goes."""
        manager = self.pools[side][1]
        size = manager.available_size // share
        try:
            manager.abort(manager.begin(list(range(10, 10 + max(size, 1)))))
        except OutOfBlocksError:
            assert size >= manager.block_size

    @precondition(lambda self: self.texts)
    @rule(side=SIDES, data=st.data(), most=st.sampled_from([1, 4000, 2**30]))
    def save_one(self, side: int, data: st.DataObject, most: int) -> None:
        cache, manager = self.pools[side]
        namespace, ids = data.draw(st.sampled_from(self.texts))
        have = cached(cache, manager, ids, namespace)
        try:
            found = save_prefix(self.folder / "one", manager, cache, ids, namespace, max_file_bytes=most)
        except ArgumentValueError:
            assert not have
            return
        assert found.num_tokens == have
        self.saved["one"] = [((namespace, ids), have)]

    @rule(side=SIDES, most=st.sampled_from([1, 4000, 2**30]))
    def save_all(self, side: int, most: int) -> None:
        cache, manager = self.pools[side]
        listed = [(space, ids.tolist()) for ids, space in manager.prefix.stored_prefixes()]
        held = [(text, have) for text in listed if (have := cached(cache, manager, text[1], text[0]))]
        if not held:
            with pytest.raises(ArgumentValueError):
                save_pool(self.folder / "all", manager, cache)
            return
        found = save_pool(self.folder / "all", manager, cache, max_file_bytes=most)
        assert found.num_prefixes <= len(held)
        self.saved["all"] = held

    @precondition(lambda self: "one" in self.saved)
    @rule(side=SIDES)
    def load_one(self, side: int) -> None:
        cache, manager = self.pools[side]
        ((namespace, ids), have), used = self.saved["one"][0], manager.num_sequences
        try:
            found = load_prefix(self.folder / "one", manager, cache)
        except OutOfBlocksError:
            assert manager.num_sequences == used
            return
        assert found.num_tokens == have
        assert cached(cache, manager, ids, namespace) >= have

    @precondition(lambda self: "all" in self.saved)
    @rule(side=SIDES)
    def load_all(self, side: int) -> None:
        cache, manager = self.pools[side]
        evictions = manager.prefix.stats.evictions
        found = load_pool(self.folder / "all", manager, cache)
        assert manager.prefix.stats.evictions == evictions
        there = [cached(cache, manager, ids, namespace) >= have for (namespace, ids), have in self.saved["all"]]
        assert sum(there) >= found.num_prefixes
        if found.num_prefixes == found.num_saved:
            assert all(there)

    @precondition(lambda self: "all" in self.saved)
    @rule(side=SIDES, at=st.floats(0, 1, exclude_max=True))
    def load_damaged(self, side: int, at: float) -> None:
        cache, manager = self.pools[side]
        data = bytearray((self.folder / "all").read_bytes())
        data[int(at * len(data))] ^= 0x80  # no bit of white space
        (self.folder / "bad").write_bytes(data)
        used, size = manager.blocks_used, manager.prefix.size_info
        with pytest.raises((FileContentError, FileAccessError)):
            load_pool(self.folder / "bad", manager, cache)
        assert (manager.blocks_used, manager.prefix.size_info) == (used, size)

    @invariant()
    def all_is_whole(self) -> None:
        for side, (cache, manager) in enumerate(self.pools):
            manager.check_integrity()
            assert manager.num_sequences == sum(of == side for of, _, _ in self.running)
            for namespace, ids in self.texts[-4:]:
                cached(cache, manager, ids, namespace)
        names = {each.name.split(".")[0] for each in self.folder.iterdir()}
        assert names <= {"one", "all", "bad"}, "and nothing unfinished"

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


@pytest.mark.slow
def test_any_saves_and_loads() -> None:
    how = settings(max_examples=examples(25), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Files, settings=how)  # type: ignore[no-untyped-call] # hypothesis has no types for it
