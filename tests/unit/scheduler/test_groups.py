"""Layer groups in a manager: windows let go, states have checkpoints, and a hit is where every group can go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, IntegrityError, KVDockError, OutOfBlocksError
from kvdock.layers import KeepAll, KeepChunk, KeepState, KeepWindow, Retention
from kvdock.scheduler import BatchTables, CacheManager, CacheSequence, csr_table, dense_table, sequence_lengths, token_table
from kvdock_conformance.checking.group_engine import group_of as group
from support_group_model import Engine

FULL, WINDOW = group(KeepAll(), 4), group(KeepWindow(8), 2)
STATE = group(KeepState(), 1)


def manager_of(*groups: Any, num_blocks: int = 64, **how: Any) -> CacheManager:
    return CacheManager(num_blocks, groups=groups, **how)


def run(manager: CacheManager, ids: Sequence[int], at_most: int = 4) -> CacheSequence:
    """Compute a prompt in chunks."""
    seq = manager.begin(ids, at_most=at_most)
    while True:
        manager.commit(seq, [], computed=seq.num_tokens)
        if seq.num_tokens >= len(ids):
            return seq
        manager.extend(seq, min(at_most, len(ids) - seq.num_tokens))


def used(manager: CacheManager) -> int:
    return manager._pool.units.blocks.num_used


# What is let go.


def test_a_window_is_let_go_as_the_sequence_grows_and_what_is_full_is_not() -> None:
    manager = manager_of(FULL, WINDOW, prefix="naive")
    seq = manager.begin(range(4))
    held = []
    for length in range(4, 41):
        manager.commit(seq, [], computed=length)
        held.append(int((seq.block_table(1) != 0).sum()))
        manager.check_integrity()
        if length < 40:
            manager.extend(seq, 1)
            manager.commit(seq, [length], computed=length)
    assert seq.block_table(0).size == 10
    # Seven tokens before the next one are in four or five blocks of two.
    assert {3, 4} <= set(held) <= {2, 3, 4, 5}
    assert used(manager) <= 10 + 5
    assert seq.slot_mapping(0, 2, group=1).tolist() == [-1, -1]
    assert (seq.slot_mapping(33, 40, group=1) >= 0).all()
    manager.finish(seq)
    assert used(manager) == 0


def test_sinks_stay() -> None:
    manager = manager_of(group(KeepWindow(4, sinks=3), 2), prefix="naive")
    seq = run(manager, range(30))
    table = seq.block_table()
    kept = np.flatnonzero(seq.slot_mapping(0, 30) >= 0)
    assert {0, 1, 2} <= set(kept.tolist())
    assert {27, 28, 29} <= set(kept.tolist())
    assert table.size == 15
    assert used(manager) <= 2 + 3


def test_sinks_stay_that_come_in_one_step_with_what_is_let_go() -> None:
    manager = manager_of(group(KeepWindow(4, sinks=6), 2), prefix="naive")
    seq = run(manager, range(2))
    manager.extend(seq, 30)
    manager.commit(seq, range(2, 32), computed=32)
    assert np.flatnonzero(seq.slot_mapping(0, 32) >= 0).tolist() == [*range(6), *range(28, 32)]
    manager.check_integrity()


@pytest.mark.parametrize("groups", [(group(KeepWindow(8), 2),), (group(KeepWindow(8, sinks=6), 2),), (FULL, WINDOW, STATE)])
def test_what_is_computed_and_passes_in_one_step_is_let_go(groups: Any) -> None:
    """Chunks of a prompt are longer than windows, mostly, and nothing may be cached."""
    taken = []
    for at_most in (4, 64):
        manager = manager_of(*groups, num_blocks=200, prefix="naive")
        run(manager, range(200), at_most=at_most)
        manager.check_integrity()
        taken.append(used(manager))
    assert taken[0] == taken[1]


def test_a_chunk_is_let_go_when_the_next_one_begins() -> None:
    manager = manager_of(group(KeepChunk(8), 2), prefix="naive")
    seq = run(manager, range(8), at_most=8)
    assert used(manager) == 0
    manager.extend(seq, 3)
    assert used(manager) == 2


def test_a_rule_of_somebody_elses_needs_no_more_than_its_spans() -> None:
    @attrs.frozen
    class KeepEvenEnd(Retention):
        """The last four tokens, from an even one on."""

        def spans(self, num_tokens: int) -> tuple[range, ...]:
            start = max(num_tokens - 4, 0) // 2 * 2
            return (range(start, num_tokens),) if num_tokens else ()

    assert KeepEvenEnd().first_kept(np.array([0, 3, 9, 10])).tolist() == [0, 0, 4, 6]
    manager = manager_of(group(KeepEvenEnd(), 2), prefix="naive")
    seq = run(manager, range(21))
    assert np.flatnonzero(seq.slot_mapping(0, 21) >= 0).tolist() == [16, 17, 18, 19, 20]


@pytest.mark.parametrize("rule", [KeepAll(), KeepWindow(5), KeepWindow(5, sinks=2), KeepChunk(6)])
def test_what_is_kept_at_once_is_what_the_spans_say(rule: Retention) -> None:
    counts = np.arange(40)
    for count, first in zip(counts.tolist(), rule.first_kept(counts).tolist(), strict=True):
        kept = {*range(min(rule.leading, count)), *range(first, count)}
        assert kept == {position for span in rule.spans(count) for position in span}


def test_the_pool_holds_long_prompts_in_chunks_and_refuses_them_at_once() -> None:
    manager = manager_of(WINDOW, num_blocks=12, prefix="naive")
    assert not manager.plan(range(200)).fits
    with pytest.raises(OutOfBlocksError, match="begin it in chunks with at_most"):
        manager.begin(range(200))
    seq = run(manager, range(200))
    assert seq.computed == 200
    manager.check_integrity()


def test_what_is_cached_but_let_go_makes_room_first() -> None:
    """With prefixes cached, a pool that holds one sequence's needs is enough for it."""
    manager = manager_of(FULL, WINDOW, num_blocks=25 + 8)
    seq = run(manager, range(100))
    assert (seq.computed, seq.block_table(0).size) == (100, 25)
    manager.check_integrity()


