"""BlockAllocator: all or nothing, counted, and every misuse an error that changes nothing."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    IndexRangeError,
    IntegrityError,
    KVDockError,
    OutOfBlocksError,
    WrongThreadError,
)
from kvdock.scheduler import BlockAllocator


def snapshot(allocator: BlockAllocator) -> tuple[int, list[int]]:
    """Everything a caller can see."""
    return allocator.num_free, allocator.ref_counts(np.arange(allocator.num_blocks)).tolist()


def in_thread(call: Callable[[], Any], name: str = "other") -> Any:
    """Return what a call returns, or the exception it raises, in a thread that has ended then."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - handed to the test
            results.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return results[0]


def test_hands_out_distinct_blocks_in_order_and_takes_them_back() -> None:
    allocator = BlockAllocator(10)
    first = allocator.allocate(4)
    assert first.tolist() == [0, 1, 2, 3]
    assert first.dtype == np.int32
    assert allocator.allocate(3).tolist() == [4, 5, 6]
    assert (allocator.num_free, allocator.num_used) == (3, 7)
    allocator.release([1, 4])
    assert allocator.allocate(3).tolist() == [1, 4, 7], "released last, handed out first, in the order given"
    allocator.check_integrity()


def test_what_is_handed_out_does_not_alias_the_stack() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(4)
    blocks[:] = 99
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(1)
    allocator.release(range(4))
    assert sorted(allocator.allocate(4).tolist()) == [0, 1, 2, 3]


def test_too_few_free_blocks_change_nothing_and_the_error_has_the_numbers() -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(5)
    before = snapshot(allocator)
    numbers = r"at most 3 blocks \(free now, of 8 in the pool\), got a request for 4.*Fix: .*num_blocks"
    with pytest.raises(OutOfBlocksError, match=numbers) as caught:
        allocator.allocate(4)
    assert isinstance(caught.value, MemoryError)
    assert snapshot(allocator) == before
    assert allocator.allocate(3).size == 3


def test_nothing_can_be_allocated_shared_and_released() -> None:
    allocator = BlockAllocator(2)
    assert allocator.allocate(0).tolist() == []
    allocator.share([])
    allocator.release([])
    allocator.release(np.empty((0, 3), dtype=np.int32))
    assert allocator.num_free == 2


def test_a_block_is_free_when_its_last_holder_releases_it() -> None:
    allocator = BlockAllocator(4)
    block = int(allocator.allocate(1)[0])
    allocator.share([block])
    allocator.share([block, block])
    assert int(allocator.ref_counts([block])[0]) == 4
    allocator.release([block, block, block])
    assert (int(allocator.ref_counts([block])[0]), allocator.num_free) == (1, 3)
    allocator.release([block])
    assert (int(allocator.ref_counts([block])[0]), allocator.num_free) == (0, 4)
    allocator.check_integrity()


def test_a_block_named_twice_comes_back_once() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    allocator.share(blocks)
    allocator.release([2, 0, 2, 0, 1, 1])
    assert allocator.num_free == 3
    assert sorted(allocator.allocate(3).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("blocks", "named"),
    [([0], r"\[0\]"), ([3, 3], r"\[3, 3\]"), ([4, 2, 4], r"\[4, 4\]"), ([5], r"\[5\]"), ([2, 2, 2], r"\[2, 2, 2\]")],
    ids=["already free", "twice in one call", "twice among others", "never allocated", "more often than shared"],
)
def test_a_double_free_is_named_and_changes_nothing(blocks: list[int], named: str) -> None:
    allocator = BlockAllocator(6)
    allocator.allocate(5)
    allocator.share([2])
    allocator.release([0])
    before = snapshot(allocator)
    with pytest.raises(ArgumentValueError, match=rf"double free of blocks {named}.*Fix: ") as caught:
        allocator.release(blocks)
    assert isinstance(caught.value, ValueError)
    assert snapshot(allocator) == before
    allocator.check_integrity()


@pytest.mark.parametrize("method", ["share", "release", "ref_counts"])
@pytest.mark.parametrize("foreign", [-1, 4, 2**40])
def test_ids_from_elsewhere_are_named_and_change_nothing(method: str, foreign: int) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    before = snapshot(allocator)
    with pytest.raises(IndexRangeError, match=rf"{method}: blocks: expected ids from 0 to 3, got \[{foreign}\]"):
        getattr(allocator, method)([0, foreign])
    assert snapshot(allocator) == before


def test_a_long_list_of_bad_ids_is_cut_short() -> None:
    with pytest.raises(IndexRangeError, match=r"\[4, 5, 6, 7, 8, 9, 10, 11\] and 12 more"):
        BlockAllocator(4).ref_counts(range(4, 24))


