"""Every memory order of a pool, written by a cache and read by attention kernels: what one writes, the others read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import kvdock
from support_attention import ORDERS, assert_means, filled, sdpa, served_by

LENS = (37, 16, 0, 5)
COUNTS = {"decode": None, "prefill": (20, 1, 0, 5)}


@pytest.mark.parametrize(("layout", "heads"), ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_kernels_read_what_was_written(counts: Sequence[int] | None, layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    for args in filled(layout, heads, LENS, counts, device="cpu", dtype=torch.float32):
        assert served_by(args) == "cpu"
        out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
        assert_means(args, out, lse)
        assert_means(args, sdpa(args))
        with kvdock.use_backend("portable"):
            assert_means(args, *kvdock.ops.paged_attention(**args, return_lse=True))
