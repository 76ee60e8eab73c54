"""Swapping blocks between a device and host memory, against one copy of the same bytes between page-locked memory and the device.

    python benchmarks/swap.py --out docs/benchmarks       # on a GPU; writes <card>-swap.json and .md
    python benchmarks/swap.py --small                     # anywhere, in a second: shows that it runs

Blocks are of 16 tokens, bfloat16, 8 heads of 128, in 32 layers, and as many as the size comes to: 16 of 32 MiB, 256 of 512 MiB.
They are anywhere in pools of twice as many, in no order. A swap is one call of `PagedKVCache.swap_blocks`, from a tensor of pairs
in host memory. Beside it, in the same rounds: the copy; a kernel that moves the same bytes in one run and does nothing else, which is
what processors of the device can do over the link where its copy engine can do more; copies of each block of each layer from Python; and,
to choose tiles by, the swap by other numbers of programs. Of each there are medians and quartiles, and the ratio of the copy's median to
its own. Times are the device's, which is kept busy until the call has returned; host time is that of the call alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import kvdock
from kvdock.cache.swapping import host_cache

LAYERS, HEADS, DIM, BLOCK = 32, 8, 128, 16
MIB = 2**20
BUSY = 2_000_000
"""Cycles that a device is kept busy for while a call is made: about a millisecond."""

Call = Callable[[], Any]


@attrs.frozen
class Case:
    """What is swapped.

    Args:
        size: bytes.
        layout: of the pool on the device.
        host_layout: of the pool in host memory.
        heads: order of heads of the pool on the device.
        host_heads: of the pool in host memory.
    """

    size: int
    layout: kvdock.KVCacheLayout
    host_layout: kvdock.KVCacheLayout
    heads: kvdock.HeadLayout = kvdock.HeadLayout.NHD
    host_heads: kvdock.HeadLayout = kvdock.HeadLayout.NHD

    def __str__(self) -> str:
        one, other = (
            f"{layout.value}, {heads.value}" for layout, heads in ((self.layout, self.heads), (self.host_layout, self.host_heads))
        )
        return f"{one} to {other}"


def cases(sizes: Sequence[int]) -> Iterator[Case]:
    """Yield every size in every layout; heads in another order at last."""
    for size in sizes:
        yield from (Case(size, *layouts) for layouts in itertools.product(kvdock.KVCacheLayout, repeat=2))
        yield Case(size, kvdock.KVCacheLayout.PAGE_FIRST, kvdock.KVCacheLayout.PAGE_FIRST, kvdock.HeadLayout.HND, kvdock.HeadLayout.HND)
        yield Case(size, kvdock.KVCacheLayout.LAYER_FIRST, kvdock.KVCacheLayout.PAGE_FIRST, kvdock.HeadLayout.HND, kvdock.HeadLayout.NHD)


class Machine:
    """A device, and how calls on it are timed.

    Args:
        device: its name.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type != "cpu"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def us(self, call: Call) -> float:
        """Return how long one call takes on the device, in microseconds."""
        if not self.is_gpu:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e6
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    def host_us(self, call: Call) -> float:
        """Return how long a call keeps the host, in microseconds, while the device has other work."""
        self.synchronize()
        if self.is_gpu:
            torch.cuda._sleep(BUSY)
        begin = time.perf_counter()
        call()
        took = (time.perf_counter() - begin) * 1e6
        self.synchronize()
        return took

    def pinned(self, count: int) -> torch.Tensor:
        """Return bytes in page-locked memory, or what there is of host memory."""
        memory = torch.zeros(count, dtype=torch.uint8)
        return memory.pin_memory() if self.is_gpu else memory

    def named(self) -> str:
        """Return the card's short name, or the processor's."""
        if not self.is_gpu:
            return platform.machine()
        words = torch.cuda.get_device_name(self.device).lower().replace("-", " ").split()
        return next((word for word in words if any(c.isdigit() for c in word)), words[0])


