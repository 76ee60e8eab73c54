"""Sizes that are refused before memory is taken, threads, and copies that are none."""

from __future__ import annotations

import copy
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, StaleHandleError, UnsupportedError, WrongThreadError
from kvdock.prefix import create_prefix_cache
from kvdock.scheduler import BatchTables, BlockAllocator, CacheManager, SequenceBatch
from support_descriptors import in_thread
from support_prefix_calls import cached, run


def tables(*sizes: int, **how: int) -> BatchTables:
    return BatchTables(CacheManager(8, 1, null_block=True), *sizes, **how)


SIZES: dict[str, tuple[Callable[[], object], str]] = {
    "one token too many": (lambda: CacheManager(2**31 + 1, 1), "CacheManager: num_blocks: expected at most 2147483648, since"),
    "one block too many": (lambda: CacheManager(2**27 + 1, 16), "CacheManager: num_blocks: expected at most 134217728, since"),
    "the largest blocks": (lambda: CacheManager(2**22 + 1, 512), "CacheManager: num_blocks: expected at most 4194304"),
    "beyond 64 bits": (lambda: CacheManager(2**70, 1), "CacheManager: num_blocks"),
    "with a prefix cache": (lambda: CacheManager(2**31 + 1, 1, create_prefix_cache(block_size=1)), "CacheManager: num_blocks"),
    "none": (lambda: CacheManager(0, 1), "CacheManager: num_blocks"),
    "a block size": (lambda: CacheManager(2**30, 513), "CacheManager: block_size: expected 1 to 512"),
    "no int": (lambda: CacheManager(8.0), "CacheManager: num_blocks"),  # type: ignore[arg-type]
    "a prefix cache of another block size": (lambda: CacheManager(8, 2, create_prefix_cache(block_size=1)), "CacheManager: prefix"),
    "the rows of tables": (lambda: tables(2**31, 2), "BatchTables: expected tables of at most 2**31 numbers, got [2147483648, 2]"),
    "the columns of tables": (lambda: tables(1, 2**62), "BatchTables: "),
    "the tokens of tables": (lambda: tables(1, 1, max_tokens=2**30 + 1), "BatchTables: "),
    "an allocator": (lambda: BlockAllocator(2**31 + 1), "BlockAllocator: num_blocks: expected at most 2147483648"),
    "an allocator beyond 64 bits": (lambda: BlockAllocator(2**70), "BlockAllocator: num_blocks"),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_are_checked_before_memory_is_taken(case: str) -> None:
    make, text = SIZES[case]
    tracemalloc.start()
    try:
        with pytest.raises(KVDockError) as caught:
            make()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(text)
    assert peak < 2**20, "numpy tells tracemalloc what it takes"


def test_a_prompt_that_no_pool_holds_takes_no_memory() -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin([1])
    for call in (lambda: manager.plan([1], reserve=2**62).fits, lambda: manager.plan([1], at_most=2**62).fits):
        assert call() in (True, False)
    for n in (2**40, 2**62, 2**63 - 1, 2**63, 2**70):
        for count in (lambda n=n: manager.extend(seq, n), lambda n=n: manager.extend([seq], n)):
            with pytest.raises(MemoryError):
                count()
    many = [manager.begin([at]) for at in (2, 3)]
    with pytest.raises(MemoryError):
        manager.extend(many, [2**62, 2**62])
    assert (manager.available_size, manager._pool.promised) == (1, 0)
    manager.check_integrity()


COPIED: dict[str, Callable[[CacheManager], object]] = {
    "manager": lambda manager: manager,
    "sequence": lambda manager: manager.begin([9]),
    "pin": lambda manager: manager.pin([0, 1]),
    "batch": lambda manager: SequenceBatch.empty(manager, 2),
    "tables": lambda manager: BatchTables(manager, 2, 2),
    "allocator": lambda manager: manager.allocator,
    "prefix cache": lambda manager: manager.prefix,
    "handle": lambda manager: manager.prefix.match_prefix([0, 1]).handle,
}


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps, lambda it: copy.deepcopy({"deep": [it]})])
@pytest.mark.parametrize("what", COPIED)
def test_what_names_blocks_is_not_copied_and_says_what_to_do(what: str, how: Callable[[object], object]) -> None:
    manager = CacheManager(8192, 1, null_block=True)
    run(manager, range(4000))  # a chain that copying node by node would be too deep for
    made = COPIED[what](manager)
    state = manager.available_size, manager.prefix.num_locks, manager.num_sequences
    with pytest.raises(UnsupportedError, match=rf"{type(made).__name__}: .*Fix: (\w+ ){{2}}"):
        how(made)
    assert (manager.available_size, manager.prefix.num_locks, manager.num_sequences) == state
    manager.check_integrity()
    assert cached(manager, range(4000)) == 4000


