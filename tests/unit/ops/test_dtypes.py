"""No dtype is ever guessed, quantised caches are refused alike by every op, and no scale is ignored."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# sign, exponent and mantissa bits: -0, infinities, quiet and signalling NaNs with payloads, subnormals, the largest


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