def test_what_was_let_go_first_goes_first_and_no_more_than_is_missing() -> None:
    manager = manager_of(FULL, WINDOW)
    manager.finish(run(manager, range(40)))
    units, stored = manager._pool.units, manager.prefix.match_prefix(range(40)).blocks
    for gone in (1, 2, 5):
        units.drop(gone - int((units.table[stored] == -1).sum()), ends=False)
        assert np.flatnonzero(units.table[stored, 1:] == -1).tolist() == list(range(gone))
        manager.check_integrity()


def test_what_waits_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock.scheduler.units._FEW", 0)
    manager = manager_of(FULL, WINDOW, STATE)
    manager.finish(run(manager, range(40)))
    units = manager._pool.units
    for number in range(30):
        manager.finish(run(manager, [*range(40 - number % 2 * 8), 77]))
        manager.check_integrity()
        entries = sum(places.size for queue in units._idle for places, _ in queue)
        assert units.num_idle <= entries == units._entries <= 2 * units.num_idle


def test_room_that_is_counted_and_not_there_is_no_endless_search() -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=20)
    run(manager, range(8))
    manager._pool.units.num_idle += 20
    with pytest.raises(IntegrityError, match="none that can be evicted"):
        manager.begin(range(100, 120))


def test_an_empty_range_is_no_tokens() -> None:
    manager = manager_of(FULL, WINDOW)
    seq = manager.begin(range(3))
    manager.commit(seq, range(0), computed=3)
    assert (seq.num_known, seq.computed) == (3, 3)


# Hits.


def test_a_hit_needs_the_last_window_and_no_more_of_it() -> None:
    manager = manager_of(FULL, WINDOW)
    run(manager, [*range(20), 1])
    other = manager.begin([*range(20), 2])
    assert other.cached_len == 20
    assert (other.slot_mapping(13, 20, group=1) >= 0).all()


def test_without_its_window_a_prefix_is_no_hit_but_a_shorter_one_is() -> None:
    manager = manager_of(FULL, WINDOW)
    first = run(manager, range(40))
    manager.finish(first)
    units = manager._pool.units
    stored = manager.prefix.match_prefix(range(40)).blocks
    units.drop(10**6, ends=False)
    units.drop(10**6, ends=True)
    assert (units.table[stored, 1:] == -1).all()
    assert manager.plan([*range(40), 7]).cached_len == 0
    manager.check_integrity()
    again = run(manager, range(24))  # what is computed again is put back
    manager.finish(again)
    assert manager.plan([*range(40), 7]).cached_len == 24
    manager.check_integrity()


def test_without_its_sinks_a_prefix_is_no_hit() -> None:
    manager = manager_of(group(KeepWindow(4, sinks=6), 2))
    manager.finish(run(manager, range(30)))
    units, (first, *_) = manager._pool.units, manager.prefix.match_prefix(range(2)).blocks
    assert manager.plan([*range(30), 7]).cached_len == 30
    while units.table[first, 0] >= 0:
        units.drop(1, ends=not any(places.size for places, _ in units._idle[0]))
    assert manager.plan([*range(30), 7]).cached_len == 0


