"""What a call needs that a device has no room for is kvdock's error, and says what helps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kvdock

SLOTS = torch.zeros(1, dtype=torch.int64).expand(1 << 40)
LATENTS = torch.zeros(2, 4, 1, 1 << 16)
WIDE = torch.zeros(2, 4, 64, 4096)
QUERIES, KEYS = torch.zeros(1, 1, 8).expand(1 << 40, 1 << 14, 8), torch.zeros(2, 4, 1, 8)
BATCH = {"block_table": torch.zeros(1, 1, dtype=torch.int32), "seq_lens": torch.tensor([4]), "cu_query_lens": torch.tensor([0, 1 << 40])}

CALLS: dict[str, Callable[[], object]] = {
    "gather_paged": lambda: kvdock.ops.gather_paged(WIDE, WIDE, SLOTS),
    "mla_gather": lambda: kvdock.ops.mla_gather(LATENTS, SLOTS, 1 << 15),
    "paged_attention": lambda: kvdock.ops.paged_attention(QUERIES, KEYS, KEYS, **BATCH),
    "paged_attention, sums": lambda: kvdock.ops.paged_attention(QUERIES, KEYS, KEYS, **BATCH, return_lse=True),
}
"""Calls whose outputs would take more than an address space: systems that overcommit give terabytes."""


@pytest.mark.parametrize("name", CALLS)
def test_outputs_that_there_is_no_room_for(name: str) -> None:
    op = name.partition(",")[0]
    for _ in range(2):  # the first call of its kind, and one that may be known
        with pytest.raises(kvdock.CapacityError, match=rf"^{op}: expected memory for .*\. Fix: free memory on the device") as caught:
            CALLS[name]()
        assert isinstance(caught.value.__cause__, RuntimeError)
