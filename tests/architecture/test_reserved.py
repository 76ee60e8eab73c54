"""What is reserved for later is in one table of docs/architecture.md, and is refused until then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvdock
from support_docs import ROOT
from support_sources import BACKENDS, CORE, modules_below

POOL = torch.zeros(2, 4, 1, 8)
NEW, SLOTS, ONE = torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int64), torch.ones(1)
SPEC = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_positions=8, dtype=torch.float32)
CPU = kvdock.RankInfo("cpu")


def scaled(**scale: torch.Tensor) -> None:
    """Write, and read, with a scale."""
    with pytest.raises(kvdock.ArgumentValueError, match="not quantised"):
        kvdock.ops.gather_paged(POOL, POOL.clone(), SLOTS, **scale)
    kvdock.ops.paged_caching_(POOL, POOL.clone(), NEW, NEW, SLOTS, **scale)


REFUSED: dict[str, tuple[type[kvdock.KVDockError], list[Callable[[], Any]]]] = {
    "k_scale": (kvdock.ArgumentValueError, [lambda: scaled(k_scale=ONE)]),
    "v_scale": (kvdock.ArgumentValueError, [lambda: scaled(v_scale=ONE)]),
    "scale": (
        kvdock.ArgumentValueError,
        [
            lambda: kvdock.ops.mla_caching_(POOL, NEW[0, :, :6], NEW[0, :, :2], SLOTS, scale=ONE[0]),
            lambda: kvdock.ops.mla_gather(POOL, SLOTS, 6, scale=ONE[0]),
        ],
    ),
    "kvdock.plugin.QUANTISED_DTYPES": (
        kvdock.UnsupportedError,
        [lambda dtype=dtype: kvdock.PagedKVCacheConfig(num_blocks=1, cache_dtype=dtype) for dtype in kvdock.plugin.QUANTISED_DTYPES],
    ),
    "PagedKVCacheConfig.cache_dtype": (
        kvdock.UnsupportedError,
        [
            lambda dtype=dtype: kvdock.create_cache(SPEC, kvdock.PagedKVCacheConfig(num_blocks=1, cache_dtype=dtype), CPU)
            for dtype in kvdock.plugin.COPY_DTYPES
            if dtype != SPEC.dtype
        ],
    ),
}
"""For each name that can be used: the error, and uses of it."""

UNREAD = "Descriptor.workspace_bytes"


def reserved() -> list[str]:
    """Return the names in the table."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("\n## Reserved names\n")[1].split("\n## ")[0]
    first = [line.split("|")[1].partition(" of ")[0] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]


def test_the_table_is_whole() -> None:
    assert sorted(reserved()) == sorted([*REFUSED, UNREAD])


@pytest.mark.parametrize("name", REFUSED)
def test_a_reserved_name_is_refused(name: str) -> None:
    error, uses = REFUSED[name]
    assert uses
    for use in uses:
        with pytest.raises(error):
            use()


def test_every_op_of_a_later_release_is_in_the_table() -> None:
    later = {f"kvdock.ops.{name}" for name in kvdock.ops.__all__ if "Not there yet" in (getattr(kvdock.ops, name).__doc__ or "")}
    assert later == {name for name in reserved() if name.startswith("kvdock.ops.")}


def test_nothing_but_the_kit_reads_what_is_for_planning() -> None:
    name = UNREAD.partition(".")[2]
    modules = [module for folder in (CORE, *BACKENDS.iterdir()) if folder.is_dir() for module in modules_below(folder)]
    stated = re.compile(rf"\w+\.{name} = .*")  # of a descriptor, by itself or by who makes it, and of its parts
    assert [m.where for m in modules if name in stated.sub("", m.text) and not m.name.startswith("kvdock_conformance")] == [
        "core/kvdock/interface.py"
    ]
