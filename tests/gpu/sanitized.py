"""A few calls of every kernel, to be run under compute-sanitizer: ``compute-sanitizer --tool memcheck python sanitized.py``."""

from __future__ import annotations

import torch

import kvdock

for dtype, heads, dim in ((torch.bfloat16, 3, 46), (torch.float32, 2, 64), (torch.float16, 2, 64)):
    k_cache = torch.zeros(6, 16, heads, dim, dtype=dtype, device="cuda")
    v_cache = k_cache.clone()
    rows = torch.randn(9, 3 * heads, dim, device="cuda").to(dtype)
    slots = torch.tensor([0, 95, 96, -1, 17, 16, 15, 2**40, 31], device="cuda")
    for _ in range(3):
        kvdock.ops.paged_caching_(k_cache, v_cache, rows[:, heads : 2 * heads], rows[:, 2 * heads :], slots)
    k, v = kvdock.ops.gather_paged(k_cache, v_cache, slots)
    assert torch.equal(k[1], rows[1, heads : 2 * heads])
    assert not v[2].any()
    kvdock.ops.copy_blocks_(k_cache, v_cache, [(0, 2), (5, 3)])
    static = torch.zeros(3, heads, 8, dim, dtype=dtype, device="cuda")
    new = torch.randn(3, heads, 2, dim, device="cuda").to(dtype)
    kvdock.ops.static_update_(static, static.clone(), new, new, torch.tensor([6, 7, -1], device="cuda"))
    assert torch.equal(static[0, :, 6:], new[0])
    table = torch.tensor([[5, 1, -1], [2**31 - 1, 0, 4]], dtype=torch.int32, device="cuda")  # a block outside, and one behind a length
    lens, cu = torch.tensor([32, 39], device="cuda"), torch.tensor([0, 20, 23], device="cuda")
    q = torch.randn(23, 2 * heads, dim, device="cuda").to(dtype)
    kvdock.ops.paged_attention(q[:2], k_cache, v_cache, table, lens)
    kvdock.ops.paged_attention(q, k_cache, v_cache, table, lens, cu_query_lens=cu, max_query_len=20, return_lse=True)
pool = torch.zeros(4 * 7000, 16, 8, 128, dtype=torch.bfloat16, device="cuda")  # so long that keys are read in pieces
table, lens = torch.randperm(len(pool), device="cuda").int().view(4, -1), torch.tensor([7000 * 16, 3, 90_001, 0], device="cuda")
kvdock.ops.paged_attention(torch.ones(4, 32, 128, dtype=torch.bfloat16, device="cuda"), pool, pool.clone(), table, lens)
torch.cuda.synchronize()
print("sanitized: done")
