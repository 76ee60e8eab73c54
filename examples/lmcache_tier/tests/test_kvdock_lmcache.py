"""The adapter with LMCache itself, on the CPU. Needs what README.md lists, and kvdock's own `tests` on the path."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvdock_lmcache import LMCacheEngineBuilder, LMCacheEngineConfig, LMCacheStore, engine_for

import kvdock
from support_tiny_engine import Engine, Request, ask, make, run, uncached

BLOCK, CHUNK = 4, 8
Made = Callable[..., LMCacheStore]


def config(folder: Path | None = None, **settings: Any) -> LMCacheEngineConfig:
    """So many gigabytes of host memory, and a folder that other processes may have too."""
    remote = {"remote_url": f"fs://host:0{folder}"} if folder else {}
    return LMCacheEngineConfig.from_defaults(**{"chunk_size": CHUNK, "local_cpu": True, "max_local_cpu_size": 0.05, **remote, **settings})


def pool(num_blocks: int = 16, **settings: Any) -> kvdock.PagedKVCache:
    spec = kvdock.KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, max_positions=512, dtype=torch.float32)
    conf = kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=BLOCK, **settings)
    return kvdock.create_cache(spec, conf, kvdock.RankInfo("cpu"))


@pytest.fixture
def connect() -> Iterator[Made]:
    """Connects managers with LMCache; all engines end with the test."""
    names: list[str] = []

    def made(cache: Any, manager: kvdock.CacheManager, settings: LMCacheEngineConfig, name: str = "model") -> LMCacheStore:
        names.append(name)
        return LMCacheStore(manager, engine_for(cache, settings, name))

    yield made
    for name in names:
        LMCacheEngineBuilder.destroy(name)


def values(tokens: list[int], layer: int, kind: int) -> torch.Tensor:
    """Keys or values that follow from a token and its whole prefix: those of another prefix are others."""
    sums = torch.tensor(tokens, dtype=torch.float64).cumsum(0)[:, None, None]
    return (sums + torch.arange(16).view(1, 2, 8) / 64 + 1000 * layer + 500 * kind).float()


def serve(cache: Any, manager: kvdock.CacheManager, tokens: list[int]) -> int:
    """Begin a prompt, compute what is missing, look at all of it, and end it; return how much was cached."""
    sequence = manager.begin(tokens)
    cached = sequence.cached_len
    slots = torch.from_numpy(sequence.slot_mapping(cached, len(tokens)))
    for layer in range(cache.num_layers):
        cache.update(layer, *(values(tokens, layer, kind)[cached:] for kind in range(2)), slots)
    manager.commit(sequence, [], computed=len(tokens))
    blocks = torch.from_numpy(sequence.block_table()).long()
    for layer in range(cache.num_layers):
        for kind, buffer in enumerate(cache.buffers(layer).values()):
            there = buffer[blocks].reshape(-1, 2, 8)[: len(tokens)]
            assert torch.equal(there, values(tokens, layer, kind)), (layer, kind, cached)
    manager.finish(sequence)
    manager.check_integrity()
    return int(cached)


def text(start: int, count: int = 43) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("layout", kvdock.KVCacheLayout)
@pytest.mark.parametrize("heads", kvdock.HeadLayout)
def test_what_the_pool_evicted_comes_back_bit_for_bit(connect: Made, layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    cache, manager = pool(layout=layout, head_layout=heads), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    for start in (0, 1000, 2000):  # the pool has room for one of them, and a half
        assert store.fetch(text(start)) == 0
        assert serve(cache, manager, text(start)) == 0
    assert manager.plan(text(0)).cached_len == 0
    assert store.fetch(text(0)) == 40
    assert serve(cache, manager, text(0)) == 40
    assert store.fetch(text(0)) == 0, "it is in the pool"
    for start in (2000, 1000):
        store.fetch(text(start))
        assert serve(cache, manager, text(start)) == 40


def test_it_comes_back_from_lmcaches_disk(connect: Made, tmp_path: Path) -> None:
    """With host memory for a few chunks on their way, and none that are kept there."""
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config(local_cpu=False, local_disk=f"file://{tmp_path}/", max_local_disk_size=0.05))
    for start in (0, 1000, 2000):
        serve(cache, manager, text(start))
    end = time.monotonic() + 30
    while store.engine.lookup(text(0)) < 40:  # it writes in a thread of its own
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) >= 40 * 3 * 2 * 16 * 4
    assert store.fetch(text(0)) == 40
    assert serve(cache, manager, text(0)) == 40


def test_without_fetching_nothing_comes(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    connect(cache, manager, config())
    assert [serve(cache, manager, text(start)) for start in (0, 1000, 2000, 0)] == [0] * 4


def test_only_the_common_part_of_another_prompt_comes(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    for start in (0, 1000, 2000):
        serve(cache, manager, text(start))
    other = [*text(0, 27), *text(7000, 10)]
    assert store.fetch(other) == 24, "three chunks"
    assert serve(cache, manager, other) == 24


def test_blocks_that_others_read_are_not_written(connect: Made) -> None:
    """Five blocks are in the pool, the third chunk is half there: only what is missing is written, while a sequence reads the rest."""
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    serve(cache, manager, text(0))
    manager.reset()
    reader = manager.begin(text(0, 20))
    for layer in range(cache.num_layers):
        kinds = [values(text(0, 20), layer, kind) for kind in range(2)]
        cache.update(layer, *kinds, torch.from_numpy(reader.slot_mapping(0, 20)))
    manager.commit(reader, [], computed=20)
    blocks = torch.from_numpy(reader.block_table()).long()
    for layer in range(cache.num_layers):  # marks show what is written
        for buffer in cache.buffers(layer).values():
            buffer[blocks] += 0.25
    marked = [buffer[blocks].clone() for layer in range(cache.num_layers) for buffer in cache.buffers(layer).values()]
    assert store.fetch(text(0)) == 20
    after = [buffer[blocks] for layer in range(cache.num_layers) for buffer in cache.buffers(layer).values()]
    assert all(map(torch.equal, marked, after))
    for layer in range(cache.num_layers):
        for buffer in cache.buffers(layer).values():
            buffer[blocks] -= 0.25
    manager.finish(reader)
    assert serve(cache, manager, text(0)) == 40


def test_decoded_tokens_are_kept_as_their_chunks_fill(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    tokens = text(0, 6)
    sequence = manager.begin(tokens)
    for token in range(6, 20):
        manager.commit(sequence, [token], computed=token)
        manager.extend(sequence, 1)
        tokens.append(token)
        assert store.engine.lookup(tokens) == token // CHUNK * CHUNK
    manager.finish(sequence)


def test_no_room_in_the_pool_brings_nothing_and_changes_nothing(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    for start in (0, 1000, 2000):
        serve(cache, manager, text(start))
    held = manager.begin(text(3000))
    assert store.fetch(text(0)) == 0
    manager.check_integrity()
    manager.abort(held)
    assert store.fetch(text(0)) == 40


def test_a_load_that_fails_leaves_the_manager_as_it_was(connect: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    for start in (0, 1000, 2000):
        serve(cache, manager, text(start))

    def broken(*arguments: Any, **where: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.gpu_connector, "to_gpu", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            store.fetch(text(0))
    manager.check_integrity()
    assert manager.num_sequences == 0
    assert manager.plan(text(0)).cached_len == 0
    assert store.fetch(text(0)) == 40


def test_chunks_that_are_gone_since_they_were_looked_up_are_computed(connect: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    for start in (0, 1000, 2000):
        serve(cache, manager, text(start))
    monkeypatch.setattr(store.engine, "lookup", lambda tokens: len(tokens) // CHUNK * CHUNK)
    longer = [*text(0, 43), *text(9000, 9)]
    assert store.fetch(longer) == 40, "of the 48 that were promised"
    assert serve(cache, manager, longer) == 40


def test_a_small_lmcache_forgets_and_nothing_else_happens(connect: Made) -> None:
    """Room for some twenty chunks of 1.5 KiB, each in a page of its own, for prompts of fifty."""
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config(max_local_cpu_size=21 * 4096 / 2**30))
    draw = random.Random(0)  # noqa: S311 - no secret
    for _ in range(40):
        tokens = text(1000 * draw.randrange(10))
        store.fetch(tokens)
        serve(cache, manager, tokens)


def test_another_namespace_finds_and_keeps_nothing(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    sequence = manager.begin(text(0), ("adapter",))
    manager.commit(sequence, [], computed=43)
    manager.finish(sequence)
    assert store.engine.lookup(text(0)) == 0


def test_what_is_closed_or_reset_keeps_nothing_more(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    store = connect(cache, manager, config())
    serve(cache, manager, text(0))
    manager.reset()
    serve(cache, manager, text(0))  # block numbers begin again
    store.close()
    serve(cache, manager, text(1000))
    assert [store.engine.lookup(text(start)) for start in (0, 1000)] == [40, 0]


def test_another_process_finds_it(connect: Made, tmp_path: Path) -> None:
    """Through a folder, in which the other process, `first`, leaves what it computed of the same prompt."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_kvdock_lmcache as t; t.first({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, capture_output=True)
    assert len([*tmp_path.rglob("*.data")]) >= 5
    engine = make(num_blocks=40)
    store = connect(engine.decoder.cache, engine.manager, config(tmp_path))
    request = ask(PROMPT, 5)
    assert store.fetch(request.tokens) == 40
    run(engine, [request])
    assert request.cached_tokens == 40
    assert request.tokens == uncached("llama", request)


