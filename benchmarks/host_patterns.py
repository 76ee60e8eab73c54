"""What a call costs the host where calls change, as an engine's do: counts, strides, lengths, and many layers in turn.

Each pattern is a list of steps; a step is one call for each layer. Every candidate runs the same steps, in interleaved rounds,
and nothing waits for the device. A time is that of one call: a round's time over its calls. `benchmarks/gpu_ops.py` runs it on a
GPU; it also runs on host memory, where `benchmarks/cpu_ops.py` uses it.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

import kvdock
from kvdock import KVSpec, PagedKVCache, PagedKVCacheConfig, RankInfo

HEADS, DIM, BLOCK, BLOCKS = 8, 128, 16, 64
Step = Callable[[], None]

__all__ = [
    "Pattern",
    "changing_patterns",
    "copy_patterns",
    "first_steps",
    "gather_patterns",
    "measure",
    "row",
    "static_patterns",
    "write_patterns",
]


@attrs.frozen
class Pattern:
    """One pattern of calls.

    Args:
        name: what changes.
        calls: calls in a round of each candidate.
        candidates: what runs the round, by name; the first is the baseline.
    """

    name: str
    calls: int
    candidates: dict[str, Step]


def caches(device: str, layers: int) -> PagedKVCache:
    """Return a small pool: what is measured is the host."""
    spec = KVSpec.uniform(num_layers=layers, num_kv_heads=HEADS, head_dim=DIM, max_positions=BLOCK * BLOCKS, dtype=torch.bfloat16)
    return kvdock.create_cache(spec, PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK), RankInfo(device))


def fused(device: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as slices of one projection."""
    width = HEADS * DIM
    rows = torch.randn(tokens, 3 * width, device=device).to(torch.bfloat16)
    return rows[:, width : 2 * width].unflatten(1, (HEADS, DIM)), rows[:, 2 * width :].unflatten(1, (HEADS, DIM))


