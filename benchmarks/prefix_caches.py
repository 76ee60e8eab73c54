"""The radix prefix cache, the manager and the block allocator, on one thread, against baselines in the same run.

    make bench-prefix                                            # the excerpt in tests/data; prints a table
    python benchmarks/prefix_caches.py --trace FILE --out DIR    # another trace, and writes DIR/prefix.md and DIR/prefix.json

A ratio is the baseline's time over ours: 2 means twice as fast. Ours and the baseline (`plain_tree.py`) take turns, on the
trace after each hundred requests, so that a noisy machine disturbs both; each figure is a median over rounds, with the least
and the greatest. Making token ids and handing out blocks is not in the times, and neither is Python's cycle collector.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import attrs
import decode_step
import numpy as np
from plain_tree import PlainTree

import kvdock
from kvdock.prefix import RadixPrefixCache
from kvdock.replay import Trace, read_trace
from kvdock.replay.tokens import TokenMaker
from kvdock.scheduler import BlockAllocator

BLOCK = 16
POOLS = (3_000_000, 10_000_000)
EXCERPT = Path(__file__).parents[1] / "tests" / "data" / "mooncake_conversation_300.jsonl"
TURN = 100  # requests that one of the two gets before it is the other's turn
PROMPT, PROMPTS, PROMPT_POOL = 128, 33_000, 4_000_000
LEAVES = (30_000, 300_000)
LENGTHS, SEQUENCES, COMMITS = (1_024, 131_072), 40, 32


@attrs.frozen
class Row:
    """One line of the table. ``value`` is the median over rounds, ``low`` and ``high`` the least and the greatest."""

    figure: str
    case: str
    value: float
    low: float
    high: float
    unit: str
    aim: str


class Side(Protocol):
    """One of the two that are compared."""

    def request(self, tokens: Any) -> None:
        """Take one prompt: find it, make room, store it."""


class Ours:
    """The radix prefix cache: match, lock, evict, insert, unlock."""

    def __init__(self, pool: int) -> None:
        self.tree, self.free = RadixPrefixCache(BLOCK), BlockAllocator(pool // BLOCK)
        self.seconds, self.hits, self.evictions = 0.0, 0, list[float]()

    def request(self, tokens: Any) -> None:
        """Take one prompt."""
        tree, whole = self.tree, len(tokens) // BLOCK * BLOCK
        start = perf_counter()
        match = tree.match_prefix(tokens)
        tree.lock_handle(match.handle)
        self.seconds += perf_counter() - start
        need = (whole - match.handle.cached_len) // BLOCK
        self._make_room(need - self.free.num_free)
        blocks, rest = self.free.allocate(need), tokens[match.handle.cached_len : whole]
        start = perf_counter()
        tree.insert_prefix(rest, blocks, behind=match.handle)
        tree.lock_handle(match.handle, unlock=True)
        self.seconds += perf_counter() - start
        self.hits += match.handle.cached_len

    def _make_room(self, blocks: int) -> None:
        """Evict blocks, if that many are missing."""
        if blocks > 0:
            start = perf_counter()
            gone = self.tree.evict(blocks)
            self.evictions.append(perf_counter() - start)
            self.seconds += self.evictions[-1]
            self._release(gone)

    def _release(self, blocks: Any) -> None:
        """Give evicted blocks back."""
        self.free.release(blocks)

    def prove(self) -> None:
        """Check that nothing was lost."""
        self.tree.check_integrity()
        self.free.check_integrity()
        assert self.tree.num_locks == 0
        assert self.tree.size_info.total_size == self.free.num_used * BLOCK


class Turned(Ours):
    """The same over an allocator that hands out evicted blocks in the opposite order, as `CacheManager` never does."""

    def _release(self, blocks: Any) -> None:
        """Give evicted blocks back, the last one first."""
        self.free.release(blocks[::-1])


class Plain:
    """The baseline: match, evict, insert."""

    def __init__(self, pool: int) -> None:
        self.tree, self.free = PlainTree(BLOCK), BlockAllocator(pool // BLOCK)
        self.seconds, self.hits, self.evictions = 0.0, 0, list[float]()

    def request(self, tokens: Any) -> None:
        """Take one prompt."""
        tree, whole = self.tree, len(tokens) // BLOCK * BLOCK
        start = perf_counter()
        found = tree.match(tokens)
        self.seconds += perf_counter() - start
        need = (whole - len(found)) // BLOCK
        self._make_room(need - self.free.num_free)
        slots = np.concatenate((found, slots_of(self.free.allocate(need))))
        start = perf_counter()
        tree.insert(tokens[:whole], slots)
        self.seconds += perf_counter() - start
        self.hits += len(found)

    def _make_room(self, blocks: int) -> None:
        """Evict blocks, if that many are missing."""
        if blocks > 0:
            start = perf_counter()
            slots = self.tree.evict(blocks * BLOCK)
            self.evictions.append(perf_counter() - start)
            self.seconds += self.evictions[-1]
            self.free.release(slots[::BLOCK] // BLOCK)

    def prove(self) -> None:
        """Check that nothing was lost."""
        self.free.check_integrity()
        assert self.tree.size == self.free.num_used * BLOCK


def slots_of(blocks: Any) -> Any:
    """Return the slots of blocks, int32."""
    return np.add.outer(blocks.astype(np.int32) * np.int32(BLOCK), np.arange(BLOCK, dtype=np.int32)).ravel()


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep Python's cycle collector away, as `timeit` does: it would look at both trees in the time of either."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def row(figure: str, case: str, values: Sequence[float], unit: str, aim: str = "") -> Row:
    """Make a line of one value per round."""
    return Row(figure, case, statistics.median(values), min(values), max(values), unit, aim)


def one_round(trace: Trace, pool: int, ours_first: bool, kind: type[Ours] = Ours) -> tuple[Ours, Plain]:
    """Replay a trace with both, which take turns."""
    ours, plain, maker = kind(pool), Plain(pool), TokenMaker()
    sides: list[Side] = [ours, plain]
    with no_collector():
        for start in range(0, len(trace.requests), TURN):
            prompts = [maker.tokens(request) for request in trace.requests[start : start + TURN]]
            for side in sides if ours_first == (start // TURN % 2 == 0) else sides[::-1]:
                for tokens in prompts:
                    side.request(tokens)
    ours.prove()
    plain.prove()
    return ours, plain


def trace_rows(trace: Trace, pool: int, rounds: int, aims: tuple[str, str]) -> list[Row]:
    """Measure a whole trace: how quickly, and how much is hit."""
    done = [one_round(trace, pool, number % 2 == 0) for number in range(rounds)]
    turned = [one_round(trace, pool, number % 2 == 0, Turned) for number in range(rounds)]
    case, total = f"pool of {pool // 10**6}M", trace.input_tokens
    return [
        row("hit rate, ours", case, [ours.hits / total for ours, _ in done], "", aims[0]),
        row("hit rate, plain tree", case, [plain.hits / total for _, plain in done], ""),
        row("input tokens, ours", case, [total / ours.seconds / 1e6 for ours, _ in done], "M/s"),
        row("input tokens, plain tree", case, [total / plain.seconds / 1e6 for _, plain in done], "M/s"),
        row("speed against the plain tree", case, [plain.seconds / ours.seconds for ours, plain in done], "x", aims[1]),
        row("the same, blocks turned round", case, [plain.seconds / ours.seconds for ours, plain in turned], "x"),
    ]


def prompts(first: int, count: int) -> Any:
    """Return distinct prompts, int32 ``[count, PROMPT]``: random ids, with the prompt's number in front."""
    made = np.random.default_rng(first).integers(0, 150_000, (count, PROMPT), dtype=np.int32)
    made[:, 0] = np.arange(first, first + count)
    return made


