"""What `CacheManager.check_integrity` notices, how errors begin, and what tables hold: found to be untested by a mutation run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdock.errors import IntegrityError, KVDockError, WrongThreadError
from kvdock.scheduler import CacheManager, CacheSequence, csr_table, dense_table, sequence_lengths, token_table
from support_descriptors import in_thread


def running() -> tuple[CacheManager, CacheSequence]:
    """A manager of 8 blocks of 2 tokens, and a sequence of 5 tokens: two cached blocks and one of its own."""
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4, 5])
    manager.commit(seq, [], computed=5)
    manager.check_integrity()
    return manager, seq


BROKEN: dict[str, Callable[[CacheManager, CacheSequence], object]] = {
    "a block that nobody holds is taken": lambda manager, seq: manager.allocator.allocate(1),
    "a block of a sequence is free": lambda manager, seq: manager.allocator.release(seq.block_table[2:]),
    "a cached block is free": lambda manager, seq: manager.allocator.release(seq.block_table[:1]),
    "a cached block has another holder": lambda manager, seq: manager.allocator.share(seq.block_table[:1]),
    "a block both cached and a sequence's": lambda manager, seq: setattr(seq, "_shared", 1),
    "a shared block that is not cached": lambda manager, seq: seq._blocks.view.__setitem__(0, 7),
    "fewer blocks than tokens": lambda manager, seq: setattr(seq, "num_tokens", 7),
    "more blocks than tokens": lambda manager, seq: setattr(seq, "num_tokens", 4),
    "more computed than tokens": lambda manager, seq: setattr(seq, "computed", 6),
    "a lock on less than is shared": lambda manager, seq: setattr(seq._handle, "cached_len", 2),
    "no lock": lambda manager, seq: setattr(seq, "_handle", None),
    "a lock too many": lambda manager, seq: manager.prefix.lock_handle(seq._handle),
    "a sequence that is forgotten": lambda manager, seq: manager._open.clear(),
    "a prefix cache that is broken": lambda manager, seq: setattr(manager.prefix, "_stored", 1),
    "an allocator that is broken": lambda manager, seq: setattr(manager.allocator, "_top", 0),
}


@pytest.mark.parametrize("fault", sorted(BROKEN))
def test_check_integrity_notices(fault: str) -> None:
    manager, seq = running()
    BROKEN[fault](manager, seq)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


CALLS: dict[str, tuple[Callable[[CacheManager, CacheSequence], object], str]] = {
    "begin: floats": (lambda manager, seq: manager.begin([1.5]), "CacheManager.begin: tokens: "),
    "begin: nothing": (lambda manager, seq: manager.begin([]), "CacheManager.begin: tokens: "),
    "begin: too much": (lambda manager, seq: manager.begin(range(17)), "CacheManager.begin: tokens: "),
    "begin: priority": (lambda manager, seq: manager.begin([1], priority=True), "CacheManager.begin: priority: "),
    "extend: n": (lambda manager, seq: manager.extend(seq, -1), "CacheManager.extend: n: "),
    "extend: seq": (lambda manager, seq: manager.extend(None, 1), "CacheManager.extend: seq: "),  # type: ignore[arg-type]
    "commit: tokens": (lambda manager, seq: manager.commit(seq, [1.5], computed=5), "CacheManager.commit: tokens: "),
    "commit: computed": (lambda manager, seq: manager.commit(seq, [], computed=6), "CacheManager.commit: computed: "),
    "commit: no int": (lambda manager, seq: manager.commit(seq, [], computed=None), "CacheManager.commit: computed: "),  # type: ignore[arg-type]
    "commit: seq": (lambda manager, seq: manager.commit(None, [], computed=0), "CacheManager.commit: seq: "),  # type: ignore[arg-type]
    "fork: seq": (lambda manager, seq: manager.fork(None), "CacheManager.fork: seq: "),  # type: ignore[arg-type]
    "truncate: n": (lambda manager, seq: manager.truncate(seq, 6), "CacheManager.truncate: n: "),
    "truncate: no int": (lambda manager, seq: manager.truncate(seq, 1.0), "CacheManager.truncate: n: "),  # type: ignore[arg-type]
    "truncate: seq": (lambda manager, seq: manager.truncate(None, 0), "CacheManager.truncate: seq: "),  # type: ignore[arg-type]
    "finish: seq": (lambda manager, seq: manager.finish(None), "CacheManager.finish: seq: "),  # type: ignore[arg-type]
    "abort: seq": (lambda manager, seq: manager.abort(None), "CacheManager.abort: seq: "),  # type: ignore[arg-type]
    "reset": (lambda manager, seq: manager.reset(), "CacheManager.reset: "),
    "slot_mapping": (lambda manager, seq: seq.slot_mapping(0, 6), "CacheSequence.slot_mapping: expected 0 <= start <= stop <= 5"),
    "slot_mapping: start": (lambda manager, seq: seq.slot_mapping(None, 1), "CacheSequence.slot_mapping: start: "),  # type: ignore[arg-type]
    "made: block_size": (lambda manager, seq: CacheManager(4, 0), "CacheManager: block_size: "),
    "made: prefix": (lambda manager, seq: CacheManager(4, 2, 7), "CacheManager: prefix: "),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_an_error_begins_with_what_it_is_about_and_changes_nothing(call: str) -> None:
    manager, seq = running()
    before = (seq.tokens.tolist(), seq.block_table.tolist(), seq.computed, manager.available_size, manager.prefix.stats)
    with pytest.raises(KVDockError) as caught:
        CALLS[call][0](manager, seq)
    assert str(caught.value).startswith(CALLS[call][1])
    assert (seq.tokens.tolist(), seq.block_table.tolist(), seq.computed, manager.available_size, manager.prefix.stats) == before
    manager.check_integrity()


def test_which_sequence_is_refused_is_said() -> None:
    manager, seq = running()
    with pytest.raises(KVDockError, match="another manager's"):
        CacheManager(8, 2).fork(seq)
    manager.finish(seq)
    with pytest.raises(KVDockError, match="one that is finished"):
        manager.fork(seq)


def test_a_manager_is_handed_over_with_all_its_parts() -> None:
    manager, seq = running()
    with pytest.raises(WrongThreadError):
        in_thread(lambda: manager.extend(seq, 1))
    manager.hand_over()

    def work() -> None:
        manager.extend(seq, 4)
        manager.finish(seq)
        manager.check_integrity()
        manager.reset()
        assert manager.allocator.num_free == 8
        manager.hand_over()

    in_thread(work)
    assert manager.begin([1]).num_tokens == 1


def test_tables_of_a_batch() -> None:
    manager, long = running()
    short = manager.begin([9])
    assert sequence_lengths([long, short]).tolist() == [5, 1]
    dense, tokens, csr = dense_table([long, short], fill=-1), token_table([long, short], fill=-1), csr_table([long, short])
    blocks = [*long.block_table.tolist(), *short.block_table.tolist()]
    assert dense.tolist() == [blocks[:3], [blocks[3], -1, -1]]
    assert tokens.tolist() == [[*long.slot_mapping(0, 5).tolist()], [*short.slot_mapping(0, 1).tolist(), -1, -1, -1, -1]]
    assert (csr.indptr.tolist(), csr.indices.tolist(), csr.last_block_len.tolist()) == ([0, 3, 4], blocks, [1, 1])
    assert {table.dtype for table in (dense, tokens, csr.indptr, csr.indices, csr.last_block_len, sequence_lengths([long]))} == {
        np.dtype(np.int32)
    }
    assert token_table([long], width=7).shape == (1, 7)
    for make in (dense_table, token_table):
        with pytest.raises(KVDockError, match="width"):
            make([long], width=2)


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
    assert other.block_table.tolist() == seq.block_table.tolist()
