"""A step of decoding: room for one more token of each sequence, tables for attention, and the ids committed.

Ours is `CacheManager.extend`, `BatchTables.update` and `CacheManager.commit`, on the host; the baseline (`plain_manager.py`)
does the same with Python lists. Both take the same prompts of unlike lengths and the same ids, and take turns after each
sixteen steps, in which every sequence completes a block once. `prefix_caches.py` runs it.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import numpy as np
from plain_manager import PlainManager

import kvdock
from kvdock.scheduler import BatchTables

__all__ = ["LENGTHS", "NUM_SEQUENCES", "commit_seconds", "partial_figures", "step_seconds"]

BLOCK, NUM_SEQUENCES, LENGTHS, TURNS = 16, 256, (256, 2048), 16


class Ours:
    """Sequences of a `CacheManager`, and their tables."""

    def __init__(self, prompts: list[Any], num_blocks: int) -> None:
        self.manager = kvdock.CacheManager(num_blocks, BLOCK, null_block=True)
        self.sequences = [self.manager.begin(prompt) for prompt in prompts]
        for seq, prompt in zip(self.sequences, prompts, strict=True):
            self.manager.commit(seq, [], computed=len(prompt))
        self.tables = BatchTables(self.manager, len(prompts), num_blocks // len(prompts) * 2)
        self.computed = np.array([len(prompt) for prompt in prompts])

    def step(self, ids: Any) -> None:
        """Take one token for each."""
        self.manager.extend(self.sequences, 1)  # the tables have the slots
        self.tables.update(self.sequences)
        self.computed += 1
        self.manager.commit(self.sequences, ids, computed=self.computed)


class Plain:
    """Sequences of a `PlainManager`."""

    def __init__(self, prompts: list[Any], num_blocks: int) -> None:
        self.manager = PlainManager(num_blocks, BLOCK)
        self.sequences = [self.manager.begin(prompt.tolist()) for prompt in prompts]
        self.tables: tuple[Any, ...] = ()

    def step(self, ids: Any) -> None:
        """Take one token for each."""
        slots = self.manager.extend(self.sequences)
        self.tables = self.manager.tables(self.sequences, slots)
        self.manager.commit(self.sequences, ids.tolist())


def step_seconds() -> tuple[float, float]:
    """Return what a step takes, ours and the baseline's, in seconds: means over all steps of one run."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 150_000, length, dtype=np.int32) for length in random.integers(*LENGTHS, NUM_SEQUENCES)]
    num_blocks = NUM_SEQUENCES * (LENGTHS[1] // BLOCK + TURNS + 2)
    ours, plain = Ours(prompts, num_blocks), Plain(prompts, num_blocks)
    seconds = {Ours: 0.0, Plain: 0.0}
    for turn in range(TURNS):
        ids = random.integers(0, 150_000, (BLOCK, NUM_SEQUENCES))
        for side in (ours, plain) if turn % 2 else (plain, ours):
            start = perf_counter()
            for row in ids:
                side.step(row)
            seconds[type(side)] += perf_counter() - start
    _compare(ours, plain)
    return seconds[Ours] / (TURNS * BLOCK), seconds[Plain] / (TURNS * BLOCK)


def _compare(ours: Ours, plain: Plain) -> None:
    """Raise unless both have the same lengths and positions; their block ids differ."""
    _, lengths, _, sums, positions, _ = plain.tables
    host = ours.tables.host
    same = [np.array_equal(a, b) for a, b in ((lengths, host.seq_lens), (sums, host.cu_query_lens), (positions, host.positions))]
    if not all(same):
        raise AssertionError("the two sides of the benchmark have done different things")
    ours.manager.check_integrity()


def commit_seconds(length: int, times: int = 200) -> float:
    """Return what it takes to commit one block behind ``length`` tokens, in seconds: the median."""
    manager = kvdock.CacheManager(length // BLOCK + times + 1, BLOCK)
    seq = manager.begin(np.random.default_rng(0).integers(0, 150_000, length, dtype=np.int32))
    manager.commit(seq, [], computed=length)
    taken = []
    for number in range(times):
        manager.extend(seq, BLOCK)
        ids = np.arange(BLOCK) + number
        start = perf_counter()
        manager.commit(seq, ids, computed=seq.num_tokens)
        taken.append(perf_counter() - start)
    manager.check_integrity()
    return statistics.median(taken)


def partial_figures(count: int = 400, prompt: int = 2000) -> dict[str, float]:
    """Return what `begin` finds and takes where prompts share a stored prefix of any length, without and with parts of blocks.

    Returns:
        ``tokens`` and ``tokens, partial``: cached tokens per prompt; ``seconds`` and ``seconds, partial``: time of `begin`, medians.
    """
    random = np.random.default_rng(0)
    stored = random.integers(0, 150_000, prompt, dtype=np.int32)
    prompts = random.integers(0, 150_000, (count, prompt), dtype=np.int32)
    for row, shared in zip(prompts, random.integers(1, prompt, count), strict=True):
        row[:shared] = stored[:shared]
    figures: dict[str, float] = {}
    for name, partial in (("", False), (", partial", True)):
        manager = kvdock.CacheManager(2 * prompt // BLOCK + 2, BLOCK)
        first = manager.begin(stored)
        manager.commit(first, [], computed=prompt)
        taken, found = [], 0
        for row in prompts:
            start = perf_counter()
            seq = manager.begin(row, partial=partial)
            taken.append(perf_counter() - start)
            found += seq.cached_len
            manager.abort(seq)
        manager.check_integrity()
        figures[f"tokens{name}"], figures[f"seconds{name}"] = found / count, statistics.median(taken)
    return figures