def test_the_state_where_prompts_part_is_kept_longest() -> None:
    manager = manager_of(FULL, STATE, num_blocks=40, state_interval=4)
    system = list(range(100, 116))
    for number in range(8):
        manager.finish(run(manager, [*system, number, *range(20)]))
        assert manager.plan([*system, 77, 78]).cached_len == 16, "it is in use again and again"


def test_where_prompts_part_is_kept_longest() -> None:
    """A system prompt's window goes after what was let go within other prompts."""
    manager = manager_of(FULL, WINDOW, num_blocks=60)
    system = list(range(100, 116))
    for tail in range(2):
        manager.finish(run(manager, [*system, tail, *range(30)]))
    for number in range(4):
        manager.finish(run(manager, [1000 + number, *range(40)]))
        assert manager.plan([*system, 77, 78]).cached_len == 16, "it is in use again and again"
        manager.finish(run(manager, [*system, 50 + number]))


def test_any_prefix_cache_serves_several_groups() -> None:
    """It knows numbers of units: which blocks these have is the manager's own affair."""

    class Mine(kvdock.prefix.RadixPrefixCache):
        """One that never heard of groups."""

    manager = manager_of(FULL, WINDOW, STATE, prefix=Mine(4))
    run(manager, range(20))
    assert manager.plan([*range(20), 5]).cached_len == 16
    manager.check_integrity()


def test_ranks_that_are_called_alike_decide_alike() -> None:
    tables = []
    for _ in range(2):
        manager = manager_of(FULL, WINDOW, STATE, num_blocks=50, null_block=True, state_interval=8)
        rng, found = np.random.default_rng(5), []
        for _ in range(40):
            seq = run(manager, rng.integers(0, 2, rng.integers(1, 30)).tolist(), at_most=int(rng.integers(1, 9)))
            found.append([seq.block_table(at).tolist() for at in range(3)] + [seq.cached_len])
            manager.finish(seq)
        tables.append(found)
    assert tables[0] == tables[1]


def test_what_a_prompt_has_evicted_of_its_own_prefix_is_marked_no_more() -> None:
    """Where prompts part is noted once there is room, for which units without windows may have gone."""
    manager = manager_of(FULL, group(KeepWindow(5), 1), num_blocks=21)
    manager.finish(run(manager, range(40)))
    for ends in (False, True):
        manager._pool.units.drop(10**6, ends=ends)
    other = manager.begin(range(100, 108))
    seq = manager.begin([*range(40), 7], at_most=4)
    assert (seq.cached_len, other.num_tokens) == (0, 8)
    manager.check_integrity()


@pytest.mark.parametrize("rule", [KeepWindow(4), KeepWindow(4, sinks=6), KeepChunk(8)])
def test_what_passes_in_one_step_is_found_again(rule: Retention) -> None:
    manager = manager_of(group(rule, 2))
    seq = run(manager, range(2))
    manager.extend(seq, 30)
    manager.commit(seq, range(2, 32), computed=32)
    for length in range(2, 32, 2):
        assert manager.plan([*range(length), 99]).cached_len == length


# States.


def test_a_state_has_a_checkpoint_at_the_end_of_a_prompt_and_every_so_often() -> None:
    manager = manager_of(FULL, STATE, state_interval=8)
    seq = run(manager, range(11), at_most=100)
    assert manager.plan([*range(8), 99]).cached_len == 8, "the end of the last whole unit before the last token"
    for token in range(11, 30):
        manager.extend(seq, 1)
        manager.commit(seq, [token], computed=token + 1)
        manager.check_integrity()
    assert manager.plan([*range(30), 99]).cached_len == 24
    assert manager.plan([*range(22), 99]).cached_len == 16
    assert manager.plan([*range(15), 99]).cached_len == 8


def test_checkpoints_are_as_far_apart_behind_a_hit_and_in_a_fork() -> None:
    manager = manager_of(FULL, STATE, state_interval=8)
    manager.finish(run(manager, range(9), at_most=8))
    seq = manager.begin([*range(8), 50])
    assert seq.cached_len == 8
    manager.commit(seq, [], computed=9)
    for one in (manager.fork(seq), seq):
        for token in range(9, 17):
            manager.extend(one, 1)
            manager.commit(one, [token + one._serial], computed=token + 1)
        ids = one.tokens.tolist()
        assert [manager.plan([*ids[:length], 99]).cached_len for length in (12, 16)] == [8, 16]
        manager.check_integrity()