PROMPT = [number % 57 + 2 for number in range(5, 91, 2)]  # 43 tokens


def first(folder: str) -> None:
    """What the other process does."""
    engine = make(num_blocks=40)
    store = LMCacheStore(engine.manager, engine_for(engine.decoder.cache, config(Path(folder)), "model"))
    run(engine, [ask(PROMPT, 5)])
    end = time.monotonic() + 30
    while len([*Path(folder).rglob("*.data")]) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    store.close()
    LMCacheEngineBuilder.destroy("model")


def test_the_example_engine_gives_the_tokens_of_generate_through_it(connect: Made) -> None:
    """Conversations in a pool that is too small for them: what went comes back, and no token changes."""
    engine: Engine = make(num_blocks=24)
    store = connect(engine.decoder.cache, engine.manager, config())
    draw = random.Random(1)  # noqa: S311 - no secret
    said = [[draw.randrange(2, 60) for _ in range(30)] for _ in range(4)]
    brought, cached = 0, 0
    for _ in range(3):
        for number, tokens in enumerate(said):
            request: Request = ask(tokens, 6)
            brought += store.fetch(request.tokens)
            run(engine, [request])
            assert request.tokens == uncached("llama", request)
            cached += request.cached_tokens
            said[number] = request.tokens + [draw.randrange(2, 60) for _ in range(4)]
    assert cached >= brought > 8 * 24, "each of the last two turns of each"


def test_what_does_not_fit_is_refused(connect: Made) -> None:
    cache, manager = pool(), kvdock.CacheManager(16, BLOCK)
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"chunk_size: expected a multiple of the block size, 4, got 6\. Fix: chunk_size=64"
    ):
        connect(cache, manager, config(chunk_size=6))
    serve(cache, manager, text(0))
    with pytest.raises(kvdock.ArgumentValueError, match=r"LMCacheStore: manager: expected nothing cached yet, got 40 tokens"):
        connect(cache, manager, config(), "late")
    window = kvdock.KVSpec((kvdock.LayerSpec(2, 2, 8, 8, window=8),) * 2, 512, torch.float32)
    windows = kvdock.create_cache(window, kvdock.PagedKVCacheConfig(num_blocks=16, block_size=BLOCK), kvdock.RankInfo("cpu"))
    with pytest.raises(kvdock.UnsupportedError, match=r"LMCache: cache: expected keys and values of one shape, of all tokens"):
        engine_for(windows, config(), "window")
