"""A paged cache in any memory order, filled through its own ops, and what attention to it means."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock_conformance import reference

__all__ = ["ORDERS", "assert_means", "filled", "sdpa", "served_by", "why_not_usable"]

ORDERS = [
    pytest.param(layout, heads, id=f"{layout.value}-{heads.value}")
    for layout, heads in itertools.product(kvdock.KVCacheLayout, kvdock.HeadLayout)
]
"""Every memory order that a paged cache can be made in."""

BOUND = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
"""Of the norm of what differs, to that of the result."""

_HEADS, _KV_HEADS, _BLOCK, _WIDTH = 8, 2, 16, 4


def filled(
    layout: kvdock.KVCacheLayout,
    heads: kvdock.HeadLayout,
    lens: Sequence[int],
    counts: Sequence[int] | None,
    *,
    device: str,
    dtype: torch.dtype,
    dim: int = 64,
) -> list[dict[str, Any]]:
    """Return the arguments of `paged_attention` for each of two layers of a cache that holds NaN wherever no token was written.

    Args:
        layout: order of layers and blocks.
        heads: order of tokens and heads in a block.
        lens: tokens of each sequence.
        counts: queries of each; None for one each.
        device: where the cache is.
        dtype: of the cache.
        dim: of a head.
    """
    torch.manual_seed(0)
    spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=_KV_HEADS, head_dim=dim, max_positions=_BLOCK * _WIDTH, dtype=dtype)
    config = kvdock.PagedKVCacheConfig(num_blocks=len(lens) * _WIDTH + 1, block_size=_BLOCK, layout=layout, head_layout=heads)
    cache = kvdock.create_cache(spec, config, kvdock.RankInfo(device))
    table = torch.randperm(len(lens) * _WIDTH + 1)[: len(lens) * _WIDTH].view(len(lens), _WIDTH)
    slots = torch.cat([(row[:, None] * _BLOCK + torch.arange(_BLOCK)).flatten()[:length] for row, length in zip(table, lens, strict=True)])
    cu = None if counts is None else torch.tensor([0, *itertools.accumulate(counts)], device=device)
    found = []
    for layer in range(2):
        for pool in (cache.k_cache(layer), cache.v_cache(layer)):
            pool.fill_(torch.nan)
        k, v = torch.randn(2, len(slots), _KV_HEADS, dim, device=device).to(dtype)
        cache.update(layer, k, v, slots.to(device))
        queries = len(lens) if counts is None else sum(counts)
        args = {"q": torch.randn(queries, _HEADS, dim, device=device).to(dtype), "cu_query_lens": cu}
        args |= {"block_table": table.int().to(device), "seq_lens": torch.tensor(lens, device=device)}
        found.append(args | {"k_cache": cache.k_cache(layer), "v_cache": cache.v_cache(layer)})
    return found


def assert_means(
    args: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None = None, *, bound: float | None = None, **options: Any
) -> None:
    """Compare a result with the reference's in float64, within ``bound`` or what there is for its dtype."""
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_query_lens")
    read = {name: None if args[name] is None else args[name].cpu() for name in names}
    expected, sums = torch.empty(out.shape, dtype=torch.float64), torch.empty(out.shape[:2])
    settings = {"starts": None, "sinks": None, "max_query_len": len(out), "scale": None, "causal": True, "window": None, "softcap": None}
    reference.paged_attention(**read, **settings | options, out=expected, lse=sums)
    assert float((out.cpu() - expected).norm() / expected.norm()) < (bound or BOUND[out.dtype])
    if lse is not None:
        torch.testing.assert_close(lse.cpu(), sums, rtol=1e-4, atol=1e-3)


def sdpa(args: dict[str, Any]) -> torch.Tensor:
    """Attend by torch's `scaled_dot_product_attention`, which reads no blocks: what it reads is gathered by indexing the pool."""
    lens = args["seq_lens"].tolist()
    ends = list(range(len(lens) + 1)) if args["cu_query_lens"] is None else args["cu_query_lens"].tolist()
    found = torch.zeros_like(args["q"])
    for row, length in enumerate(lens):
        queries = slice(ends[row], ends[row + 1])
        if length and queries.start < queries.stop:
            blocks = args["block_table"][row].long()
            k, v = (args[name][blocks].flatten(0, 1)[:length].transpose(0, 1) for name in ("k_cache", "v_cache"))
            q = args["q"][queries].transpose(0, 1)
            places = torch.arange(length, device=q.device)
            is_seen = places <= places[length - q.shape[1] :, None]
            attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=is_seen, enable_gqa=True)
            found[queries] = attended[0].transpose(0, 1)
    return found


def served_by(args: dict[str, Any], backend: str | None = None, **options: Any) -> str:
    """Return who serves a call."""
    op = kvdock.runtime.default().dispatcher.op("paged_attention")
    most = args["q"].shape[0] if args["cu_query_lens"] is not None else 1
    given = {"max_query_len": most, "causal": True, "out": torch.empty_like(args["q"]), **args, **options}
    explained = kvdock.runtime.default().dispatcher.explain(
        "paged_attention", tuple(given.get(name) for name in op.schema.arg_names), backend
    )
    return explained.served_by


def why_not_usable(name: str) -> str:
    """Return why there is no backend of a name in this process; empty if there is one."""
    records = kvdock.runtime.default().registry.records()
    states = {item.name: item for record in records for item in record.backends}
    if name not in states:
        return f"the plugin of {name!r} is not installed"
    return "" if states[name].state.name == "READY" else f"{name} is {states[name].state.name}: {states[name].reason}"