def test_a_prompt_goes_on_with_the_state_that_another_has_published() -> None:
    manager = manager_of(FULL, STATE, state_interval=8)
    seq = manager.begin(range(20), at_most=4)
    manager.commit(seq, [], computed=4)
    manager.extend(seq, 2)
    manager.commit(seq, [], computed=6)
    manager.finish(run(manager, range(20), at_most=8))
    manager.check_integrity()
    _, pairs = manager.extend(seq, 4)
    assert seq.computed == 16
    assert pairs[:, 1].tolist() == seq.block_table(1).tolist()
    manager.commit(seq, [], computed=20)
    manager.check_integrity()
    assert manager.plan([*range(20), 99]).cached_len == 16, "the next one is eight tokens behind that"


def test_a_checkpoint_is_copied_before_it_is_written() -> None:
    manager = manager_of(FULL, STATE, null_block=True, state_interval=4)
    seq = manager.begin(range(4))
    (zero, first), *_ = seq.block_pairs.tolist()
    assert (zero, seq.block_table(1).tolist()) == (0, [first])
    manager.commit(seq, [], computed=4)
    version = seq.table_version
    _, pairs = manager.extend(seq, 1)
    manager.commit(seq, [4], computed=5)
    assert manager._pool.units.num_idle == 1, "the checkpoint is nobody's"
    assert pairs.tolist() == [[first, seq.block_table(1)[0]]]
    assert seq.block_table(1)[0] != first
    assert seq.table_version != version
    other = manager.begin([*range(4), 9])
    assert other.cached_len == 4
    assert other.block_pairs.tolist() == [[first, other.block_table(1)[0]]]
    fork = manager.fork(seq)
    assert fork.block_pairs.tolist() == [[seq.block_table(1)[0], fork.block_table(1)[0]]]


def test_a_checkpoint_that_only_its_sequence_needs_is_its_own_again_where_there_is_no_room() -> None:
    manager = manager_of(FULL, STATE, num_blocks=3, state_interval=4)
    seq = manager.begin(range(4))
    manager.commit(seq, [], computed=4)
    (before,) = seq.block_table(1)
    _, pairs = manager.extend(seq, 1)
    assert pairs.size == 0 or used(manager) <= 3
    manager.commit(seq, [4], computed=5)
    for token in range(5, 8):
        manager.extend(seq, 1)
        manager.commit(seq, [token], computed=token + 1)
    with pytest.raises(OutOfBlocksError):
        manager.extend(seq, 1)
    assert seq.block_table(1).size == 1
    assert before >= 0
    manager.check_integrity()


def test_a_checkpoint_that_a_pin_needs_too_is_nobody_s_own_again() -> None:
    manager = manager_of(FULL, STATE, num_blocks=3, state_interval=4)
    seq = manager.begin(range(4))
    manager.commit(seq, [], computed=4)
    with manager.pin(range(4)):
        with pytest.raises(OutOfBlocksError):
            manager.extend(seq, 1)
        manager.check_integrity()
    manager.extend(seq, 1)
    manager.check_integrity()


def test_chunks_end_where_a_state_can_be_kept() -> None:
    manager = manager_of(FULL, STATE)
    seq = manager.begin(range(11), at_most=7)
    assert seq.num_tokens == 4
    manager.commit(seq, [], computed=4)
    slots, _ = manager.extend(seq, 7)
    assert (slots.size, seq.num_tokens) == (4, 8)
    manager.commit(seq, [], computed=8)
    manager.extend(seq, 7)
    assert seq.num_tokens == 15, "behind the prompt's last whole unit there is nothing to stop for"


# Copies.


def test_sequences_that_let_go_of_one_block_at_once_let_it_go_once() -> None:
    for prefix in ("radix", "naive"):
        manager = manager_of(FULL, WINDOW, prefix=prefix)
        seqs = [seq := run(manager, range(12)), manager.fork(seq)]
        for length in range(12, 30):
            manager.extend(seqs, 1)
            manager.commit(seqs, [length, length], computed=[length + 1] * 2)
            manager.check_integrity()


def test_a_copy_of_a_unit_has_no_block_where_that_has_none() -> None:
    manager = manager_of(group(KeepAll(), 8), group(KeepWindow(3), 2), prefix="naive")
    seq = run(manager, range(7), at_most=1)
    fork = manager.fork(seq)
    before = used(manager)
    pairs = manager.extend([seq, fork], 1)
    # Of the window's four blocks of a unit the last two are needed behind seven tokens.
    assert sorted(pairs[:, 0].tolist()) == sorted([*seq.block_table(0).tolist(), *seq.block_table(1)[2:].tolist()])
    assert used(manager) == before + 3


