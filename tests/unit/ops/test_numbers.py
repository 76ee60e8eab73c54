"""Bits arrive as they came: NaN payloads, signalling NaNs, infinities, subnormals and -0. And no dtype is ever guessed."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target, bits_of, check, check_gather

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CASTS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}

# sign, exponent and mantissa bits: -0, infinities, quiet and signalling NaNs with payloads, subnormals, the largest
ODD = {
    torch.float32: [1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC0BEEF, 0x7F800001, 0xFFA00000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF],
    torch.float64: [
        1 << 63,
        0x7FF0000000000000,
        0xFFF0000000000000,
        0x7FF8000000000001,
        0xFFF80000DEADBEEF,
        0x7FF0000000000001,
        0xFFF4000000000000,
        1,
        0x800FFFFFFFFFFFFF,
        0x7FEFFFFFFFFFFFFF,
    ],
}


def odd_values(dtype: torch.dtype) -> torch.Tensor:
    """Return every bit pattern of a 16-bit dtype, or the odd ones of a wider one, as ``[T, 2, 8]``."""
    bits = 8 * dtype.itemsize
    patterns = range(1 << 16) if bits == 16 else ODD[dtype] * 16
    signed = [p - (1 << bits) if p >> (bits - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=CASTS[dtype]).view(dtype).view(-1, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", ["contiguous", "heads apart"])
def test_every_odd_number_is_written_and_read_bit_for_bit(target: Target, dtype: torch.dtype, source: str) -> None:
    values = odd_values(dtype).to(target.device)
    k = values if source == "contiguous" else values.transpose(0, 1).contiguous().transpose(0, 1)
    count = len(k)
    k_cache, v_cache = (torch.zeros((count + 15) // 16 + 1, 16, 2, 8, dtype=dtype, device=target.device) for _ in range(2))
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(target.device)
    kvdock.ops.paged_caching_(k_cache, v_cache, k, k.flip(0), slots)
    got_k, got_v = kvdock.ops.gather_paged(k_cache, v_cache, slots)
    assert torch.equal(bits_of(k_cache.view(-1, 2, 8)[slots]), bits_of(values))
    assert torch.equal(bits_of(got_k), bits_of(values))
    assert torch.equal(bits_of(got_v), bits_of(values).flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_odd_numbers_and_copied_blocks_keep_their_bits(target: Target, memory: Memory, dtype: torch.dtype) -> None:
    g = Geometry(dtype=dtype)
    pools = g.pools(memory)
    for start in range(0, 40, 4):
        k, v = g.tokens(memory, [2])
        k.copy_(odd_values(dtype)[start % 8 : start % 8 + 2])
        check(target, memory, "paged_caching_", *pools, k, v, memory.index([start % 24, 23]))
    check(target, memory, "copy_blocks_", *pools, memory.index([[0, 1], [5, 2]]))
    check_gather(target, memory, *pools, memory.index(list(range(24))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [0, [3], [0, 5], [1, 2, 3, 0, 7]], ids=str)
def test_static_updates_keep_bits(target: Target, memory: Memory, dtype: torch.dtype, lengths: int | list[int]) -> None:
    rows = len(lengths) if isinstance(lengths, list) else 5
    k_cache, v_cache, k, v = (memory.tensor(dtype, (rows, 2, size, 8)) for size in (10, 10, 2, 2))
    k.copy_(odd_values(dtype)[: rows * 2].view(rows, 2, 2, 8))
    check(target, memory, "static_update_", k_cache, v_cache, k, v, memory.index(lengths) if isinstance(lengths, list) else lengths)


def test_all_zero_rows_and_negative_zeros(target: Target, memory: Memory) -> None:
    g = Geometry()
    k, v = g.tokens(memory, [6])
    k.zero_()
    v.fill_(-0.0)
    check(target, memory, "paged_caching_", *g.pools(memory), k, v, memory.index([0, 5, 9, 13, 20, 23]))


UNEQUAL = [(a, b) for a in DTYPES for b in DTYPES if a != b]


@pytest.mark.parametrize(("cache", "given"), UNEQUAL, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_cache_of_another_dtype_is_an_error(target: Target, memory: Memory, cache: torch.dtype, given: torch.dtype) -> None:
    """Also of the same width: float16 and bfloat16 bits mean other numbers."""
    g, other = Geometry(dtype=cache), Geometry(dtype=given)
    pools, slots = g.pools(memory), memory.index([1, 2, 3])
    k, v = g.tokens(memory, [3])
    wrong_k, wrong_v = other.tokens(memory, [3])
    before = memory.copy()
    for name, call in {
        "k": lambda: kvdock.ops.paged_caching_(*pools, wrong_k, v, slots),
        "v": lambda: kvdock.ops.paged_caching_(*pools, k, wrong_v, slots),
        "v_cache": lambda: kvdock.ops.paged_caching_(pools[0], other.pools(Memory(target.device))[1], k, v, slots),
        "k_out": lambda: kvdock.ops.gather_paged(*pools, slots, out=(wrong_k, v)),
        "v_out": lambda: kvdock.ops.gather_paged(*pools, slots, out=(k, wrong_v)),
    }.items():
        with pytest.raises(kvdock.ArgumentTypeError, match=rf"(paged_caching_|gather_paged): {name}: expected {cache}, .* got {given}"):
            call()
    before.assert_same("raised")


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint16, torch.bool, torch.complex64], ids=str)
def test_a_dtype_that_no_cache_has_is_an_error(target: Target, dtype: torch.dtype) -> None:
    caches = [torch.zeros(4, 4, 2, 8, dtype=dtype, device=target.device) for _ in range(2)]
    tokens = [torch.zeros(3, 2, 8, dtype=dtype, device=target.device) for _ in range(2)]
    with pytest.raises(kvdock.ArgumentTypeError, match=r"paged_caching_: k_cache: expected one of torch.float16, .* got torch."):
        kvdock.ops.paged_caching_(*caches, *tokens, torch.arange(3, device=target.device))


@pytest.mark.parametrize("dtype", kvdock.plugin.QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [(), (2,), (3, 2)], ids=["per tensor", "per head", "per token and head"])
def test_quantised_caches_with_their_scales_come_later(target: Target, dtype: torch.dtype, scale: tuple[int, ...]) -> None:
    caches = [torch.zeros(4, 4, 2, 8, dtype=torch.int8, device=target.device).view(dtype) for _ in range(2)]
    tokens = [torch.ones(3, 2, 8, dtype=torch.bfloat16, device=target.device) for _ in range(2)]
    scales = {name: torch.ones(scale, device=target.device) for name in ("k_scale", "v_scale")}
    slots = torch.arange(3, device=target.device)
    with pytest.raises(kvdock.UnsupportedError, match=f"quantised caches \\({dtype}\\) are not there yet"):
        kvdock.ops.paged_caching_(*caches, *tokens, slots, **scales)
    with pytest.raises(kvdock.UnsupportedError, match="not there yet"):
        kvdock.ops.gather_paged(*caches, slots, **scales, out=tuple(tokens))
    with pytest.raises(kvdock.UnsupportedError, match="not there yet"):
        kvdock.ops.copy_blocks_(*caches, [(0, 1)])
    assert not any(cache.view(torch.int8).any() for cache in caches)


@pytest.mark.parametrize("dtype", kvdock.plugin.QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("rows", ["as they are", "quantised"])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_every_op_refuses_quantised_caches_alike(target: Target, dtype: torch.dtype, rows: str, is_scaled: bool) -> None:
    """No text sends the caller in a circle, or names what was not passed; what it advises works."""
    made = [torch.zeros(4, 4, 2, 8, dtype=torch.int8, device=target.device).view(dtype) for _ in range(4)]
    caches, as_rows = made[:2], [cache[0, :3] if rows == "quantised" else cache[0, :3].bfloat16() for cache in made[2:]]
    slots = torch.arange(3, device=target.device)
    scales = {f"{name}_scale": torch.ones((), device=target.device) for name in "kv"} if is_scaled else {}
    calls = {
        "paged_caching_": lambda c, r, s: kvdock.ops.paged_caching_(*c, *r, slots, **s),
        "gather_paged": lambda c, r, s: kvdock.ops.gather_paged(*c, slots, **s, out=r),
        "gather_paged ": lambda c, r, s: kvdock.ops.gather_paged(*c, slots, **s),
        "static_update_": lambda c, r, s: kvdock.ops.static_update_(
            *(cache.transpose(1, 2) for cache in c), *(row.transpose(0, 1)[None] for row in r), 0
        ),
        "copy_blocks_": lambda c, r, s: kvdock.ops.copy_blocks_(*c, [(0, 1)]),
    }
    for op, call in calls.items():
        with pytest.raises(kvdock.UnsupportedError, match=f"^{op.strip()}( on .*|: k_cache): .*{dtype}.* not there yet"):
            call(caches, tuple(as_rows), scales)
        call([cache.view(torch.uint8) for cache in caches], [row.view(torch.uint8)[..., :8] for row in as_rows], {})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_scale_for_a_cache_that_is_not_quantised_is_an_error(target: Target, memory: Memory, name: str, on_host: bool) -> None:
    """Also once plans are there, and for a scale of ones: a silently ignored scale has been shipped elsewhere."""
    g = Geometry()
    pools, (k, v), slots = g.pools(memory), g.tokens(memory, [3]), memory.index([1, 2, 3])
    scale = torch.ones((), device="cpu" if on_host else target.device)
    for count in (3, 0):
        kvdock.ops.paged_caching_(*pools, k, v, slots)
        before = memory.copy()
        with pytest.raises(kvdock.ArgumentValueError, match=f"paged_caching_: {name}: expected None, since [kv]_cache is torch.bfloat16"):
            kvdock.ops.paged_caching_(*pools, k[:count], v[:count], slots[:count], **{name: scale})
        with pytest.raises(kvdock.ArgumentValueError, match=f"gather_paged: {name}: expected None"):
            kvdock.ops.gather_paged(*pools, slots[:count], **{name: scale})
        before.assert_same("raised")
