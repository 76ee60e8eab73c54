"""The tables of a batch as values: on the host, and the first rows and tokens of them."""

from __future__ import annotations

import attrs
import torch

from kvdock.scheduler.exporters import Int32

__all__ = ["HostTables", "TableViews"]


@attrs.frozen(eq=False)
class HostTables:
    """The same on the host, as numpy arrays of int32 that `BatchTables.update` writes; see `kvdock.scheduler.batch_tables`."""

    block_table: Int32
    seq_lens: Int32
    query_lens: Int32
    cu_query_lens: Int32
    positions: Int32
    slot_mapping: Int32
    block_tables: tuple[Int32, ...]
    slot_mappings: tuple[Int32, ...]


@attrs.frozen(eq=False)
class TableViews:
    """The first ``b`` rows and ``t`` tokens of `BatchTables`, as views: what stands in them is that of the last update, whenever it was.

    All int32: block_table ``[b, max_blocks]``, seq_lens and query_lens ``[b]``, cu_query_lens ``[b + 1]``, positions and
    slot_mapping ``[t]``; block_tables and slot_mappings are those of each layer group.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