@pytest.mark.parametrize("count", [1, 2])
def test_a_prefix_without_a_part_of_its_checkpoint_is_no_hit(count: int) -> None:
    manager = manager_of(FULL, STATE, STATE, state_interval=4)
    manager.finish(run(manager, range(9)))
    assert manager.plan([*range(8), 99]).cached_len == 8
    manager._pool.units.drop(100, ends=False)  # that behind four tokens
    manager._pool.units.drop(count, ends=True)
    assert manager.plan([*range(8), 99]).cached_len == 0
    manager.check_integrity()
    manager.finish(run(manager, range(9)))
    assert manager.plan([*range(8), 99]).cached_len == 8
    manager.check_integrity()


# What can be undone.


def test_drafts_can_be_undone_and_what_was_let_go_cannot() -> None:
    manager = manager_of(FULL, WINDOW, prefix="naive")
    seq = run(manager, range(40))
    manager.extend(seq, 4)
    manager.truncate(seq, 40)
    assert seq.shortest > 30
    manager.truncate(seq, seq.shortest)
    with pytest.raises(IndexRangeError, match=rf"CacheManager.truncate: n: expected at least {seq.shortest}: what was before is let go"):
        manager.truncate(seq, seq.shortest - 1)
    with pytest.raises(IndexRangeError, match=r"CacheManager.fork: num_tokens: expected at least .* Fix: fork\(\) before"):
        manager.fork(seq, 3)
    manager.check_integrity()


def test_what_is_promised_is_there_whatever_is_undone() -> None:
    undone = refused = 0
    for num_blocks in range(34, 46):
        manager = manager_of(FULL, WINDOW, num_blocks=num_blocks)
        seq = run(manager, range(40))
        manager.begin([99], ("other",), reserve=max(n for n in range(100) if manager.plan([99], reserve=n).fits))
        for n in range(39, 20, -1):
            try:
                manager.truncate(seq, n)
                undone += 1
            except OutOfBlocksError:
                refused += 1
                break
            finally:
                assert manager.available_size >= 0
                manager.check_integrity()
    assert undone
    assert refused


def test_a_state_cannot_be_undone() -> None:
    manager = manager_of(FULL, STATE)
    seq = run(manager, range(10))
    assert seq.shortest == 10
    manager.extend(seq, 3)
    manager.truncate(seq, 10)
    with pytest.raises(IndexRangeError, match="or is in a state"):
        manager.truncate(seq, 9)


def test_one_group_that_keeps_all_is_as_before() -> None:
    plain, grouped = CacheManager(8, 4), manager_of(FULL, num_blocks=8)
    for manager in (plain, grouped):
        seq = manager.begin(range(10))
        assert (seq.shortest, seq.block_table(0).tolist(), manager.available_size) == (0, [0, 1, 2], 20)
    assert type(plain._pool) is type(grouped._pool)


# Pins.


def test_a_pin_keeps_the_window_and_the_checkpoint() -> None:
    manager = manager_of(FULL, WINDOW, STATE, num_blocks=60)
    manager.finish(run(manager, range(17)))
    with manager.pin(range(16)) as pin:
        assert pin.num_tokens == 16
        for number in range(6):
            manager.finish(run(manager, [100 + number, *range(40)]))
        manager.check_integrity()
        assert manager.plan([*range(16), 1]).cached_len == 16
    manager.check_integrity()


def test_a_prefix_whose_window_is_gone_cannot_be_pinned() -> None:
    manager = manager_of(FULL, WINDOW)
    manager.finish(run(manager, range(40)))
    manager._pool.units.drop(10**6, ends=False)
    manager._pool.units.drop(10**6, ends=True)
    with pytest.raises(ArgumentValueError, match=r"CacheManager\.pin: tokens: expected at least a block"):
        manager.pin(range(40))


# Tables.


