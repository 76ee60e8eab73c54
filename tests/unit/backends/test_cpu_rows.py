"""How the CPU backend moves rows: elements as wide as addresses allow, runs of slots, stretches without padding."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import kvdock
from opskit import PROPERTY, Geometry, Memory, bits_of

pytest.importorskip("kvdock_cpu", reason="kvdock_cpu is not installed")

from kvdock_cpu.paged_caching import RowWriter
from kvdock_cpu.rows import as_bits, memmove, runs_of, spans, wide_dtype, widen

BF16 = torch.bfloat16
WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def meta(tensor: torch.Tensor, *, alignment: int = 16, runtime: int = 0) -> kvdock.plugin.TensorMeta:
    """Describe a tensor as a request does; ``runtime`` leading dims are run-time values."""
    shape = tuple(None if i < runtime else size for i, size in enumerate(tensor.shape))
    strides = tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return kvdock.plugin.TensorMeta(tensor.dtype, shape, None if runtime else strides, alignment)


@PROPERTY
@given(st.lists(st.integers(-2, 30), min_size=1, max_size=40), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_runs_against_a_loop(slots: list[int], ordered: bool, dtype: torch.dtype) -> None:
    slots = sorted(slots) if ordered else slots
    found = runs_of(torch.tensor(slots, dtype=dtype), 25)
    if min(slots) < 0 or max(slots) >= 25:
        assert found is None
        return
    expected: list[tuple[int, int, int]] = []
    for place, slot in enumerate(slots):
        if expected and slots[place - 1] + 1 == slot:
            expected[-1] = (*expected[-1][:2], expected[-1][2] + 1)
        else:
            expected.append((place, slot, 1))
    assert found == expected


def test_runs_of_a_batch_go_on_across_its_rows() -> None:
    assert runs_of(torch.tensor([[3, 4], [5, 9]]), 10) == [(0, 3, 3), (3, 9, 1)]
    assert runs_of(torch.tensor([[3, 9], [4, 9], [5, 9]])[:, 0], 10) == [(0, 3, 3)]


@PROPERTY
@given(st.lists(st.booleans(), max_size=30))
def test_spans_against_a_loop(keep: list[bool]) -> None:
    expected, start = [], None
    for place, kept in enumerate([*keep, False]):
        if kept and start is None:
            start = place
        if not kept and start is not None:
            expected.append((start, place))
            start = None
    assert list(spans(torch.tensor(keep, dtype=torch.bool))) == expected


@pytest.mark.parametrize(
    ("gaps", "alignment", "others", "dim", "bytes_"),
    [
        ((0, 0, 0, 0), 16, (), 8, 16),
        ((0, 0, 0, 0), 16, (), 4, 8),
        ((0, 0, 0, 0), 16, (), 6, 4),
        ((0, 0, 0, 0), 16, (), 5, 2),
        ((0, 0, 0, 0), 8, (), 8, 8),
        ((0, 0, 0, 0), 16, (4,), 8, 4),
        ((0, 0, 0, 0), 16, (16, 2), 8, 2),
        ((0, 4, 0, 0), 16, (), 8, 8),
        ((0, 0, 2, 0), 16, (), 8, 4),
        ((0, 0, 0, 1), 16, (), 8, 2),
    ],
)
def test_elements_are_as_wide_as_everything_allows(
    gaps: tuple[int, ...], alignment: int, others: tuple[int, ...], dim: int, bytes_: int
) -> None:
    pool = Memory().tensor(BF16, (3, 4, 2, dim), gaps=gaps)
    sources = [kvdock.plugin.TensorMeta(BF16, (None, 2, dim), None, other) for other in others]
    dtype = wide_dtype(meta(pool, alignment=alignment), *sources)
    assert dtype == WIDE[bytes_]
    assert dtype.itemsize == bytes_


@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (1, 4, 2, 8), (3, 1, 2, 8), (3, 4, 1, 8), (1, 1, 1, 8)])
@pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)
def test_a_wide_view_is_the_same_memory(shape: tuple[int, ...], wide: torch.dtype) -> None:
    """Also where dims of size 1 have strides that torch would refuse to divide."""
    tensor = Memory().tensor(BF16, shape)
    odd = tensor.as_strided(shape, [3 if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True)])
    view = widen(odd, wide)
    assert view.dtype == wide
    assert view.data_ptr() == tensor.data_ptr()
    assert view.shape == (*shape[:3], 8 * 2 // wide.itemsize)
    assert torch.equal(bits_of(view.resolve_conj().contiguous().view(torch.int16)), bits_of(tensor))


def test_an_odd_offset_in_a_storage_keeps_elements_narrow() -> None:
    """torch divides the offset in the storage too, though only the address matters to memory."""
    tensor = Memory().tensor(BF16, (3, 4, 2, 8), offset=2, shift=62)
    assert tensor.data_ptr() % 16 == 0
    assert widen(tensor, torch.int64).dtype == torch.int16


def test_bits_keep_shape_and_memory() -> None:
    for dtype, integer in ((BF16, torch.int16), (torch.float32, torch.int32), (torch.float64, torch.int64)):
        tensor = torch.randn(2, 3).to(dtype)
        bits = as_bits(tensor)
        assert (bits.dtype, bits.shape, bits.data_ptr()) == (integer, tensor.shape, tensor.data_ptr())


def test_memmove_moves_bytes() -> None:
    source, target = torch.arange(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    memmove(target.data_ptr() + 2, source.data_ptr() + 5, 3)
    assert target.tolist() == [0, 0, 5, 6, 7, 0, 0, 0, 0, 0]
    memmove(source.data_ptr() + 1, source.data_ptr(), 5)
    assert source.tolist() == [0, 0, 1, 2, 3, 4, 6, 7, 8, 9]


STEPS = {
    "dense": (Geometry(), {}, 32, True),
    "padded slots": (Geometry(), {"gaps": (0, 0, 8, 0)}, None, False),
    "padded slots of one block": (Geometry(num_blocks=1), {"gaps": (0, 0, 8, 0)}, 48, False),
    "padded blocks": (Geometry(), {"gaps": (0, 8, 0, 0)}, None, False),
    "padded blocks of one slot": (Geometry(block=1), {"gaps": (0, 8, 0, 0)}, 48, False),
    "padded heads": (Geometry(), {"gaps": (0, 0, 0, 8)}, None, False),
    "hnd": (Geometry(), {"order": (0, 2, 1, 3)}, None, False),
    "hnd of one head": (Geometry.even(1, 8), {"order": (0, 2, 1, 3)}, 16, True),
    "one slot": (Geometry(num_blocks=1, block=1), {}, 32, True),
    "slots outermost": (Geometry(), {"order": (1, 0, 2, 3)}, None, False),
}


@pytest.mark.parametrize(("g", "layout", "step", "packed"), STEPS.values(), ids=STEPS)
def test_the_step_from_slot_to_slot(g: Geometry, layout: dict[str, tuple[int, ...]], step: int | None, packed: bool) -> None:
    """A step where rows are dense and every slot is a multiple of it: then a row can be moved by its address."""
    memory = Memory()
    pool, rows = memory.tensor(BF16, g.k_shape, **layout), memory.tensor(BF16, (5, g.hk, g.dk))
    if layout.get("gaps") == (0, 0, 8, 0) and g.num_blocks > 1:
        step = 48  # blocks are padded alike, since their last slot is
    writer = RowWriter(meta(pool), meta(rows, runtime=1))
    assert writer.row_bytes == g.hk * g.dk * 2
    assert writer.slot_bytes == step
    assert writer.is_packed(rows) is packed
    assert not writer.is_packed(rows[::2])
    starts = [pool[b, o].data_ptr() - pool.data_ptr() for b, o in itertools.product(range(g.num_blocks), range(g.block))]
    if step is not None and len(starts) > 1:
        assert starts == [step * slot for slot in range(g.capacity)]
