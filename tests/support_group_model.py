"""The kit's engine on managers of several layer groups, which also looks at the tables of batches."""

from __future__ import annotations

from collections.abc import Sequence

from kvdock.scheduler import BatchTables, CacheSequence, dense_table, token_table
from kvdock_conformance.checking.group_engine import GroupEngine

__all__ = ["Engine"]


class Engine(GroupEngine):
    """Compares what `BatchTables` and exporters show of a batch with what each sequence says."""

    def look_at(self, seqs: Sequence[CacheSequence]) -> None:
        tables = BatchTables(self.manager, len(seqs), 64)
        tables.update(seqs)
        for at, each in enumerate(self.groups):
            wide = 1 if each.retention.is_state else 64
            shown, exported = tables.block_tables[at].numpy(), dense_table(seqs, width=wide, group=at)
            for row, seq in enumerate(seqs):
                table = seq.block_table(at)
                kept = table != 0
                assert (shown[row, : table.size][kept] == table[kept]).all()
                assert (exported[row, : table.size][kept] == table[kept]).all()
            if not each.retention.is_state:
                last = [int(seq.slot_mapping(seq.num_tokens - 1, seq.num_tokens, group=at)[0]) for seq in seqs]
                assert tables.slot_mappings[at].tolist() == last
                assert [row[seq.num_tokens - 1] for row, seq in zip(token_table(seqs, group=at).tolist(), seqs, strict=True)] == last
            else:
                assert set(tables.slot_mappings[at].tolist()) == {-1}