def test_each_group_has_tables_of_its_own() -> None:
    manager = manager_of(FULL, WINDOW, STATE, num_blocks=120, null_block=True)
    seqs = [run(manager, range(start, start + length)) for start, length in ((0, 11), (50, 22))]
    tables = BatchTables(manager, 3, (8, 16, 5), max_tokens=8)
    assert [tuple(table.shape) for table in tables.block_tables] == [(3, 8), (3, 16), (3, 1)]
    for queries in ([1, 1], [3, 2], [1, 1]):
        manager.extend(seqs, queries)
        tables.update(seqs, queries)
        assert tables.block_tables[0] is tables.block_table
        assert tables.slot_mappings[0] is tables.slot_mapping
        for at in range(2):
            slots = [seq.slot_mapping(seq.num_tokens - count, seq.num_tokens, at) for seq, count in zip(seqs, queries, strict=True)]
            assert tables.slot_mappings[at].tolist() == [*np.concatenate(slots).tolist(), *[-1] * (8 - sum(queries))]
            for row, seq in enumerate(seqs):
                table = seq.block_table(at)
                shown = tables.block_tables[at][row].numpy()
                assert (shown[: table.size][table != 0] == table[table != 0]).all()
                assert not shown[table.size :].any()
        assert tables.block_tables[2][:2, 0].tolist() == [seq.block_table(2)[0] for seq in seqs]
        for at in range(3):
            seqs[0].block_table(at)[:] = 99  # the caller's own
            assert 99 not in seqs[0].block_table(at)
        assert tables.slot_mappings[2].tolist() == [-1] * 8
        views = tables.first(2, 3)
        assert [tuple(view.shape) for view in views.block_tables] == [(2, 8), (2, 16), (2, 1)]
        assert [tuple(view.shape) for view in views.slot_mappings] == [(3,)] * 3
        for seq in seqs:
            manager.commit(seq, list(range(seq.num_tokens - seq.num_known)), computed=seq.num_tokens)


def test_a_block_that_begins_within_a_unit_is_shown() -> None:
    manager = manager_of(FULL, WINDOW, null_block=True)
    seq = run(manager, range(4))
    tables = BatchTables(manager, 2, 16)
    for length in range(5, 30):
        manager.extend(seq, 1)
        tables.update([seq])
        table = seq.block_table(1)
        assert tables.block_tables[1][0].numpy()[: table.size][table != 0].tolist() == table[table != 0].tolist()
        manager.commit(seq, [length], computed=length)
        if length % 7 == 0:
            manager.extend(seq, 3)
            tables.update([seq])
            manager.truncate(seq, length)
    tables.update([])
    assert not any(shown.any() for shown in tables.block_tables), "padding alone"


def test_a_row_of_tables_that_is_anothers_is_written_anew() -> None:
    """Also where that one has only got more blocks since the row was shown as somebody else's."""
    manager = manager_of(FULL, WINDOW, null_block=True, num_blocks=100)
    one, two = (run(manager, range(start, start + 9)) for start in (0, 50))
    tables = BatchTables(manager, 2, 16)
    for shown in ([one, two], [two], [one], [two, one], [one, two]):
        manager.extend([one, two], 3)
        tables.update(shown)
        for row, seq in enumerate(shown):
            assert tables.block_table[row].tolist() == [*seq.block_table(0).tolist(), *[0] * 16][:16]
        for seq in (one, two):
            manager.commit(seq, [1, 2, 3], computed=seq.num_tokens)


def test_exporters_take_a_group() -> None:
    manager = manager_of(FULL, WINDOW, STATE, null_block=True)
    seqs = [manager.begin(range(start, start + length)) for start, length in ((0, 6), (50, 3))]
    tables = [[seq.block_table(at).tolist() for seq in seqs] for at in range(3)]
    for at, rows in enumerate(tables):
        widest = max(map(len, rows))
        assert dense_table(seqs, fill=-7, group=at).tolist() == [row + [-7] * (widest - len(row)) for row in rows]
        csr = csr_table(seqs, group=at)
        assert csr.indices.tolist() == [block for row in rows for block in row]
        assert csr.indptr.tolist() == [0, len(rows[0]), len(rows[0]) + len(rows[1])]
    assert csr_table(seqs, group=1).last_block_len.tolist() == [2, 1]
    assert [row[:3] for row in token_table(seqs, group=1).tolist()] == [seq.slot_mapping(0, 3, 1).tolist() for seq in seqs]
    assert sequence_lengths(seqs).tolist() == [6, 3]


# Bad input.

