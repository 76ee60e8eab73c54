"""Offsets beyond 32 bits: tokens into pools that are larger than memory, of which only a few pages are ever touched."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import Target, bits_of

PATTERN = 0x5A5A


def huge(elements: int, device: str) -> torch.Tensor:
    """Return a bfloat16 tensor whose memory is reserved, and not used before it is touched."""
    if device != "cpu" and torch.cuda.mem_get_info()[0] < 4 * elements + 2**30:
        pytest.skip(f"needs {4 * elements / 2**30:.0f} GiB for two pools on {device}")
    try:
        return torch.empty(elements, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:  # a host that does not overcommit
        pytest.skip(f"cannot reserve {2 * elements / 2**30:.0f} GiB: {error}")


def places_of(offset: int, size: int) -> list[int]:
    """Return where a row at ``offset`` would land with 32-bit arithmetic in elements or in bytes, and its neighbours."""
    wrapped = {offset % 2**31, offset % 2**32, offset * 2 % 2**31 // 2, offset * 2 % 2**32 // 2, (offset + 2**31) % 2**32 - 2**31}
    return sorted({place for place in wrapped if 0 <= place != offset} | {offset - size, offset + size})


def row(pool: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    """Return the bits of a row of a flat pool."""
    return pool[offset : offset + size].view(torch.int16)


@pytest.mark.parametrize("past", [2**31, 2**32], ids=["2**31", "2**32"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_one_token_behind_many(target: Target, past: int, count: int) -> None:
    """A pool of more than ``past`` elements of keys: the token whose row starts there, and tokens around it."""
    heads, dim, block = 8, 128, 16
    size = heads * dim
    num_blocks = past // (block * size) + 2
    k_flat = huge(num_blocks * block * size, target.device)
    v_flat = torch.zeros(num_blocks * block, dtype=torch.bfloat16, device=target.device)
    k_cache, v_cache = k_flat.view(num_blocks, block, heads, dim), v_flat.view(num_blocks, block, 1, 1)
    slot = past // size
    slots = torch.tensor([slot + 2 * i for i in range(count)], device=target.device)
    offsets = [int(s) * size for s in slots]
    others = [place for offset in offsets for place in places_of(offset, size) if place not in offsets]
    for place in others:
        row(k_flat, place, size).fill_(PATTERN)
    k, v = (torch.randn(count, h, d, dtype=torch.bfloat16, device=target.device) for h, d in ((heads, dim), (1, 1)))
    kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
    for i, offset in enumerate(offsets):
        assert torch.equal(row(k_flat, offset, size), k[i].view(torch.int16).flatten())
    assert all(bool((row(k_flat, place, size) == PATTERN).all()) for place in others), "a row elsewhere was written"
    assert torch.equal(v_flat.nonzero().flatten(), slots)
    got_k, got_v = kvdock.ops.gather_paged(k_cache, v_cache, slots)
    assert torch.equal(bits_of(got_k), bits_of(k))
    assert torch.equal(bits_of(got_v), bits_of(v))


@pytest.mark.parametrize("step", [2**31, 2**31 + 8], ids=["2**31", "2**31 + 8"])
def test_few_blocks_with_a_huge_step(target: Target, step: int) -> None:
    flat = huge(2 * step + 1024, target.device)
    k_cache = flat.as_strided((3, 4, 2, 8), (step, 16, 8, 1))
    v_cache = torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16, device=target.device)
    row(flat, 0, 256).fill_(PATTERN)
    k = torch.randn(7, 2, 8, dtype=torch.bfloat16, device=target.device)
    slots = torch.tensor([8, 11, 4, -1, 7, 10, 5], device=target.device)
    for count in (1, 3, 7):
        kvdock.ops.paged_caching_(k_cache, v_cache, k[:count], k[:count].clone(), slots[:count])
        kept = slots[:count] >= 0
        read = kvdock.ops.gather_paged(k_cache, v_cache, slots[:count])[0]
        assert torch.equal(bits_of(read)[kept.cpu()], bits_of(k[:count])[kept.cpu()])
        assert torch.equal(bits_of(k_cache[1:].reshape(8, 16))[slots[:count][kept].cpu() - 4], bits_of(k[:count][kept]).view(-1, 16))
    assert bool((row(flat, 0, 256) == PATTERN).all()), "block 0 was written"
    kvdock.ops.copy_blocks_(k_cache, v_cache, [(2, 0)])
    assert torch.equal(bits_of(k_cache[0]), bits_of(k_cache[2]))
    assert bool((row(flat, 64, 192) == PATTERN).all()), "more than a block was copied"


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("lengths", ["int", "tensor"])
def test_static_rows_with_a_huge_step(target: Target, rows: int, lengths: str) -> None:
    step = 2**32 // (rows - 1) // 8 * 8 + 64
    flat = huge((rows - 1) * step + 1024, target.device)
    k_cache = flat.as_strided((rows, 2, 4, 8), (step, 32, 8, 1))
    v_cache = torch.zeros(rows, 2, 4, 8, dtype=torch.bfloat16, device=target.device)
    k = torch.randn(rows, 2, 1, 8, dtype=torch.bfloat16, device=target.device)
    start = [1] * rows if lengths == "int" else [i % 4 for i in range(rows)]
    for i in range(rows):
        row(flat, i * step, 64).fill_(PATTERN)
    kvdock.ops.static_update_(k_cache, v_cache, k, k.clone(), 1 if lengths == "int" else torch.tensor(start, device=target.device))
    for i in range(rows):
        wanted = torch.full((2, 4, 8), PATTERN, dtype=torch.int16)
        wanted[:, start[i]] = bits_of(k[i, :, 0])
        assert torch.equal(bits_of(k_cache[i]), wanted)


def test_a_slot_far_beyond_a_huge_pool(target: Target) -> None:
    """2**40 is out of range also where 2**31 is not."""
    num_blocks = 2**32 // 16 + 1
    flat = huge(num_blocks * 16, target.device)
    cache = flat.view(num_blocks, 16, 1, 1)
    k = torch.ones(2, 1, 1, dtype=torch.bfloat16, device=target.device)
    v_cache = huge(num_blocks * 16, target.device).view(num_blocks, 16, 1, 1)
    slots = torch.tensor([2**32 + 3, 2**40], device=target.device)
    flat[2**32 + 3] = 0
    before = target.skipped()
    if target.host_reads(slots):
        with pytest.raises(kvdock.IndexRangeError, match=r"slot_mapping\[1\]: expected a slot below 4294967312 .* got 1099511627776"):
            kvdock.ops.paged_caching_(cache, v_cache, k, k.clone(), slots)
        assert flat[2**32 + 3] == 0
    else:
        kvdock.ops.paged_caching_(cache, v_cache, k, k.clone(), slots)
        assert flat[2**32 + 3] == 1
        assert target.skipped() == before + 1
