"""What attention reads: the exporters, and `BatchTables`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, KVDockError, StaleHandleError, WrongThreadError
from kvdock.scheduler import (
    BatchTables,
    CacheManager,
    CacheSequence,
    CSRTable,
    HostTables,
    SequenceBatch,
    csr_table,
    dense_table,
    sequence_lengths,
    token_table,
)
from support_descriptors import in_thread

EXPORTERS: dict[str, Callable[..., Any]] = {
    "sequence_lengths": sequence_lengths,
    "dense_table": dense_table,
    "token_table": token_table,
    "csr_table": csr_table,
}


def two() -> tuple[CacheManager, list[CacheSequence]]:
    """Blocks 1, 2 and 3; block 0 is the null block."""
    manager = CacheManager(16, 2, null_block=True)
    return manager, [manager.begin([1, 2, 3]), manager.begin([4])]


def int32(*shape: int) -> Any:
    return np.full(shape, -77, dtype=np.int32)


def test_exporters_by_hand() -> None:
    manager, (one, two_) = two()
    assert sequence_lengths([one, two_]).tolist() == [3, 1]
    assert dense_table([one, two_]).tolist() == [[1, 2], [3, 0]]
    assert dense_table((one, two_), fill=-1, width=3).tolist() == [[1, 2, -1], [3, -1, -1]]
    assert dense_table([two_, two_, one]).tolist() == [[3, 0], [3, 0], [1, 2]], "each as often as it is wanted"
    assert token_table([one, two_], fill=-1).tolist() == [[2, 3, 4], [6, -1, -1]]
    csr = csr_table([one, two_])
    assert (csr.indptr.tolist(), csr.indices.tolist(), csr.last_block_len.tolist()) == ([0, 2, 3], [1, 2, 3], [1, 1])
    manager.extend(one, 1)
    manager.truncate(two_, 0)
    assert csr_table([one, two_]).last_block_len.tolist() == [2, 0]
    tables = (dense_table([one]), token_table([one]), csr.indptr, csr.indices, csr.last_block_len, sequence_lengths([one]))
    assert {table.dtype for table in tables} == {np.dtype(np.int32)}
    assert (dense_table([]).shape, token_table([], width=3).shape, sequence_lengths([]).shape) == ((0, 0), (0, 3), (0,))
    assert csr_table([]).indptr.tolist() == [0]


def test_exporters_write_where_they_are_told() -> None:
    _, sequences = two()
    out = int32(2)
    assert sequence_lengths(sequences, out=out) is out
    assert out.tolist() == [3, 1]
    dense, tokens = int32(2, 4), int32(2, 5)
    assert dense_table(sequences, out=dense, fill=-1) is dense
    assert dense.tolist() == [[1, 2, -1, -1], [3, -1, -1, -1]]
    assert token_table(sequences, out=tokens, fill=9).tolist() == [[2, 3, 4, 9, 9], [6, 9, 9, 9, 9]]
    assert dense_table(sequences, out=int32(4, 2).T[:2], width=4).tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]], "a view"
    csr = CSRTable(int32(3), int32(5), int32(2))
    assert csr_table(sequences, out=csr).indices is csr.indices
    assert (csr.indptr.tolist(), csr.indices.tolist(), csr.last_block_len.tolist()) == ([0, 2, 3], [1, 2, 3, -77, -77], [1, 1])


def read_only(*shape: int) -> Any:
    array = int32(*shape)
    array.flags.writeable = False
    return array


OUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "lengths: shape": ("sequence_lengths", {"out": int32(3)}, "sequence_lengths: out"),
    "lengths: dtype": ("sequence_lengths", {"out": np.zeros(2, np.int64)}, "sequence_lengths: out"),
    "lengths: a tensor": ("sequence_lengths", {"out": torch.zeros(2, dtype=torch.int32, device="meta")}, "sequence_lengths: out"),
    "lengths: read-only": ("sequence_lengths", {"out": read_only(2)}, "sequence_lengths: out"),
    "dense: rows": ("dense_table", {"out": int32(3, 4)}, "dense_table: out"),
    "dense: too narrow": ("dense_table", {"out": int32(2, 1)}, "dense_table: width: expected at least 2"),
    "dense: width too small": ("dense_table", {"width": 1}, "dense_table: width: expected at least 2, as long as the longest row, got 1"),
    "dense: two widths": ("dense_table", {"width": 3, "out": int32(2, 4)}, "dense_table: out"),
    "dense: flat": ("dense_table", {"out": int32(8)}, "dense_table: out"),
    "dense: floats": ("dense_table", {"out": np.zeros((2, 4))}, "dense_table: out"),
    "dense: read-only": ("dense_table", {"out": read_only(2, 4)}, "dense_table: out"),
    "dense: width": ("dense_table", {"width": 2.0}, "dense_table: width"),
    "dense: fill": ("dense_table", {"fill": 2**31}, "dense_table: fill: expected an int32, got 2147483648"),
    "dense: no fill": ("dense_table", {"fill": None}, "dense_table: fill"),
    "tokens: fill": ("token_table", {"fill": 2**40}, "token_table: fill"),
    "tokens: width": ("token_table", {"width": 2}, "token_table: width"),
    "tokens: dtype": ("token_table", {"out": np.zeros((2, 4), np.int64)}, "token_table: out"),
    "csr: an array": ("csr_table", {"out": int32(8)}, "csr_table: out: expected a CSRTable"),
    "csr: indptr": ("csr_table", {"out": CSRTable(int32(2), int32(9), int32(2))}, "csr_table: out.indptr"),
    "csr: indices": ("csr_table", {"out": CSRTable(int32(3), int32(2), int32(2))}, "csr_table: out.indices"),
    "csr: indices, a tensor": (
        "csr_table",
        {"out": CSRTable(int32(3), torch.zeros(9, dtype=torch.int32), int32(2))},  # type: ignore[arg-type]
        "csr_table: out.indices",
    ),
    "csr: last": ("csr_table", {"out": CSRTable(int32(3), int32(9), int32(3))}, "csr_table: out.last_block_len"),
}


@pytest.mark.parametrize("case", OUTS)
def test_exporters_check_their_arguments(case: str) -> None:
    name, how, text = OUTS[case]
    with pytest.raises(KVDockError) as caught:
        EXPORTERS[name](two()[1], **how)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("name", EXPORTERS)
def test_exporters_take_open_sequences_of_one_manager(name: str) -> None:
    manager, (one, two_) = two()
    bad: list[tuple[Any, type[KVDockError]]] = [
        ([one, two()[1][0]], StaleHandleError),
        ([one, None], ArgumentTypeError),
        (one, ArgumentTypeError),
        ((seq for seq in [one]), ArgumentTypeError),
        (None, ArgumentTypeError),
    ]
    for sequences, error in bad:
        with pytest.raises(error):
            EXPORTERS[name](sequences)
    manager.finish(two_)
    with pytest.raises(StaleHandleError, match="finished or aborted"):
        EXPORTERS[name]([one, two_])
    with pytest.raises(StaleHandleError):
        EXPORTERS[name]([two_, one])


@pytest.mark.parametrize("how", ["finish", "drop", "abort", "batch"])
def test_a_sequence_that_is_over_says_so(how: str) -> None:
    """Its blocks are another's by now."""
    manager, (one, _) = two()
    if how == "batch":
        SequenceBatch(manager, [one]).close()
    else:
        {"finish": manager.finish, "abort": manager.abort, "drop": lambda seq: manager.finish(seq, keep=False)}[how](one)
    manager.begin([7, 8, 9])
    calls = [lambda name=name: getattr(one, name) for name in ("tokens", "num_tokens", "num_known", "computed")]
    calls += [lambda name=name: getattr(one, name) for name in ("cached_len", "table_version")]
    calls += [
        one.block_table,
        lambda: one.shortest,
        lambda: one.slot_mapping(0, 0),
        lambda: manager.extend(one, 1),
        lambda: manager.commit(one, [], computed=0),
    ]
    calls += [lambda: manager.fork(one), lambda: manager.truncate(one, 0), lambda: manager.finish(one), lambda: manager.abort(one)]
    for call in calls:
        with pytest.raises(StaleHandleError, match=r"Fix: "):
            call()
    assert (one.is_open, one.namespace, repr(one)) == (False, (), "CacheSequence(closed)")


