"""No count, no length and no width of a projection makes a plan of its own: one plan serves them all."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, active, counting_runtime

COUNTS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 255, 256, 500, 511, 512, 777, 1024, 70_000]


def projected(g: Geometry, count: int, q_width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut k and v out of a projection of any width."""
    rows = torch.zeros(count, q_width + 2 * g.hk * g.dk, dtype=g.dtype, device=device)[:, q_width:]
    k, v = (half.view(count, g.hk, g.dk) for half in rows.chunk(2, dim=1))
    return k, v


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [8, 46, 128])
def test_no_token_count_and_no_width_prepares_a_second_time(dim: int, device: str) -> None:
    """One plan for every count, every width of projection, and every q of ``[B, q, H, D]`` and ``[B, H, q, D]``."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    g = Geometry.even(1, dim, num_blocks=100, block=16)
    runtime, kernels = counting_runtime(device)
    k_cache, v_cache = (torch.zeros(shape, dtype=g.dtype, device=device) for shape in (g.k_shape, g.v_shape))
    with active(runtime):
        for count in COUNTS:
            for q_width in (0, 2 * dim, 12 * dim, 96 * dim if count < 2000 else 0):
                kvdock.ops.paged_caching_(k_cache, v_cache, *projected(g, count, q_width, device), torch.full((count,), -1, device=device))
        assert len(kernels["paged_caching_"].prepared) == 1
        for batch, q in ((1, 1), (1, 7), (2, 1), (3, 5), (4, 16), (1, 1024)):
            slots = torch.randint(0, g.capacity, (batch, q))
            for name in ("contiguous", "[B, H, q, D]", "fused qkv"):
                k, v = g.tokens(Memory(device), (batch, q), name)
                kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots.to(device))
        assert len(kernels["paged_caching_"].prepared) == 2, "one plan for [T], one for [B, S]"
        for count in (1, 15, 1024, 70_000):
            kvdock.ops.gather_paged(k_cache, v_cache, torch.full((count,), -1, device=device))
        assert len(kernels["gather_paged"].prepared) == 1
        for count in (1, 2, 15, 300):
            kvdock.ops.copy_blocks_(k_cache, v_cache, torch.full((count, 2), -1, device=device))
        assert len(kernels["copy_blocks_"].prepared) == 1


def test_no_length_and_no_count_prepares_a_static_update_again() -> None:
    runtime, kernels = counting_runtime()
    caches = [torch.zeros(8, 2, 2000, 16), torch.zeros(8, 2, 2000, 16)]
    with active(runtime):
        for new in COUNTS[:-1]:
            for rows in (1, 3, 8):
                k = torch.randn(rows, 2, new, 16)
                for start in (0, 1, 17, 900):
                    kvdock.ops.static_update_(*caches, k, k.clone(), start)
        assert len(kernels["static_update_"].prepared) == 1
        for rows in (1, 3, 8):
            k = torch.randn(rows, 2, 3, 16)
            kvdock.ops.static_update_(*caches, k, k.clone(), torch.arange(rows))
            kvdock.ops.static_update_(*caches, k, k.clone(), torch.tensor([5]))
        assert len(kernels["static_update_"].prepared) == 2, "one plan for an int, one for [n] lengths"
