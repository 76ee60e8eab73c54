"""What was saved is what is loaded, bit for bit, whatever the dtype, the layers and the orders in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.bits import as_bits
from kvdock.checks import COPY_DTYPES
from kvdock.files import Loaded, load_pool, load_prefix, save_pool, save_prefix
from kvdock.scheduler.cached import cached_blocks
from support_files import CANARY, KINDS, cached, compute, pool

IDS = list(range(100, 150))
ORDERS: list[dict[str, Any]] = [{"layout": layout, "head_layout": heads} for layout in kvdock.KVCacheLayout for heads in kvdock.HeadLayout]


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in KINDS), *(("equal", dtype) for dtype in COPY_DTYPES)])
def test_kinds_and_dtypes(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    cache, manager = pool(kind, dtype=dtype)
    compute(cache, manager, IDS, ("a", 1))
    whole = len(IDS) // manager.block_size * manager.block_size
    saved = save_prefix(tmp_path / "file", manager, cache, IDS, ("a", 1), model="m")
    assert (saved.num_prefixes, saved.num_tokens, saved.num_files) == (1, whole, 1)
    assert saved.nbytes == (tmp_path / "file").stat().st_size
    other, others = pool(kind, dtype=dtype, num_blocks=80)
    assert load_prefix(tmp_path / "file", others, other, model="m") == Loaded(1, 1, whole, whole)
    assert cached(other, others, IDS, ("a", 1)) == whole
    assert cached(other, others, IDS) == 0, "another namespace"
    others.check_integrity()
    assert others.num_sequences == 0


@pytest.mark.parametrize("source", ORDERS[:2], ids=str)
@pytest.mark.parametrize("target", ORDERS, ids=str)
def test_orders_in_memory(tmp_path: Path, source: dict[str, Any], target: dict[str, Any]) -> None:
    cache, manager = pool("equal", **source)
    compute(cache, manager, IDS)
    save_prefix(tmp_path / "file", manager, cache, IDS)
    other, others = pool("equal", **target)
    load_prefix(tmp_path / "file", others, other)
    assert cached(other, others, IDS) == 48


def test_nothing_is_written_but_the_blocks_that_are_cached_then(tmp_path: Path) -> None:
    cache, manager = pool("windows")
    compute(cache, manager, IDS)
    save_prefix(tmp_path / "file", manager, cache, IDS)
    other, others = pool("windows")
    load_prefix(tmp_path / "file", others, other)
    length, tables = cached_blocks(others, IDS)
    assert length
    owned = sorted({block for table in tables for block in table.tolist() if block >= 0})
    free = sorted(set(range(other.num_blocks)) - set(owned))
    for layer in range(other.num_layers):
        for view in other.buffers(layer).values():
            assert (as_bits(view)[free].contiguous().view(torch.uint8) == CANARY).all()


def test_what_windows_have_let_go_is_not_saved_and_not_found(tmp_path: Path) -> None:
    cache, manager = pool("windows", num_blocks=256)
    ids = list(range(160))
    compute(cache, manager, ids)
    save_prefix(tmp_path / "file", manager, cache, ids)
    other, others = pool("windows", num_blocks=256)
    load_prefix(tmp_path / "file", others, other)
    length, tables = cached_blocks(others, ids)
    kept = [int((table >= 0).sum()) * group.block_size for table, group in zip(tables, other.groups, strict=True)]
    assert length == kept[0]
    assert max(kept[1:]) < length // 2
    size = others.block_size
    assert not others.can_go_on(ids)[size : length - 2 * size].any(), "nobody may go on where a window is not there"
    assert cached(other, others, ids[: length // 2]) == 0
    compute(other, others, ids[: length // 2])
    assert cached(other, others, ids[: length // 2])
    assert cached(other, others, ids) == length
    others.check_integrity()


def test_what_is_cached_already_is_not_read_again(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, IDS)
    save_prefix(tmp_path / "file", manager, cache, IDS)
    other, others = pool()
    compute(other, others, IDS[:21])
    _, (before,) = cached_blocks(others, IDS)
    assert load_prefix(tmp_path / "file", others, other).num_loaded == 48 - 20
    _, (after,) = cached_blocks(others, IDS)
    assert after[:5].tolist() == before.tolist()
    used, version = others.blocks_used, others.prefix.stats.inserted_tokens
    assert load_prefix(tmp_path / "file", others, other) == Loaded(1, 1, 48, 0)
    assert (others.blocks_used, others.prefix.stats.inserted_tokens) == (used, version)
    assert cached(other, others, IDS) == 48


def test_loading_evicts_what_nobody_uses_and_nothing_else(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, IDS)
    save_prefix(tmp_path / "file", manager, cache, IDS)
    other, others = pool(num_blocks=20)
    held = compute(other, others, list(range(20)), finish=False)
    compute(other, others, list(range(500, 560)))
    load_prefix(tmp_path / "file", others, other)
    assert (cached(other, others, list(range(20))), cached(other, others, IDS)) == (20, 48)
    assert cached(other, others, list(range(500, 560))) < 60
    others.finish(held)
    tiny, of_tiny = pool(num_blocks=11)
    with pytest.raises(kvdock.OutOfBlocksError):
        load_prefix(tmp_path / "file", of_tiny, tiny)
    assert of_tiny.blocks_used == 0
    of_tiny.check_integrity()


@pytest.mark.parametrize("most", [1, 700, 10**9])
def test_parts(tmp_path: Path, most: int) -> None:
    cache, manager = pool("windows")
    compute(cache, manager, IDS)
    saved = save_prefix(tmp_path / "a.file", manager, cache, IDS, max_file_bytes=most)
    assert saved.num_files == len(list(tmp_path.iterdir()))
    assert saved.nbytes == sum(each.stat().st_size for each in tmp_path.iterdir())
    assert (saved.num_files > 1) == (most < 10**9)
    other, others = pool("windows")
    load_prefix(tmp_path / "a.file", others, other)
    assert cached(other, others, IDS) == saved.num_tokens


def test_parts_have_about_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    cache, manager = pool()
    compute(cache, manager, IDS)
    block = 2 * 2 * 4 * 2 * 8 * 2
    saved = save_prefix(tmp_path / "f", manager, cache, IDS, max_file_bytes=5 * block + 1)
    assert saved.num_files == 4, "12 blocks, 5 to a part, and the file that names them"


@pytest.mark.parametrize("call", ["save", "load"])
def test_progress(tmp_path: Path, call: str) -> None:
    told: list[tuple[int, int]] = []
    cache, manager = pool("both")
    compute(cache, manager, IDS)
    path = tmp_path / "file"
    save_prefix(path, manager, cache, IDS, progress=(lambda *at: told.append(at)) if call == "save" else None)
    if call == "load":
        other, others = pool("both")
        load_prefix(path, others, other, progress=lambda *at: told.append(at))
    done, totals = [at[0] for at in told], {at[1] for at in told}
    assert len(totals) == 1
    assert len(told) > 3
    assert done == sorted(set(done))
    assert done[-1] == totals.pop()


def test_what_progress_raises_ends_it_and_nothing_was_changed(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total * 3 // 4:
            raise KeyboardInterrupt

    cache, manager = pool()
    compute(cache, manager, IDS)
    save_prefix(tmp_path / "file", manager, cache, IDS)
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        save_prefix(tmp_path / "file", manager, cache, IDS[:20], progress=stop)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == before
    other, others = pool()
    with pytest.raises(KeyboardInterrupt):
        load_prefix(tmp_path / "file", others, other, progress=stop)
    assert (others.blocks_used, others.num_sequences, cached(other, others, IDS)) == (0, 0, 0)
    others.check_integrity()


def test_saving_counts_as_no_use_and_takes_no_block(tmp_path: Path) -> None:
    cache, manager = pool(num_blocks=16)
    compute(cache, manager, IDS)
    compute(cache, manager, list(range(12)))
    before, used = manager.prefix.stats, manager.blocks_used
    save_prefix(tmp_path / "file", manager, cache, IDS)
    save_pool(tmp_path / "pool", manager, cache)
    assert (manager.prefix.stats, manager.blocks_used, manager.prefix.num_locks) == (before, used, 0)
    assert manager.prefix.evict(1).size == 1, "of the one that was used first"
    assert cached(cache, manager, list(range(12))) == 12


PROMPTS = st.lists(
    st.tuples(st.sampled_from([(), ("a",), (b"a",), (1, ("x", None))]), st.lists(st.integers(0, 2), min_size=1, max_size=40)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=PROMPTS,
    kind=st.sampled_from(["equal", "windows", "sinks", "chunks", "states", "only states"]),
    most=st.sampled_from([1, 3000, 10**9]),
    before=PROMPTS,
)
def test_any_pool(tmp_path: Path, prompts: Any, kind: str, most: int, before: Any) -> None:
    cache, manager = pool(kind, num_blocks=400)
    for namespace, ids in prompts:
        compute(cache, manager, ids, namespace)
    if not manager.prefix.size_info.total_size:
        return
    saved = save_pool(tmp_path / "pool", manager, cache, max_file_bytes=most)
    other, others = pool(kind, num_blocks=800)
    for namespace, ids in before:
        compute(other, others, ids, namespace)
    found = load_pool(tmp_path / "pool", others, other)
    assert found.num_prefixes == found.num_saved == saved.num_prefixes
    for namespace, ids in prompts:
        have = cached(cache, manager, ids, namespace)
        now = cached(other, others, ids, namespace)
        # Windows are there where prefixes ended that nothing goes on behind.
        assert now >= have or kind in ("windows", "sinks", "chunks")
    for namespace, ids in [*prompts, *before]:
        compute(other, others, ids, namespace)
        assert cached(other, others, ids, namespace) == len(ids) // others.block_size * others.block_size
    others.check_integrity()
    assert others.num_sequences == others.prefix.num_locks == 0
