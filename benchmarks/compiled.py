"""A step of all layers under torch.compile, against the same step without it, in one process.

    python benchmarks/compiled.py --out DIR              # writes DIR/<card>-compiled.json and .md
    python benchmarks/compiled.py --device cpu --layers 2 --batch 3 --context 16 --runs 3 --out DIR    # that it works; says nothing

A step of decoding: each layer writes its new tokens, and attends, where kvdock has the op, else gathers what it wrote. What is between
is elementwise. The ways to run it:

by hand       the step without torch.compile, captured into a graph; the others are compared with this one
replayed      ``torch.compile(fullgraph=True, mode="reduce-overhead")``: the compiler captures the graph
captured      ``torch.compile(fullgraph=True)``, captured by hand
compiled      ``torch.compile(fullgraph=True)`` without a graph
eager         the step as it is

On a host there are no graphs: "by hand" is eager there, and two ways are left out. Times are of one step, between events on the device
with the L2 cache flushed before, and by the clock of a host that waits for each step; ways take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

import kvdock
from kvdock.ops.catalog import CATALOG

BLOCK = 16
Step = Callable[..., torch.Tensor]
Run = Callable[[], torch.Tensor]


@attrs.frozen
class Sizes:
    """What a step has."""

    layers: int
    batch: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def cache(self) -> kvdock.PagedKVCache:
        """Return a cache with room for the batch."""
        spec = kvdock.KVSpec.uniform(
            num_layers=self.layers, num_kv_heads=self.kv_heads, head_dim=self.dim, max_positions=self.context, dtype=self.dtype
        )
        config = kvdock.PagedKVCacheConfig(num_blocks=self.batch * self.context // BLOCK, block_size=BLOCK)
        cache = kvdock.create_cache(spec, config, kvdock.RankInfo(self.device))
        assert isinstance(cache, kvdock.PagedKVCache)
        return cache

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return hidden states, slots of the new tokens, block tables at random, and lengths."""
        torch.manual_seed(0)
        width = (self.heads + 2 * self.kv_heads) * self.dim
        tables = torch.randperm(self.batch * self.context // BLOCK).view(self.batch, -1)
        slots, lengths = tables[:, -1] * BLOCK + BLOCK - 1, torch.full((self.batch,), self.context)
        found = torch.randn(self.batch, width).to(self.dtype), slots, tables.to(torch.int32), lengths.to(torch.int32)
        return tuple(tensor.to(self.device) for tensor in found)


def step_of(cache: kvdock.PagedKVCache, sizes: Sizes) -> Step:
    """Return a step of all layers."""
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.dim
    attend: Any = kvdock.ops.paged_attention if "paged_attention" in CATALOG else None

    def step(x: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in range(cache.num_layers):
            q, k, v = (part.unflatten(1, (-1, dim)) for part in x.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
            pools = cache.update(layer, k, v, slots)
            read = attend(q, *pools, tables, lengths) if attend else cache.gather(layer, slots)[0].repeat(1, heads // kv_heads, 1)
            x = torch.cat([q + read, k, v], 1).flatten(1) * 0.5
        return x

    return step


def captured(run: Run) -> Run:
    """Return what replays the graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def ways(step: Step, args: tuple[torch.Tensor, ...], *, has_graphs: bool) -> dict[str, Run]:
    """Return each way to run a step, the one to compare with first."""

    def eager() -> torch.Tensor:
        return step(*args)

    compiled = torch.compile(step, fullgraph=True)
    if not has_graphs:
        return {"by hand": eager, "compiled": lambda: compiled(*args)}
    replayed = torch.compile(step, fullgraph=True, mode="reduce-overhead")

    def marked() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return replayed(*args)

    found = {"by hand": captured(eager), "replayed": marked, "captured": captured(lambda: compiled(*args))}
    return found | {"compiled": lambda: compiled(*args), "eager": eager}


def check(runs: dict[str, Run], cache: kvdock.PagedKVCache) -> None:
    """Hold that each way does the same."""
    expected: list[torch.Tensor] = []
    for run in runs.values():
        for _ in range(5):
            cache.reset()
            out = run().float().clone()
        after = [out, *(cache.k_cache(layer).float().clone() for layer in range(cache.num_layers))]
        expected = expected or after
        for found, other in zip(after, expected, strict=True):
            torch.testing.assert_close(found, other, rtol=2e-2, atol=2e-2)


def measure(runs: dict[str, Run], count: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Return the times of each way in microseconds, on the device (where there is one) and by the host's clock."""
    times: dict[str, dict[str, list[float]]] = {name: {"device": [], "host": []} for name in runs}
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device) if device.type != "cpu" else None
    for _ in range(count):
        for name, run in runs.items():
            if flush is not None:
                times[name]["device"].append(_on_device(run, flush))
            start = time.perf_counter()
            run()
            if flush is not None:
                torch.accelerator.synchronize()
            times[name]["host"].append((time.perf_counter() - start) * 1e6)
    return times


def _on_device(run: Run, flush: torch.Tensor) -> float:
    begin, end = torch.Event(flush.device, enable_timing=True), torch.Event(flush.device, enable_timing=True)
    flush.zero_()
    begin.record()
    run()
    end.record()
    torch.accelerator.synchronize()
    return begin.elapsed_time(end) * 1e3


def summary(times: list[float]) -> dict[str, float] | None:
    """Return median and quartiles."""
    if len(times) < 2:
        return None
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": median, "low": low, "high": high}


def report(sizes: Sizes, count: int) -> dict[str, Any]:
    """Run everything."""
    cache = sizes.cache()
    runs = ways(step_of(cache, sizes), sizes.inputs(), has_graphs=sizes.device.type == "cuda")
    check(runs, cache)
    times = measure(runs, count, sizes.device)
    card = torch.cuda.get_device_name(sizes.device) if sizes.device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "machine": {"card": card, "torch": torch.__version__, "python": platform.python_version(), "kvdock": kvdock.__version__},
        "sizes": {name: str(value) for name, value in attrs.asdict(sizes).items()},
        "step": "updates and attends" if "paged_attention" in CATALOG else "updates and gathers",
        "us": {name: {clock: summary(taken) for clock, taken in each.items()} for name, each in times.items()},
        "runs": count,
    }


def markdown(found: dict[str, Any]) -> str:
    """Write the record as a page."""
    lines = ["# A step of all layers under torch.compile", "", "Written by `benchmarks/compiled.py`.", ""]
    lines += [f"* {name}: {value}" for name, value in {**found["machine"], **found["sizes"], "step": found["step"]}.items()]
    lines += ["", f"Times of one step in us: median (quartiles) of {found['runs']}, and of by hand's.", ""]
    lines += ["| way | device | of by hand | host | of by hand |", "|---|---|---|---|---|"]
    first = found["us"]["by hand"]
    for name, each in found["us"].items():
        cells = [cell for clock in ("device", "host") for cell in _cells(each[clock], first[clock])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(times: dict[str, float] | None, first: dict[str, float] | None) -> tuple[str, str]:
    if times is None or first is None:
        return "-", "-"
    return f"{times['median']:.1f} ({times['low']:.1f} .. {times['high']:.1f})", f"{times['median'] / first['median']:.3f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the record where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"layers": 16, "batch": 64, "context": 4096, "heads": 32, "kv-heads": 8, "dim": 128, "runs": 100}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    sizes = Sizes(
        *(options.layers, options.batch, options.context, options.heads, options.kv_heads, options.dim),
        dtype=getattr(torch, options.dtype),
        device=torch.device(options.device),
    )
    found = report(sizes, options.runs)
    print(markdown(found))
    if options.out is not None:
        words = found["machine"]["card"].lower().replace("-", " ").split()
        stem = next((word for word in words if any(c.isdigit() for c in word)), words[0])
        (options.out / f"{stem}-compiled.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / f"{stem}-compiled.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
