"""SequenceBatch: rows of one length, blocks shared until they are written."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, KVDockError, OutOfBlocksError, StaleHandleError
from kvdock.scheduler import CacheManager, SequenceBatch


def make(rows: int = 2, *, length: int = 0, block_size: int = 4, num_blocks: int = 64) -> tuple[CacheManager, SequenceBatch]:
    manager = CacheManager(num_blocks, block_size)
    batch = SequenceBatch.empty(manager, rows)
    if length:
        batch.grow(length)
    return manager, batch


def used(manager: CacheManager) -> int:
    manager.check_integrity()
    return manager.allocator.num_used


def state(manager: CacheManager, batch: SequenceBatch) -> tuple[Any, ...]:
    counts = manager.allocator.ref_counts(range(manager.allocator.num_blocks)).tolist()
    return (
        len(batch),
        batch.length,
        batch.pads.tolist(),
        batch.block_table().tolist(),
        manager.available_size,
        manager.num_sequences,
        counts,
    )


def test_a_new_batch_is_empty() -> None:
    manager, batch = make(3)
    assert (len(batch), batch.batch_size, batch.length, batch.block_size, batch.num_blocks) == (3, 3, 0, 4, 0)
    assert (batch.block_table().shape, batch.slot_mapping(0, 0).shape) == ((3, 0), (3, 0))
    assert used(manager) == 0


def test_blocks_are_taken_only_when_the_last_one_is_full() -> None:
    manager, batch = make(2)
    taken = []
    for _ in range(9):
        assert batch.grow(1).shape == (0, 2)
        taken.append(used(manager))
    assert taken == [2, 2, 2, 2, 4, 4, 4, 4, 6]


@pytest.mark.parametrize("block_size", [1, 3, 16, 512])
def test_every_token_of_every_row_has_its_own_slot(block_size: int) -> None:
    _, batch = make(3, length=50, block_size=block_size, num_blocks=180)
    batch.grow(7)
    slots = batch.slot_mapping(0, 57)
    assert (slots.dtype, np.unique(slots).size) == (np.int64, 3 * 57)
    assert slots.max() < 180 * block_size
    assert [row.slot_mapping(0, 57).tolist() for row in batch.sequences] == slots.tolist()


def test_places_of_padding_have_no_slot_and_no_block() -> None:
    manager = CacheManager(8, 2)
    batch = SequenceBatch(manager, [manager.begin([1, 2, 3, 4]), manager.begin([5])], length=4, pads=[0, 3])
    assert batch.slot_mapping(0, 4).tolist() == [[0, 1, 2, 3], [-1, -1, -1, 4]]
    batch.grow(1)
    assert batch.slot_mapping(3, 5).tolist() == [[3, 6], [4, 5]]
    batch.select([1, 1, 0])
    assert batch.pads.tolist() == [3, 3, 0]
    batch.truncate(2)
    assert (batch.pads.tolist(), [row.num_tokens for row in batch.sequences]) == ([3, 3, 0], [0, 0, 2])
    batch.grow(2)
    assert [row.num_tokens for row in batch.sequences] == [1, 1, 4]
    assert (batch.slot_mapping(2, 4) < 0).tolist() == [[True, False], [True, False], [False, False]]


def test_room_that_is_there_already_is_used_first() -> None:
    manager = CacheManager(8, 2)
    batch = SequenceBatch(manager, [manager.begin([1, 2, 3, 4, 5])], length=2)
    batch.grow(3)
    assert (batch.length, batch.sequences[0].num_tokens) == (5, 5)
    batch.truncate(1)
    assert batch.sequences[0].num_tokens == 1


def test_room_that_is_reserved_is_used_by_the_next_growth_or_given_back() -> None:
    manager, batch = make(2, length=3)
    before = state(manager, batch)
    assert len(batch.reserve(6)) == 0
    assert (batch.length, used(manager)) == (3, 6)
    with pytest.raises(OutOfBlocksError):
        batch.reserve(1000)
    batch.truncate(3)
    assert state(manager, batch) == before
    batch.reserve(6)
    assert len(batch.grow(6)) == 0
    assert (batch.length, used(manager)) == (9, 6)


def test_what_is_reserved_in_a_shared_block_is_copied_once() -> None:
    manager, batch = make(1, length=3)
    fork = batch.fork()
    assert batch.reserve(2).tolist() == [[fork.block_table()[0, 0], batch.block_table()[0, 0]]]
    assert len(batch.grow(2)) == 0
    assert (batch.length, fork.length, used(manager)) == (5, 3, 3)


def test_steps_use_the_room_of_whole_blocks_without_asking_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager is asked for the step that needs a block of any row."""
    manager, batch = make(2, block_size=4)
    other = SequenceBatch(manager, [manager.open_empty() for _ in range(2)], pads=[1, 3])
    asked, extend = list[int](), manager.extend
    monkeypatch.setattr(manager, "extend", lambda seqs, n, **told: (asked.append(one.length), extend(seqs, n, **told))[1])
    for one, steps in ((batch, [0, 4, 8]), (other, [0, 1, 3, 5, 7, 9])):
        for _ in range(10):
            if not one.room:
                assert len(one.reserve(1, whole_blocks=True)) == 0
            assert one.grow(1).shape == (0, 2)
        assert asked == steps
        assert one.seq_lens.tolist() == (10 - one.pads).tolist()
        asked.clear()
    slots = np.concatenate([one.slot_mapping(0, 10).ravel() for one in (batch, other)])
    assert np.unique(slots[slots >= 0]).size == 36, "each token has a slot of its own"
    assert used(manager) == 11, "no more blocks than tokens need"


