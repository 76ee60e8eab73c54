"""A step of decoding with two layer groups beside one: room, tables of each group, and the ids committed, on the host.

    OMP_NUM_THREADS=1 python benchmarks/group_step.py --out docs/benchmarks     # writes group-step.md

Both managers take the same prompts and ids, and take turns after each sixteen steps, in which every sequence completes a block
once, and lets a block of its window go. What counts is the processor's time: other processes do not.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock.layers import LayerGroup
from kvdock.scheduler import BatchTables

SEQUENCES, LENGTHS, BLOCK = 256, (256, 2048), 16


class Decoding:
    """Sequences of a manager, and their tables."""

    def __init__(self, prompts: Sequence[Any], groups: Sequence[LayerGroup]) -> None:
        blocks = len(prompts) * (LENGTHS[1] // BLOCK + 64)
        self.manager = kvdock.CacheManager(blocks * len(groups), groups=groups, null_block=True)
        self.sequences = [self.manager.begin(prompt) for prompt in prompts]
        for seq, prompt in zip(self.sequences, prompts, strict=True):
            self.manager.commit(seq, [], computed=len(prompt))
        self.tables = BatchTables(self.manager, len(prompts), LENGTHS[1] // BLOCK + 64)
        self.computed = np.array([len(prompt) for prompt in prompts])

    def step(self, ids: Any) -> None:
        """Take one token for each."""
        self.manager.extend(self.sequences, 1)  # the tables have the slots
        self.tables.update(self.sequences)
        self.computed += 1
        self.manager.commit(self.sequences, ids, computed=self.computed)


def groups_of(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Return the groups of a model whose layers have these windows."""
    spec = kvdock.KVSpec([kvdock.LayerSpec(8, 8, 64, 64, window=window) for window in windows], 131_072, torch.bfloat16)
    return kvdock.plan_blocks(spec, kvdock.PagedKVCacheConfig(num_blocks=1), kvdock.RankInfo("cpu")).groups


def measure(turns: int) -> tuple[list[float], list[float]]:
    """Return seconds of a step with one group and with two, one of each for a turn."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 150_000, length, dtype=np.int32) for length in random.integers(*LENGTHS, SEQUENCES)]
    sides = [Decoding(prompts, groups_of(windows)) for windows in ((None, None), (None, 128))]
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        ids = random.integers(0, 150_000, (BLOCK, SEQUENCES))
        for which in (0, 1) if turn % 2 else (1, 0):
            start = process_time()
            for row in ids:
                sides[which].step(row)
            taken[which].append((process_time() - start) / BLOCK)
    for side in sides:
        side.manager.check_integrity()
    return taken


def page(one: Sequence[float], two: Sequence[float]) -> str:
    """Return the page."""
    ratios = [both / single for single, both in zip(one, two, strict=True)]
    rows = []
    for name, values, scale, digits in (("one group, us", one, 1e6, 0), ("two groups, us", two, 1e6, 0), ("ratio", ratios, 1, 2)):
        low, middle, high = (f"{cut * scale:.{digits}f}" for cut in statistics.quantiles(values, n=4))
        rows.append(f"| {name} | {middle} | {low} to {high} |")
    head = [
        "# A step of decoding with two layer groups",
        "",
        f"Written by `benchmarks/group_step.py`: {SEQUENCES} sequences of {LENGTHS[0]} to {LENGTHS[1]:,} tokens; `extend`,",
        "`BatchTables.update` and `commit`, in the processor's time of one thread. One group keeps all tokens; the second of two",
        f"has windows of 128 tokens, and lets a block go every {BLOCK} steps of each sequence. {len(one)} turns of {BLOCK} steps in one",
        f"run, one beside the other; {platform.machine()},",
        f"{platform.system()}, Python {platform.python_version()}, numpy {np.__version__}.",
        "",
        "| | median | quartiles |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def main() -> None:
    """Measure, print, and write the page where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = page(*measure(options.turns))
    print(text)
    if options.out is not None:
        (options.out / "group-step.md").write_text(text)


if __name__ == "__main__":
    main()
