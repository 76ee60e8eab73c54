"""kvdock's ops on one GPU, against what else moves the same bytes, in one process.

    make gpu-bench                       # tables; needs nvcc for the C++ baseline
    python benchmarks/gpu_ops.py --out DIR   # and writes DIR/<card>.json and .md, and DIR/<card>-host.json and .md

Device time is taken with events around single calls, the L2 cache flushed in between (`triton.testing.do_bench`, median);
for small sizes from replays of a captured graph of many calls, which hides launch gaps. Host time is that of the call alone,
in patterns of changing calls: see `host_patterns`.
A ratio on the device is a speed relative to one contiguous `copy_` of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import gpu_report
import host_patterns
import torch
import triton
from torch.utils.cpp_extension import load

import kvdock
from kvdock import HeadLayout, KVSpec, LayerSpec, PagedKVCache, PagedKVCacheConfig, RankInfo, StaticKVCacheConfig

BLOCK = 16
Call = Callable[[], Any]


@attrs.frozen
class Geometry:
    """Heads, dims and dtype of one table."""

    name: str
    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    dtype: torch.dtype
    head_layout: HeadLayout = HeadLayout.NHD

    @property
    def is_plain(self) -> bool:
        """Whether the C++ baseline, which knows dense rows only, can serve it."""
        return self.head_layout is HeadLayout.NHD

    def pool(self, num_blocks: int) -> PagedKVCache:
        """Return a cache of one layer."""
        layer = LayerSpec(self.k_heads, self.v_heads, self.k_dim, self.v_dim)
        config = PagedKVCacheConfig(num_blocks=num_blocks, block_size=BLOCK, head_layout=self.head_layout)
        return kvdock.create_cache(KVSpec([layer], 1 << 20, self.dtype), config, RankInfo("cuda:0"))

    def contiguous(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as tensors of their own."""
        return self._random(tokens, self.k_heads, self.k_dim), self._random(tokens, self.v_heads, self.v_dim)

    def fused(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as slices of one projection ``[tokens, queries + keys + values]``."""
        k_width, v_width = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        rows = self._random(tokens, 1, 2 * k_width + v_width).flatten(1)
        k, v = rows[:, k_width : 2 * k_width], rows[:, 2 * k_width :]
        return k.unflatten(1, (self.k_heads, self.k_dim)), v.unflatten(1, (self.v_heads, self.v_dim))

    def _random(self, *shape: int) -> torch.Tensor:
        """Return random values on the GPU."""
        return torch.randn(shape, device="cuda").to(self.dtype)


BF16 = torch.bfloat16
GEOMETRIES = (
    Geometry("bf16, 8 x 128", 8, 128, 8, 128, BF16),
    Geometry("bf16, 8 x 128, HND", 8, 128, 8, 128, BF16, HeadLayout.HND),
    Geometry("fp32, 8 x 128", 8, 128, 8, 128, torch.float32),
    Geometry("bf16, 3 x 64", 3, 64, 3, 64, BF16),
    Geometry("bf16, 64 x 128", 64, 128, 64, 128, BF16),
    Geometry("bf16, 8 x 192 / 8 x 128", 8, 192, 8, 128, BF16),
)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def device_us(call: Call) -> float:
    """Return the median device time of a call, in microseconds, with a cold L2 cache."""
    return float(triton.testing.do_bench(call, warmup=5, rep=40, return_mode="median")) * 1e3


def graph_us(call: Call, calls: int = 20, rounds: int = 40) -> float:
    """Return the median device time of a call among many in a replayed graph, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return statistics.median(times)


def copy_us(k: torch.Tensor, v: torch.Tensor) -> float:
    """Return the time of one contiguous `copy_` of the bytes of keys and values: the floor."""
    size = k.numel() * k.element_size() + v.numel() * v.element_size()
    source, to = (torch.empty(size // 8, dtype=torch.int64, device="cuda").random_() for _ in range(2))
    return device_us(lambda: to.copy_(source))


def write_table(geometry: Geometry, cpp: Callable[..., None], tokens: int) -> list[dict[str, Any]]:
    """Measure `paged_caching_` of one geometry: contiguous, sliced, and at random slots."""
    pool = geometry.pool(max(2 * tokens // BLOCK, 64))
    k_cache, v_cache = pool.k_cache(0), pool.v_cache(0)
    in_order = torch.arange(tokens, device="cuda")
    anywhere = torch.randperm(pool.num_blocks * BLOCK, device="cuda")[:tokens]
    skipped = torch.zeros((), dtype=torch.int64, device="cuda")
    contiguous, fused = geometry.contiguous(tokens), geometry.fused(tokens)
    floor = copy_us(*contiguous)
    cases = {
        "contiguous, consecutive slots": (contiguous, in_order),
        "sliced from a fused qkv, consecutive slots": (fused, in_order),
        "sliced, random slots": (fused, anywhere),
        "contiguous, random slots": (contiguous, anywhere),
    }
    rows = []
    for case, ((k, v), slots) in cases.items():
        times = {"kvdock": device_us(lambda k=k, v=v, slots=slots: kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots))}
        if geometry.is_plain:
            flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
            times["C++, one block per token"] = device_us(lambda k=k, v=v, s=slots: cpp(k_cache, v_cache, k, v, s, skipped))
            times["2 index_copy_"] = device_us(lambda k=k, v=v, s=slots, f=flat: (f[0].index_copy_(0, s, k), f[1].index_copy_(0, s, v)))
            if slots is in_order:
                times["2 strided copy_"] = device_us(lambda k=k, v=v, f=flat: (f[0][:tokens].copy_(k), f[1][:tokens].copy_(v)))
        rows.append(
            {"geometry": geometry.name, "tokens": tokens, "case": case, "copy_us": floor, **{n: floor / t for n, t in times.items()}}
        )
    return rows


def size_table(cpp: Callable[..., None]) -> list[dict[str, Any]]:
    """Measure `paged_caching_` and the C++ baseline at every size, from graph replays."""
    geometry, rows = GEOMETRIES[0], []
    pool = geometry.pool(2 * SIZES[-1] // BLOCK)
    k_cache, v_cache, skipped = pool.k_cache(0), pool.v_cache(0), torch.zeros((), dtype=torch.int64, device="cuda")
    for tokens in SIZES:
        (k, v), slots = geometry.fused(tokens), torch.randperm(pool.num_blocks * BLOCK, device="cuda")[:tokens]
        mine = lambda k=k, v=v, s=slots: kvdock.ops.paged_caching_(k_cache, v_cache, k, v, s)  # noqa: E731
        theirs = lambda k=k, v=v, s=slots: cpp(k_cache, v_cache, k, v, s, skipped)  # noqa: E731
        torch.cuda.synchronize()
        pairs = [(graph_us(mine), graph_us(theirs)) for _ in range(3)]
        us, cpp_us = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append({"tokens": tokens, "kvdock_us": us, "cpp_us": cpp_us, "ratio": cpp_us / us})
    return rows


def other_table() -> list[dict[str, Any]]:
    """Measure the other ops against `copy_` of the same bytes."""
    rows = []
    for tokens in (16384, 65536):
        geometry = GEOMETRIES[0]
        pool, (k, v) = geometry.pool(2 * tokens // BLOCK), geometry.contiguous(tokens)
        floor, out = copy_us(k, v), (torch.empty_like(k), torch.empty_like(v))
        slots = torch.randperm(pool.num_blocks * BLOCK, device="cuda")[:tokens]
        pairs = torch.randperm(pool.num_blocks, device="cuda").view(-1, 2)
        static = kvdock.create_cache(
            KVSpec.uniform(num_layers=1, num_kv_heads=8, head_dim=128, max_positions=2 * tokens // 16, dtype=BF16),
            StaticKVCacheConfig(max_batch_size=16),
            RankInfo("cuda:0"),
        )
        new_k, new_v = (torch.randn(16, 8, tokens // 16, 128, device="cuda").to(BF16) for _ in range(2))
        lengths = torch.randint(0, tokens // 16, (16,), device="cuda")
        calls: dict[str, Call] = {
            "gather_paged, random slots": lambda p=pool, s=slots, o=out: p.gather(0, s, o),
            f"copy_blocks_, {len(pairs)} random blocks": lambda p=pool, pairs=pairs: p.copy_blocks(pairs),
            "static_update_, 16 rows, one length": lambda c=static, k=new_k, v=new_v: c.update(0, k, v, 7),
            "static_update_, 16 rows, lengths in a tensor": lambda c=static, k=new_k, v=new_v, n=lengths: c.update(0, k, v, n),
        }
        rows += [{"tokens": tokens, "case": name, "copy_us": floor, "ratio": floor / device_us(call)} for name, call in calls.items()]
    return rows


def host_tables() -> dict[str, list[dict[str, Any]]]:
    """Measure the host time of whole calls in every pattern, none of them waiting for the device."""
    ops, device = torch.ops.kvdock_baseline, "cuda:0"
    patterns = {
        "paged_caching_": host_patterns.write_patterns(device, ops.paged_caching),
        "gather_paged": host_patterns.gather_patterns(device, ops.gather_paged),
        "static_update_": host_patterns.static_patterns(device),
        "copy_blocks_": host_patterns.copy_patterns(device),
    }
    return {op: [host_patterns.row(pattern, torch.cuda.synchronize) for pattern in each] for op, each in patterns.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all tables and print them; write records if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--only", choices=["host", "write", "sizes", "other"], action="append", help="tables to run; default all")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    here = Path(__file__).parent
    load(name="kvdock_baseline", sources=[str(here / "paged_caching_op.cu")], is_python_module=False, extra_cuda_cflags=["-O3"])
    cpp = torch.ops.kvdock_baseline.paged_caching
    only = options.only or ["host", "write", "sizes", "other"]
    machine = {"machine": gpu_report.machine()}
    host: dict[str, Any] = {}
    report: dict[str, Any] = {}
    if "host" in only:
        host = {**machine, "host": host_tables(), "first": host_patterns.first_steps("cuda:0", torch.cuda.synchronize)}
    if "write" in only:
        report["write"] = [row for geometry in GEOMETRIES for tokens in (16384, 65536) for row in write_table(geometry, cpp, tokens)]
    if "sizes" in only:
        report["sizes"] = size_table(cpp)
    if "other" in only:
        report["other"] = other_table()
    for found, suffix in ((host, "-host"), ({**machine, **report} if report else {}, "")):
        if not found:
            continue
        text = gpu_report.markdown(found)
        print(text)
        if options.out:
            path = options.out / f"{gpu_report.card_name()}{suffix}"
            path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