# Tables that stay where they are.


def wanted(manager: CacheManager, rows: int, width: int, tokens: int, sequences: Any, queries: list[int]) -> dict[str, list[Any]]:
    """The tables of a batch, in plain Python."""
    lengths, pad = [seq.num_tokens for seq in sequences], rows - len(sequences)
    positions = [at for length, query in zip(lengths, queries, strict=True) for at in range(length - query, length)]
    slots = [seq.slot_mapping(n - query, n).tolist() for seq, n, query in zip(sequences, lengths, queries, strict=True)]
    return {
        "block_table": [[*seq.block_table().tolist(), *[0] * width][:width] for seq in sequences] + [[0] * width] * pad,
        "seq_lens": [*lengths, *[0] * pad],
        "query_lens": [*queries, *[0] * pad],
        "cu_query_lens": [sum(queries[:at]) for at in range(rows + 1)],
        "positions": [*positions, *[0] * tokens][:tokens],
        "slot_mapping": [*(slot for row in slots for slot in row), *[-1] * tokens][:tokens],
    }


def shown(tables: BatchTables | HostTables) -> dict[str, list[Any]]:
    names = ("block_table", "seq_lens", "query_lens", "cu_query_lens", "positions", "slot_mapping")
    found = {name: getattr(tables, name) for name in names}
    assert {str(table.dtype).split(".")[-1] for table in found.values()} == {"int32"}
    return {name: table.tolist() for name, table in found.items()}


