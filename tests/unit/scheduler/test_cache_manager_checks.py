"""What `CacheManager.check_integrity` notices, how errors begin, and what tables hold: found to be untested by a mutation run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import IntegrityError, KVDockError, WrongThreadError
from kvdock.scheduler import BatchTables, CacheManager, CacheSequence, SequenceBatch, dense_table, token_table
from support_descriptors import in_thread


def running() -> tuple[CacheManager, CacheSequence]:
    """A manager of 8 blocks of 2 tokens, and a sequence of 5 tokens: two cached blocks and one of its own."""
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4, 5])
    manager.commit(seq, [], computed=5)
    manager.pin([1, 2])
    manager.check_integrity()
    return manager, seq


def put(name: str, value: int) -> Callable[[CacheManager, CacheSequence], object]:
    """Damage a number of the sequence's row."""
    return lambda manager, seq: getattr(manager._rows, name).__setitem__(seq._row, value)


BROKEN: dict[str, Callable[[CacheManager, CacheSequence], object]] = {
    "a block that nobody holds is taken": lambda manager, seq: manager.allocator.allocate(1),
    "a block of a sequence is free": lambda manager, seq: manager.allocator.release(seq.block_table()[2:]),
    "a cached block is free": lambda manager, seq: manager.allocator.release(seq.block_table()[:1]),
    "a cached block has another holder": lambda manager, seq: manager.allocator.share(seq.block_table()[:1]),
    "a block both cached and a sequence's": put("shared", 1),
    "a shared block that is not cached": lambda manager, seq: manager._rows.table.__setitem__((seq._row, 0), 7),
    "fewer blocks than tokens": put("num_tokens", 7),
    "more blocks than tokens": put("num_tokens", 4),
    "more computed than tokens": put("computed", 6),
    "fewer ids than are computed": put("num_known", 4),
    "ids of another number": put("num_known", 200),
    "a lock elsewhere": put("locked", 3),
    "a lock on less than is shared": lambda manager, seq: setattr(seq._handle, "cached_len", 2),
    "no lock": lambda manager, seq: setattr(seq, "_handle", None),
    "a lock too many": lambda manager, seq: manager.prefix.lock_handle(seq._handle),
    "a sequence that is forgotten": lambda manager, seq: manager._rows.sequences.__setitem__(seq._row, None),
    "a sequence of another row": lambda manager, seq: setattr(seq, "_row", seq._row + 1),
    "a promise that nobody counts": put("promised", 1),
    "a promise that nobody has": lambda manager, seq: setattr(manager._pool, "promised", 1),
    "more promised than there is": lambda manager, seq: manager._promises.add(seq._row, 6),
    "a promise below none": lambda manager, seq: manager._promises.add(seq._row, -1),
    "a prompt that is not counted": put("prompt_len", 9),
    "a pin that is forgotten": lambda manager, seq: manager._pins._held.clear(),
    "a pin that has no lock": lambda manager, seq: manager.prefix.lock_handle(
        next(iter(manager._pins._held.values()))._handle, unlock=True
    ),
    "a null block that is somebody's": lambda manager, seq: setattr(manager._pool, "reserved", 0),
    "a prefix cache that is broken": lambda manager, seq: setattr(manager.prefix._tree, "stored", 1),
    "an allocator that is broken": lambda manager, seq: setattr(manager.allocator, "_top", 0),
}


@pytest.mark.parametrize("fault", sorted(BROKEN))
def test_check_integrity_notices(fault: str) -> None:
    manager, seq = running()
    BROKEN[fault](manager, seq)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


