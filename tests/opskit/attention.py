"""Batches for `paged_attention`, and what they mean, by the loops in float64."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from kvdock_conformance import reference

__all__ = ["LONGEST", "ORDERS", "TOLERANCE", "assert_close", "batch", "meant"]

LONGEST = 40
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ORDERS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "heads first": (2, 0, 1, 3)}


def pool(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...], gap: int = 3) -> torch.Tensor:
    """Return random numbers whose dimensions lie in memory in some order, with a gap behind every row."""
    wide = torch.randn([*(shape[dim] for dim in order[:-1]), shape[-1] + gap])[..., : shape[-1]].to(dtype)
    return wide.permute([order.index(dim) for dim in range(4)])


def batch(seed: int, dtype: torch.dtype, order: str = "NHD", *, aligned: bool = False, **options: Any) -> dict[str, Any]:
    """Draw a batch whose tables and pools are poisoned where no query may look; ``options`` are arguments of the op.

    With ``aligned``, rows begin at multiples of 16 bytes, of 16-bit elements, and blocks hold multiples of 16 tokens.
    """
    torch.manual_seed(seed)
    draw = random.Random(seed)  # noqa: S311 - the same in every run
    rows, block, heads, group = draw.choice([1, 2, 5]), draw.choice([1, 3, 16]), draw.choice([1, 2]), draw.choice([1, 3, 4])
    k_dim, v_dim = draw.choice([8, 5]), draw.choice([8, 3])
    counts = [draw.choice([0, 1, 1, 2, 9]) for _ in range(rows)] if draw.random() < 0.7 else None
    lens = [0 if draw.random() < 0.15 else draw.randint(max(1, counts[row] if counts else 1), LONGEST) for row in range(rows)]
    if aligned:
        block, k_dim, v_dim = draw.choice([16, 32, 48]), draw.choice([16, 24]), draw.choice([8, 32])
    width = -(-LONGEST // block) + 1
    places = torch.randperm(rows * width + 3)[: rows * width].view(rows, width)
    k, v = (pool((rows * width + 3, block, heads, dim), dtype, ORDERS[order], 8 if aligned else 3) for dim in (k_dim, v_dim))
    table = places.to(torch.int32)
    for row, length in enumerate(lens):
        table[row, -(-length // block) :] = draw.choice([-1, 2**31 - 1])
        for key in range(length, width * block):
            for cache in (k, v):
                cache[places[row, key // block], key % block] = torch.nan
    index = draw.choice([torch.int32, torch.int64])
    return {
        "q": torch.randn(sum(counts) if counts else rows, heads * group, k_dim).to(dtype),
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=index),
        "cu_query_lens": torch.tensor([0, *itertools.accumulate(counts)], dtype=index) if counts else None,
        "starts": torch.tensor([draw.randint(0, length) for length in lens], dtype=index) if draw.random() < 0.4 else None,
        "sinks": torch.randn(heads * group) if draw.random() < 0.4 else None,
        "causal": draw.random() < 0.7,
        "window": draw.choice([None, 1, 5, 100]),
        "softcap": draw.choice([None, 3.0]),
        "scale": draw.choice([None, 0.3]),
        **options,
    }


def meant(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a call means: ``out`` in float64, and ``lse``."""
    q, v_cache = args["q"], args["v_cache"]
    out, lse = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=torch.float64), torch.empty(q.shape[:2])
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_query_lens", "starts", "sinks")
    options = (len(q), args["scale"], args["causal"], args["window"], args["softcap"])
    reference.paged_attention(*(args[name] for name in names), *options, out, lse)
    return out, lse


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
