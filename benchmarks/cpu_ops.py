"""Each op on the CPU against `copy_` of the same bytes, in one process, on one thread.

    make bench                                    # prints a table
    python benchmarks/cpu_ops.py --json FILE      # and writes the record

A ratio is the baseline's time over the op's: 0.8 means that the op moves its bytes at 0.8 of the speed of `copy_`. Baseline
and op are interleaved, so that a noisy machine disturbs both; each figure is a median over rounds, with its quartiles. For
one token the baseline is two `index_copy_` calls on views flattened beforehand, and the ratio is the other way round: how
many times as long a whole call takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import host_patterns
import torch

import kvdock
from kvdock import HeadLayout, KVSpec, PagedKVCache, PagedKVCacheConfig, RankInfo, StaticKVCacheConfig

HEADS, DIM, BLOCK, DTYPE = 8, 128, 16, torch.bfloat16
NUM_BLOCKS = 4096
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


@attrs.frozen
class Row:
    """One line of the table."""

    op: str
    case: str
    baseline: str
    microseconds: float
    ratio: float
    low: float
    high: float
    aim: str


def ratios(baseline: Callable[[], Any], candidate: Callable[[], Any], rounds: int, calls: int) -> tuple[list[float], float]:
    """Time both in turn; return the candidate's time over the baseline's for each round, and its median in microseconds."""
    for function in (baseline, candidate):
        for _ in range(3):
            function()
    found, own = [], []
    for _ in range(rounds):
        base, mine = (timed(function, calls) for function in (baseline, candidate))
        found.append(mine / base)
        own.append(mine)
    return found, statistics.median(own) * 1e6


def timed(function: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def row(
    op: str,
    case: str,
    names: tuple[str, str],
    functions: tuple[Callable[[], Any], Callable[[], Any]],
    rounds: int,
    calls: int,
    *,
    speed: bool,
) -> Row:
    """Measure one line. ``speed``: a ratio of speeds rather than of times."""
    found, own = ratios(*functions, rounds, calls)
    values = [1 / value for value in found] if speed else found
    low, middle, high = statistics.quantiles(values, n=4)
    return Row(op, case, names[0], round(own, 2), round(middle, 3), round(low, 3), round(high, 3), names[1])


def rounds_for(tokens: int, share: float) -> int:
    """Return how many rounds to run: fewer where each is long."""
    return max(15, int(share * 400_000 / tokens)) if tokens > 1 else int(300 * share)


def keys_values(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys and values, ``[tokens, HEADS, DIM]``."""
    return tuple(torch.randn(tokens, HEADS, DIM).to(DTYPE) for _ in range(2))  # type: ignore[return-value]


def block_slots(tokens: int) -> torch.Tensor:
    """Return the slots of whole blocks in random order, as a block table gives them."""
    blocks = torch.randperm(NUM_BLOCKS)[: tokens // BLOCK]
    return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()


def make_paged(head_layout: HeadLayout = HeadLayout.NHD) -> PagedKVCache:
    """Return a pool whose memory has been touched."""
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, max_positions=32768, dtype=DTYPE)
    cache = kvdock.create_cache(spec, PagedKVCacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK, head_layout=head_layout), RankInfo("cpu"))
    cache.k_cache(0).fill_(1)
    cache.v_cache(0).fill_(1)
    return cache


