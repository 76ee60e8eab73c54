"""Looking ahead, reservations, prompts in chunks, parts of blocks and pins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from kvdock.scheduler import CacheManager, CacheSequence
from support_prefix_calls import cached, run


def test_what_a_prompt_would_lock_itself_is_no_room_for_it() -> None:
    """The pool says 8, and 5 new tokens do not fit: the 4 cached ones are needed for the prompt."""
    manager = CacheManager(10, 1)
    run(manager, [1, 2, 3, 4])
    manager.begin([50, 51])
    assert manager.available_size == 8
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert manager.plan(prompt) == (4, 5, False)
    with pytest.raises(OutOfBlocksError, match=r"at most 4 blocks: 4 free and 0 evictable.*got a request for 5.*plan\(\)"):
        manager.begin(prompt)
    assert manager.plan(prompt[:8]) == (4, 4, True)
    assert manager.begin(prompt[:8]).cached_len == 4


@pytest.mark.parametrize("fits", [True, False])
def test_plan_changes_nothing(fits: bool) -> None:
    manager = CacheManager(6, 2)
    run(manager, [1, 2, 3, 4])
    run(manager, [5, 6])
    before = manager.prefix.stats, manager.prefix.size_info, manager.prefix.num_locks, manager.allocator.num_free
    assert manager.plan([1, 2, 3, 4, 9] * (1 if fits else 3), reserve=1).fits == fits
    assert (manager.prefix.stats, manager.prefix.size_info, manager.prefix.num_locks, manager.allocator.num_free) == before
    assert manager.allocator.num_free == 3
    manager.begin(range(10, 18))
    assert (cached(manager, [1, 2, 3, 4]), cached(manager, [5, 6])) == (2, 2), "least recently used goes first: a plan is no use"


@pytest.mark.parametrize(
    ("how", "expected"),
    [({}, (4, 2)), ({"reserve": 1}, (4, 2)), ({"reserve": 2}, (4, 3)), ({"at_most": 0}, (4, 0)), ({"at_most": 2, "reserve": 1}, (4, 2))],
)
def test_plan_counts_what_begin_takes_and_promises(how: dict[str, int], expected: tuple[int, int]) -> None:
    manager = CacheManager(8, 2)
    run(manager, [1, 2, 3, 4])
    manager.begin([9])
    free = manager.available_size
    fit = manager.plan([1, 2, 3, 4, 5, 6, 7], **how)
    assert fit == (*expected, True)
    seq = manager.begin([1, 2, 3, 4, 5, 6, 7], **how)
    assert (seq.cached_len, free - manager.available_size) == (4, 2 * (fit.new_blocks + 2)), "and it locks the two it found"


def test_room_that_was_reserved_is_there_whoever_asks() -> None:
    manager = CacheManager(4, 2)
    seq = manager.begin([1, 2, 3], reserve=3)
    assert (seq.num_tokens, manager.available_size, manager.allocator.num_free) == (3, 2, 2)
    assert not manager.plan([8, 9, 7]).fits
    other = manager.begin([8, 9])
    for call in (lambda: manager.extend(other, 1), lambda: manager.begin([7])):
        with pytest.raises(OutOfBlocksError, match="1 of them promised"):
            call()
    assert manager.extend(seq, 3)[0].size == 3
    with pytest.raises(OutOfBlocksError):
        manager.extend(seq, 1)
    manager.check_integrity()


def test_a_reserve_is_all_or_nothing() -> None:
    manager = CacheManager(4, 2)
    with pytest.raises(OutOfBlocksError):
        manager.begin([1, 2, 3], reserve=6)
    assert (manager.available_size, manager.num_sequences) == (8, 0)
    manager.begin([9])
    with pytest.raises(OutOfBlocksError, match="3 free"):
        manager.begin([1, 2, 3], reserve=5)
    assert (manager.available_size, manager.num_sequences, manager.prefix.num_locks) == (6, 1, 1)


@pytest.mark.parametrize("end", ["finish", "abort", "drop"])
def test_a_promise_ends_with_its_sequence(end: str) -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin([1], reserve=3)
    assert manager.available_size == 0
    {"finish": manager.finish, "abort": manager.abort, "drop": lambda one: manager.finish(one, keep=False)}[end](seq)
    assert manager.available_size == 4


def test_what_is_truncated_is_promised_again_as_far_as_blocks_became_free() -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin([1, 2], reserve=2)
    manager.extend(seq, 2)
    fork = manager.fork(seq, 4)
    manager.truncate(seq, 1)
    assert manager.available_size == 0
    with pytest.raises(OutOfBlocksError):
        manager.extend(seq, 1)
    manager.abort(fork)
    manager.truncate(seq, 1)
    with pytest.raises(OutOfBlocksError):
        manager.begin([9])
    assert manager.extend(seq, 3)[0].size == 3


def test_a_fork_of_what_was_promised_room_needs_a_block_for_the_copy() -> None:
    manager = CacheManager(2, 4)
    seq = manager.begin([1, 2], reserve=4)
    with pytest.raises(OutOfBlocksError, match=r"CacheManager.fork"):
        manager.fork(seq)
    assert (manager.num_sequences, manager.available_size) == (1, 0)
    manager = CacheManager(3, 4)
    seq = manager.begin([1, 2], reserve=4)
    fork = manager.fork(seq)
    slots, pairs = manager.extend(seq, 4)
    assert (slots.size, len(pairs)) == (4, 1)
    assert manager.extend(fork, 1)[1].size == 0, "it has the block for itself now"
    manager.check_integrity()


def test_equal_blocks_of_forks_do_not_use_up_what_was_promised() -> None:
    """The fork kept a block of its own, while the cached one was locked: one block fewer than promised."""
    manager = CacheManager(5, 1)
    first, seq = manager.begin([1]), manager.begin([1])
    fork = manager.fork(seq)
    manager.commit(first, [], computed=1)
    manager.finish(first)
    promised = manager.begin([9], reserve=3)
    assert manager.available_size == 0
    manager.commit(seq, [], computed=1)
    assert fork.block_table().tolist() == seq.block_table().tolist()
    manager.check_integrity()
    manager.extend(promised, 3)


def test_a_pin_breaks_no_promise() -> None:
    manager = CacheManager(4, 1)
    run(manager, [1, 2])
    manager.begin([9], reserve=3)
    assert manager.available_size == 0
    with pytest.raises(OutOfBlocksError, match=r"CacheManager\.pin"):
        manager.pin([1, 2])
    assert (manager.num_pins, manager.prefix.num_locks) == (0, 1)


def chunked(manager: CacheManager, tokens: list[int], at_most: int = 2) -> CacheSequence:
    return manager.begin(tokens, at_most=at_most)


def test_a_prompt_in_chunks_goes_on_behind_what_others_have_published() -> None:
    manager, prompt = CacheManager(16, 2), list(range(11))
    seq = chunked(manager, prompt)
    assert (seq.num_tokens, seq.num_known, seq.cached_len) == (2, 11, 0)
    manager.commit(seq, [], computed=2)
    run(manager, prompt[:9])
    hits = manager.prefix.stats.hit_tokens
    slots, pairs = manager.extend(seq, 2)
    assert (seq.cached_len, seq.computed, seq.num_tokens, slots.size, pairs.size) == (8, 8, 10, 2, 0)
    assert slots.tolist() == seq.slot_mapping(8, 10).tolist()
    assert manager.prefix.stats.hit_tokens == hits + 8
    manager.check_integrity()
    manager.commit(seq, [], computed=10)
    slots, _ = manager.extend(seq, 2)
    assert slots.size == 2, "nothing was found, so there is room for as much as was asked for"
    assert seq.num_tokens == 12


@pytest.mark.parametrize("why", ["not asked", "not computed", "truncated", "no room"])
def test_a_prompt_in_chunks_is_not_looked_up(why: str) -> None:
    manager, prompt = CacheManager(16, 2), list(range(11))
    seq = chunked(manager, prompt)
    manager.commit(seq, [], computed=1 if why == "not computed" else 2)
    run(manager, prompt[:7])
    if why == "truncated":
        manager.truncate(seq, 2)
    if why == "no room":  # to lock the three that are cached, behind this one's
        manager.begin([90], reserve=manager.available_size - 2 - 1)
        manager.begin([91])
    before = seq.num_tokens
    if why == "no room":
        with pytest.raises(OutOfBlocksError):
            manager.extend(seq, 2)
    else:
        manager.extend(seq, 2, match=why != "not asked")
    assert (seq.cached_len, seq.num_tokens) == (0, before + 2 * (why != "no room"))
    manager.check_integrity()


def test_no_room_is_made_beyond_a_prompt_that_is_found() -> None:
    manager, prompt = CacheManager(16, 2), list(range(9))
    seq, plain = chunked(manager, prompt), manager.begin([50])
    manager.commit(seq, [], computed=2)
    run(manager, prompt)
    out = np.full(6, -7, dtype=np.int32)
    manager.extend([seq, plain], [5, 1], slots=out)
    assert (seq.cached_len, seq.num_tokens) == (8, 9)
    assert out.tolist() == [*seq.slot_mapping(8, 9).tolist(), -1, -1, -1, -1, *plain.slot_mapping(1, 2).tolist()]


@pytest.mark.parametrize("at_most", [0, 1, 3, 100])
def test_a_fork_of_a_prompt_in_chunks_goes_on_by_itself(at_most: int) -> None:
    manager, prompt = CacheManager(32, 2), list(range(9))
    seq = chunked(manager, prompt, at_most)
    fork = manager.fork(seq)
    assert fork.num_known == 9
    for one in (seq, fork):
        while one.num_tokens < 9:
            manager.commit(one, [], computed=one.num_tokens)
            manager.extend(one, min(2, 9 - one.num_tokens))
        manager.commit(one, [], computed=9)
    assert fork.cached_len == (0 if at_most == 100 else 8)
    assert fork.block_table().tolist()[:4] == seq.block_table().tolist()[:4]
    manager.check_integrity()


def test_a_part_of_a_cached_block_is_copied_where_asked() -> None:
    manager = CacheManager(8, 4)
    run(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.begin([1, 2, 3, 4, 5, 6, 9]).cached_len == 4, "off by default"
    seq = manager.begin([1, 2, 3, 4, 5, 6, 9], partial=True)
    assert (seq.cached_len, seq.computed) == (6, 6)
    source = manager.prefix.match_prefix([1, 2, 3, 4, 5, 6, 7, 8]).blocks[1]
    assert seq.block_pairs.tolist() == [[source, seq.block_table()[1]]]
    assert manager.begin([1, 2, 3, 4, 5, 9, 9], partial=True).cached_len == 4, "less than half a block"
    assert manager.begin([1, 2, 3, 4, 5, 6, 7, 8], partial=True).cached_len == 7, "one is left to compute"
    manager.check_integrity()


def test_a_prompt_that_fits_only_without_a_part_of_a_block_is_begun_without() -> None:
    manager = CacheManager(3, 4)
    run(manager, [0, 1, 2, 3, 4, 5, 6, 7])
    prompt = [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12, 13]
    seq = manager.begin(prompt, at_most=8, partial=True)
    assert (seq.cached_len, seq.num_tokens, seq.block_pairs.size) == (4, 12, 0)
    manager.abort(seq)
    seq = manager.begin(prompt[:12], partial=True)
    assert (seq.cached_len, seq.block_pairs.size) == (4, 0), "the block to copy would have to be locked"


@pytest.mark.parametrize(("most", "found"), [(0, 0), (3, 3), (4, 4), (6, 6), (100, 8)])
def test_a_limit_on_what_is_found(most: int, found: int) -> None:
    manager = CacheManager(16, 4)
    run(manager, list(range(8)))
    seq = manager.begin(list(range(9)), max_cached_len=most)
    assert (seq.cached_len, len(seq.block_pairs)) == (found, found % 4 > 0)
    manager.commit(seq, [], computed=9)
    assert seq.block_table().tolist()[:2] == manager.prefix.match_prefix(list(range(8))).blocks.tolist()
    manager.check_integrity()


# Pins.


def pinned_manager(**how: Any) -> CacheManager:
    manager = CacheManager(4, 2, **how)
    run(manager, [1, 2, 3, 4])
    return manager


def test_what_is_pinned_is_not_evicted_until_it_is_released() -> None:
    manager = pinned_manager()
    pin = manager.pin([1, 2, 3])
    assert (pin.num_tokens, pin.is_held, manager.num_pins, manager.available_size) == (2, True, 1, 6)
    with pytest.raises(OutOfBlocksError):
        manager.begin(range(10, 18))
    manager.finish(manager.begin(range(10, 16)))
    assert cached(manager, [1, 2, 3, 4]) == 2
    manager.check_integrity()
    with pytest.raises(ArgumentValueError, match="1 pins"):
        manager.reset()
    pin.release()
    pin.release()
    assert (pin.is_held, manager.num_pins, manager.prefix.num_locks, manager.available_size) == (False, 0, 0, 8)
    manager.reset()
    assert cached(manager, [1, 2]) == 0


def test_each_pin_holds_by_itself_and_a_with_block_releases_one() -> None:
    manager = pinned_manager()
    kept = manager.pin([1, 2])
    with manager.pin([1, 2]) as pin:
        assert manager.num_pins == 2
        manager.check_integrity()
    assert not pin.is_held
    with pytest.raises(ZeroDivisionError), manager.pin([1, 2]) as pin:
        _ = 1 / 0
    assert (pin.is_held, kept.is_held, manager.prefix.num_locks) == (False, True, 1)


def test_a_pin_is_over_at_the_first_call_after_its_time() -> None:
    steps = [0.0]
    manager = pinned_manager(clock=lambda: steps[0])
    short, long, forever = manager.pin([1, 2], ttl=np.int64(2)), manager.pin([1, 2], ttl=5), manager.pin([1, 2])
    released = manager.pin([1, 2], ttl=1)
    released.release()
    steps[0] = 1.9
    assert manager.num_pins == 3
    steps[0] = 2
    assert short.is_held, "nobody called"
    assert manager.available_size == 6
    assert (short.is_held, long.is_held, manager.num_pins) == (False, True, 2)
    steps[0] = 99
    manager.check_integrity()
    assert (long.is_held, forever.is_held, manager.num_pins) == (False, True, 1)
    short.release()
    forever.release()
    assert manager.available_size == 8


def test_pins_that_are_released_before_their_time_are_forgotten() -> None:
    steps = [0.0]
    manager = pinned_manager(clock=lambda: steps[0])
    kept = [manager.pin([1, 2], ttl=9), manager.pin([1, 2])]
    for _ in range(100):
        manager.pin([1, 2], ttl=1000).release()
    assert len(manager._pins._ends) < 10
    steps[0] = 9
    assert (manager.num_pins, [pin.is_held for pin in kept]) == (1, [False, True])


@pytest.mark.parametrize("says", [None, "soon", [1]])
def test_a_clock_that_says_no_number_changes_nothing(says: Any) -> None:
    time: list[Any] = [says]
    manager = pinned_manager(clock=lambda: time[0])
    with pytest.raises(ArgumentTypeError, match=r"CacheManager: clock: expected a function that returns a number, got .*Fix: pass time"):
        manager.pin([1, 2], ttl=1)
    assert (manager.num_pins, manager.prefix.num_locks) == (0, 0)
    manager.check_integrity()


def test_a_clock_that_raises_leaves_nothing_locked_and_loses_no_pin() -> None:
    times: list[float] = []
    manager = pinned_manager(clock=lambda: times[0])
    with pytest.raises(IndexError, match="list index out of range"):
        manager.pin([1, 2], ttl=1)
    assert (manager.num_pins, manager.prefix.num_locks) == (0, 0)
    manager.check_integrity()
    times.append(0.0)
    pins = [manager.pin([1, 2], ttl=1), manager.pin([1, 2], ttl=1)]
    times.clear()
    with pytest.raises(IndexError, match="list index out of range"):
        manager.begin([1])
    times.append(2.0)
    assert (manager.num_pins, [pin.is_held for pin in pins], manager.prefix.num_locks) == (0, [False, False], 0)
    manager.check_integrity()


def test_time_is_in_seconds_by_default() -> None:
    manager = pinned_manager()
    manager.pin([1, 2], ttl=1e-9)
    assert manager.num_pins == 0
    manager.pin([1, 2], ttl=100)
    assert manager.num_pins == 1


def test_a_limit_to_what_is_cached_holds_for_later_chunks_too() -> None:
    manager, prompt = CacheManager(32, 4), list(range(100, 120))
    first = manager.begin(prompt)
    manager.commit(first, [], computed=20)
    limited = manager.begin(prompt, at_most=4, max_cached_len=4)
    free = manager.begin(prompt, at_most=4, namespace=("other",))
    manager.commit(limited, [], computed=limited.num_tokens)
    slots, pairs = manager.extend(limited, 4)
    assert (limited.cached_len, limited.num_tokens, len(slots), len(pairs)) == (4, 12, 4, 0)
    assert free.num_tokens == 4
    manager.check_integrity()


@pytest.mark.parametrize("clock", [None, 3.0, "now"])
def test_a_clock_is_a_function(clock: Any) -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"CacheManager: clock: expected a function without arguments, got .*Fix: pass time.monotonic"
    ):
        CacheManager(4, 4, clock=clock)


def test_any_true_null_block_takes_one_block() -> None:
    manager = CacheManager(4, 4, null_block=2)  # type: ignore[arg-type] - what is true is taken for True
    assert manager.null_block == 0
    assert manager.plan([1] * 12).fits
    assert not manager.plan([1] * 13).fits
