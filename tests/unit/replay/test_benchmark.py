"""The benchmark's baseline finds what ours finds, and its page and record say what was measured."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvdock.replay import read_trace
from kvdock.replay.bounds import ceiling
from support_docs import ROOT
from support_replay import CONVERSATION, endless_hits

NAMES = ("plain_tree", "plain_manager", "decode_step", "prefix_caches")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("prefix_caches")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in NAMES:
        sys.modules.pop(name, None)


def test_with_room_for_all_both_hit_all_that_was_there(bench: ModuleType) -> None:
    trace = read_trace(CONVERSATION, limit=20)
    ours, plain = bench.one_round(trace, 10**6, ours_first=True)
    assert ours.hits == plain.hits == endless_hits(trace, 16)
    assert ours.seconds > 0 < plain.seconds
    assert ours.evictions == plain.evictions == []


def test_with_little_room_both_evict_and_lose_nothing(bench: ModuleType) -> None:
    trace = read_trace(CONVERSATION)
    for first in (True, False):
        ours, plain = bench.one_round(trace, 500_000, ours_first=first)  # its `prove` compares blocks in use with tokens stored
        assert len(ours.evictions) > 200
        assert len(plain.evictions) > 50, "fewer, since each frees whole leaves"
        assert 0 < plain.hits <= ours.hits <= ceiling(trace).tokens * trace.input_tokens


def test_the_plain_tree_by_hand(bench: ModuleType) -> None:
    tree = sys.modules["plain_tree"].PlainTree(2)
    assert tree.insert(np.array([1, 2, 3, 4, 5], np.int32), np.arange(5, dtype=np.int32)) == 0
    assert tree.size == 4, "whole blocks only"
    assert tree.match(np.array([1, 2, 3, 9], np.int32)).tolist() == [0, 1]
    assert tree.insert(np.array([1, 2, 7, 8], np.int32), np.array([0, 1, 6, 7], np.int32)) == 2
    assert tree.match(np.array([1, 2, 7, 8, 1, 1], np.int32)).tolist() == [0, 1, 6, 7]
    assert tree.evict(1).tolist() == [2, 3], "the leaf that was used least recently, whole"
    assert tree.evict(3).tolist() == [6, 7, 0, 1], "then the next one, and the root's child behind it"
    assert tree.size == 0


def test_evictions_are_of_one_prompt_each(bench: ModuleType) -> None:
    ours = bench.Ours(1000 * bench.PROMPT)
    taken = bench.evictions(ours, 1200)
    assert len(taken) == 200
    assert ours.tree.stats.evictions == 200
    assert ours.tree.stats.evicted_tokens == 200 * bench.PROMPT
    assert len(set(map(bytes, bench.prompts(0, 1000)[:, :16]))) == 1000


def test_allocation_and_memory(bench: ModuleType) -> None:
    allocate, free = bench.allocation_rows(1, blocks=2000, at_once=10)
    assert allocate.value > 0 < free.value
    (memory,) = bench.memory_rows(prompt=1600, count=4)
    assert 4 < memory.value < 8, "the ids of a cached token take four bytes"


def test_both_sides_of_a_step_do_the_same(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = sys.modules["decode_step"]
    monkeypatch.setattr(steps, "NUM_SEQUENCES", 5)
    monkeypatch.setattr(steps, "LENGTHS", (20, 90))
    ours, plain = steps.step_seconds()  # compares lengths and positions in the end, and raises where they differ
    assert ours > 0 < plain
    one, other = steps.Ours([np.arange(20, dtype=np.int32)], 100), steps.Plain([np.arange(20, dtype=np.int32)], 100)
    one.step(np.array([1]))
    other.step(np.array([1]))
    steps._compare(one, other)
    other.step(np.array([1]))
    with pytest.raises(AssertionError, match="different"):
        steps._compare(one, other)


def test_the_plain_manager_by_hand(bench: ModuleType) -> None:
    manager = sys.modules["plain_manager"].PlainManager(8, 2)
    first, second = manager.begin([1, 2, 3]), manager.begin([1, 2])
    assert (first.blocks, second.blocks) == ([7, 6], [5])
    assert manager.by_hash == {hash((0, (1, 2))): 7}
    slots = manager.extend([first, second])
    assert slots == [6 * 2 + 1, 4 * 2]
    tables = manager.tables([first, second], slots)
    assert [table.tolist() for table in tables] == [[[7, 6], [5, 4]], [4, 3], [1, 1], [0, 1, 2], [3, 2], slots]
    manager.commit([first, second], [4, 9])
    assert manager.by_hash[hash((hash((0, (1, 2))), (3, 4)))] == 6


def test_parts_of_blocks_are_found_and_a_commit_is_timed(bench: ModuleType) -> None:
    steps = sys.modules["decode_step"]
    figures = steps.partial_figures(count=20, prompt=200)
    assert 0 < figures["tokens, partial"] - figures["tokens"] < 16
    assert steps.commit_seconds(64, times=3) > 0


def test_the_page_and_the_record(bench: ModuleType, tmp_path: Path) -> None:
    rows = [bench.row("speed", "a case", [1.0, 3.0, 2.0], "x", ">= 1"), bench.row("rate", "another", [0.12345], "")]
    assert (rows[0].value, rows[0].low, rows[0].high) == (2.0, 1.0, 3.0)
    bench.write(tmp_path, read_trace(CONVERSATION), CONVERSATION, 3, rows)
    page, record = (tmp_path / "prefix.md").read_text(), json.loads((tmp_path / "prefix.json").read_text())
    assert "Made by `make bench-prefix`;" in page
    assert bench.text(rows) in page
    assert "300 requests, 4,269,971 input tokens" in page
    assert (record["trace"], record["rounds"], record["requests"]) == (CONVERSATION.name, 3, 300)
    assert [one["value"] for one in record["rows"]] == [2.0, 0.12345]
    assert {"cpu", "python", "numpy", "kvdock"} <= set(record["machine"])


@pytest.mark.parametrize(("value", "text"), [(0.14189, "0.1419"), (1.5, "1.50"), (12.34, "12.3"), (271.2, "271"), (5417.4, "5,417")])
def test_numbers(bench: ModuleType, value: float, text: str) -> None:
    assert bench.number(value) == text
