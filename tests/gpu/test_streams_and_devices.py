"""Streams, devices and synchronisation: a call goes to its tensors' device, on its current stream, and waits for nothing."""

from __future__ import annotations

import threading

import pytest
import torch

import kvdock

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")


def pools(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, 16, 4, 64, dtype=torch.bfloat16, device=device), torch.zeros(64, 16, 4, 64, dtype=torch.bfloat16, device=device)


def rows(tokens: int, device: str) -> torch.Tensor:
    return torch.randn(tokens, 4, 64, device=device).bfloat16()


def test_a_side_stream_orders_the_write() -> None:
    (k_cache, v_cache), k, v, slots = pools("cuda"), rows(8, "cuda"), rows(8, "cuda"), torch.arange(8, device="cuda")
    kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
    new = rows(8, "cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a write on another stream would read k before it is replaced
        k.copy_(new)
        kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
        assert not side.query()
    side.synchronize()
    assert torch.equal(k_cache.flatten(0, 1)[:8], new)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_synchronises() -> None:
    (k_cache, v_cache), k, v, slots = pools("cuda"), rows(8, "cuda"), rows(8, "cuda"), torch.arange(8, device="cuda")
    static = torch.zeros(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
    new, lengths = torch.randn(2, 4, 3, 64, device="cuda").bfloat16(), torch.tensor([1, 2], device="cuda")
    pairs = torch.tensor([[0, 9], [1, 10]], device="cuda")
    twin = static.clone()

    def everything() -> None:
        for named in ("cuda", "portable"):
            with kvdock.use_backend(named):
                kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
                kvdock.ops.gather_paged(k_cache, v_cache, slots)
                kvdock.ops.copy_blocks_(k_cache, v_cache, pairs)
                kvdock.ops.static_update_(static, twin, new, new, lengths)
                kvdock.ops.static_update_(static, twin, new, new, 5)
        kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
        kvdock.ops.copy_blocks_(k_cache, v_cache, [(2, 11)])

    everything()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@two_gpus
@pytest.mark.parametrize(("current", "target"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("on_side_stream", [False, True])
def test_the_other_device(current: int, target: int, on_side_stream: bool) -> None:
    device = f"cuda:{target}"
    (k_cache, v_cache), k, v, slots = pools(device), rows(8, device), rows(8, device), torch.arange(8, device=device)
    stream = torch.cuda.Stream(device) if on_side_stream else torch.cuda.default_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(current):
        torch.cuda.set_stream(stream) if on_side_stream else None
        torch.cuda.set_device(current)
        for _ in range(4):  # by the quick path, then from memory
            kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
        got = kvdock.ops.gather_paged(k_cache, v_cache, slots)
        assert torch.cuda.current_device() == current
    torch.cuda.synchronize(device)
    torch.cuda.set_stream(torch.cuda.default_stream(device))
    assert torch.equal(k_cache.flatten(0, 1)[:8], k)
    assert torch.equal(got[1], v)


@two_gpus
def test_tensors_of_two_devices_are_refused() -> None:
    (k_cache, v_cache), k, slots = pools("cuda:0"), rows(8, "cuda:0"), torch.arange(8, device="cuda:1")
    with pytest.raises(kvdock.ArgumentValueError, match="slot_mapping: expected a tensor on cuda:0"):
        kvdock.ops.paged_caching_(k_cache, v_cache, k, k, slots)
    assert not k_cache.any()


@two_gpus
def test_two_threads_on_two_cold_devices() -> None:
    failures: list[BaseException] = []

    def work(device: str) -> None:
        try:
            for heads in (1, 2, 3, 5):
                k_cache = torch.zeros(16, 16, heads, 48, device=device)
                v_cache, k, slots = k_cache.clone(), torch.randn(40, heads, 48, device=device), torch.randperm(256, device=device)[:40]
                for _ in range(5):
                    kvdock.ops.paged_caching_(k_cache, v_cache, k, k, slots)
                assert torch.equal(k_cache.flatten(0, 1)[slots], k)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that asserts
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"cuda:{index}",)) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("name", ["k", "v", "slot_mapping"])
def test_host_tensors_among_device_tensors_are_refused(name: str) -> None:
    k_cache, v_cache = pools("cuda")
    args = {"k": rows(4, "cuda"), "v": rows(4, "cuda"), "slot_mapping": torch.arange(4, device="cuda")}
    kvdock.ops.paged_caching_(k_cache, v_cache, **args)
    kvdock.ops.paged_caching_(k_cache, v_cache, **args)
    kvdock.ops.paged_caching_(k_cache, v_cache, **args)
    before = k_cache.clone()
    with pytest.raises(kvdock.ArgumentValueError, match=f"{name}: expected a tensor on cuda:0, where k_cache is, got a tensor on cpu"):
        kvdock.ops.paged_caching_(k_cache, v_cache, **{**args, name: args[name].cpu()})
    assert torch.equal(k_cache, before)