def quartiles(times: Sequence[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3


def pools(machine: Machine, case: Case, layers: int) -> tuple[kvdock.PagedKVCache, kvdock.PagedKVCache, int]:
    """Return a cache on the device, one in host memory, and how many blocks are swapped."""
    count = max(case.size // (2 * layers * BLOCK * HEADS * DIM * 2), 1)
    spec = kvdock.KVSpec.uniform(num_layers=layers, num_kv_heads=HEADS, head_dim=DIM, max_positions=2**20, dtype=torch.bfloat16)
    config = kvdock.PagedKVCacheConfig(num_blocks=2 * count, block_size=BLOCK, layout=case.layout, head_layout=case.heads)
    cache = kvdock.create_cache(spec, config, kvdock.RankInfo(machine.device))
    host_config = attrs.evolve(cache.config, head_layout=case.host_heads)
    like = cache if case.host_heads is case.heads else kvdock.create_cache(spec, attrs.evolve(host_config, num_blocks=1), cache.rank)
    host = host_cache(like, num_blocks=2 * count, layout=case.host_layout)
    if host.host_pages is not None and not host.host_pages.wait() and machine.is_gpu:
        raise SystemExit("the host pool could not be page-locked: its figures would be those of staging")
    return cache, host, count


def plain_kernel(target: torch.Tensor, source: torch.Tensor) -> Call:
    """Return a copy of one run of bytes by a kernel, one of whose ends is page-locked memory."""
    import triton
    import triton.language as tl

    @triton.jit
    def move(target, source, pieces, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803 - Triton's way
        for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
            at = piece.to(tl.int64) * PIECE + tl.arange(0, PIECE)
            tl.store(target + at, tl.load(source + at))

    words = [memory.view(torch.int32) for memory in (target, source)]
    piece, pieces = 8192, len(words[0]) // 8192
    return lambda: move[(16,)](*words, pieces, PIECE=piece, num_warps=8)


def per_block(src: kvdock.PagedKVCache, dst: kvdock.PagedKVCache, pairs: Sequence[tuple[int, int]]) -> Call:
    """Return copies of each block of each layer."""
    views = [(getattr(src, name)(i), getattr(dst, name)(i)) for i in range(src.num_layers) for name in ("k_cache", "v_cache")]

    def call() -> None:
        for source, to in views:
            for a, b in pairs:
                to[b].copy_(source[a], non_blocking=True)

    return call


def check(src: kvdock.PagedKVCache, dst: kvdock.PagedKVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Stop where a block did not arrive."""
    for layer, (a, b) in itertools.product((0, src.num_layers - 1), (pairs[0], pairs[-1])):
        if not torch.equal(src.v_cache(layer)[a].cpu(), dst.v_cache(layer)[b].cpu()):
            raise SystemExit(f"layer {layer}: block {a} is not at {b}")


def measure(machine: Machine, case: Case, rounds: int, layers: int, programs: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each way."""
    cache, host, count = pools(machine, case, layers)
    for layer in range(layers):
        cache.k_cache(layer).normal_()
        cache.v_cache(layer).normal_()
    nbytes = count * cache.nbytes // cache.num_blocks
    flat, locked = torch.zeros(nbytes, dtype=torch.uint8, device=machine.device), machine.pinned(nbytes)
    ids = torch.stack([torch.randperm(2 * count)[:count], torch.randperm(2 * count)[:count]], 1)
    for way, src, dst, copy in (
        ("to host", cache, host, lambda: locked.copy_(flat, non_blocking=True)),
        ("to device", host, cache, lambda: flat.copy_(locked, non_blocking=True)),
    ):
        pairs = ids if way == "to host" else ids.flip(1).contiguous()
        calls: dict[str, Call] = {
            "copy": copy,
            "swap": lambda src=src, dst=dst, pairs=pairs: src.swap_blocks(dst, pairs),
            "per block": per_block(src, dst, pairs.tolist()),
            **({"kernel": plain_kernel(*((locked, flat) if way == "to host" else (flat, locked)))} if machine.is_gpu else {}),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        machine.synchronize()
        check(src, dst, pairs.tolist())
        for number in range(rounds):
            for name, call in calls.items():
                if name != "per block" or number < max(rounds // 4, 2):
                    times[name].append(machine.us(call))
        host_us = quartiles([machine.host_us(calls["swap"]) for _ in range(rounds)])
        found = {name: quartiles(values) for name, values in times.items()}
        more = {str(n): statistics.median(by_programs(machine, src, dst, pairs, n, max(rounds // 3, 2))) for n in programs}
        yield {
            "way": way,
            "layouts": str(case),
            "mib": nbytes / MIB,
            "blocks": count,
            "us": found,
            "host_us": host_us,
            "ratio": found["copy"][1] / found["swap"][1],
            "kernel_ratio": found["copy"][1] / found["kernel"][1] if "kernel" in found else None,
            "per_block_ratio": found["copy"][1] / found["per block"][1],
            "gb_s": nbytes / found["swap"][1] / 1e3,
            "by_programs": {n: found["copy"][1] / us for n, us in more.items()},
        }


def by_programs(
    machine: Machine, src: kvdock.PagedKVCache, dst: kvdock.PagedKVCache, pairs: torch.Tensor, programs: int, rounds: int
) -> list[float]:
    """Return times of the swap by another number of programs."""
    from kvdock_triton.swap_blocks import SwapBlocksDescriptor

    usual = SwapBlocksDescriptor.__call__

    def other(self: Any, *args: Any) -> None:
        before, self._programs = self._programs, programs
        usual(self, *args)
        self._programs = before

    SwapBlocksDescriptor.__call__ = other  # type: ignore[method-assign] # for these calls alone
    try:
        src.swap_blocks(dst, pairs)
        return [machine.us(lambda: src.swap_blocks(dst, pairs)) for _ in range(rounds)]
    finally:
        SwapBlocksDescriptor.__call__ = usual  # type: ignore[method-assign] # as it was


def described(machine: Machine) -> dict[str, str]:
    """Describe what the figures were taken on."""
    card = torch.cuda.get_device_name(machine.device) if machine.is_gpu else platform.processor() or platform.machine()
    return {"card": card, "torch": torch.__version__, "python": platform.python_version(), "kvdock": kvdock.__version__}


def page(report: dict[str, Any]) -> str:
    """Return the record as a page."""
    head = (
        "| way | pool to pool | MiB | blocks | swap / copy | kernel / copy | GB/s | per block / copy | swap, us: median (quartiles) "
        "| copy, us | host, us |"
    )
    lines = [head, "|" + "---|" * 11]
    for row in report["rows"]:
        low, middle, high = row["us"]["swap"]
        cells = [row["way"], row["layouts"], f"{row['mib']:.0f}", row["blocks"], f"{row['ratio']:.3f}"]
        cells += [f"{row['kernel_ratio']:.3f}" if row["kernel_ratio"] else "", f"{row['gb_s']:.1f}"]
        cells += [f"{row['per_block_ratio']:.3f}", f"{middle:.0f} ({low:.0f} .. {high:.0f})", f"{row['us']['copy'][1]:.0f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['host_us'][1]:.0f} (.. {row['host_us'][2]:.0f})"])) + " |")
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    text = (
        f"# Swapping blocks, {report['machine']['card']}\n\n{machine}. Made by `python benchmarks/swap.py`.\n\n"
        f"Blocks of {BLOCK} tokens, bfloat16, {HEADS} x {DIM}, {report['layers']} layers; `PagedKVCache.swap_blocks` with pairs in host "
        "memory, beside one `copy_` of the same bytes between page-locked memory and the device, a kernel that moves them in one run, and "
        "copies of each block of each layer from Python, in the same rounds. Ratios are speeds relative to that copy, by medians. Times "
        "are the device's, without the call's host time.\n\n" + "\n".join(lines) + "\n"
    )
    numbers = sorted({int(n) for row in report["rows"] for n in row["by_programs"]})
    if not numbers:
        return text
    rows = [
        [row["way"], row["layouts"], f"{row['mib']:.0f}", *(f"{row['by_programs'][str(n)]:.3f}" for n in numbers)] for row in report["rows"]
    ]
    table = ["| way | pool to pool | MiB | " + " | ".join(map(str, numbers)) + " |", "|" + "---|" * (3 + len(numbers))]
    return text + "\n## By number of programs\n\n" + "\n".join([*table, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the page, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the record")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--programs", type=int, nargs="*", default=[], metavar="N", help="try these numbers of programs too, on a GPU")
    parser.add_argument("--small", action="store_true", help="2 layers and 1 MiB, 3 rounds: to see that it runs")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    machine = Machine(options.device)
    layers, sizes, rounds = (2, [MIB], 3) if options.small else (LAYERS, [32 * MIB, 512 * MIB], options.rounds)
    programs = options.programs if machine.is_gpu else []
    rows = [row for case in cases(sizes) for row in measure(machine, case, rounds, layers, programs)]
    report = {"machine": described(machine), "layers": layers, "rounds": rounds, "rows": rows}
    print(page(report))
    if options.out:
        path = options.out / f"{machine.named()}-swap"
        path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(report))
    return report


if __name__ == "__main__":
    main()