BAD: dict[str, tuple[Callable[[], object], type[KVDockError], str]] = {
    "no groups": (lambda: CacheManager(8, groups=[]), ArgumentTypeError, "LayerGroups, at least one.*Fix: pass cache.groups"),
    "no group": (lambda: CacheManager(8, groups=[KeepAll()]), ArgumentTypeError, "LayerGroups"),  # type: ignore[list-item]
    "another block size": (lambda: CacheManager(64, 16, groups=[FULL, WINDOW]), ArgumentValueError, "expected 4 tokens.*Fix: leave it out"),
    "another block size of one group": (lambda: CacheManager(64, 16, groups=[FULL]), ArgumentValueError, "expected 4 tokens"),
    "a pool of less than a unit": (
        lambda: CacheManager(1, groups=[group(KeepAll(), 2), group(KeepAll(), 4)]),
        ArgumentValueError,
        "at least the 3 blocks of 4 tokens",
    ),
    "units that are too large": (
        lambda: CacheManager(64, groups=[group(KeepAll(), 512), group(KeepWindow(8), 3)]),
        ArgumentValueError,
        "block_size: expected 1 to 512 tokens, got 1536",
    ),
    "no interval": (lambda: CacheManager(8, groups=[FULL], state_interval=0), ArgumentValueError, "state_interval"),
    "a prefix cache of another block size": (
        lambda: CacheManager(64, prefix=kvdock.create_prefix_cache(block_size=16), groups=[FULL, WINDOW]),
        ArgumentValueError,
        "an empty prefix cache in blocks of 4",
    ),
    "no such group": (lambda: manager_of(FULL, WINDOW).begin([1]).block_table(2), IndexRangeError, "0 to 1, a layer group"),
    "a group below 0": (lambda: manager_of(FULL, WINDOW).begin([1]).slot_mapping(0, 1, group=-1), IndexRangeError, "0 to 1"),
    "slots of a state": (lambda: manager_of(FULL, STATE).begin([1]).slot_mapping(0, 1, group=1), ArgumentValueError, "that keeps a state"),
    "columns for another number of groups": (
        lambda: BatchTables(manager_of(FULL, WINDOW), 2, (4, 4, 4)),
        ArgumentValueError,
        "one number, or 2: one for each layer group",
    ),
    "a group of an exporter": (lambda: dense_table([manager_of(FULL, WINDOW).begin([1])], group=5), IndexRangeError, "dense_table: group"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_reason(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error, match=text):
        call()


def broken(change: Callable[[Any, CacheSequence], object]) -> CacheManager:
    manager = manager_of(FULL, WINDOW, STATE, num_blocks=80)
    manager.finish(run(manager, range(30)))
    seq = run(manager, range(50, 80))
    manager.check_integrity()
    change(manager._pool.units, seq)
    return manager


def _set(array: Any, at: Any, value: Any) -> None:
    array[at] = value


BROKEN: dict[str, Callable[[Any, CacheSequence], object]] = {
    "a block of two units": lambda units, seq: _set(units.table, (int(seq._rows.blocks(seq._row)[0]), 0), units.table[units.table >= 0][0]),
    "a lasting block that is gone": lambda units, seq: _set(units.table, (int(seq._rows.blocks(seq._row)[0]), 0), -1),
    "a need that nobody has": lambda units, seq: _set(units.needs, (int(seq._rows.blocks(seq._row)[-1]), 1), 5),
    "idle blocks that are counted otherwise": lambda units, seq: setattr(units, "num_idle", units.num_idle + 1),
    "an idle block without a turn": lambda units, seq: units._idle[0].clear(),
    "a cached unit that nobody holds": lambda units, seq: _set(units.is_cached, -1, True),
    "a block that is free and a unit's": lambda units, seq: units.blocks.release([int(units.table[units.table >= 0][0])]),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_check_integrity_notices(fault: str) -> None:
    manager = broken(BROKEN[fault])
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_there_are_no_more_units_than_a_prefix_cache_can_name() -> None:
    manager = manager_of(group(KeepWindow(8), 512), num_blocks=2**17)
    assert manager.allocator.num_blocks * manager.block_size == 2**31


def steps(engine: Engine, times: int) -> None:
    """Decode, with a prompt that shares all that is there after each step."""
    one = engine.begin(list(range(9)))
    assert one is not None
    for _ in range(times):
        engine.step(one)
        other = engine.begin([*one.ids, 5])
        assert other is not None
        engine.end(other, "keep")


def test_the_model_notices_what_is_wrong() -> None:
    """A model that cannot fail proves nothing: a window that is let go too early, and a copy that is not made, are noticed."""
    steps(Engine("full and a window", 60), 12)
    engine = Engine("full and a window", 60, prefix="naive")
    for passing in engine.manager._pool.needs.passing.values():
        object.__setattr__(passing, "retention", KeepWindow(2))
    with pytest.raises(AssertionError, match="is gone"):
        steps(engine, 12)
    steps(Engine("full and a state", 60), 12)
    engine = Engine("full and a state", 60)
    engine.copy = lambda pairs: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="state"):
        steps(engine, 12)


def test_a_prompt_that_is_committed_in_parts_keeps_its_state() -> None:
    """Where there is room left, a state that became a checkpoint would be written before anybody could say what to copy."""
    manager = manager_of(FULL, STATE, null_block=True, state_interval=4)
    seq = manager.begin(range(18))
    for computed in range(1, 19):
        manager.commit(seq, [], computed=computed)
        manager.check_integrity()
    assert manager.plan([*range(16), 1]).cached_len == 0
    manager.finish(seq)
    manager.check_integrity()


def test_to_plan_changes_nothing() -> None:
    """Not even what is given up first: a prompt that is only planned does not part from others."""
    gone = []
    for plans in (0, 5):
        manager = manager_of(FULL, WINDOW, num_blocks=60)
        for start in (0, 100, 200):
            manager.finish(run(manager, range(start, start + 30)))
        for _ in range(plans):
            manager.plan([*range(100, 116), 7])
        manager.finish(run(manager, range(300, 330)))
        gone.append([manager.plan([*range(start, start + length), 7]).cached_len for start in (0, 100, 200) for length in (8, 16, 28)])
    assert gone[0] == gone[1]
    assert len(set(gone[0])) > 1, "some of it had to go"


def windows_of(*sizes: int) -> tuple[Any, Any]:
    """Return a group that keeps all, and one of a window of 8, of so many tokens a block."""
    return group(KeepAll(), sizes[0]), group(KeepWindow(8), sizes[1])


@pytest.mark.parametrize("sizes", [(4, 4), (20, 4), (4, 12)])
@pytest.mark.parametrize("prefix", ["naive", "radix"])
def test_what_is_written_and_not_known_lets_windows_go(sizes: tuple[int, int], prefix: str) -> None:
    """Whether it comes at once or one by one; what was let go stays until its room is wanted, and can be published."""
    groups = windows_of(*sizes)
    for step in (1, 7, 100):
        manager = CacheManager(200, groups=groups, prefix=prefix)
        seq = manager.open_empty()
        for _ in range(100 // step):
            manager.extend(seq, step)
            manager.note_written([seq], [seq.num_tokens])
            manager.check_integrity()
        tokens, unit = seq.num_tokens, manager.block_size
        room = -(-tokens // unit) * unit
        assert manager.blocks_used == room // sizes[0] + -(-room // sizes[1]) - (tokens - 7) // sizes[1]
        manager.truncate(seq, 30)
        manager.check_integrity()
        assert (seq.num_tokens, seq.computed) == (30, 0)
        manager.commit(seq, range(30), computed=30)
        manager.check_integrity()
        manager.finish(seq)
        can = manager.can_go_on(range(60))
        assert (can[0], can.size) == (True, 60)
        whole = 30 // unit * unit if prefix == "radix" else 0
        assert int(np.flatnonzero(can)[-1]) == whole
        if whole:
            again = manager.begin(range(60), at_most=0)
            manager.truncate(again, whole - 1)
            assert (again.cached_len, again.num_tokens) == (whole - 1, whole - 1)
            _, pairs = manager.extend(again, 3)
            assert len(pairs), "it goes on within what is cached, so that is copied"
        manager.check_integrity()


def test_what_is_spared_goes_first_when_room_is_wanted() -> None:
    manager = CacheManager(30, groups=windows_of(4, 4))
    seq = manager.open_empty()
    manager.extend(seq, 56)
    manager.note_written([seq], [56])
    assert (manager.blocks_used, seq.shortest) == (16, 0)
    other = manager.begin(range(28))  # 14 blocks: the 2 that were free, and all that was let go
    assert seq.shortest > 0
    with pytest.raises(IndexRangeError, match=r"CacheManager.truncate: n: expected at least \d+: what was before is let go"):
        manager.truncate(seq, 20)
    manager.check_integrity()
    manager.abort(other)
    manager.truncate(seq, 55)
    manager.check_integrity()


@pytest.mark.parametrize("written", [-1, 9, 3], ids=["below 0", "beyond the room", "less than computed"])
def test_what_cannot_be_written(written: int) -> None:
    manager = CacheManager(30, groups=windows_of(4, 4))
    seq = manager.begin(range(8))
    manager.commit(seq, [], computed=4)
    with pytest.raises((ArgumentValueError, IndexRangeError), match=r"note_written: written"):
        manager.note_written([seq], [written])
    manager.check_integrity()


def test_blocks_that_come_into_use_within_a_unit_are_shown() -> None:
    """A unit has its blocks before they are used: a step that comes to the next one changes the tables all the same."""
    manager = CacheManager(100, groups=windows_of(20, 4))
    tables, seq = BatchTables(manager, 1, 32), manager.begin(range(3))
    for _ in range(60):
        tables.update([seq])
        for at, table in enumerate(tables.host.block_tables):
            expected = seq.block_table(at)
            assert table[0, : expected.size][expected > 0].tolist() == expected[expected > 0].tolist(), (seq.num_tokens, at)
        if seq.num_tokens == 30:
            manager.truncate(seq, 27)
        manager.commit(seq, np.arange(seq.num_known, seq.num_tokens), computed=seq.num_tokens)
        manager.extend(seq, 1)