CALLS: dict[str, Callable[[CacheManager, Any, Any, Any], object]] = {
    "plan": lambda manager, seq, pin, batch: manager.plan([1]),
    "begin": lambda manager, seq, pin, batch: manager.begin([1]),
    "open_empty": lambda manager, seq, pin, batch: manager.open_empty(),
    "extend": lambda manager, seq, pin, batch: manager.extend([seq], 1),
    "commit": lambda manager, seq, pin, batch: manager.commit(seq, [1], computed=1),
    "fork": lambda manager, seq, pin, batch: manager.fork(seq),
    "truncate": lambda manager, seq, pin, batch: manager.truncate(seq, 0),
    "finish": lambda manager, seq, pin, batch: manager.finish(seq),
    "abort": lambda manager, seq, pin, batch: manager.abort(seq),
    "pin": lambda manager, seq, pin, batch: manager.pin([7, 8]),
    "release": lambda manager, seq, pin, batch: pin.release(),
    "reset": lambda manager, seq, pin, batch: manager.reset(),
    "hand_over": lambda manager, seq, pin, batch: manager.hand_over(),
    "check_integrity": lambda manager, seq, pin, batch: manager.check_integrity(),
    "available_size": lambda manager, seq, pin, batch: manager.available_size,
    "grow": lambda manager, seq, pin, batch: batch.grow(1),
    "select": lambda manager, seq, pin, batch: batch.select([0, 0]),
    "fork of a batch": lambda manager, seq, pin, batch: batch.fork(),
    "close": lambda manager, seq, pin, batch: batch.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_another_thread_is_noticed_and_changes_nothing(call: str) -> None:
    manager = CacheManager(16, 2)
    run(manager, [7, 8])
    seq, pin, batch = manager.begin([1, 2, 3]), manager.pin([7, 8]), SequenceBatch.empty(manager, 1)

    def state() -> tuple[Any, ...]:
        counts = manager.allocator.ref_counts(np.arange(16)).tolist()
        return counts, manager.prefix.num_locks, manager.num_sequences, manager.num_pins, pin.is_held, seq.num_tokens, batch.length

    before = state()
    with pytest.raises(WrongThreadError, match=r"hand_over\(\)"):
        in_thread(lambda: CALLS[call](manager, seq, pin, batch))
    assert state() == before
    manager.hand_over()
    in_thread(lambda: CALLS[call](manager, seq, pin, batch) if call != "reset" else manager.abort(seq))


@pytest.mark.parametrize("null_block", [True, False])
def test_a_manager_belongs_to_the_thread_of_its_first_call_not_to_the_one_that_made_it(null_block: bool) -> None:
    manager, stay = CacheManager(8, 2, null_block=null_block), threading.Event()
    begun: list[Any] = []

    def work() -> None:
        try:
            begun.append(manager.begin([1, 2, 3]))
        except KVDockError as error:
            begun.append(error)
        stay.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    while not begun:
        pass
    with pytest.raises(WrongThreadError):
        manager.extend(begun[0], 1)
    stay.set()
    thread.join()
    assert manager.extend(begun[0], 1)[0].size == 1, "a thread that has ended owns nothing"


def test_a_handle_that_tokens_are_stored_behind_is_of_this_cache_and_stored() -> None:
    cache, other = create_prefix_cache(block_size=1), create_prefix_cache(block_size=1)
    for one in (cache, other):
        one.insert_prefix([1, 2], [0, 1])
    stale = cache.match_prefix([1, 2]).handle
    space = cache.insert_prefix([1, 2], [4, 5], ("a",)).handle
    cache.evict(2)
    before = cache.size_info
    for behind, error in ((other.match_prefix([1]).handle, StaleHandleError), (stale, StaleHandleError), (space, ArgumentValueError)):
        with pytest.raises(error, match=r"got "):
            cache.insert_prefix([3], [2], behind=behind)
    with pytest.raises((StaleHandleError, ArgumentTypeError)):
        cache.insert_prefix([3], [2], behind="root")  # type: ignore[arg-type]
    assert cache.size_info == before
    cache.check_integrity()