def dense(device: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as tensors of their own."""
    k, v = fused(device, tokens)
    return k.contiguous(), v.contiguous()


def heads_first(device: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as attention has them, ``[heads, tokens, dim]``, viewed by token: strides follow the count."""
    k, v = dense(device, tokens)
    return k.transpose(0, 1).contiguous().transpose(0, 1), v.transpose(0, 1).contiguous().transpose(0, 1)


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tokens_of(device: str, count: int, make: Callable[[str, int], tuple[torch.Tensor, torch.Tensor]] = fused) -> Tokens:
    """Return keys, values and slots of so many tokens."""
    return (*make(device, count), torch.randperm(BLOCK * BLOCKS, device=device)[:count])


def write_patterns(device: str, baseline: Callable[..., Any] | None) -> list[Pattern]:
    """List the patterns of `paged_caching_`.

    Args:
        device: where.
        baseline: a C++ op of caches, keys, values, slots and a counter; None where there is none.
    """
    one: dict[str, list[Tokens]] = {
        "the same call": [tokens_of(device, 8)],
        "8 and 16 tokens in turn": [tokens_of(device, 8), tokens_of(device, 16)],
        "1 to 64 tokens, one more each time": [tokens_of(device, n) for n in range(1, 65)],
        "sliced and dense in turn": [tokens_of(device, 8), tokens_of(device, 8, dense)],
        "heads before tokens, 1 to 64 tokens": [tokens_of(device, n, heads_first) for n in range(1, 65)],
        "int64 and int32 slots in turn": [tokens_of(device, 8), (*fused(device, 8), torch.arange(8, device=device, dtype=torch.int32))],
    }
    many: dict[str, list[int]] = {
        "the same count": [8],
        "8 and 16 in turn": [8, 16],
        "8, 8, 16, 16, 24, 24": [8, 8, 16, 16, 24, 24],
        "1 to 32, one more each step": list(range(1, 33)),
    }
    found = [_write(device, f"1 layer, {name}", 1, steps, baseline) for name, steps in one.items()]
    return found + [_write(device, f"32 layers, {name}", 32, [tokens_of(device, n) for n in ns], baseline) for name, ns in many.items()]


def _write(device: str, name: str, layers: int, steps: Sequence[Tokens], baseline: Callable[..., Any] | None) -> Pattern:
    """Make a pattern of writes. The baseline knows dense rows and int64 slots: it gets such of the same counts."""
    cache = caches(device, layers)
    pools = [(cache.k_cache(layer), cache.v_cache(layer)) for layer in range(layers)]
    plain = [(k if k.stride(1) == DIM else k.contiguous(), v if v.stride(1) == DIM else v.contiguous(), s.long()) for k, v, s in steps]
    op, update, counter = kvdock.ops.paged_caching_, cache.update, torch.zeros((), dtype=torch.int64, device=device)

    def run_baseline() -> None:
        assert baseline is not None
        for k, v, slots in plain:
            for k_cache, v_cache in pools:
                baseline(k_cache, v_cache, k, v, slots, counter)

    def run_op() -> None:
        for k, v, slots in steps:
            for k_cache, v_cache in pools:
                op(k_cache, v_cache, k, v, slots)

    def run_update() -> None:
        for k, v, slots in steps:
            for layer in range(layers):
                update(layer, k, v, slots)

    candidates: dict[str, Step] = {"C++ op": run_baseline} if baseline is not None else {}
    return Pattern(name, layers * len(steps), {**candidates, "kvdock.ops": run_op, "PagedKVCache": run_update})


def changing_patterns(device: str) -> list[Pattern]:
    """List patterns of 32 layers against the same number of calls that all have the first count."""
    found = []
    for name, counts in {"8 and 16 tokens in turn": [8, 16], "8, 8, 16, 16, 24, 24 tokens": [8, 8, 16, 16, 24, 24]}.items():
        same = _write(device, name, 32, [tokens_of(device, counts[0])] * len(counts), None)
        changing = _write(device, name, 32, [tokens_of(device, count) for count in counts], None)
        names = {"kvdock.ops": "paged_caching_", "PagedKVCache": "PagedKVCache.update"}
        candidates = {"8 tokens each time": same.candidates["PagedKVCache"], **{names[n]: run for n, run in changing.candidates.items()}}
        found.append(Pattern(f"32 layers, {name}", changing.calls, candidates))
    return found


def gather_patterns(device: str, baseline: Callable[..., Any] | None) -> list[Pattern]:
    """List the patterns of `gather_paged`, whose outputs are made by the call."""
    growing = [torch.randperm(BLOCK * BLOCKS, device=device)[:n] for n in range(128, 192)]
    batch = [slots.view(1, -1) for slots in growing]
    return [
        _gather(device, "1 layer, the same call", 1, growing[:1], baseline),
        _gather(device, "16 layers, one token more each step", 16, growing, baseline),
        _gather(device, "16 layers, [1, S], one token more each step", 16, batch, baseline),
    ]


def _gather(device: str, name: str, layers: int, steps: Sequence[torch.Tensor], baseline: Callable[..., Any] | None) -> Pattern:
    """Make a pattern of gathers."""
    cache = caches(device, layers)
    pools = [(cache.k_cache(layer), cache.v_cache(layer)) for layer in range(layers)]
    flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in pools]
    plain = [slots.view(-1) for slots in steps]
    op, gather = kvdock.ops.gather_paged, cache.gather

    def run_baseline() -> None:
        assert baseline is not None
        for slots in plain:
            for k_cache, v_cache in pools:
                baseline(k_cache, v_cache, slots)

    def run_select() -> None:
        for slots in plain:
            for k_rows, v_rows in flat:
                k_rows.index_select(0, slots)
                v_rows.index_select(0, slots)

    def run_op() -> None:
        for slots in steps:
            for k_cache, v_cache in pools:
                op(k_cache, v_cache, slots)

    def run_gather() -> None:
        for slots in steps:
            for layer in range(layers):
                gather(layer, slots)

    candidates: dict[str, Step] = {"C++ op": run_baseline} if baseline is not None else {}
    others = {"2 index_select": run_select, "kvdock.ops": run_op, "PagedKVCache": run_gather}
    return Pattern(name, layers * len(steps), {**candidates, **others})