CALLS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "begin: floats": (lambda manager, seq: manager.begin([1.5]), "CacheManager.begin: tokens: "),
    "begin: lists of unlike length": (
        lambda manager, seq: manager.begin([[1], [2, 3]]),
        "CacheManager.begin: tokens: expected integers in one dimension, got [[1], [2, 3]]. Fix: pass one flat list",
    ),
    "begin: on a device": (
        lambda manager, seq: manager.begin(torch.zeros(2, dtype=torch.int64, device="meta")),
        "CacheManager.begin: tokens: expected integers on the host, got ",
    ),
    "slot_mapping: None": (
        lambda manager, seq: seq.slot_mapping(None, 1),
        "CacheSequence.slot_mapping: start: expected an int, got None. Fix: pass an int",
    ),
    "share: lists of unlike length": (
        lambda manager, seq: manager.allocator.share([[1], [2, 3]]),
        "BlockAllocator.share: blocks: expected integers in one dimension, got [[1], [2, 3]]. Fix: pass one flat list",
    ),
    "release: on a device": (
        lambda manager, seq: manager.allocator.release(torch.zeros(2, dtype=torch.int64, device="meta")),
        "BlockAllocator.release: blocks: expected integers on the host, got ",
    ),
    "insert_prefix: padding": (
        lambda manager, seq: manager.prefix.insert_prefix([7, 8], [-1]),
        "insert_prefix: blocks: expected blocks from 0 to 2147483647, since a pool has at most 2**31 slots, got block -1. Fix: pass ids",
    ),
    "lock_handle: None": (
        lambda manager, seq: manager.prefix.lock_handle(None),
        "RadixPrefixCache: handle: expected one of this cache, got None, which is not. Fix: pass the handle of a match",
    ),
    "dense_table: too wide": (
        lambda manager, seq: dense_table([seq], width=2**62),
        "dense_table: width: expected a table of at most 2**31 numbers, got [1, 4611686018427387904]. Fix: pass the columns",
    ),
    "token_table: too wide for two": (
        lambda manager, seq: token_table([seq, seq], width=2**30 + 1),
        "token_table: width: expected a table of at most 2**31 numbers, got [2, 1073741825]. Fix: pass the columns",
    ),
    "BatchTables: no device": (
        lambda manager, seq: BatchTables(CacheManager(4, 2, null_block=True), 2, 2, device="nope"),
        "BatchTables: device: expected a device that torch knows, such as \"cpu\", got 'nope'. Fix: ",
    ),
    "BatchTables: a list for a device": (
        lambda manager, seq: BatchTables(CacheManager(4, 2, null_block=True), 2, 2, device=["cpu"]),  # type: ignore[arg-type] # the test
        "BatchTables: device: expected a torch.device or a string such as \"cpu\", got ['cpu']",
    ),
    "begin: nothing": (lambda manager, seq: manager.begin([]), "CacheManager.begin: tokens: "),
    "begin: too much": (lambda manager, seq: manager.begin(range(17)), "CacheManager.begin: tokens: "),
    "begin: too much to come": (lambda manager, seq: manager.begin([1], reserve=2**70), "CacheManager.begin: tokens: "),
    "begin: a reserve that cannot be met": (lambda manager, seq: manager.begin([1], reserve=10), "CacheManager.begin: "),
    "begin: reserve": (lambda manager, seq: manager.begin([1], reserve=-1), "CacheManager.begin: reserve: "),
    "begin: at_most": (lambda manager, seq: manager.begin([1], at_most=1.0), "CacheManager.begin: at_most: "),
    "begin: max_cached_len": (lambda manager, seq: manager.begin([1], max_cached_len=-1), "CacheManager.begin: max_cached_len: "),
    "begin: priority": (lambda manager, seq: manager.begin([1], priority=True), "CacheManager.begin: priority: "),
    "begin: namespace": (lambda manager, seq: manager.begin([1], "a"), "match_prefix: namespace: "),
    "plan: floats": (lambda manager, seq: manager.plan([1.5]), "CacheManager.plan: tokens: "),
    "plan: nothing": (lambda manager, seq: manager.plan([]), "CacheManager.plan: tokens: "),
    "plan: reserve": (lambda manager, seq: manager.plan([1], reserve=True), "CacheManager.plan: reserve: "),
    "extend: n": (lambda manager, seq: manager.extend(seq, -1), "CacheManager.extend: n: "),
    "extend: near 2**63": (lambda manager, seq: manager.extend(seq, 2**63 - 4), "CacheManager.extend: "),
    "extend: beyond 64 bits": (lambda manager, seq: manager.extend([seq], 2**70), "CacheManager.extend: "),
    "extend: no seq": (lambda manager, seq: manager.extend(None, 1), "CacheManager.extend: seq: "),
    "extend: a generator": (lambda manager, seq: manager.extend((one for one in [seq]), 1), "CacheManager.extend: seq: "),
    "extend: a generator of others": (lambda manager, seq: manager.extend((one for one in [other()]), 1), "CacheManager.extend: seq: "),
    "extend: text": (lambda manager, seq: manager.extend("text", 1), "CacheManager.extend: seq: "),
    "extend: numbers": (lambda manager, seq: manager.extend([1], 1), "CacheManager.extend: seq: "),
    "extend: twice": (lambda manager, seq: manager.extend([seq, seq], 1), "CacheManager.extend: seq: expected each sequence once"),
    "extend: of two managers": (lambda manager, seq: manager.extend([seq, other()], 1), "CacheManager.extend: seq: "),
    "extend: over": (lambda manager, seq: manager.extend([seq, over(manager)], 1), "CacheManager.extend: seq: "),
    "extend: n for another number": (lambda manager, seq: manager.extend([seq], [1, 2]), "CacheManager.extend: n: "),
    "extend: n below none": (lambda manager, seq: manager.extend([seq], [-1]), "CacheManager.extend: n: "),
    "extend: n of floats": (lambda manager, seq: manager.extend([seq], [1.0]), "CacheManager.extend: n: "),
    "extend: slots for one": (lambda manager, seq: manager.extend(seq, 1, slots=np.zeros(1, np.int32)), "CacheManager.extend: slots: "),
    "extend: slots of another size": (
        lambda manager, seq: manager.extend([seq], 2, slots=np.zeros(1, np.int32)),
        "CacheManager.extend: slots: ",
    ),
    "extend: slots of another shape": (
        lambda manager, seq: manager.extend([seq], 1, slots=np.zeros((1, 1), np.int32)),
        "CacheManager.extend: slots: ",
    ),
    "extend: slots of int16": (lambda manager, seq: manager.extend([seq], 1, slots=np.zeros(1, np.int16)), "CacheManager.extend: slots: "),
    "extend: slots of floats": (lambda manager, seq: manager.extend([seq], 1, slots=np.zeros(1)), "CacheManager.extend: slots: "),
    "extend: slots in a tensor": (
        lambda manager, seq: manager.extend([seq], 1, slots=torch.zeros(1, device="meta")),
        "CacheManager.extend: slots: ",
    ),
    "extend: slots that cannot be written": (
        lambda manager, seq: manager.extend([seq], 1, slots=read_only()),
        "CacheManager.extend: slots: ",
    ),
    "commit: floats": (lambda manager, seq: manager.commit(seq, [1.5], computed=5), "CacheManager.commit: tokens: "),
    "commit: one number": (lambda manager, seq: manager.commit([seq], 7, computed=[5]), "CacheManager.commit: tokens: "),
    "commit: no tokens": (lambda manager, seq: manager.commit([seq], None, computed=[5]), "CacheManager.commit: tokens: "),
    "commit: a generator": (lambda manager, seq: manager.commit([seq], iter([[1]]), computed=[5]), "CacheManager.commit: tokens: "),
    "commit: tokens for two": (lambda manager, seq: manager.commit([seq], [1, 2], computed=[5]), "CacheManager.commit: tokens: "),
    "commit: lists for two": (lambda manager, seq: manager.commit([seq], [[1], []], computed=[5]), "CacheManager.commit: tokens: "),
    "commit: rows for two": (
        lambda manager, seq: manager.commit([seq], np.ones((2, 1), int), computed=[5]),
        "CacheManager.commit: tokens: ",
    ),
    "commit: lists of floats": (lambda manager, seq: manager.commit([seq], [[1.5]], computed=[5]), "CacheManager.commit: tokens: "),
    "commit: computed for two": (lambda manager, seq: manager.commit([seq], [], computed=[5, 5]), "CacheManager.commit: computed: "),
    "commit: one computed for a batch": (lambda manager, seq: manager.commit([seq], [], computed=5), "CacheManager.commit: computed: "),
    "commit: computed of floats": (lambda manager, seq: manager.commit([seq], [], computed=[5.0]), "CacheManager.commit: computed: "),
    "commit: computed goes back": (
        lambda manager, seq: manager.commit(seq, [], computed=4),
        "CacheManager.commit: computed: expected 5 (as before) to 5",
    ),
    "commit: in a batch": (
        lambda manager, seq: manager.commit([manager.fork(seq), seq], [], computed=[5, 4]),
        "CacheManager.commit: computed of sequence 1: ",
    ),
    "commit: more than room": (lambda manager, seq: manager.commit(seq, [6], computed=6), "CacheManager.commit: computed: "),
    "commit: computed": (lambda manager, seq: manager.commit(seq, [], computed=6), "CacheManager.commit: computed: "),
    "commit: no int": (lambda manager, seq: manager.commit(seq, [], computed=None), "CacheManager.commit: computed: "),
    "commit: no seq": (lambda manager, seq: manager.commit(None, [], computed=0), "CacheManager.commit: seq: "),
    "commit: twice": (lambda manager, seq: manager.commit([seq, seq], [], computed=[5, 5]), "CacheManager.commit: seq: "),
    "commit: another manager's": (
        lambda manager, seq: manager.commit([other()], [], computed=[5]),
        "CacheManager.commit: seq: expected an open sequence of this manager, got another manager's",
    ),
    "fork: seq": (lambda manager, seq: manager.fork(None), "CacheManager.fork: seq: "),
    "fork: another manager's": (lambda manager, seq: manager.fork(other()), "CacheManager.fork: seq: "),
    "fork: over": (
        lambda manager, seq: manager.fork(over(manager)),
        "CacheManager.fork: seq: expected an open sequence of this manager, got one that is finished",
    ),
    "fork: beyond the room": (lambda manager, seq: manager.fork(seq, 6), "CacheManager.fork: num_tokens: "),
    "truncate: n": (lambda manager, seq: manager.truncate(seq, 6), "CacheManager.truncate: n: "),
    "truncate: no int": (lambda manager, seq: manager.truncate(seq, 1.0), "CacheManager.truncate: n: "),
    "truncate: seq": (lambda manager, seq: manager.truncate(None, 0), "CacheManager.truncate: seq: "),
    "finish: seq": (lambda manager, seq: manager.finish(None), "CacheManager.finish: seq: "),
    "abort: seq": (lambda manager, seq: manager.abort(None), "CacheManager.abort: seq: "),
    "pin: what is not cached": (
        lambda manager, seq: manager.pin([1, 2, 3, 9]),
        "CacheManager.pin: tokens: expected at least a block of 2 tokens that are cached, got 4 tokens, of which 2",
    ),
    "pin: less than a block": (lambda manager, seq: manager.pin([1]), "CacheManager.pin: tokens: "),
    "pin: another namespace": (lambda manager, seq: manager.pin([1, 2], ("b",)), "CacheManager.pin: tokens: "),
    "pin: floats": (lambda manager, seq: manager.pin([1.0, 2.0]), "CacheManager.pin: tokens: "),
    "pin: no time": (lambda manager, seq: manager.pin([1, 2], ttl=0), "CacheManager.pin: ttl: "),
    "pin: not a time": (lambda manager, seq: manager.pin([1, 2], ttl=float("nan")), "CacheManager.pin: ttl: "),
    "pin: a truth": (lambda manager, seq: manager.pin([1, 2], ttl=True), "CacheManager.pin: ttl: "),
    "pin: text": (lambda manager, seq: manager.pin([1, 2], ttl="1"), "CacheManager.pin: ttl: "),
    "reset": (lambda manager, seq: manager.reset(), "CacheManager.reset: "),
    "slot_mapping": (
        lambda manager, seq: seq.slot_mapping(0, 6),
        "CacheSequence.slot_mapping: expected 0 <= start <= stop <= 5, got start=0, stop=6. Fix: make room by",
    ),
    "slot_mapping: start": (lambda manager, seq: seq.slot_mapping(None, 1), "CacheSequence.slot_mapping: start: "),
    "slot_mapping: stop": (lambda manager, seq: seq.slot_mapping(0, True), "CacheSequence.slot_mapping: stop: "),
    "slot_mapping: a float": (lambda manager, seq: seq.slot_mapping(0.0, 1), "CacheSequence.slot_mapping: start: "),
    "made: block_size": (lambda manager, seq: CacheManager(4, 0), "CacheManager: block_size: "),
    "made: prefix": (lambda manager, seq: CacheManager(4, 2, 7), "CacheManager: prefix: "),
    "batch: another manager's": (lambda manager, seq: SequenceBatch(manager, [other()]), "SequenceBatch: sequences: "),
}