def test_tables_show_a_batch_and_inert_padding_behind_it() -> None:
    manager, (one, two_) = two()
    tables = BatchTables(manager, 3, 4, max_tokens=6)
    nothing = wanted(manager, 3, 4, 6, [], [])
    assert shown(tables) == nothing
    places = [getattr(tables, name).data_ptr() for name in nothing]
    for sequences, queries in (([one, two_], [3, 1]), ([two_, one], [1, 2]), ([one], [0]), ([], []), ([one, two_], [1, 1])):
        tables.update(sequences, queries)
        assert shown(tables) == shown(tables.host) == wanted(manager, 3, 4, 6, sequences, queries)
        assert (tables.num_sequences, tables.num_tokens) == (len(sequences), sum(queries))
    manager.extend([one, two_], [2, 4])
    tables.update([one, two_])
    assert shown(tables) == wanted(manager, 3, 4, 6, [one, two_], [1, 1])
    manager.finish(one)
    three = manager.begin([9])
    assert three._row == 0, "the row of one that is over"
    tables.update([three, two_])
    assert shown(tables) == wanted(manager, 3, 4, 6, [three, two_], [1, 1])
    assert [getattr(tables, name).data_ptr() for name in nothing] == places, "a graph may have captured them"


def test_lengths_may_be_less_than_the_room() -> None:
    manager, (one, two_) = two()
    manager.extend([one, two_], 3)
    tables = BatchTables(manager, 2, 4, max_tokens=3)
    tables.update([one, two_], [2, 1], seq_lens=[3, 2])
    assert (tables.seq_lens.tolist(), tables.positions.tolist()) == ([3, 2], [1, 2, 1])
    assert tables.slot_mapping.tolist() == [*one.slot_mapping(1, 3).tolist(), *two_.slot_mapping(1, 2).tolist()]


def test_only_rows_whose_blocks_changed_are_written() -> None:
    """Rows on the host are damaged: what is not written stays so."""
    manager, (one, two_) = two()
    tables = BatchTables(manager, 4, 4, max_tokens=16)
    tables.update([one, two_])
    rows = tables.host.block_table

    def written(call: Callable[[], object], sequences: list[CacheSequence]) -> list[int]:
        call()
        rows[:] = -5
        tables.update(sequences)
        return np.flatnonzero((rows != -5).any(axis=1)).tolist()

    def cut_and_extend() -> None:
        manager.truncate(two_, 2)
        manager.extend(two_, 1)

    assert written(lambda: None, [one, two_]) == []
    assert written(lambda: manager.extend(one, 1), [one, two_]) == [], "room in its last block"
    assert written(lambda: manager.extend(two_, 2), [one, two_]) == [1]
    assert written(lambda: manager.commit(one, [5], computed=4), [one, two_]) == []
    assert written(lambda: manager.extend([one, two_], 1), [one, two_]) == [0]
    assert written(cut_and_extend, [one, two_]) == [1]
    assert written(lambda: None, [two_]) == [0, 1], "one row of another, and one of padding"
    assert written(lambda: None, []) == [0]
    assert written(lambda: None, []) == []


def test_the_null_block_is_never_handed_out() -> None:
    manager = CacheManager(4, 2, null_block=True)
    assert (manager.null_block, manager.available_size) == (0, 6)
    for _ in range(3):
        seq = manager.begin(range(6))
        manager.commit(seq, [], computed=6)
        assert 0 not in seq.block_table()
        assert not manager.plan([9]).fits
        manager.finish(seq)
        manager.reset()
        manager.check_integrity()
    assert not manager.plan(range(7)).fits
    assert CacheManager(4, 2).null_block is None


