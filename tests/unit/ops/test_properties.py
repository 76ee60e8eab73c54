"""Each op against the reference, on drawn sizes, memory orders, gaps, addresses, dtypes and index values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from opskit import PROPERTY, SINGLE, Memory, Target, check

pytestmark = pytest.mark.parametrize("target", SINGLE, indirect=True)

DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64]
Layout = dict[str, Any]


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> Layout:
    """Draw how a tensor lies in memory, its innermost dim dense."""
    order = (*draw(st.permutations(range(dims - 1))), dims - 1)
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 8]), min_size=dims, max_size=dims))
    return {"order": order, "gaps": gaps, "offset": 8 * draw(st.integers(0, 3)), "shift": 8 * draw(st.integers(0, 1))}


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.dtype, int, int]:
    """Draw dtype, heads and dim of keys or of values."""
    return draw(st.sampled_from(DTYPES)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 5, 8, 16, 24, 46]))


@st.composite
def leads(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the leading sizes of a call."""
    return draw(st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 4), st.integers(1, 10))))


def runs(draw: st.DrawFn, count: int, below: int) -> list[int]:
    """Draw ``count`` different slots as runs of consecutive ones in any order, with padding between and after them."""
    free, slots = list(range(below)), list[int]()
    while free and len(slots) < count and draw(st.integers(0, 5)):
        start = draw(st.integers(0, len(free) - 1))
        length = draw(st.sampled_from([1, 1, 2, 5, 16]))
        slots += free[start : start + length]
        del free[start : start + length]
        slots += [-draw(st.sampled_from([1, 1, 2, below, 2**31]))] * draw(st.sampled_from([0, 0, 0, 1, 3]))
    return (slots + [-1] * count)[:count]


def spoilt(draw: st.DrawFn, numbers: list[int], below: int) -> list[int]:
    """Put at times a number that is out of range somewhere."""
    if numbers and draw(st.integers(0, 3)) == 0:
        numbers[draw(st.integers(0, len(numbers) - 1))] = below + draw(st.sampled_from([0, 1, 1000]))
    return numbers


def indexed(memory: Memory, draw: st.DrawFn, numbers: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Place numbers as an index tensor of this shape."""
    dtype, step = draw(st.sampled_from([torch.int32, torch.int64])), draw(st.sampled_from([1, 1, 2]))
    content = torch.tensor([max(n, -(2**31)) for n in numbers], dtype=torch.int64).view(shape)
    return memory.index(content.tolist(), dtype, step=step).view(shape)


@PROPERTY
@given(st.data())
def test_paged_caching_and_gather_paged(target: Target, data: st.DataObject) -> None:
    draw, memory = data.draw, Memory(target.device)
    (dtype, hk, dk), (_, hv, dv) = draw(rows()), draw(rows())
    num_blocks, block, lead = draw(st.integers(1, 8)), draw(st.integers(1, 20)), draw(leads())
    pools = [memory.tensor(dtype, (num_blocks, block, *row), **draw(layouts(4))) for row in ((hk, dk), (hv, dv))]
    tokens = [memory.tensor(dtype, (*lead, *row), **draw(layouts(len(lead) + 2))) for row in ((hk, dk), (hv, dv))]
    capacity = num_blocks * block
    slots = indexed(memory, draw, spoilt(draw, runs(draw, torch.Size(lead).numel(), capacity), capacity), lead)
    check(target, memory, "paged_caching_", *pools, *tokens, slots)
    check(target, memory, "gather_paged", *pools, slots, *tokens)


@PROPERTY
@given(st.data())
def test_static_update(target: Target, data: st.DataObject) -> None:
    draw, memory = data.draw, Memory(target.device)
    (dtype, hk, dk), (_, hv, dv) = draw(rows()), draw(rows())
    batch, length = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    given_rows, new = draw(st.integers(0, batch)), draw(st.integers(0, length + 1))
    caches = [memory.tensor(dtype, (batch, h, length, d), **draw(layouts(4))) for h, d in ((hk, dk), (hv, dv))]
    tokens = [memory.tensor(dtype, (given_rows, h, new, d), **draw(layouts(4))) for h, d in ((hk, dk), (hv, dv))]
    fits = st.integers(0, max(length - new, 0))
    wild = st.sampled_from([-1, length - new + 1, 2**31 - 1, -(2**31)])
    number = fits if draw(st.integers(0, 2)) else st.one_of(fits, wild)
    kind = draw(st.sampled_from(["int", "[]", "[1]", "[b]"]))
    if kind == "int":
        lengths: Any = draw(number)
    else:
        count = given_rows if kind == "[b]" else 1
        shape = () if kind == "[]" else (count,)
        lengths = indexed(memory, draw, draw(st.lists(number, min_size=count, max_size=count)), shape)
    check(target, memory, "static_update_", *caches, *tokens, lengths)


@PROPERTY
@given(st.data())
def test_swap_blocks(target: Target, data: st.DataObject) -> None:
    """Pools of unlike numbers of blocks and memory orders: sources may repeat, and have a destination's number."""
    draw, memory = data.draw, Memory(target.device)
    (dtype, heads, dim), block = draw(rows()), draw(st.integers(1, 9))
    sizes = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    pools = [memory.tensor(dtype, (size, block, heads, dim), **draw(layouts(4))) for size in sizes]
    targets = draw(st.permutations(range(sizes[1])))[: draw(st.integers(0, sizes[1]))]
    flat = [draw(st.sampled_from([n, n, n, n, -1])) for dst in targets for n in (draw(st.integers(0, sizes[0] - 1)), dst)]
    dtype_index = draw(st.sampled_from([torch.int32, torch.int64]))
    pairs = torch.tensor(spoilt(draw, flat, max(sizes)), dtype=torch.int64).view(-1, 2).tolist()
    check(target, memory, "swap_blocks_", *pools, memory.index(pairs, dtype_index).view(-1, 2))


@PROPERTY
@given(st.data())
def test_copy_blocks(target: Target, data: st.DataObject) -> None:
    draw, memory = data.draw, Memory(target.device)
    (dtype, hk, dk), (_, hv, dv) = draw(rows()), draw(rows())
    num_blocks, blocks = draw(st.integers(1, 12)), (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    shapes = ((num_blocks, blocks[0], hk, dk), (num_blocks, blocks[1], hv, dv))
    pools = [memory.tensor(dtype, shape, **draw(layouts(4))) for shape in shapes]
    shuffled = draw(st.permutations(range(num_blocks)))
    targets = shuffled[: draw(st.integers(0, num_blocks - 1))]
    pairs = [[draw(st.sampled_from(shuffled[len(targets) :])), dst] for dst in targets]
    flat = spoilt(draw, [draw(st.sampled_from([block] * 6 + [-1])) for pair in pairs for block in pair], num_blocks)
    dtype_index = draw(st.sampled_from([torch.int32, torch.int64]))
    index = memory.index(torch.tensor(flat, dtype=torch.int64).view(-1, 2).tolist(), dtype_index).view(-1, 2)
    check(target, memory, "copy_blocks_", *pools, index)
