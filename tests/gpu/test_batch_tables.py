"""`BatchTables` on a GPU: copies that nobody waits for, in order, and graphs that read the tables where they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvdock.scheduler import BatchTables, CacheManager, CacheSequence

NAMES = ("block_table", "seq_lens", "query_lens", "cu_query_lens", "positions", "slot_mapping")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(rows: int = 4) -> tuple[CacheManager, list[CacheSequence], BatchTables]:
    manager = CacheManager(256, 4, null_block=True)
    sequences = [manager.begin([row] * (row + 1)) for row in range(rows)]
    return manager, sequences, BatchTables(manager, rows, 32, max_tokens=2 * rows, device="cuda")


def check(tables: BatchTables) -> None:
    torch.cuda.synchronize()
    for name in NAMES:
        table = getattr(tables, name)
        assert (table.is_cuda, table.dtype) == (True, torch.int32)
        assert table.tolist() == getattr(tables.host, name).tolist(), name


@pytest.mark.parametrize("grown", [[], [0, 1, 2, 3], [1, 2], [0, 3]], ids=["none", "all", "neighbours", "others"])
def test_the_device_shows_what_the_host_shows_without_waiting(grown: list[int]) -> None:
    manager, sequences, tables = make()
    places = [getattr(tables, name).data_ptr() for name in NAMES]
    tables.update(sequences)
    check(tables)
    for _ in range(3):
        if grown:
            manager.extend([sequences[row] for row in grown], 5)
        with no_waiting():
            tables.update(sequences)
        check(tables)
    with no_waiting():
        tables.update(sequences[2:])
    check(tables)
    assert [getattr(tables, name).data_ptr() for name in NAMES] == places


def test_what_is_sent_is_pinned() -> None:
    _, _, tables = make()
    assert tables._pinned
    assert tables._staged(tables._flat).is_pinned()


def test_no_copy_on_its_way_is_overtaken_by_the_next_step() -> None:
    manager, sequences, tables = make()
    tables.update(sequences)
    torch.cuda.synchronize()
    seen, wanted = [], []
    torch.cuda._sleep(200_000_000)  # a step that takes long, while the host goes on
    for _ in range(20):
        manager.extend(sequences, 3)
        tables.update(sequences, [1, 2, 1, 2])
        seen.append([getattr(tables, name).clone() for name in NAMES])
        wanted.append([getattr(tables.host, name).tolist() for name in NAMES])
    torch.cuda.synchronize()
    assert [[table.tolist() for table in step] for step in seen] == wanted


def test_a_captured_graph_reads_the_tables_of_each_step() -> None:
    manager, sequences, tables = make()
    pool = torch.arange(256 * 4, device="cuda", dtype=torch.int32)
    out = torch.zeros_like(tables.slot_mapping)

    def attend() -> None:
        """Reads the slot of each new token through the block table, as attention would."""
        last = (tables.seq_lens - 1).clamp(min=0)
        blocks = tables.block_table.gather(1, (last // 4).long()[:, None])[:, 0]
        out[: len(last)] = pool[(blocks * 4 + last % 4).long()]

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for step in range(12):
        batch = sequences[: 4 - step % 3]
        manager.extend(batch, 1)
        with no_waiting():
            tables.update(batch)
            graph.replay()
        wanted = [int(seq.slot_mapping(seq.num_tokens - 1, seq.num_tokens)[0]) for seq in batch]
        assert out[: len(batch)].tolist() == wanted == tables.slot_mapping[: len(batch)].tolist()
        assert out[len(batch) : 4].tolist() == [0] * (4 - len(batch)), "padding reads the null block"
        assert (tables.slot_mapping[len(batch) :] == -1).all()
