"""The file tier of docs/tiers.md: what it does where a disk is full, which its page does not show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import kvdock
from support_docs import blocks


def test_its_file_has_no_holes(tmp_path: Path) -> None:
    """A write to a hole of a mapped file, on a disk that is full, is a SIGBUS: the process ends, and no tier raises."""
    (text,) = (block.text for block in blocks(Path("docs/tiers.md"), "python") if "class FileTier" in block.text)
    names: dict[str, Any] = {}
    exec(text.split("\nspec = ")[0], names)  # noqa: S102 - the page's own code
    spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=8, max_positions=512, dtype=torch.float32)
    cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=16), kvdock.RankInfo("cpu"))
    tier = names["FileTier"](str(tmp_path / "blocks"), 100, cache)
    found = os.stat(tmp_path / "blocks")
    assert found.st_size == 100 * tier.file.shape[1] == 100 * cache.nbytes // cache.num_blocks
    assert found.st_blocks * 512 >= found.st_size
