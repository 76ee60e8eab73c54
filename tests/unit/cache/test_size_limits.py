"""Sizes that cannot be meant are refused before memory is taken and before a backend is looked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import kvdock
from support_caches import CPU

ONE = kvdock.LayerSpec(1, 1, 1, 1)


def spec(layer: kvdock.LayerSpec = ONE, max_positions: int = 64) -> kvdock.KVSpec:
    return kvdock.KVSpec((layer,), max_positions, torch.float32)


def paged(of: kvdock.KVSpec, **settings: Any) -> Any:
    return kvdock.create_cache(of, kvdock.PagedKVCacheConfig(**settings), CPU, ops=Untouched())


def static(of: kvdock.KVSpec, **settings: Any) -> Any:
    return kvdock.create_cache(of, kvdock.StaticKVCacheConfig(**settings), CPU, ops=Untouched())


class Untouched:
    """Where no op may be asked for: what asks has come too far."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail, and not only fill the machine, where memory is taken."""

    def refuse(*args: Any, **settings: Any) -> Any:
        raise AssertionError(f"memory was taken: {args}")

    monkeypatch.setattr(torch, "zeros", refuse)


MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "PagedKVCacheConfig: num_blocks": lambda n: paged(spec(), num_blocks=n),
    "PagedKVCacheConfig: block_size": lambda n: paged(spec(), num_blocks=1, block_size=n),
    "PagedKVCacheConfig: max_kv_memory_bytes": lambda n: paged(spec(), max_kv_memory_bytes=n),
    "StaticKVCacheConfig: max_batch_size": lambda n: static(spec(), max_batch_size=n),
    "StaticKVCacheConfig: max_cache_len": lambda n: static(spec(max_positions=2**70), max_cache_len=n),
    "KVSpec: max_positions": lambda n: static(spec(max_positions=n)),
    "LayerSpec: num_k_heads": lambda n: kvdock.LayerSpec(n, 1, 1, 1),
    "LayerSpec: num_v_heads": lambda n: kvdock.LayerSpec(1, n, 1, 1),
    "LayerSpec: k_dim": lambda n: kvdock.LayerSpec(1, 1, n, 1),
    "LayerSpec: v_dim": lambda n: kvdock.LayerSpec(1, 1, 1, n),
    "MLALayerSpec: kv_lora_rank": lambda n: kvdock.MLALayerSpec(n, 1),
    "MLALayerSpec: rope_dim": lambda n: kvdock.MLALayerSpec(1, n),
    "KVSpec.uniform: num_layers": lambda n: kvdock.KVSpec.uniform(
        num_layers=n, num_kv_heads=1, head_dim=1, max_positions=1, dtype=torch.float32
    ),
    "ShardedKVCache.create: max_len": lambda n: kvdock.ShardedKVCache.create(
        spec(max_positions=2**70), n, ["cpu"], ops=Untouched()
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [2**57, 2**63, 2**64 + 1, 2**70])
@pytest.mark.parametrize("subject", MAKERS)
def test_a_size_beyond_all_machines(subject: str, size: int) -> None:
    with pytest.raises(kvdock.errors.ArgumentValueError, match=r": expected at most .*, got \d+.*Fix: "):
        MAKERS[subject](size)


@pytest.mark.parametrize("size", [-1, -(2**63), True, False, 1.0, float("inf"), "2", torch.tensor(2)], ids=repr)
@pytest.mark.parametrize("subject", MAKERS)
def test_a_size_that_is_none(subject: str, size: Any) -> None:
    with pytest.raises((kvdock.errors.ArgumentTypeError, kvdock.errors.ArgumentValueError), match=subject):
        MAKERS[subject](size)


def test_products_are_bounded_too() -> None:
    large = spec(kvdock.LayerSpec(2**20, 2**20, 2**20, 2**20))
    with pytest.raises(kvdock.errors.ArgumentValueError, match=rf"got {2**61} bytes: {2**16} blocks of 4 tokens in 1 layers"):
        paged(large, num_blocks=2**16, block_size=4)
    with pytest.raises(kvdock.errors.ArgumentValueError, match=rf"got {2**57} bytes: 256 rows of 64 tokens"):
        static(spec(kvdock.LayerSpec(2**18, 2**18, 2**22, 2**22)), max_batch_size=256)


def test_a_budget_beyond_all_machines_bounds_a_small_pool() -> None:
    with pytest.raises(AssertionError, match="choose was asked for"):
        paged(spec(), num_blocks=4, max_kv_memory_bytes=2**70)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31 + 1, 2**40])
def test_more_slots_than_int32_counts_are_no_error_as_such(size: int) -> None:
    with pytest.raises(AssertionError, match="choose was asked for"):
        paged(spec(), num_blocks=size, block_size=1)


@pytest.mark.parametrize("number", [2**16 + 1, 2**31 + 1, 2**63])
def test_layers_beyond_all_models(number: int) -> None:
    config = type("Config", (), {"num_hidden_layers": number, "num_attention_heads": 1, "hidden_size": 1, "max_position_embeddings": 1})()
    with pytest.raises(kvdock.errors.ArgumentValueError, match=f"number of layers: expected 1 to {2**16}, got {number}"):
        kvdock.KVSpec.from_hf_config(config, torch.float32)
    with pytest.raises(kvdock.errors.ArgumentValueError, match=f"num_layers: expected at most {2**16}, got {number}"):
        MAKERS["KVSpec.uniform: num_layers"](number)


@pytest.mark.parametrize("device", ["cpu:300", "cuda:300", "cuda:4294967297", 2**31 + 1, 2**63, 2**70, -1, "cuda:-1", "cuda:" + "9" * 30])
def test_a_device_index_that_torch_cannot_hold(device: Any) -> None:
    with pytest.raises(kvdock.errors.ArgumentValueError, match=r"RankInfo: device: .*Fix: "):
        kvdock.RankInfo(device)


@pytest.mark.parametrize("name", ["tp_size", "tp_rank"])
@pytest.mark.parametrize("size", [-1, True, 1.0, 2**63], ids=repr)
def test_places_in_a_group(name: str, size: Any) -> None:
    settings = {"tp_size": 2, "tp_rank": 1, name: size}
    if name == "tp_size" and size == 2**63:
        assert kvdock.RankInfo("cpu", **settings).head_range(2) == range(1), "a number, of which no memory is made"
        return
    with pytest.raises((kvdock.errors.ArgumentTypeError, kvdock.errors.ArgumentValueError), match=f"RankInfo: {name}"):
        kvdock.RankInfo("cpu", **settings)


def test_a_capacity_is_a_bound_and_takes_no_memory() -> None:
    assert kvdock.LRUDescriptorCache[object](2**63).capacity == 2**63
    for capacity in (-1, 0, True, 1.0):
        with pytest.raises((kvdock.errors.ArgumentTypeError, kvdock.errors.ArgumentValueError), match="LRUDescriptorCache: capacity"):
            kvdock.LRUDescriptorCache(capacity)  # type: ignore[arg-type]
