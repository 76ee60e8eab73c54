"""Offsets past 2**31 and 2**32 elements, and more tokens than a grid dimension of 65,535."""

from __future__ import annotations

import pytest
import torch

import kvdock


@pytest.mark.parametrize("elements", [2**31, 2**32])
def test_a_token_far_into_a_big_pool(elements: int) -> None:
    heads, dim, block = 8, 128, 16
    num_blocks = elements // (heads * dim * block) + 4
    k_cache = torch.zeros(num_blocks, block, heads, dim, dtype=torch.float16, device="cuda")
    v_cache = torch.zeros(num_blocks, block, heads, dim, dtype=torch.float16, device="cuda")
    k, v = (torch.randn(2, heads, dim, device="cuda").half() for _ in range(2))
    slots = torch.tensor([num_blocks * block - 1, 5], device="cuda")
    kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
    assert torch.equal(k_cache[-1, -1], k[0])
    assert torch.equal(k_cache[0, 5], k[1])
    got = kvdock.ops.gather_paged(k_cache, v_cache, slots)
    assert torch.equal(got[1], v)
    kvdock.ops.copy_blocks_(k_cache, v_cache, [(num_blocks - 1, num_blocks - 2)])
    assert torch.equal(v_cache[-2], v_cache[-1])
    assert int((k_cache != 0).sum()) == int((k != 0).sum()) + int((k[0] != 0).sum())


def test_more_tokens_than_a_grid_has_rows() -> None:
    tokens = 70_000
    k_cache = torch.zeros(tokens // 16 + 1, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
    k, slots = torch.randn(tokens, 1, 64, device="cuda").bfloat16(), torch.randperm(tokens, device="cuda")
    kvdock.ops.paged_caching_(k_cache, k_cache.clone(), k, k, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)


def test_nothing_is_compiled_for_new_counts_and_widths() -> None:
    from kvdock_triton.launch import COMPILED

    k_cache = torch.zeros(5000, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    v_cache, seen = k_cache.clone(), set[int]()
    for tokens in (1, 15, 16, 17, 31, 32, 33, 100, 1023, 1024, 70_000):
        for width in (6, 8, 10):
            rows = torch.randn(tokens, width, 64, device="cuda").bfloat16()
            kvdock.ops.paged_caching_(k_cache, v_cache, rows[:, 2:4], rows[:, 4:6], torch.randperm(80_000, device="cuda")[:tokens])
            seen.add(len(COMPILED))
    assert len(seen) == 1
