"""The kit's engine on managers of several layer groups, which also looks at the tables of batches and at how much is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdock.scheduler import BatchTables, CacheSequence, dense_table, token_table
from kvdock_conformance.checking.group_engine import GroupEngine, Request

__all__ = ["Engine"]


class Engine(GroupEngine):
    """Compares what `BatchTables` and exporters show of a batch with what each sequence says, and hits with the longest there could be."""

    tables: BatchTables | None = None  # the same in all steps, of whatever sequences

    def begin(self, ids: list[int], namespace: tuple[Any, ...] = (), **how: Any) -> Request | None:
        assert self.manager.plan(ids, namespace).cached_len == self.longest_hit(ids, namespace)
        return super().begin(ids, namespace, **how)

    def check(self) -> None:
        """Look, too, whether only what somebody needs has a block, where nothing is cached."""
        super().check()
        null = self.manager.null_block
        if not self.manager.prefix.can_store and null is not None:
            blocks = [self._blocks_of(one.seq, at) for one in self.all for at in range(len(self.groups))]
            assert self.manager._pool.units.blocks.num_used == len({null}.union(*blocks))

    def _blocks_of(self, seq: CacheSequence, at: int) -> set[int]:
        """Return the blocks of a sequence in a group, with those that its last unit has beyond its tokens."""
        table, of = seq.block_table(at), self.manager._pool.units
        begun = 0 if self.groups[at].retention.is_state else table.size % of.widths[at]
        rest = of.table[seq._rows.blocks(seq._row)[-1], of.starts[at] + begun : of.starts[at] + of.widths[at]] if begun else []
        return {*table.tolist(), *(int(block) for block in rest)}

    def longest_hit(self, ids: list[int], namespace: tuple[Any, ...]) -> int:
        """Return behind how many cached tokens each group has all that the next one reads, by what blocks units have."""
        size, units = self.manager.block_size, self.manager._pool.units
        found = self.manager.prefix.match_prefix(ids[: (len(ids) - 1) // size * size], namespace, record=False).blocks
        for count in range(found.size, 0, -1):
            reads = (self._read(at, found[:count], count * size) for at in range(len(self.groups)))
            if all(units.table[place] >= 0 for places in reads for place in places):
                return count * size
        return 0

    def _read(self, at: int, units: Any, length: int) -> set[tuple[int, int]]:
        """Return the places, in the table of units, of what a group reads behind a number of tokens."""
        group, of = self.groups[at], self.manager._pool.units
        if group.retention.is_state:
            return {(int(units[-1]), of.starts[at])}
        blocks = {position // group.block_size for span in group.retention.spans(length) for position in span}
        return {(int(units[block // of.widths[at]]), of.starts[at] + block % of.widths[at]) for block in blocks}

    def look_at(self, seqs: Sequence[CacheSequence]) -> None:
        if self.tables is None:
            self.tables = BatchTables(self.manager, 64, 64)
        tables = self.tables
        tables.update(seqs)
        for at, each in enumerate(self.groups):
            wide = 1 if each.retention.is_state else 64
            shown, exported = tables.block_tables[at].numpy(), dense_table(seqs, width=wide, group=at)
            assert shown.min() >= 0, "what is let go points to the null block"
            for row, seq in enumerate(seqs):
                table = seq.block_table(at)
                kept = table != 0
                assert (shown[row, : table.size][kept] == table[kept]).all()
                assert (exported[row, : table.size][kept] == table[kept]).all()
            if not each.retention.is_state:
                last = [int(seq.slot_mapping(seq.num_tokens - 1, seq.num_tokens, group=at)[0]) for seq in seqs]
                assert tables.slot_mappings[at][: len(seqs)].tolist() == last
                assert [row[seq.num_tokens - 1] for row, seq in zip(token_table(seqs, group=at).tolist(), seqs, strict=True)] == last
            else:
                assert set(tables.slot_mappings[at].tolist()) == {-1}