@pytest.mark.parametrize("share", ["fork", "select"])
def test_what_is_shared_is_copied_though_there_was_room_in_it(share: str) -> None:
    """Whichever of the two writes first."""
    manager, batch = make(1, length=1)
    batch.reserve(1, whole_blocks=True)
    assert (batch.room, batch.sequences[0].num_tokens) == (3, 4)
    other = batch.fork() if share == "fork" else batch
    if share == "select":
        batch.select([0, 0])
    assert batch.room == other.room == 0
    assert [seq.num_tokens for seq in (*batch.sequences, *other.sequences)] == [1, 1, *[1] * (2 if share == "select" else 0)]
    (old, new), *more = batch.grow(1).tolist()
    assert (more, old == new) == ([], False)
    if share == "fork":
        assert other.grow(1).shape == (0, 2), "nobody else holds the block any more"
    assert used(manager) == 2


def test_a_row_that_is_cut_or_chosen_keeps_no_room_that_nobody_knows_of() -> None:
    manager, batch = make(3, length=2)
    batch.reserve(1, whole_blocks=True)
    batch.select([2, 0])
    assert batch.room == 2, "nobody shares a block"
    batch.truncate(1)
    assert (batch.room, [seq.num_tokens for seq in batch.sequences]) == (0, [1, 1])
    with pytest.raises(OutOfBlocksError):
        batch.reserve(1000, whole_blocks=True)
    assert (batch.room, used(manager)) == (0, 2)


@pytest.mark.parametrize("share", [False, True], ids=["new blocks", "a copy"])
def test_growing_past_the_pool_changes_nothing(share: bool) -> None:
    manager, batch = make(1, length=5, num_blocks=2)
    other = batch.fork() if share else None
    before = state(manager, batch)
    with pytest.raises(OutOfBlocksError):
        batch.grow(1 if share else 4)
    assert state(manager, batch) == before
    del other
    gc.collect()
    assert batch.grow(3).shape == (0, 2), "nobody else holds the block any more"


def test_only_the_partly_filled_shared_block_is_copied_and_only_once() -> None:
    manager, batch = make(1, length=6)
    other = batch.fork()
    assert (other.block_table().tolist(), used(manager)) == ([[0, 1]], 2)
    assert other.grow(0).shape == (0, 2), "nothing is written"
    assert other.grow(7).tolist() == [[1, 2]]
    assert (other.block_table().tolist(), batch.block_table().tolist()) == ([[0, 2, 3, 4]], [[0, 1]])
    assert batch.grow(1).tolist() == [], "it is the only one now"
    batch.truncate(4)
    third = batch.fork()
    assert third.grow(5).tolist() == batch.grow(5).tolist() == [], "full blocks are never copied"


