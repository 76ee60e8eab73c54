"""`paged_attention` by compiled kernels: against the portable ones, with NaN where no query may look, in graphs, and in big pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock

LENS = (1500, 0, 333, 64, 17)
COUNTS = {"one each": None, "few": (3, 0, 2, 1, 1), "many": (300, 0, 77, 1, 5)}
HEADS = {
    "bf16, 32/8 x 128": (torch.bfloat16, 32, 8, 128, 128, 16, {}),
    "fp16, MQA, cap and sinks": (torch.float16, 8, 1, 64, 64, 16, {"softcap": 20.0, "sinks": True}),
    "bf16, 15/3 x 80/96, window": (torch.bfloat16, 15, 3, 80, 96, 5, {"window": 100}),
    "fp32, starts": (torch.float32, 4, 2, 64, 64, 16, {"starts": True}),
    "fp16, 256, not causal": (torch.float16, 8, 4, 256, 256, 32, {"causal": False}),
    "bf16, 64/1 x 192/128": (torch.bfloat16, 64, 1, 192, 128, 16, {"sinks": True}),
    "bf16, 8/2 x 128, starts": (torch.bfloat16, 8, 2, 128, 128, 16, {"starts": True, "sinks": True}),
    "fp16, 14/2 x 80, window": (torch.float16, 14, 2, 80, 80, 48, {"window": 100, "softcap": 20.0}),
    "bf16, 46": (torch.bfloat16, 4, 2, 46, 46, 16, {}),
}
BOUND = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
"""Of the norm of what differs, to that of the result."""


def batch(name: str, counts: Sequence[int] | None) -> dict[str, Any]:
    """Return arguments whose pools are poisoned behind the sequences; one block in the first is not in the pool."""
    torch.manual_seed(0)
    dtype, query_heads, heads, k_dim, v_dim, block, options = HEADS[name]
    width, rows = 1600 // block, len(LENS)
    k, v = (torch.randn(rows * width + 3, block, heads, dim, device="cuda").to(dtype) for dim in (k_dim, v_dim))
    table = torch.randperm(len(k), device="cuda")[: rows * width].view(rows, width).int()
    for row, length in enumerate(LENS):
        for cache in (k, v):
            cache[int(table[row, length // block]), length % block :] = torch.nan
        table[row, length // block + 1 :] = 1 << 30
    table[0, 3] = len(k)
    cu = None if counts is None else torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    queries = rows if counts is None else sum(counts) + 4  # some that belong to no sequence
    made = {
        "sinks": lambda: torch.randn(query_heads, device="cuda"),
        "starts": lambda: torch.tensor([700, 0, 5, 60, 0], device="cuda"),
    }
    return {
        "q": torch.randn(queries, query_heads, k_dim, device="cuda").to(dtype),
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": torch.tensor(LENS, device="cuda"),
        "cu_query_lens": cu,
        "max_query_len": None if counts is None else max(counts),
        **{key: made[key]() if key in made else value for key, value in options.items()},
    }


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_results_are_those_of_portable_torch(name: str, counts: Sequence[int] | None) -> None:
    args = batch(name, counts)
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
    with kvdock.use_backend("portable"):
        expected, sums = kvdock.ops.paged_attention(**args, return_lse=True)
    assert float((out - expected).float().norm() / expected.float().norm()) < BOUND[out.dtype]
    torch.testing.assert_close(lse, sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 40}], ids=["causal", "not causal", "window"])
@pytest.mark.parametrize("place", [1170, 1390, 1450])
def test_a_value_that_is_no_number_reaches_those_who_see_it(place: int, options: dict[str, Any]) -> None:
    args = batch("bf16, 32/8 x 128", COUNTS["many"]) | options
    args["block_table"][0, 3] = 0
    args["v_cache"][int(args["block_table"][0, place // 16]), place % 16, 2, 7] = torch.nan
    out = kvdock.ops.paged_attention(**args)
    with kvdock.use_backend("portable"):
        expected = kvdock.ops.paged_attention(**args)
    assert torch.equal(out.isnan(), expected.isnan())
    assert 0 < int(expected.isnan().sum()) <= 4 * 300
    kept = ~expected.isnan()
    assert float((out - expected)[kept].float().norm() / expected[kept].float().norm()) < BOUND[out.dtype]


def test_a_graph_follows_lengths_and_tables() -> None:
    args = batch("bf16, 32/8 x 128", None)
    out = torch.empty_like(args["q"])
    kvdock.ops.paged_attention(**args, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvdock.ops.paged_attention(**args, out=out)
    args["seq_lens"].copy_(torch.tensor([900, 7, 0, 33, 17]))
    args["block_table"].copy_(args["block_table"].flip(0).clamp(max=50))
    expected = kvdock.ops.paged_attention(**args)
    out.fill_(torch.nan)
    junk = torch.full((1 << 24,), torch.nan, device="cuda")  # where the workspace of a call may lie
    graph.replay()
    assert torch.equal(out, expected)
    del junk


@pytest.mark.parametrize("heads", kvdock.HeadLayout)
@pytest.mark.parametrize("layout", kvdock.KVCacheLayout)
def test_pools_in_every_order_are_read_alike(layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    """By maps, of two layers in turn, and from a graph that was captured with other lengths."""
    args = batch("bf16, 32/8 x 128", None)
    k, v = args.pop("k_cache"), args.pop("v_cache")
    spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=8, head_dim=128, max_positions=4096, dtype=k.dtype)
    config = kvdock.PagedKVCacheConfig(num_blocks=len(k), block_size=16, layout=layout, head_layout=heads)
    cache = kvdock.create_cache(spec, config, kvdock.RankInfo(k.device))
    for layer in range(2):
        cache.k_cache(layer).copy_(k.roll(layer, 2))
        cache.v_cache(layer).copy_(v.roll(layer, 2))
    outs = [torch.empty_like(args["q"]) for _ in range(2)]

    def step() -> None:
        for layer, out in enumerate(outs):
            kvdock.ops.paged_attention(k_cache=cache.k_cache(layer), v_cache=cache.v_cache(layer), out=out, **args)

    def check() -> None:
        for layer, out in enumerate(outs):
            expected = kvdock.ops.paged_attention(k_cache=k.roll(layer, 2), v_cache=v.roll(layer, 2), **args)
            assert torch.equal(out, expected)
            with kvdock.use_backend("portable"):
                expected = kvdock.ops.paged_attention(k_cache=k.roll(layer, 2), v_cache=v.roll(layer, 2), **args)
            assert float((out - expected).float().norm() / expected.float().norm()) < BOUND[out.dtype]

    step()
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    args["seq_lens"].copy_(torch.tensor([1499, 0, 332, 48, 1]))
    graph.replay()
    check()


def test_long_sequences_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs that begin when others have ended: in rows of any length, of none, and in a graph that was captured with other ones."""
    from kvdock_triton.paged_attention import _Way

    torch.manual_seed(0)
    rows, width, block, heads, dim = 4, 7000, 16, 8, 128
    seen, real = list[int](), _Way.chunks
    monkeypatch.setattr(_Way, "chunks", lambda *args: seen.append(real(*args)[1]) or real(*args))
    k, v = (torch.randn(rows * width, block, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    table = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    lens = torch.tensor([width * block, 3, 90_001, 0], device="cuda")
    q = torch.randn(rows, 4 * heads, dim, device="cuda", dtype=torch.bfloat16)
    args = (q, k, v, table, lens)
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    kvdock.ops.paged_attention(*args, out=out)
    with torch.cuda.graph(graph):
        kvdock.ops.paged_attention(*args, out=out)
    for lengths in ([width * block, 3, 90_001, 0], [width * block] * rows, [100, 65_000, 17, 111_999]):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        with kvdock.use_backend("portable"):
            expected = kvdock.ops.paged_attention(*args)
        assert float((out - expected).float().norm() / expected.float().norm()) < BOUND[out.dtype]
    assert min(seen) > 1, "the pool is too small for this GPU"


def test_blocks_far_into_a_big_pool() -> None:
    heads, dim, block = 8, 128, 16
    num_blocks = 2**32 // (heads * dim * block) + 4
    k, v = (torch.zeros(num_blocks, block, heads, dim, dtype=torch.float16, device="cuda") for _ in "kv")
    small = [torch.randn(2, block, heads, dim, device="cuda").half() for _ in "kv"]
    for pool, values in zip((k, v), small, strict=True):
        pool[-2:] = values
    q, lens = torch.randn(1, heads, dim, device="cuda").half(), torch.tensor([2 * block], device="cuda")
    table = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda")
    expected = kvdock.ops.paged_attention(q, *small, table, lens)
    assert torch.equal(kvdock.ops.paged_attention(q, k, v, table + num_blocks - 2, lens), expected)
