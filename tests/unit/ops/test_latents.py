"""`mla_caching_` and `mla_gather` against the loops: every byte, in any memory order, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import kvdock
from opskit import PROPERTY, Memory, Target, bits_of, check

DIMS = [(512, 64), (16, 4), (5, 3), (4, 4), (1, 1), (64, 1)]
POOLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "slots outermost": {"order": (1, 0, 2, 3)},
    "gaps behind slots and blocks": {"gaps": (0, 3, 5, 0)},
    "odd address": {"offset": 2},
    "one of two halves": {"gaps": (0, 0, 64, 0)},
}


def pool(
    memory: Memory, dims: tuple[int, int], blocks: int = 5, block: int = 4, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> torch.Tensor:
    return memory.tensor(dtype, (blocks, block, 1, sum(dims)), **how)


def fused(memory: Memory, dims: tuple[int, int], lead: list[int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return latents and rotary parts out of one projection, behind something else."""
    projection = memory.tensor(dtype, (*lead, 3 + sum(dims)))
    return [*projection.split([3, *dims], -1)[1:]]


def apart(memory: Memory, dims: tuple[int, int], lead: list[int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return latents and rotary parts with steps of their own."""
    gaps = [[0] * (len(lead) - 1) + [0, gap] for gap in (8, 3)]
    return [memory.tensor(dtype, (*lead, dim), gaps=gap) for dim, gap in zip(dims, gaps, strict=True)]


def cases() -> Iterator[Any]:
    """Every combination; in quick ones each pool and each size have rows of one kind: by turns."""
    for (at, dims), (turn, name), (kind, rows) in itertools.product(enumerate(DIMS), enumerate(POOLS), enumerate((fused, apart))):
        marks = [pytest.mark.slow] if (at + turn) % 2 != kind else []
        yield pytest.param(dims, POOLS[name], rows, id=f"{rows.__name__}-{name}-{dims}", marks=marks)


@pytest.mark.parametrize(("dims", "how", "rows"), [*cases()])
def test_both_parts_of_a_row(target: Target, memory: Memory, dims: tuple[int, int], how: dict[str, Any], rows: Callable[..., Any]) -> None:
    kv_cache = pool(memory, dims, **how)
    for slots in ([7], [19, 0, 3, -1, 4, -9], [[1, 2], [-1, 18]], [*range(20)], [0, 20, 5]):
        index = memory.index(slots)
        new, out = rows(memory, dims, [*index.shape]), rows(memory, dims, [*index.shape])
        for _ in range(4):  # by every way that a call goes once it is known
            check(target, memory, "mla_caching_", kv_cache, *new, index)
            check(target, memory, "mla_gather", kv_cache, index, *out)


@given(seed=st.integers(0, 2**20))
@PROPERTY
def test_any_call(target: Target, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - the same in every run
    memory, dims = Memory(target.device, seed), (draw.randint(1, 40), draw.randint(1, 20))
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8])
    blocks, block = draw.randint(1, 4), draw.choice([1, 3, 16])
    kv_cache = pool(memory, dims, blocks, block, dtype, **draw.choice([how for how in POOLS.values() if "offset" not in how]))
    for _ in range(3):
        count = draw.randint(1, blocks * block)
        places = draw.sample([*range(blocks * block), *[-1] * 3, *([blocks * block] if draw.random() < 0.2 else [])], count)
        rows = draw.choice([fused, apart])
        index = memory.index(places, draw.choice([torch.int32, torch.int64]), step=draw.choice([1, 2]))
        check(target, memory, "mla_caching_", kv_cache, *rows(memory, dims, [count], dtype), index)
        check(target, memory, "mla_gather", kv_cache, index, *rows(memory, dims, [count], dtype))


def test_what_is_read_into_new_tensors(target: Target, memory: Memory) -> None:
    kv_cache = pool(memory, (16, 4))
    for slots in ([3, -1, 19], [[0, 1], [-2, 7]]):
        before = memory.copy()
        index = torch.tensor(slots, device=target.device)
        parts = kvdock.ops.mla_gather(kv_cache, index, 16)
        before.assert_same("mla_gather")
        rows = torch.where(index[..., None] >= 0, bits_of(kv_cache).to(target.device)[index // 4, index % 4, 0], 0)
        for part, expected in zip(parts, rows.split([16, 4], -1), strict=True):
            assert torch.equal(bits_of(part), expected.cpu())
            assert part.is_contiguous()


def test_a_pool_without_blocks_and_calls_without_tokens(target: Target, memory: Memory) -> None:
    nothing = pool(memory, (16, 4), blocks=0)
    check(target, memory, "mla_caching_", nothing, *fused(memory, (16, 4), [2]), memory.index([-1, -1]))
    check(target, memory, "mla_gather", nothing, memory.index([-1, -1]), *fused(memory, (16, 4), [2]))
    kv_cache = pool(memory, (16, 4))
    check(target, memory, "mla_caching_", kv_cache, *fused(memory, (16, 4), [0]), memory.index([]))
    assert [part.shape for part in kvdock.ops.mla_gather(kv_cache, memory.index([]), 16)] == [(0, 16), (0, 4)]


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no head": (
        lambda a: kvdock.ops.mla_caching_(a.kv[:, :, 0], a.c, a.pe, a.slots),
        kvdock.ArgumentValueError,
        r"kv_cache: expected shape \[NB",
    ),
    "two heads": (
        lambda a: kvdock.ops.mla_caching_(torch.zeros(4, 4, 2, 10), a.c, a.pe, a.slots),
        kvdock.ArgumentValueError,
        r"kv_cache: expected shape \[NB, block, 1, Dw\], got shape \[4, 4, 2, 10\]",
    ),
    "too narrow": (
        lambda a: kvdock.ops.mla_caching_(a.kv, a.c, a.pe[:, :2], a.slots),
        kvdock.ArgumentValueError,
        r"k_pe: expected the 20 elements of a row of kv_cache, less 16 of the latent, got shape \[3, 2\]\. Fix: pass the latent first",
    ),
    "in its own pool": (
        lambda a: kvdock.ops.mla_caching_(a.kv, a.kv[0, :3, 0, :16], a.pe, a.slots),
        kvdock.ArgumentValueError,
        "kv_c: .*which is written",
    ),
    "another dtype": (
        lambda a: kvdock.ops.mla_caching_(a.kv, a.c, a.pe.double(), a.slots),
        kvdock.ArgumentTypeError,
        "k_pe: expected torch.float32",
    ),
    "every other element": (
        lambda a: kvdock.ops.mla_caching_(a.kv, torch.zeros(3, 32)[:, ::2], a.pe, a.slots),
        kvdock.ArgumentValueError,
        "kv_c: expected an innermost stride of 1",
    ),
    "a scale": (
        lambda a: kvdock.ops.mla_caching_(a.kv, a.c, a.pe, a.slots, scale=torch.ones(())),
        kvdock.ArgumentValueError,
        "scale: .*not quantised",
    ),
    "quantised": (
        lambda a: kvdock.ops.mla_caching_(a.kv.to(torch.float8_e4m3fn), a.c, a.pe, a.slots),
        kvdock.UnsupportedError,
        "kv_cache: .*quantised caches are not there yet",
    ),
    "no rank": (
        lambda a: kvdock.ops.mla_gather(a.kv, a.slots, None),
        kvdock.ArgumentTypeError,
        "rank: expected an int of at least 1, got None",
    ),
    "a rank of all": (
        lambda a: kvdock.ops.mla_gather(a.kv, a.slots, 20),
        kvdock.ArgumentValueError,
        "rank: expected less than the 20 elements of a row, got 20",
    ),
    "another rank": (
        lambda a: kvdock.ops.mla_gather(a.kv, a.slots, 4, out=(a.c, a.pe)),
        kvdock.ArgumentValueError,
        "out: expected rows of rank=4 elements first, got 16",
    ),
    "no rank beside outputs": (
        lambda a: kvdock.ops.mla_gather(a.kv, a.slots, 16.0, out=(a.c, a.pe)),
        kvdock.ArgumentTypeError,
        "rank: expected an int of at least 1, got 16.0",
    ),
    "one output": (
        lambda a: kvdock.ops.mla_gather(a.kv, a.slots, 16, out=a.c),
        kvdock.ArgumentTypeError,
        "mla_gather: out: expected a pair",
    ),
    "no cache": (
        lambda a: kvdock.ops.mla_gather(None, a.slots, 16),
        kvdock.ArgumentTypeError,
        "kv_cache: expected a torch.Tensor, got NoneType",
    ),
    "outputs on the cache": (
        lambda a: kvdock.ops.mla_gather(a.kv, a.slots, 16, out=(a.kv[0, :3, 0, :16], a.pe)),
        kvdock.ArgumentValueError,
        "kv_cache: expected memory outside kv_c_out, which is written",
    ),
}


class Good:
    """Arguments of a good call."""

    def __init__(self) -> None:
        self.kv, self.c, self.pe = torch.zeros(4, 4, 1, 20), torch.ones(3, 16), torch.ones(3, 4)
        self.slots = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    call, error, text = WRONG[name]
    args = Good()
    with kvdock.use_backend("portable"), pytest.raises(error, match=text):
        call(args)
    assert not args.kv.any()
    assert bool((args.c == 1).all())