def evictions(side: Ours | Plain, count: int) -> list[float]:
    """Let a side take distinct prompts, and return what each eviction took, in microseconds."""
    with no_collector():
        for first in range(0, count, 1000):
            for tokens in prompts(first, min(1000, count - first)):
                side.request(tokens)
    side.prove()
    return [taken * 1e6 for taken in side.evictions]


def eviction_rows(rounds: int) -> list[Row]:
    """Measure evictions of one prompt's blocks each, ours and the plain tree's."""
    means, tails, plains, ratios = [], [], [], []
    for _ in range(rounds):
        ours, plain = (evictions(side, PROMPTS) for side in (Ours(PROMPT_POOL), Plain(PROMPT_POOL)))
        means.append(statistics.fmean(ours))
        tails.append(float(np.quantile(ours, 0.99)) / means[-1])
        plains.append(statistics.fmean(plain))
        ratios.append(plains[-1] / means[-1])
    case = f"{PROMPTS:,} prompts of {PROMPT}, pool of {PROMPT_POOL // 10**6}M"
    return [
        row("eviction, ours, mean", case, means, "us"),
        row("eviction, plain tree, mean", case, plains, "us"),
        row("eviction against the plain tree", case, ratios, "x", ">= 250"),
        row("eviction, ours, p99 over mean", case, tails, "x", "<= 10"),
    ]


