"""A tier behind the pool: how much of a trace is found, and what its bookkeeping costs.

    python benchmarks/tiers.py --trace FILE --out docs/benchmarks

On the trace the tier is only counted. The pool alone and the pool with the tier take turns, a hundred requests each, so that a noisy
machine disturbs both; Python's cycle collector is off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from prefix_caches import EXCERPT, Row, machine, no_collector, row, text

from kvdock.replay import ReplaySettings, Trace, read_trace
from kvdock.replay.bounds import ceiling
from kvdock.replay.pool import ReplayPool
from kvdock.replay.tokens import TokenMaker

SIZES = ((3_000_000, 30_000_000), (500_000, 1_500_000), (500_000, 5_000_000))
"""Tokens of the pool, and of the tier."""

TURN = 100
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Side:
    """A pool, and what its calls have taken."""

    def __init__(self, pool: int, host: int) -> None:
        self.pool: ReplayPool = ReplaySettings(host_tokens=host).make_pool(pool)
        self.hits = 0

    def request(self, request: Any, tokens: Any) -> None:
        """Let a request find its prompt, store it and finish."""
        begun = self.pool.begin(request, tokens)
        assert begun is not None
        self.pool.store(begun)
        self.pool.finish(begun)
        self.hits += begun.cached_len

    @property
    def seconds(self) -> float:
        """What the calls of the manager have taken."""
        return self.pool.times.total_s()


def turns(trace: Trace, sides: tuple[Side, ...], maker: TokenMaker, round_number: int) -> None:
    """Let each side have all requests, in turns."""
    for start in range(0, len(trace.requests), TURN):
        part = [(request, maker.tokens(request)) for request in trace.requests[start : start + TURN]]
        for side in sides if (start // TURN + round_number) % 2 else sides[::-1]:
            for each in part:
                side.request(*each)


def trace_rows(trace: Trace, pool: int, host: int, rounds: int) -> Iterator[Row]:
    """Measure one size of pool and tier."""
    case = f"pool of {pool:,}, tier of {host:,}"
    maker, found = TokenMaker(), list[tuple[Side, Side]]()
    for number in range(rounds):
        sides = Side(pool, 0), Side(pool, host)
        with no_collector():
            turns(trace, sides, maker, number)
        found.append(sides)
    total, top = trace.input_tokens, ceiling(trace).tokens
    for side in found[-1]:
        side.pool.close()
    yield row("hit rate, the pool alone", case, [alone.hits / total for alone, _ in found], "")
    yield row("hit rate, with the tier", case, [tier.hits / total for _, tier in found], "")
    yield row("the same, over that of a cache without end", case, [tier.hits / total / top for _, tier in found], "x", ">= 0.95")
    yield row("input tokens, the pool alone", case, [total / alone.seconds / 1e6 for alone, _ in found], "M/s")
    yield row("input tokens, with the tier", case, [total / tier.seconds / 1e6 for _, tier in found], "M/s")
    yield row("speed with the tier over without", case, [alone.seconds / tier.seconds for alone, tier in found], "x", ">= 0.6")


def main() -> None:
    """Measure, print the table, and write page and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="the trace to replay; its first 300 requests are in tests/data")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each figure (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write tiers.md and tiers.json into this folder")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    large = len(trace.requests) > 1000
    rows = [each for pool, host in (SIZES[:1] if large else SIZES[1:]) for each in trace_rows(trace, pool, host, options.rounds)]
    print(text(rows))
    if options.out:
        write(options.out, options, trace, rows)


PAGE = """# A tier behind the pool

Made by `{command}`; `tiers.json` beside this page is the record. A figure is the median over {rounds} rounds, with the least and the
greatest. {about}
```
{where}
{table}
```
"""


def write(folder: Path, options: Any, trace: Trace, rows: list[Row]) -> None:
    """Write the page and the record."""
    about = {"machine": machine(), "trace": options.trace.name, "requests": len(trace.requests), "rounds": options.rounds}
    record = {**about, "rows": [attrs.asdict(each) for each in rows]}
    (folder / "tiers.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = PAGE.format(
        command=f"python benchmarks/tiers.py --trace .../{options.trace.name}",
        rounds=options.rounds,
        about=(__doc__ or "").split("\n\n", 2)[2],
        where=", ".join(f"{key} {value}" for key, value in machine().items()),
        table=text(rows),
    )
    (folder / "tiers.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