@pytest.mark.parametrize("method", ["share", "release"])
@pytest.mark.parametrize("blocks", [[0.0], ["0"], [True], [None]])
def test_what_is_no_integer_is_refused(method: str, blocks: list[object]) -> None:
    allocator = BlockAllocator(2)
    allocator.allocate(2)
    with pytest.raises(ArgumentTypeError, match=r"expected integers"):
        getattr(allocator, method)(blocks)
    assert allocator.num_free == 0


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.uint8)])
def test_ids_come_as_lists_arrays_and_tensors(kind: Callable[[list[int]], Any]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    allocator.release(kind([1, 3]))
    assert allocator.allocate(2).tolist() == [1, 3]


def test_sharing_a_free_block_is_refused() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    before = snapshot(allocator)
    with pytest.raises(ArgumentValueError, match=r"expected blocks in use, got free blocks \[2, 3\]"):
        allocator.share([0, 2, 3])
    assert snapshot(allocator) == before


@pytest.mark.parametrize("n", [-1, 1.0, "1", None, True])
def test_a_request_is_a_number_of_blocks(n: Any) -> None:
    with pytest.raises(KVDockError, match=r"BlockAllocator.allocate: n: expected"):
        BlockAllocator(4).allocate(n)


@pytest.mark.parametrize("n", [0, -3, 2.0, None])
def test_a_pool_has_blocks(n: Any) -> None:
    with pytest.raises(KVDockError, match=r"BlockAllocator: num_blocks: expected"):
        BlockAllocator(n)


def test_another_thread_is_noticed_and_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    before = snapshot(allocator)
    changes = (lambda: allocator.allocate(1), lambda: allocator.share(blocks), lambda: allocator.release(blocks))
    for call in (*changes, allocator.hand_over):
        error = in_thread(call, name="intruder")
        assert isinstance(error, WrongThreadError)
        assert "MainThread" in str(error)
        assert "'intruder'" in str(error)
        assert "hand_over()" in str(error)
    assert snapshot(allocator) == before
    assert in_thread(lambda: allocator.num_free) == 2, "reading is open to all"


def test_an_allocator_goes_to_another_thread_when_handed_over() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    allocator.hand_over()
    stay, done = threading.Event(), threading.Event()

    def work() -> None:
        allocator.allocate(1)
        done.set()
        stay.wait()

    thread = threading.Thread(target=work)
    thread.start()
    done.wait()
    with pytest.raises(WrongThreadError):
        allocator.allocate(1)
    stay.set()
    thread.join()
    assert allocator.allocate(1).tolist() == [2], "a thread that has ended owns nothing"


def test_the_integrity_check_finds_what_is_wrong() -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(3)
    allocator.check_integrity()
    for array, place, value in ((allocator._counts, 5, 1), (allocator._stack, 0, 1), (allocator._counts, 0, -1)):
        kept = allocator._counts.copy(), allocator._stack.copy()
        array[place] = value
        with pytest.raises(IntegrityError, match=r"got 8 blocks, 5 on the free stack"):
            allocator.check_integrity()
        allocator._counts[:], allocator._stack[:] = kept
    allocator.check_integrity()


def test_equal_calls_give_equal_blocks() -> None:
    """Ranks of a tensor-parallel group decide alike."""

    def run(seed: int) -> list[list[int]]:
        allocator, generator = BlockAllocator(64), np.random.default_rng(seed)
        held: list[Any] = []
        log = []
        for _ in range(200):
            if held and generator.random() < 0.5:
                allocator.release(held.pop(int(generator.integers(len(held)))))
            elif allocator.num_free >= 5:
                held.append(allocator.allocate(int(generator.integers(1, 6))))
                log.append(held[-1].tolist())
        return log

    assert run(1) == run(1)


def median_us(call: Callable[[], object], times: int = 200) -> float:
    spans = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans) * 1e6


def test_the_cost_is_in_the_blocks_touched_not_in_the_pool() -> None:
    """1,000 blocks: in a pool of a million not much slower than in one of 4,000, where everything is in the caches."""

    def cost(num_blocks: int) -> float:
        allocator = BlockAllocator(num_blocks)
        scattered = allocator.allocate(num_blocks)
        np.random.default_rng(0).shuffle(scattered)
        allocator.release(scattered)

        def both_ways() -> None:
            allocator.release(allocator.allocate(1000))

        gc.collect()
        return median_us(both_ways)

    small = min(cost(4_000) for _ in range(3))
    large = min(cost(1_000_000) for _ in range(3))
    assert large < 8 * small, f"{large:.1f} us in a pool of a million, {small:.1f} us in one of 4,000"