def copy_patterns(device: str) -> list[Pattern]:
    """List the ways of `copy_blocks_`: a tensor on the device, which is the baseline, and lists of different lengths."""
    cache = caches(device, 1)
    k_cache, v_cache = cache.k_cache(0), cache.v_cache(0)
    found = []
    for count in (1, 4, 16):
        pairs = [(2 * n, 2 * n + 1) for n in range(count)]
        there = torch.tensor(pairs, device=device)
        candidates: dict[str, Step] = {
            "tensor": lambda there=there: kvdock.ops.copy_blocks_(k_cache, v_cache, there),
            "list": lambda pairs=pairs: kvdock.ops.copy_blocks_(k_cache, v_cache, pairs),
            "PagedKVCache, list": lambda pairs=pairs: cache.copy_blocks(pairs),
        }
        found.append(Pattern(f"{count} pair(s)", 1, candidates))
    return found


def static_patterns(device: str) -> list[Pattern]:
    """List patterns of `static_update_`: a host length, which is the baseline, lengths in a tensor, and a changing count."""
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, max_positions=256, dtype=torch.bfloat16)
    cache = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(max_batch_size=4), RankInfo(device))
    new = [[torch.randn(4, HEADS, n, DIM, device=device).to(torch.bfloat16) for _ in range(2)] for n in range(1, 33)]
    lengths = torch.arange(4, device=device)
    candidates: dict[str, Step] = {
        "host length": lambda: cache.update(0, *new[0], 7),
        "lengths in a tensor": lambda: cache.update(0, *new[0], lengths),
    }
    growing: dict[str, Step] = {"host length": lambda: [cache.update(0, *each, 7) for each in new]}  # type: ignore[dict-item, return-value]
    return [Pattern("1 layer, one position", 1, candidates), Pattern("1 layer, 1 to 32 positions", 32, growing)]


def row(pattern: Pattern, wait: Callable[[], Any], seconds: float = 1.5) -> dict[str, Any]:
    """Measure a pattern, and return it as a record has it: quartiles of times, and of ratios to the first in the same round."""
    first, *others = (times := measure(pattern, wait, seconds))
    ratios = {name: _quartiles([one / base for one, base in zip(times[name], times[first], strict=True)]) for name in others}
    return {"pattern": pattern.name, "us": {name: _quartiles(values) for name, values in times.items()}, "ratios": ratios}


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4)


def measure(pattern: Pattern, wait: Callable[[], Any], seconds: float = 1.5) -> dict[str, list[float]]:
    """Return a call's host time in microseconds for each candidate, one for each round: they take turns within it.

    Args:
        pattern: what to run.
        wait: waits for the device.
        seconds: about how long all of it may take.
    """
    for run in [*pattern.candidates.values()] * 3:
        run()
    wait()
    number = max(200 // pattern.calls, 1)
    times: dict[str, list[float]] = {name: [] for name in pattern.candidates}
    stop = time.perf_counter() + seconds
    for rounds in itertools.count():
        if rounds >= 12 and time.perf_counter() > stop:
            break
        for name, run in pattern.candidates.items():
            wait()
            start = time.perf_counter()
            for _ in range(number):
                run()
            times[name].append((time.perf_counter() - start) / number / pattern.calls * 1e6)
    return {name: values[2:] for name, values in times.items()}


def first_steps(device: str, wait: Callable[[], Any], steps: int = 10, repeats: int = 9) -> list[float]:
    """Return the median time of a call in each of the first steps of a thread, 32 layers, in microseconds: kernels are compiled."""
    tokens, times = tokens_of(device, 8), [[0.0] * repeats for _ in range(steps)]
    caches(device, 1).update(0, *tokens)

    def work(repeat: int) -> None:
        cache = caches(device, 32)
        for step in range(steps):
            wait()
            start = time.perf_counter()
            for layer in range(32):
                cache.update(layer, *tokens)
            times[step][repeat] = (time.perf_counter() - start) / 32 * 1e6

    for repeat in range(repeats):
        thread = threading.Thread(target=work, args=(repeat,))
        thread.start()
        thread.join()
    return [statistics.median(each) for each in times]