BAD: dict[str, tuple[Callable[[BatchTables, CacheSequence, CacheSequence], object], type[KVDockError]]] = {
    "too many rows": (lambda tables, one, two_: tables.update([one, two_, tables._manager.begin([1])]), ArgumentValueError),
    "too many blocks": (lambda tables, one, two_: tables.update([tables._manager.begin(range(9))]), ArgumentValueError),
    "too many tokens": (lambda tables, one, two_: tables.update([one, two_], [3, 1]), ArgumentValueError),
    "there twice": (lambda tables, one, two_: tables.update([one, one]), ArgumentValueError),
    "another manager's": (lambda tables, one, two_: tables.update([one, two()[1][0]]), StaleHandleError),
    "no sequence": (lambda tables, one, two_: tables.update([one, 1]), ArgumentTypeError),  # type: ignore[list-item]
    "not in a list": (lambda tables, one, two_: tables.update(one), ArgumentTypeError),  # type: ignore[arg-type]
    "more queries than tokens": (lambda tables, one, two_: tables.update([two_], 2), IndexRangeError),
    "queries below none": (lambda tables, one, two_: tables.update([two_], -1), ArgumentValueError),
    "queries for another number": (lambda tables, one, two_: tables.update([two_], [1, 1]), ArgumentValueError),
    "queries of floats": (lambda tables, one, two_: tables.update([two_], [1.0]), ArgumentTypeError),
    "queries beyond 64 bits": (lambda tables, one, two_: tables.update([two_], 2**70), ArgumentValueError),
    "lengths beyond the room": (lambda tables, one, two_: tables.update([two_], seq_lens=[2]), IndexRangeError),
    "lengths for another number": (lambda tables, one, two_: tables.update([two_], seq_lens=[1, 1]), ArgumentValueError),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_shown_changes_nothing(case: str) -> None:
    manager, (one, two_) = two()
    tables = BatchTables(manager, 2, 4, max_tokens=3)
    tables.update([one, two_], [2, 1])
    before = shown(tables)
    call, error = BAD[case]
    with pytest.raises(error):
        call(tables, one, two_)
    assert (shown(tables), tables.num_sequences, tables.num_tokens) == (before, 2, 3)
    manager.finish(two_)
    with pytest.raises(StaleHandleError):
        tables.update([one, two_])
    with pytest.raises(WrongThreadError):
        in_thread(lambda: manager.extend(one, 1))
    assert shown(tables) == before


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BatchTables(None, 1, 1), "BatchTables: manager: expected a CacheManager"),  # type: ignore[arg-type]
        (lambda: BatchTables(two()[0], 0, 1), "BatchTables: batch_size"),
        (lambda: BatchTables(two()[0], 1, 0), "BatchTables: max_blocks"),
        (lambda: BatchTables(two()[0], 1, 1, max_tokens=0), "BatchTables: max_tokens"),
        (lambda: BatchTables(two()[0], 1.0, 1), "BatchTables: batch_size"),  # type: ignore[arg-type]
    ],
)
def test_tables_that_cannot_be_made(make: Callable[[], BatchTables], text: str) -> None:
    with pytest.raises(KVDockError) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_a_device_that_is_not_the_host_gets_copies_of_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors: what is sent, and that nothing is waited for. What arrives is looked at on a GPU, in tests/gpu."""
    manager, sequences = two()
    more = [manager.begin([20 + at]) for at in range(2)]
    tables = BatchTables(manager, 4, 4, device=torch.device("meta"))
    assert tables.block_table.device.type == "meta"
    sent: list[tuple[str, tuple[int, ...]]] = []
    for name in ("copy_", "index_copy_"):
        real = getattr(torch.Tensor, name)

        def spy(self: torch.Tensor, *args: Any, real: Any = real, name: str = name, **how: Any) -> Any:
            if self.device.type == "meta":
                sent.append((name, tuple(self.shape)))
                assert name != "copy_" or how == {"non_blocking": True}
            return real(self, *args, **how)

        monkeypatch.setattr(torch.Tensor, name, spy)

    def update(batch: list[CacheSequence]) -> list[tuple[str, tuple[int, ...]]]:
        sent.clear()
        tables.update(batch)
        return list(sent)

    flat = ("copy_", (4 + 4 + 5 + 4 + 4,))
    batch = [*sequences, *more]
    assert update(batch) == [flat, ("copy_", (4, 4))]
    assert update(batch) == [flat], "one transfer a step"
    manager.extend([batch[1], batch[2]], 2)
    assert update(batch) == [flat, ("copy_", (2, 4))]
    manager.extend([batch[0], batch[3]], 2)
    assert update(batch) == [flat, ("index_copy_", (4, 4))]
    assert shown(tables.host) == wanted(manager, 4, 4, 4, batch, [1, 1, 1, 1])