def leaves_rows(rounds: int) -> list[Row]:
    """Measure evictions among few and among many leaves."""
    found: dict[int, list[float]] = {count: [] for count in LEAVES}
    for _ in range(rounds):
        for count in LEAVES:
            found[count].append(statistics.fmean(evictions(Ours(count * PROMPT), count + 5_000)))
    rows = [row("eviction, ours, mean", f"{count:,} leaves", found[count], "us") for count in LEAVES]
    growth = [many / few for few, many in zip(*found.values(), strict=True)]
    return [*rows, row("eviction, many leaves over few", f"{LEAVES[1]:,} over {LEAVES[0]:,}", growth, "x", "<= 1.5")]


def allocation_rows(rounds: int, blocks: int = 1_000_000, at_once: int = 1000) -> list[Row]:
    """Measure the allocator, in a pool whose free blocks lie anywhere."""
    took: list[float] = []
    gave: list[float] = []
    for number in range(rounds):
        allocator, random = BlockAllocator(blocks), np.random.default_rng(number)
        held = allocator.allocate(blocks)
        random.shuffle(held)
        allocator.release(held[: blocks // 2])
        chunks = held[blocks // 2 :].reshape(-1, at_once)
        taken = [(timed(allocator.allocate, at_once), timed(allocator.release, chunk)) for chunk in chunks]
        took.append(statistics.median(first for first, _ in taken) * 1e6)
        gave.append(statistics.median(second for _, second in taken) * 1e6)
        allocator.check_integrity()
    case = f"{at_once:,} of {blocks // 10**6}M blocks"
    return [row("allocate", case, took, "us", "< 50"), row("free", case, gave, "us", "< 50")]


def timed(function: Callable[[Any], Any], argument: Any) -> float:
    """Return the seconds that one call takes."""
    start = perf_counter()
    function(argument)
    return perf_counter() - start


def memory_rows(prompt: int = 16_000, count: int = 64) -> list[Row]:
    """Measure what the tree allocates while long prompts that share their first half are inserted, and keeps."""
    ids = np.random.default_rng(0).integers(0, 150_000, (count, prompt), dtype=np.int32)
    ids[1::2, : prompt // 2] = ids[::2, : prompt // 2]
    blocks = np.arange(count * prompt // BLOCK, dtype=np.int32).reshape(count, -1)
    tree = RadixPrefixCache(BLOCK)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for tokens, own in zip(ids, blocks, strict=True):
        tree.insert_prefix(tokens, own)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    value = (after - before) / tree.size_info.total_size
    return [row("memory of the tree", f"{count} prompts of {prompt:,} tokens, half shared by two", [value], "bytes per token", "<= 8")]


class Growing:
    """One sequence in a radix prefix cache of its own, published block by block as it is decoded."""

    def __init__(self, tokens: int) -> None:
        self.tree, self.block = RadixPrefixCache(BLOCK), np.array([tokens // BLOCK], dtype=np.int32)
        self.ids = np.random.default_rng(tokens).integers(0, 150_000, tokens, dtype=np.int32)
        self.end = self.tree.insert_prefix(self.ids, np.arange(tokens // BLOCK, dtype=np.int32)).handle
        self.tree.lock_handle(self.end)

    def commit(self) -> float:
        """Publish one block behind the rest, and hold it too; return the microseconds that took."""
        tree, ids, last = self.tree, self.ids[-BLOCK:], self.end
        start = perf_counter()
        self.end = tree.insert_prefix(ids, self.block, behind=last).handle
        tree.lock_handle(self.end)
        tree.lock_handle(last, unlock=True)
        taken = perf_counter() - start
        self.block += 1
        return taken * 1e6


def commit_rows(rounds: int) -> list[Row]:
    """Measure the commit of one block, at the end of a short sequence and of a long one, which take turns."""
    found: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(rounds):
        taken: dict[int, list[float]] = {length: [] for length in LENGTHS}
        with no_collector():
            for _ in range(SEQUENCES):
                growing = [Growing(length) for length in LENGTHS]
                for _ in range(COMMITS):
                    for length, sequence in zip(LENGTHS, growing, strict=True):
                        taken[length].append(sequence.commit())
        for length, values in taken.items():
            found[length].append(statistics.median(values))
    growth = [long / short for short, long in zip(*found.values(), strict=True)]
    rows = [row("commit of one block", f"behind {length:,} tokens", found[length], "us") for length in LENGTHS]
    return [*rows, row("commit, long over short", f"{LENGTHS[1]:,} over {LENGTHS[0]:,} tokens", growth, "x", "<= 1.2")]


def manager_rows(rounds: int) -> list[Row]:
    """Measure the manager: a step of a batch against Python lists, a commit behind a long prompt, parts of blocks."""
    with no_collector():
        steps = [decode_step.step_seconds() for _ in range(rounds)]
        commits = [[decode_step.commit_seconds(length) for length in LENGTHS] for _ in range(rounds)]
        parts = [decode_step.partial_figures() for _ in range(rounds)]
    step, long = f"{decode_step.NUM_SEQUENCES} sequences", f"{LENGTHS[1]:,} over {LENGTHS[0]:,} tokens"
    found = [figures["tokens, partial"] - figures["tokens"] for figures in parts]
    return [
        row("step of a batch, ours", step, [ours * 1e6 for ours, _ in steps], "us"),
        row("step of a batch, Python lists", step, [plain * 1e6 for _, plain in steps], "us"),
        row("step, ours over Python lists", step, [ours / plain for ours, plain in steps], "x", "<= 0.25"),
        row("CacheManager.commit, long over short", long, [after / before for before, after in commits], "x", "<= 1.2"),
        row("begin with partial=True, more cached", "prompts that share 1 to 2,000 tokens", found, "tokens a prompt"),
        row("begin, partial=True over without", "the same", [f["seconds, partial"] / f["seconds"] for f in parts], "x"),
    ]


def text(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [f"{'figure':36} {'case':50} {'median':>9}  {'least .. greatest':21} {'unit':16} aim"]
    for r in rows:
        spread = f"{number(r.low)} .. {number(r.high)}"
        lines.append(f"{r.figure:36} {r.case:50} {number(r.value):>9}  {spread:21} {r.unit:16} {r.aim}".rstrip())
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number with four digits that count, or four behind the point if it is below 1."""
    return f"{value:.4f}" if value < 1 else f"{value:,.{max(0, 3 - len(str(int(value))))}f}"


def machine() -> dict[str, str]:
    """Describe what the figures were taken on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvdock": kvdock.__version__,
    }


PAGE = """# Prefix cache, manager and block allocator

Made by `{command}`; `prefix.json` beside this page is the record. One process, one thread. A figure is the
median over {rounds} rounds, with the least and the greatest. A ratio compares two that took turns in the same round.

The trace is `{trace}`: {requests:,} requests, {tokens:,} input tokens; blocks of {block}. "Ours" is
`RadixPrefixCache` with all its checks: match, lock, evict, insert behind what was found, unlock. The plain tree is
`benchmarks/plain_tree.py`: a numpy tree without locks and checks. It collects and heapifies its leaves at each eviction, and stores a
slot for each token. Both get the same token ids, and the same blocks in the form that they store, all int32. Not timed: making these
arrays, handing out blocks, and Python's cycle collector, which is off.

```
{head}
{table}
```

Memory is what `tracemalloc` counts as allocated while prompts were inserted and not freed at the end.

The next insertion mostly brings the blocks that an eviction released, in the same order: `BlockAllocator` first hands out what was
released last, as in `CacheManager`. The prefix cache sees this with one comparison. Blocks in another order are looked up one by one.
"blocks turned round" measures that, with an allocator that returns evicted blocks in the opposite order.

A commit inserts one block behind the last, locks the new end and unlocks the old one. The figure is a median over {commits:,} commits for
each length and round. The two sequences take turns, block by block.

A step of a batch makes room for one more token of each sequence, fills the tables for attention and commits the ids. One id in sixteen
completes a block: `benchmarks/decode_step.py`. The baseline does the same with Python lists of ids and blocks for each sequence, and a
hash table of whole blocks (`benchmarks/plain_manager.py`). The two take turns every sixteen steps.
"""


def write(folder: Path, trace: Trace, path: Path, rounds: int, rows: Sequence[Row]) -> None:
    """Write the page and the record."""
    about = {"trace": path.name, "requests": len(trace.requests), "input_tokens": trace.input_tokens, "rounds": rounds, "block_size": BLOCK}
    record = {"machine": machine(), **about, "rows": [attrs.asdict(r) for r in rows]}
    (folder / "prefix.json").write_text(json.dumps(record, indent=1) + "\n")
    page = PAGE.format(
        command="make bench-prefix" if path == EXCERPT else f"make bench-prefix TRACE=.../{path.name}",
        trace=path.name,
        requests=len(trace.requests),
        tokens=trace.input_tokens,
        block=BLOCK,
        rounds=rounds,
        commits=SEQUENCES * COMMITS,
        head=", ".join(f"{key} {value}" for key, value in machine().items()),
        table=text(rows),
    )
    (folder / "prefix.md").write_text(page)


def main() -> None:
    """Run all, print the table, and write page and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="the trace to replay; its first 300 requests are in tests/data")
    parser.add_argument("--out", type=Path, help="write prefix.md and prefix.json into this folder")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each figure")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    aims = {3_000_000: (">= 0.1413", ">= 1"), 10_000_000: (">= 0.2936", ">= 1.5")} if trace.input_tokens > 100e6 else {}
    rows = [line for pool in POOLS for line in trace_rows(trace, pool, options.rounds, aims.get(pool, ("", "")))]
    rows += [
        *eviction_rows(options.rounds),
        *leaves_rows(options.rounds),
        *commit_rows(options.rounds),
        *manager_rows(options.rounds),
        *allocation_rows(options.rounds),
        *memory_rows(),
    ]
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(text(rows))
    if options.out:
        write(options.out, trace, options.trace, options.rounds, rows)


if __name__ == "__main__":
    main()
