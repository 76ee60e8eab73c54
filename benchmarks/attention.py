"""`paged_attention` on one GPU, against reading the same bytes and against kernels that others make, in one process.

    python benchmarks/attention.py --out DIR   # tables; writes DIR/<card>-attention.json and .md

Times are medians of replays of a graph of many calls. Each call of a graph reads blocks of its own, at random places of one pool,
until a round of them is several times the L2 cache: so what a call reads is never there. FlashInfer is measured where it is installed.
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
import torch
import triton
import triton.language as tl

import kvdock

BLOCK = 16
HEADS, KV_HEADS = 32, 8
COLD = 400_000_000
"""Bytes that a graph reads at least, so that none is still in the L2 cache when it comes round."""

BF16 = torch.bfloat16
Call = Callable[[], Any]


@attrs.frozen
class Shape:
    """Sequences of one step.

    Args:
        name: for people.
        lengths: tokens of each sequence.
        queries: new ones among them, of each sequence.
        dim: of a head.
    """

    name: str
    lengths: tuple[int, ...]
    queries: int = 1
    dim: int = 128

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(self.lengths) * KV_HEADS * self.dim * 2 * 2

    @property
    def flops(self) -> int:
        """Operations on what causal queries see."""
        seen = sum(self.queries * length - self.queries * (self.queries - 1) // 2 for length in self.lengths)
        return 4 * HEADS * self.dim * seen


def ragged(count: int) -> tuple[int, ...]:
    """Return lengths from 256 to 8192, always the same."""
    return tuple(torch.randint(256, 8193, (count,), generator=torch.Generator().manual_seed(1)).tolist())


DECODE = (
    Shape("64 x 4k", (4096,) * 64),
    Shape("16 x 4k", (4096,) * 16),
    Shape("16 x 32k", (32768,) * 16),
    Shape("64 x 32k", (32768,) * 64),
    Shape("64 ragged 256..8k", ragged(64)),
    Shape("1 x 4k", (4096,)),
    Shape("64 x 4k, D 64", (4096,) * 64, dim=64),
    Shape("16 x 4k, D 64", (4096,) * 16, dim=64),
)
PREFILL = tuple(Shape(f"{queries} queries on {keys // 1024}k", (keys,), queries) for queries in (512, 2048) for keys in (4096, 16384))


class Step:
    """A pool, and as many sets of tables as make the L2 cache cold."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.sets = shape, max(2, -(-COLD // shape.bytes))
        self.counts = [-(-length // BLOCK) for length in shape.lengths]
        blocks = sum(self.counts) * self.sets
        self.pools = [torch.randn(blocks, BLOCK, KV_HEADS, shape.dim, device="cuda").to(BF16) for _ in "kv"]
        self.places = torch.randperm(blocks, device="cuda").int().view(self.sets, -1)
        self.lens = torch.tensor(shape.lengths, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(shape.lengths) * shape.queries, HEADS, shape.dim, device="cuda").to(BF16)
        self.cu = torch.arange(len(shape.lengths) + 1, dtype=torch.int32, device="cuda") * shape.queries

    def table(self, number: int) -> torch.Tensor:
        """Return the block table of one set."""
        rows = self.places[number].split(self.counts)
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)

    def ours(self) -> list[Call]:
        """Return calls of the op."""
        many = {} if self.shape.queries == 1 else {"cu_query_lens": self.cu, "max_query_len": self.shape.queries}
        tables, out = [self.table(number) for number in range(self.sets)], torch.empty_like(self.q)
        return [lambda table=table: kvdock.ops.paged_attention(self.q, *self.pools, table, self.lens, out=out, **many) for table in tables]

    def flashinfer(self) -> list[Call]:
        """Return calls of FlashInfer's kernels, planned."""
        import flashinfer

        decode, calls = self.shape.queries == 1, []
        ends = torch.tensor([0, *self.counts]).cumsum(0).int()
        last = torch.tensor([(length - 1) % BLOCK + 1 for length in self.shape.lengths], dtype=torch.int32)
        for number in range(self.sets):
            room = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
            heads = (HEADS, KV_HEADS, self.shape.dim, BLOCK)
            if decode:
                way = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
                way.plan(ends.cuda(), self.places[number], last.cuda(), *heads, q_data_type=BF16, kv_data_type=BF16)
            else:
                way = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
                way.plan(self.cu, ends.cuda(), self.places[number], last.cuda(), *heads, causal=True, q_data_type=BF16)
            calls.append(lambda way=way: way.run(self.q, tuple(self.pools)))
        return calls

    def contiguous(self) -> list[Call]:
        """Return calls of torch's flash attention over contiguous keys, of sequences of one length."""
        length, batch = self.shape.lengths[0], len(self.shape.lengths)
        flat = [pool.view(-1, batch, length, KV_HEADS, self.shape.dim) for pool in self.pools]
        q = self.q.view(batch, self.shape.queries, HEADS, self.shape.dim)
        flash = torch.ops.aten._flash_attention_forward
        return [
            lambda k=k, v=v: flash(q, k, v, None, None, self.shape.queries, length, 0.0, True, False)
            for k, v in zip(*(each.unbind(0) for each in flat), strict=True)
        ]

    def cudnn(self) -> list[Call]:
        """Return calls of cuDNN over contiguous keys."""
        length, batch = self.shape.lengths[0], len(self.shape.lengths)
        flat = [pool.view(-1, batch, length, KV_HEADS, self.shape.dim).transpose(2, 3) for pool in self.pools]
        q = self.q.view(batch, 1, HEADS, self.shape.dim).transpose(1, 2)

        def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return [lambda k=k, v=v: call(k, v) for k, v in zip(*(each.unbind(0) for each in flat), strict=True)]

    def reads(self, programs: int, size: int) -> list[Call]:
        """Return calls that read as many bytes, and do nothing else."""
        words = self.shape.bytes // 8 // size * size  # half of the bytes, in words of four
        flat, none = [pool.view(torch.int32).flatten() for pool in self.pools], torch.zeros(1, dtype=torch.int32, device="cuda")
        grid = (programs,)
        return [
            lambda at=at: read_kernel[grid](flat[0], flat[1], at, words // size, none, SIZE=size, num_warps=8)
            for at in range(0, self.sets * words, words)
        ]


@triton.jit
def read_kernel(a, b, begin, tiles, none, SIZE: tl.constexpr):  # noqa: N803 - Triton specialises on what is annotated
    """Read two runs of numbers."""
    begin = begin.to(tl.int64)
    found = tl.zeros([SIZE], tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = begin + tile.to(tl.int64) * SIZE + tl.arange(0, SIZE)
        found = found | (tl.load(a + at) ^ tl.load(b + at))
    if tl.max(found, 0) == -123456789:  # never, which the compiler cannot know
        tl.store(none, 1)


def graph_us(calls: Sequence[Call], rounds: int = 15) -> float:
    """Return the median device time of a call, of a replayed graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(rounds + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times[2:])


def best_read_us(step: Step) -> float:
    """Return the least time of a plain read of as many bytes, over several sizes of it."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = [(programs, size) for programs in (1, 2, 4, 8, 16) for size in (2048, 8192)]
    return min(graph_us(step.reads(programs * processors, size)) for programs, size in sizes)


def measured(name: str, calls: Callable[[], list[Call]]) -> dict[str, float | str]:
    """Return the time of calls, or why there is none."""
    try:
        return {name: graph_us(calls())}
    except (AttributeError, ImportError, RuntimeError) as error:
        return {name: f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}


def decode_row(shape: Shape) -> dict[str, Any]:
    """Measure one step of decoding."""
    step = Step(shape)
    read, ours = best_read_us(step), graph_us(step.ours())
    row = {"shape": shape.name, "read_us": read, "kvdock_us": ours, "of_read": read / ours, **measured("flashinfer_us", step.flashinfer)}
    return row | (measured("cudnn_us", step.cudnn) if len(set(shape.lengths)) == 1 else {})


def prefill_row(shape: Shape) -> dict[str, Any]:
    """Measure one chunk of a prompt."""
    step = Step(shape)
    ours = graph_us(step.ours())
    row = {"shape": shape.name, "kvdock_us": ours, "kvdock_tflops": shape.flops / ours / 1e6}
    return row | measured("flash_us", step.contiguous) | measured("flashinfer_us", step.flashinfer)


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in (row.get(name, "") for name in names)] for row in rows
    ]
    lines = [f"## {title}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write records if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    found = {
        "machine": gpu_report.machine(),
        "decode": [decode_row(shape) for shape in DECODE],
        "prefill": [prefill_row(shape) for shape in PREFILL],
    }
    titles = {"decode": "Decode, bf16, 32/8 heads, blocks of 16 at random places", "prefill": "Chunked prefill, D 128"}
    text = "\n".join(table(title, found[name]) for name, title in titles.items())
    print(text)
    if options.out:
        path = options.out / f"{gpu_report.card_name()}-attention"
        path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(f"# Attention on pages\n\nMade by `benchmarks/attention.py`.\n\n{text}")


if __name__ == "__main__":
    main()