def copies(k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
    """Return the baseline: `copy_` of the same bytes into memory of its own."""
    k_to, v_to = torch.empty(k.shape, dtype=DTYPE), torch.empty(v.shape, dtype=DTYPE)

    def run() -> None:
        k_to.copy_(k)
        v_to.copy_(v)

    return run


def write_rows(cache: PagedKVCache, share: float) -> list[Row]:
    """Measure `paged_caching_` on blocks in random order, contiguous and sliced from a fused projection."""
    rows = []
    for tokens in TOKENS:
        k, v = keys_values(tokens)
        slots = block_slots(tokens)
        op = lambda k=k, v=v, slots=slots: kvdock.ops.paged_caching_(cache.k_cache(0), cache.v_cache(0), k, v, slots)  # noqa: E731
        rows.append(
            row(
                "paged_caching_",
                f"{tokens} tokens, random blocks",
                ("copy_", ">= 0.6"),
                (copies(k, v), op),
                rounds_for(tokens, share),
                1,
                speed=True,
            )
        )
    return rows


def other_write_rows(cache: PagedKVCache, share: float) -> list[Row]:
    """Measure `paged_caching_` on what is not dense: a fused projection, slots in random order, another head layout."""
    tokens = 4096
    fused = torch.randn(tokens, 3 * HEADS, DIM).to(DTYPE)
    k, v = fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]
    dense, slots, anywhere = keys_values(tokens), block_slots(tokens), torch.randperm(NUM_BLOCKS * BLOCK)[:tokens]
    hnd = make_paged(HeadLayout.HND)
    cases: list[tuple[str, PagedKVCache, tuple[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        ("sliced from a fused qkv", cache, (k, v), slots),
        ("slots in random order", cache, dense, anywhere),
        ("HND pool", hnd, dense, slots),
    ]
    rows = []
    for case, pool, (k, v), where in cases:
        op = lambda pool=pool, k=k, v=v, where=where: kvdock.ops.paged_caching_(pool.k_cache(0), pool.v_cache(0), k, v, where)  # noqa: E731
        rows.append(
            row("paged_caching_", f"{tokens} tokens, {case}", ("copy_", ""), (copies(k, v), op), rounds_for(tokens, share), 1, speed=True)
        )
    return rows


def one_token_rows(cache: PagedKVCache, share: float) -> list[Row]:
    """Measure a whole call for one token, checks included, against two bare `index_copy_`."""
    k, v = keys_values(1)
    slots = torch.tensor([371])
    k_cache, v_cache = cache.k_cache(0), cache.v_cache(0)
    k_flat, v_flat, k_row, v_row = k_cache.view(-1, HEADS * DIM), v_cache.view(-1, HEADS * DIM), k.view(1, -1), v.view(1, -1)

    def two_index_copies() -> None:
        k_flat.index_copy_(0, slots, k_row)
        v_flat.index_copy_(0, slots, v_row)

    calls: list[tuple[str, str, Callable[[], Any]]] = [
        ("paged_caching_", "<= 1.7", lambda: kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)),
        ("PagedKVCache.update", "<= 1.4", lambda: cache.update(0, k, v, slots)),
    ]
    return [
        row(name, "1 token (times as long)", ("2 index_copy_", aim), (two_index_copies, call), rounds_for(1, share), 200, speed=False)
        for name, aim, call in calls
    ]


def pattern_rows(share: float) -> list[Row]:
    """Measure writes of 32 layers where counts change from step to step, against as many calls with one count."""
    rows = []
    for pattern in host_patterns.changing_patterns("cpu"):
        baseline, *candidates = pattern.candidates.items()
        case = f"{pattern.name} (times as long)"
        calls = max(round(20 * share), 3), 1
        rows += [row(name, case, (baseline[0], "<= 1.6"), (baseline[1], call), *calls, speed=False) for name, call in candidates]
    return rows


def read_rows(cache: PagedKVCache, share: float) -> list[Row]:
    """Measure `gather_paged` and `copy_blocks_`."""
    rows = []
    for tokens in (512, 4096):
        k, v = keys_values(tokens)
        slots = block_slots(tokens)
        out = (torch.empty_like(k), torch.empty_like(v))
        op = lambda slots=slots, out=out: cache.gather(0, slots, out)  # noqa: E731
        rows.append(
            row(
                "gather_paged",
                f"{tokens} tokens, random blocks",
                ("copy_", ""),
                (copies(k, v), op),
                rounds_for(tokens, share),
                1,
                speed=True,
            )
        )
        blocks = torch.randperm(NUM_BLOCKS)[: 2 * tokens // BLOCK].view(-1, 2)
        copy = lambda blocks=blocks: cache.copy_blocks(blocks)  # noqa: E731
        rows.append(
            row("copy_blocks_", f"{tokens // BLOCK} blocks", ("copy_", ""), (copies(k, v), copy), rounds_for(tokens, share), 1, speed=True)
        )
    return rows


def static_rows(share: float) -> list[Row]:
    """Measure `static_update_`: all rows at one length, and each at its own."""
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, max_positions=2048, dtype=DTYPE)
    batch, new = 8, 128
    cache = kvdock.create_cache(spec, StaticKVCacheConfig(max_batch_size=batch), RankInfo("cpu"))
    k, v = (torch.randn(batch, HEADS, new, DIM).to(DTYPE) for _ in range(2))
    lengths = torch.randint(0, 1024, (batch,))
    cases: list[tuple[str, Any]] = [("one length", 512), ("a length for each row", lengths)]
    return [
        row(
            "static_update_",
            f"{batch} rows x {new}, {case}",
            ("copy_", ""),
            (copies(k, v), lambda n=n: cache.update(0, k, v, n)),
            rounds_for(batch * new, share),
            1,
            speed=True,
        )
        for case, n in cases
    ]


def attention_rows(share: float) -> list[Row]:
    """Measure a step of decoding in float32, blocks in a run and in random order, against torch's attention over contiguous keys."""
    batch, length, heads = 16, 2048, 4 * HEADS
    q, lens, rows = torch.randn(batch, heads, DIM), torch.full((batch,), length), []
    k, v = (torch.randn(batch, HEADS, length, DIM) for _ in range(2))
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, max_positions=length, dtype=torch.float32)
    for layout in HeadLayout:
        config = PagedKVCacheConfig(num_blocks=batch * length // BLOCK, block_size=BLOCK, head_layout=layout)
        cache = kvdock.create_cache(spec, config, RankInfo("cpu"))
        for order, blocks in (("a run", torch.arange(config.num_blocks or 0)), ("random order", torch.randperm(config.num_blocks or 0))):
            for pool, states in ((cache.k_cache(0), k), (cache.v_cache(0), v)):
                pool[blocks] = states.transpose(1, 2).reshape(-1, BLOCK, HEADS, DIM)
            table = blocks.view(batch, -1).int()
            sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)  # noqa: E731
            op = lambda cache=cache, table=table: cache.attend(0, q, table, lens)  # noqa: E731
            case, rounds = f"{batch} x {length}, {layout.name}, blocks in {order}", max(15, int(30 * share))
            rows.append(row("paged_attention", case, ("SDPA", ">= 0.9"), (sdpa, op), rounds, 1, speed=True))
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"{'op':20} {'case':38} {'baseline':14} {'us':>9} {'ratio':>6}  quartiles      aim")
    for r in rows:
        print(f"{r.op:20} {r.case:38} {r.baseline:14} {r.microseconds:9.2f} {r.ratio:6.2f}  {r.low:.2f} .. {r.high:.2f}   {r.aim}")


def machine() -> dict[str, str]:
    """Describe what the figures were taken on."""
    info = Path("/proc/cpuinfo")
    model = (
        next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), "")
        if info.exists()
        else ""
    )
    return {
        "cpu": model or platform.processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kvdock": kvdock.__version__,
    }


def main() -> None:
    """Run all, print the table, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--share", type=float, default=1.0, help="share of the usual number of rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cache = make_paged()
    share = options.share
    rows = [
        *write_rows(cache, share),
        *one_token_rows(cache, share),
        *pattern_rows(share),
        *other_write_rows(cache, share),
        *read_rows(cache, share),
        *static_rows(share),
        *attention_rows(share),
    ]
    print(f"bf16, {HEADS} heads x {DIM}, block {BLOCK}, {NUM_BLOCKS} blocks; " + ", ".join(f"{k} {v}" for k, v in machine().items()))
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": [attrs.asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
