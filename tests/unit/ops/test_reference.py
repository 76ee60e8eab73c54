"""The slow reference against results written out by hand: it defines what the ops mean, so nothing else can check it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvdock_conformance import reference


def counting(*shape: int, start: int = 1) -> torch.Tensor:
    """Return the numbers from ``start`` on in a shape."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.fixture(scope="module")
def forks() -> None:
    """Fork nothing: what has imported torch cannot say who does."""


def test_importing_it_does_not_import_torch() -> None:
    script = (
        "import sys, kvdock_conformance, kvdock_conformance.reference; assert 'torch' not in sys.modules and 'kvdock' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_slot_is_a_block_and_an_offset() -> None:
    k_cache, v_cache = torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 2, 1)
    k, v = counting(4, 1, 2), counting(4, 2, 1, start=11)
    skipped = reference.paged_caching_(k_cache, v_cache, k, v, torch.tensor([5, -1, 0, 3]))
    assert skipped == []
    assert k_cache.tolist() == [[[[5, 6]], [[0, 0]]], [[[0, 0]], [[7, 8]]], [[[0, 0]], [[1, 2]]]]
    assert v_cache.tolist() == [[[[15], [16]], [[0], [0]]], [[[0], [0]], [[17], [18]]], [[[0], [0]], [[11], [12]]]]


def test_a_batch_is_its_rows_one_after_another() -> None:
    one, two = [torch.zeros(2, 2, 1, 1) for _ in range(2)], [torch.zeros(2, 2, 1, 1) for _ in range(2)]
    k, slots = counting(2, 2, 1, 1), torch.tensor([[3, 0], [-1, 1]])
    reference.paged_caching_(*one, k, k, slots)
    reference.paged_caching_(*two, k.flatten(0, 1), k.flatten(0, 1), slots.flatten())
    assert one[0].flatten().tolist() == two[0].flatten().tolist() == [2, 4, 0, 1]


def test_slots_beyond_the_pool_are_returned_and_not_written() -> None:
    caches = [torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)]
    k = counting(2, 3, 1, 1)
    assert reference.paged_caching_(*caches, k, k, torch.tensor([[4, 1, -5], [-(2**63), 2**63 - 1, 3]])) == [(0, 0), (1, 1)]
    assert caches[0].flatten().tolist() == [0, 2, 0, 6]


def test_the_last_of_equal_slots_wins() -> None:
    caches = [torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1)]
    reference.paged_caching_(*caches, counting(3, 1, 1), counting(3, 1, 1), torch.tensor([1, 1, 1]))
    assert caches[0].flatten().tolist() == [0, 3]


