"""Latents by compiled kernels, in the size that DeepSeek-V3 has: written, read and copied bit for bit, attended to, and in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock_conformance import reference

RANK, ROPE, BLOCK = 512, 64, 16
LENS = (300, 0, 77, 64, 17)
COUNTS = {"decode": None, "few": (3, 0, 2, 1, 1), "chunked": (90, 0, 33, 1, 5)}
SCALE = 192**-0.5
BOUND = 8e-3
"""Of the norm of what differs from float64, to that of the result."""


def filled(layers: int = 1, **how: Any) -> tuple[kvdock.MLAKVCache, torch.Tensor, torch.Tensor]:
    """Return a cache whose last layer holds NaN wherever no token was written, a table with a poisoned end, and lengths."""
    torch.manual_seed(0)
    width = -(-max(LENS) // BLOCK) + 1
    blocks = len(LENS) * width + 3
    spec = kvdock.KVSpec((kvdock.MLALayerSpec(RANK, ROPE),) * layers, 4096, torch.bfloat16)
    cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=blocks, block_size=BLOCK, **how), kvdock.RankInfo("cuda"))
    assert isinstance(cache, kvdock.MLAKVCache)
    cache.kv_cache(layers - 1).fill_(torch.nan)
    table = torch.randperm(blocks)[: len(LENS) * width].view(len(LENS), width)
    slots = torch.cat([(row[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length] for row, length in zip(table, LENS, strict=True)])
    projection = torch.randn(len(slots), 24 + RANK + ROPE, device="cuda").bfloat16()
    _, kv_c, k_pe = projection.split([24, RANK, ROPE], -1)
    cache.update(layers - 1, kv_c, k_pe, slots.cuda())
    got = cache.gather(layers - 1, slots.cuda())
    assert torch.equal(got[0], kv_c)
    assert torch.equal(got[1], k_pe)
    for row, length in enumerate(LENS):
        table[row, -(-length // BLOCK) :] = 1 << 30
    return cache, table.int().cuda(), torch.tensor(LENS, device="cuda")


def meant(
    q: torch.Tensor, cache: kvdock.MLAKVCache, layer: int, table: torch.Tensor, lens: torch.Tensor, cu: torch.Tensor | None
) -> torch.Tensor:
    """Return attention in float64, by the loops."""
    out = torch.empty(*q.shape[:2], RANK, dtype=torch.float64)
    k, v = cache.k_cache(layer).cpu(), cache.v_cache(layer).cpu()
    sums = None if cu is None else cu.cpu()
    reference.paged_attention(q.cpu(), k, v, table.cpu(), lens.cpu(), sums, None, None, len(q), SCALE, True, None, None, out, None)
    return out


@pytest.mark.parametrize("layout", kvdock.KVCacheLayout)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_attention_in_the_absorbed_form(layout: kvdock.KVCacheLayout, heads: int, counts: Sequence[int] | None) -> None:
    cache, table, lens = filled(2, layout=layout)
    cu = None if counts is None else torch.tensor([0, *counts], device="cuda").cumsum(0)
    queries = len(LENS) if counts is None else sum(counts)
    q = torch.randn(queries, heads, RANK + ROPE, device="cuda").bfloat16()
    most = 1 if counts is None else max(counts)
    expected = meant(q, cache, 1, table, lens, cu)
    k_cache, v_cache = cache.k_cache(1), cache.v_cache(1)
    args = (None, None, None, None, most, SCALE, True, None, None, q.new_empty(queries, heads, RANK), None)
    served = kvdock.runtime.default().dispatcher.explain("paged_attention", (q, k_cache, v_cache, table, lens, cu, *args))
    assert served.served_by == "cuda", served
    apart = torch.empty_strided(k_cache.shape, k_cache.stride(), dtype=q.dtype, device="cuda").copy_(k_cache)[..., :RANK]
    options = {"cu_query_lens": cu, "max_query_len": most, "scale": SCALE}
    for got in (cache.attend(1, q, table, lens, **options), kvdock.ops.paged_attention(q, k_cache, apart, table, lens, **options)):
        assert float((got.cpu() - expected).norm() / expected.norm()) < BOUND


@pytest.mark.parametrize("layout", kvdock.KVCacheLayout)
def test_writes_reads_and_copies_are_those_of_the_reference(layout: kvdock.KVCacheLayout) -> None:
    cache, _, _ = filled(3, layout=layout)
    blocks = cache.num_blocks
    host = [cache.kv_cache(i).cpu() for i in range(3)]
    for count, index in ((1, torch.int64), (7, torch.int32), (blocks * BLOCK, torch.int64)):
        slots = torch.randperm(blocks * BLOCK)[:count].to(index)
        slots[count // 2] = -1
        rows = torch.randint(-(2**15), 2**15, (count, 3 + RANK + ROPE), dtype=torch.int16).view(torch.bfloat16)  # any bits
        kv_c, k_pe = rows[:, 3 : 3 + RANK], rows[:, 3 + RANK :]
        for _ in range(4):  # by every way that a call goes once it is known
            cache.update(1, *(part.cuda() for part in (kv_c, k_pe)), slots.cuda())
            cuda = rows.cuda()
            cache.update(2, cuda[:, 3 : 3 + RANK], cuda[:, 3 + RANK :], slots.cuda())
        for layer in (1, 2):
            reference.mla_caching_(host[layer], kv_c, k_pe, slots)
            assert torch.equal(cache.kv_cache(layer).cpu().view(torch.int16), host[layer].view(torch.int16))
        outs = [torch.empty(count, dim, dtype=torch.bfloat16) for dim in (RANK, ROPE)]
        reference.mla_gather(host[2], slots, *outs)
        for found, expected in zip(cache.gather(2, slots.cuda()), outs, strict=True):
            assert torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))
    cache.copy_blocks([(0, 1), (blocks - 1, 2)])
    for layer in range(3):
        host[layer][1], host[layer][2] = host[layer][0], host[layer][blocks - 1]
        assert torch.equal(cache.kv_cache(layer).cpu().view(torch.int16), host[layer].view(torch.int16))


def test_a_slot_beyond_the_pool_is_skipped_and_counted() -> None:
    cache, _, _ = filled()
    before, skipped = cache.kv_cache(0).clone(), kvdock.runtime.default().skipped_writes("cuda")
    slots = torch.tensor([cache.num_blocks * BLOCK, -1, 2**40], device="cuda")
    cache.update(0, torch.ones(3, RANK, device="cuda").bfloat16(), torch.ones(3, ROPE, device="cuda").bfloat16(), slots)
    assert torch.equal(before.view(torch.int16), cache.kv_cache(0).view(torch.int16))
    assert kvdock.runtime.default().skipped_writes("cuda") == skipped + 2
    assert not cache.gather(0, slots)[0].any()


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_of_a_step_writes_and_attends(heads: int) -> None:
    cache, table, lens = filled()
    rows = torch.randn(len(LENS), RANK + ROPE, device="cuda").bfloat16()
    q = torch.randn(len(LENS), heads, RANK + ROPE, device="cuda").bfloat16()
    slots = torch.full((len(LENS),), -1, device="cuda")
    out = q.new_empty(len(LENS), heads, RANK)

    def step() -> None:
        cache.update(0, rows[:, :RANK], rows[:, RANK:], slots)
        cache.attend(0, q, table, lens, scale=SCALE, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(3):
        at = lens.cpu()
        new = [int(table[row, length // BLOCK]) * BLOCK + length % BLOCK if length > 0 else -1 for row, length in enumerate(at.tolist())]
        for row, length in enumerate(at.tolist()):
            if length and length % BLOCK == 0:  # a block that the sequence did not have yet
                table[row, length // BLOCK] = cache.num_blocks - 1 - row
                new[row] = (cache.num_blocks - 1 - row) * BLOCK
        slots.copy_(torch.tensor(new))
        lens.add_((lens > 0).long())
        rows.copy_(torch.randn_like(rows))
        q.copy_(torch.randn_like(q))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        live = slots >= 0
        assert torch.equal(cache.gather(0, slots)[0][live], rows[live][:, :RANK]), f"turn {turn}"
        expected = meant(q, cache, 0, table, lens, None)
        assert float((out.cpu() - expected).norm() / expected.norm()) < BOUND