def other() -> CacheSequence:
    """A sequence of another manager."""
    return CacheManager(8, 2).begin([1])


def over(manager: CacheManager) -> CacheSequence:
    """A sequence that is over."""
    seq = manager.open_empty()
    manager.abort(seq)
    return seq


def read_only() -> Any:
    """An array that cannot be written."""
    array = np.zeros(1, dtype=np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("call", sorted(CALLS))
def test_an_error_begins_with_what_it_is_about_and_changes_nothing(call: str) -> None:
    manager, seq = running()

    def state() -> list[object]:
        numbers = [int(getattr(manager._rows, name)[seq._row]) for name in manager._rows._INTEGERS]
        stats = manager.prefix.stats, manager.prefix.num_locks, manager._pool.promised, manager.num_pins
        return [seq.tokens.tolist(), seq.block_table().tolist(), numbers, manager.available_size, stats]

    before = state()
    with pytest.raises(KVDockError) as caught:
        CALLS[call][0](manager, seq)
    assert str(caught.value).startswith(CALLS[call][1])
    for fork in manager._rows.open():
        if fork is not seq:
            manager.abort(fork)
    assert state() == before
    manager.check_integrity()


def test_a_manager_is_handed_over_with_all_its_parts() -> None:
    manager, seq = running()
    with pytest.raises(WrongThreadError):
        in_thread(lambda: manager.extend(seq, 1))
    manager.hand_over()

    def work() -> None:
        manager.extend(seq, 4)
        manager.finish(seq)
        manager.check_integrity()
        manager._unpin(next(iter(manager._pins._held.values())))
        manager.reset()
        assert manager.allocator.num_free == 8
        manager.hand_over()

    in_thread(work)
    assert manager.begin([1]).num_tokens == 1


def test_a_truncated_sequence_of_a_namespace_stays_in_it() -> None:
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4, 5], ("a",))
    manager.commit(seq, [], computed=5)
    manager.truncate(seq, 2)
    manager.check_integrity()
    assert manager.prefix.match_prefix([1, 2], ("a",)).handle.cached_len == 2
    assert seq._handle is not None
    assert seq._handle.cached_len == 2, "what is behind can be evicted"
    assert manager.prefix.size_info.evictable_size == 2


def test_room_for_nothing_copies_nothing() -> None:
    manager, seq = running()
    other: Any = manager.fork(seq)
    slots, pairs = manager.extend(other, 0)
    assert (slots.size, pairs.shape, pairs.dtype) == (0, (0, 2), np.int64)
    assert other.block_table().tolist() == seq.block_table().tolist()