def test_one_of_the_rows_that_share_a_block_keeps_it_unless_others_hold_it_too() -> None:
    manager, batch = make(1, length=6)
    batch.repeat(3)
    assert batch.grow(1)[:, 0].tolist() == [1, 1], "three rows, two copies"
    assert batch.block_table()[0].tolist() == [0, 1]
    assert np.unique(batch.block_table()[:, 1]).size == 3
    assert manager.allocator.ref_counts([0, 1]).tolist() == [3, 1]
    _, batch = make(1, length=6)
    other = batch.fork()
    other.select([0, 0])
    assert other.grow(1)[:, 0].tolist() == [1, 1]
    assert batch.block_table().tolist() == [[0, 1]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_select_reorders_repeats_and_drops_rows(kind: Any) -> None:
    manager, batch = make(3, length=6)
    ids, sequences = batch.block_table(), batch.sequences
    batch.select(kind([2, 0, 2, 2]))
    assert batch.block_table().tolist() == ids[[2, 0, 2, 2]].tolist()
    assert batch.sequences[:2] == (sequences[2], sequences[0]), "the first of each goes on"
    assert (used(manager), sequences[1].is_open) == (4, False)
    assert manager.allocator.ref_counts(ids).tolist() == [1, 1, 0, 0, 3, 3]


BAD: dict[str, tuple[Any, type[KVDockError], str]] = {
    "select: too far": (lambda batch: batch.select([0, 2]), IndexRangeError, r"rows from 0 to 1, got \[0, 2\]"),
    "select: negative": (lambda batch: batch.select([-1]), IndexRangeError, "rows from 0 to 1"),
    "select: none": (lambda batch: batch.select([]), ArgumentValueError, "at least one row"),
    "select: 2-D": (lambda batch: batch.select([[0, 1]]), ArgumentValueError, r"got shape \(1, 2\)"),
    "select: floats": (lambda batch: batch.select([0.0, 1.0]), ArgumentTypeError, "expected integers"),
    "repeat": (lambda batch: batch.repeat(0), ArgumentValueError, "repeat: times"),
    "grow": (lambda batch: batch.grow(-1), ArgumentValueError, "grow: n"),
    "grow: huge": (lambda batch: batch.grow(2**63 - 8), OutOfBlocksError, "at most 60 blocks"),
    "grow: beyond 64 bits": (lambda batch: batch.grow(2**70), OutOfBlocksError, "at most 60 blocks"),
    "truncate": (lambda batch: batch.truncate(7), IndexRangeError, "at most the 6 places there are, got 7"),
    "truncate: negative": (lambda batch: batch.truncate(-1), ArgumentValueError, "at least 0"),
    "truncate: float": (lambda batch: batch.truncate(2.0), ArgumentTypeError, "an int"),
    "slots": (lambda batch: batch.slot_mapping(2, 7), IndexRangeError, r"0 <= start <= stop <= 6, got start=2, stop=7"),
    "slots: floats": (lambda batch: batch.slot_mapping(0, 2.0), ArgumentTypeError, "slot_mapping: stop: expected an int, got 2.0"),
    "slots: text": (lambda batch: batch.slot_mapping("0", 2), ArgumentTypeError, "slot_mapping: start: expected an int, got '0'"),
    "made: pads": (lambda batch: SequenceBatch(batch._manager, batch.sequences, pads=[0]), ArgumentValueError, "a pad for each"),
    "made: pads below none": (
        lambda batch: SequenceBatch(batch._manager, batch.sequences, length=3, pads=[0, -1]),
        IndexRangeError,
        "pads",
    ),
    "made: room": (lambda batch: SequenceBatch(batch._manager, batch.sequences, length=7), IndexRangeError, "room for"),
    "made: no rows": (lambda batch: SequenceBatch(batch._manager, []), ArgumentValueError, "at least one row"),
    "made: twice": (lambda batch: SequenceBatch(batch._manager, batch.sequences[:1] * 2), ArgumentValueError, "there twice"),
    "made: another manager's": (lambda batch: SequenceBatch(CacheManager(4, 4), batch.sequences), StaleHandleError, "another manager's"),
    "made: no manager": (lambda batch: SequenceBatch(None, batch.sequences), ArgumentTypeError, "manager: expected a CacheManager"),  # type: ignore[arg-type]
    "empty: no manager": (lambda batch: SequenceBatch.empty(None, 1), ArgumentTypeError, "manager: expected a CacheManager"),  # type: ignore[arg-type]
    "empty": (lambda batch: SequenceBatch.empty(batch._manager, 0), ArgumentValueError, "batch_size"),
}


@pytest.mark.parametrize("call", BAD)
def test_bad_calls_change_nothing(call: str) -> None:
    manager, batch = make(2, length=6)
    before, (do, error, text) = state(manager, batch), BAD[call]
    with pytest.raises(error, match=text):
        do(batch)
    assert state(manager, batch) == before


@pytest.mark.parametrize("how", ["repeat", "fork"])
def test_a_fork_of_rows_that_is_refused_halfway_leaves_nothing_behind(how: str) -> None:
    """Each row was promised room, so each needs a block for its copy: there is one, for the first."""
    manager = CacheManager(4, 4)
    batch = SequenceBatch(manager, [manager.begin([1, 2], reserve=6), manager.begin([3, 4], reserve=2)], length=2)
    before = state(manager, batch)
    with pytest.raises(OutOfBlocksError):
        batch.repeat(2) if how == "repeat" else batch.fork()
    assert state(manager, batch) == before
    manager.check_integrity()


def test_truncate_gives_back_whole_blocks() -> None:
    manager, batch = make(2, length=14)
    ids, taken = batch.block_table(), []
    for length in (14, 9, 8, 0):
        batch.truncate(length)
        taken.append(used(manager))
        assert batch.block_table().tolist() == ids[:, : -(-length // 4)].tolist()
    assert taken == [8, 6, 4, 0]
    batch.grow(5)
    assert batch.block_table().shape == (2, 2)


def test_truncating_into_a_shared_block_copies_it_at_the_next_write() -> None:
    _, batch = make(1, length=8)
    other = batch.fork()
    other.truncate(5)
    assert other.grow(1).tolist() == [[1, 2]]
    assert batch.block_table().tolist() == [[0, 1]]


def test_a_batch_that_is_dropped_gives_back_what_it_held_last() -> None:
    """In whatever thread the collector runs, at the next call of the manager."""
    manager, batch = make(1, length=3)
    batch.select([0, 0])
    batch.grow(20)
    batch.truncate(9)
    other, holder = batch.fork(), [batch]
    del batch
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert used(manager) == 6, "what the fork holds"
    del other
    gc.collect()
    assert (manager.available_size, manager.num_sequences) == (64 * 4, 0)


@pytest.mark.parametrize("keep", [True, False])
def test_a_batch_that_is_closed_says_so(keep: bool) -> None:
    manager, batch = make(2, length=4)
    manager.commit(batch.sequences, [[1, 2, 3, 4], [5, 6, 7, 8]], computed=[4, 4])
    batch.close(keep=keep)
    batch.close()
    assert used(manager) == 2 * keep
    calls = [lambda: batch.grow(1), lambda: batch.truncate(0), lambda: batch.select([0]), lambda: batch.repeat(2), batch.fork]
    looks = [lambda: batch.slot_mapping(0, 1), lambda: batch.block_table(), lambda: batch.num_blocks]
    for call in (*calls, *looks):
        with pytest.raises(StaleHandleError, match=r"SequenceBatch\.\w+: expected an open batch"):
            call()


def test_a_batch_of_which_somebody_ended_a_row_is_refused_as_a_whole() -> None:
    """Not halfway: forks that were made already would be held for ever, and other rows ended."""
    manager, batch = make(3, length=6)
    manager.abort(batch.sequences[1])
    before = manager.available_size, manager.num_sequences
    calls = [lambda: batch.grow(1), lambda: batch.truncate(0), lambda: batch.select([0, 0, 2]), lambda: batch.repeat(2), batch.fork]
    for call in (*calls, batch.close):
        with pytest.raises(StaleHandleError, match=r"SequenceBatch\.\w+: expected an open sequence of this manager"):
            call()
        assert (manager.available_size, manager.num_sequences, len(batch)) == (*before, 3)


def test_a_row_that_shares_what_a_fork_has_published_is_cut_without_knowing_the_ids() -> None:
    manager = CacheManager(9, 1)
    batch = SequenceBatch(manager, [manager.begin([7])], length=1)
    batch.grow(3)
    fork = batch.fork()
    manager.commit(list(fork.sequences), [[8, 9, 10]], computed=[4])
    shared = batch.block_table()[0, :3].tolist()
    batch.truncate(3)  # what it keeps is cached and locked, though it knows one id of it only
    manager.check_integrity()
    fork.close()
    manager.begin(range(20, 20 + manager.available_size // 1))  # evicts all that is not held
    manager.check_integrity()
    assert batch.block_table()[0].tolist() == shared
    batch.close(keep=False)
    manager.check_integrity()


def test_what_is_taken_back_is_looked_up_by_known_ids_only() -> None:
    manager = CacheManager(12, 1)
    batch = SequenceBatch(manager, [manager.begin([7, 5])], length=2)
    manager.commit(list(batch.sequences), [[]], computed=[2])
    batch.grow(2)
    fork = batch.fork()
    manager.commit(list(fork.sequences), [[8, 9]], computed=[4])
    batch.truncate(1)
    manager.check_integrity()
    fork.close()
    batch.close(keep=False)
    manager.check_integrity()
    assert manager.plan([7, 5, 8, 9, 1]).cached_len == 4, "behind what it published lies what the fork has published"