def test_it_honours_strides() -> None:
    memory = torch.zeros(24)
    k_cache = memory.as_strided((2, 2, 2, 2), (2, 4, 8, 1), 1)  # heads, then slots, then blocks
    k = counting(2, 4).as_strided((2, 2, 2), (4, 2, 1))
    reference.paged_caching_(k_cache, torch.zeros(2, 2, 1, 1), k, counting(2, 1, 1), torch.tensor([2, 1]))
    assert memory.tolist() == [0, 0, 0, 1, 2, 5, 6, 0, 0, 0, 0, 3, 4, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits_are_moved(dtype: torch.dtype) -> None:
    """A signalling NaN with a payload, and -0."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = {torch.float16: 0x7C01, torch.bfloat16: 0x7F81, torch.float32: 0x7F800001, torch.float64: 0x7FF0000000000001}[dtype]
    k = torch.tensor([bits, torch.iinfo(size).min], dtype=size).view(dtype).view(2, 1, 1)
    caches = [torch.ones(1, 2, 1, 1, dtype=dtype) for _ in range(2)]
    reference.paged_caching_(*caches, k, k, torch.tensor([0, 1]))
    assert caches[1].view(size).flatten().tolist() == [bits, torch.iinfo(size).min]
    out = [torch.ones(2, 1, 1, dtype=dtype) for _ in range(2)]
    reference.gather_paged(*caches, torch.tensor([1, 0]), *out)
    assert out[0].view(size).flatten().tolist() == [torch.iinfo(size).min, bits]


def test_reading_gives_zeros_where_there_is_nothing() -> None:
    k_cache, v_cache = counting(2, 2, 1, 2), counting(2, 2, 1, 1, start=11)
    k_out, v_out = torch.full((4, 1, 2), 9.0), torch.full((4, 1, 1), 9.0)
    assert reference.gather_paged(k_cache, v_cache, torch.tensor([3, -1, 4, 0]), k_out, v_out) == [(2,)]
    assert k_out.tolist() == [[[7, 8]], [[0, 0]], [[0, 0]], [[1, 2]]]
    assert v_out.flatten().tolist() == [14, 0, 0, 11]


@pytest.mark.parametrize(
    ("lengths", "row_0", "row_1"),
    [
        (0, [1, 2, 0], [3, 4, 0]),
        (1, [0, 1, 2], [0, 3, 4]),
        (torch.tensor(1), [0, 1, 2], [0, 3, 4]),
        (torch.tensor([1]), [0, 1, 2], [0, 3, 4]),
        (torch.tensor([1, 0]), [0, 1, 2], [3, 4, 0]),
    ],
    ids=["0", "1", "[]", "[1]", "[b]"],
)
def test_new_positions_go_behind_the_length(lengths: int | torch.Tensor, row_0: list[float], row_1: list[float]) -> None:
    caches = [torch.zeros(3, 1, 3, 1) for _ in range(2)]
    assert reference.static_update_(*caches, counting(2, 1, 2, 1), counting(2, 1, 2, 1), lengths) == []
    assert caches[0].view(3, 3).tolist() == caches[1].view(3, 3).tolist() == [row_0, row_1, [0, 0, 0]]


def test_heads_of_a_static_cache_keep_apart() -> None:
    k_cache, v_cache = torch.zeros(1, 2, 3, 1), torch.zeros(1, 1, 3, 2)
    reference.static_update_(k_cache, v_cache, counting(1, 2, 1, 1), counting(1, 1, 1, 2, start=11), 1)
    assert k_cache.tolist() == [[[[0], [1], [0]], [[0], [2], [0]]]]
    assert v_cache.tolist() == [[[[0, 0], [11, 12], [0, 0]]]]


def test_rows_that_do_not_fit_are_skipped_whole_and_every_position_is_returned() -> None:
    caches = [torch.zeros(4, 1, 3, 1) for _ in range(2)]
    k = counting(4, 1, 2, 1)
    skipped = reference.static_update_(*caches, k, k, torch.tensor([2, 1, -1, 2**63 - 1]))
    assert skipped == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert caches[0].view(4, 3).tolist() == [[0, 0, 0], [0, 3, 4], [0, 0, 0], [0, 0, 0]]


def test_blocks_are_copied_whole_in_both_caches() -> None:
    k_cache, v_cache = counting(4, 1, 1, 2), counting(4, 2, 1, 1, start=11)
    assert reference.copy_blocks_(k_cache, v_cache, [(0, 3), (-1, 2), (2, -1), (4, 1), (1, 4), (9, -1)]) == [(3,), (4,)]
    assert k_cache.view(4, 2).tolist() == [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert v_cache.view(4, 2).tolist() == [[11, 12], [13, 14], [15, 16], [11, 12]]


def test_a_pool_without_blocks() -> None:
    caches = [torch.zeros(0, 2, 1, 1), torch.zeros(0, 2, 1, 1)]
    out = [torch.ones(2, 1, 1), torch.ones(2, 1, 1)]
    slots = torch.tensor([-1, 0])
    assert reference.paged_caching_(*caches, *out, slots) == [(1,)]
    assert reference.gather_paged(*caches, slots, *out) == [(1,)]
    assert out[0].flatten().tolist() == [0, 0]
    assert reference.copy_blocks_(*caches, [(0, 0), (-1, 0)]) == [(0,)]
