"""Caches larger than the machine's memory: one error of kvdock's, and nothing is left of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvdock
from kvdock.cache.pool import allocated

CPU = kvdock.RankInfo("cpu")
MOST = 2**51
"""Bytes that no machine has, and no address space of its processors; below what is refused unasked."""


def spec(layers: int = 1) -> kvdock.KVSpec:
    return kvdock.KVSpec.uniform(num_layers=layers, num_kv_heads=1, head_dim=8, max_positions=2**60, dtype=torch.float32)


def paged(ops: kvdock.OpDispatcher, **config: int) -> kvdock.Cache:
    return kvdock.create_cache(spec(), kvdock.PagedKVCacheConfig(block_size=16, **config), CPU, ops=ops)


TOO_LARGE: dict[str, tuple[Callable[[kvdock.OpDispatcher], Any], str]] = {
    "paged, blocks": (lambda ops: paged(ops, num_blocks=MOST // 1024), "PagedKVCacheConfig"),
    "paged, a budget": (lambda ops: paged(ops, max_kv_memory_bytes=MOST), "PagedKVCacheConfig"),
    "static": (lambda ops: kvdock.create_cache(spec(), kvdock.StaticKVCacheConfig(1, MOST // 64), CPU, ops=ops), "StaticKVCacheConfig"),
    "sharded": (lambda ops: kvdock.ShardedKVCache.create(spec(), MOST // 64, ["cpu"], ops=ops), "StaticKVCacheConfig"),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_memory_that_the_device_has_not_is_a_capacity_error(kind: str, ops: kvdock.OpDispatcher) -> None:
    make, subject = TOO_LARGE[kind]
    with pytest.raises(
        kvdock.CapacityError, match=f"^{subject}: expected {MOST} bytes of memory on cpu, got fewer: .*Fix: ask for a smaller"
    ):
        make(ops)


@pytest.mark.parametrize("raised", [RuntimeError("can't allocate memory: you tried"), MemoryError(), torch.OutOfMemoryError("CUDA out of")])
def test_what_was_made_before_is_let_go_while_the_error_is_kept(raised: Exception) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> list[torch.Tensor]:
        tensors = [torch.zeros(8)]
        made.append(weakref.ref(tensors[0]))
        raise raised

    gc.disable()
    try:
        with pytest.raises(kvdock.CapacityError) as caught:
            allocated("a cache", 12, torch.device("cpu"), make)
        assert made[0]() is None
        assert "12 bytes" in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None
    finally:
        gc.enable()


def test_an_error_about_something_else_comes_through() -> None:
    def make() -> None:
        raise RuntimeError("no driver")

    with pytest.raises(RuntimeError, match=r"^no driver$"):
        allocated("a cache", 12, torch.device("cpu"), make)


def test_shards_that_fitted_are_let_go_with_the_one_that_did_not(monkeypatch: pytest.MonkeyPatch, ops: kvdock.OpDispatcher) -> None:
    """The allocator of the host is made to refuse the second shard, as a device with less memory would."""
    zeros, made = torch.zeros, list[weakref.ref[torch.Tensor]]()

    def short(*size: Any, **others: Any) -> torch.Tensor:
        if len(made) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        tensor = zeros(*size, **others)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "zeros", short)
    two_heads = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.float32)
    with pytest.raises(kvdock.CapacityError, match="expected 512 bytes of memory on cpu") as caught:
        kvdock.ShardedKVCache.create(two_heads, 8, ["cpu", "cpu"], ops=ops)
    assert [reference() for reference in made] == [None] * 3
    assert caught.value.fix
