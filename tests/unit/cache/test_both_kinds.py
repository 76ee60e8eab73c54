"""What holds for every kind of cache: indices, ranks, devices, backends, inference mode, gradients, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from support_caches import CPU, SPECS, bits, contents, counting_runtime, needs_backends, runtime_of, same
from support_plugins import InProcessBackend

CONFIGS: dict[str, kvdock.CacheConfig] = {
    "paged": kvdock.PagedKVCacheConfig(num_blocks=4, block_size=4),
    "static": kvdock.StaticKVCacheConfig(max_cache_len=8),
}
SPEC = SPECS["uniform"]


@pytest.fixture(params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of cache."""
    return str(request.param)


def make(kind: str, ops: Any = None, spec: kvdock.KVSpec = SPEC, rank: kvdock.RankInfo = CPU) -> Any:
    return kvdock.create_cache(spec, CONFIGS[kind], rank, ops=ops)


def step(
    kind: str, cache: Any, layer: Any = 0, *, at: int = 2, value: float = 3.0, grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write one token; returns what `update` returns."""
    shape = (1, 2, 8) if kind == "paged" else (1, 2, 1, 8)
    k, v = (torch.full(shape, value, requires_grad=grad) for _ in range(2))
    where = torch.tensor([at]) if kind == "paged" else at
    result: tuple[torch.Tensor, torch.Tensor] = cache.update(layer, k, v, where)
    return result


def count(cache: Any) -> int:
    """Return how many elements are not zero."""
    return sum(int((view != 0).sum()) for pair in contents(cache) for view in pair)


USES: dict[str, Callable[[str, Any, Any], object]] = {
    "k_cache": lambda kind, cache, layer: cache.k_cache(layer),
    "v_cache": lambda kind, cache, layer: cache.v_cache(layer),
    "update": step,
    "gather": lambda kind, cache, layer: cache.gather(layer, torch.tensor([0])) if kind == "paged" else cache.k_cache(layer),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", [-1, 3, 2**40])
def test_a_layer_out_of_range_is_named(kind: str, use: str, layer: int, ops: kvdock.OpDispatcher) -> None:
    cache = make(kind, ops)
    with pytest.raises(kvdock.IndexRangeError, match=f"layer: expected 0 to 2, got {layer}. Fix: count layers from 0"):
        USES[use](kind, cache, layer)
    assert count(cache) == 0


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", [True, 1.0, "1", None, np.int64(1), torch.tensor(1), slice(0, 1)], ids=repr)
def test_a_layer_that_is_no_int_is_refused(kind: str, use: str, layer: object, ops: kvdock.OpDispatcher) -> None:
    cache = make(kind, ops)
    with pytest.raises(kvdock.ArgumentTypeError, match=r"layer: expected an int from 0 to 2, got .*Fix: pass a plain int"):
        USES[use](kind, cache, layer)
    assert count(cache) == 0


LATENTS, HEADS = kvdock.MLALayerSpec(512, 64), kvdock.LayerSpec(1, 1, 8, 8)


@pytest.mark.parametrize("layers", [(HEADS, LATENTS), (LATENTS, HEADS)], ids=["second", "first"])
def test_latents_and_heads_do_not_share_a_static_cache(layers: Any, ops: kvdock.OpDispatcher) -> None:
    at = layers.index(LATENTS)
    text = rf"layers\[{at}\]: expected a layer that keeps keys and values, .*keeps kv \[576\]"
    with pytest.raises(kvdock.UnsupportedError, match=text):
        make("static", ops, kvdock.KVSpec(layers, 16, torch.float32))


@pytest.mark.parametrize(("heads", "tp_size"), [(32, 5), (8, 12), (2, 3), (3, 2)])
def test_heads_that_do_not_divide_name_both_numbers(kind: str, heads: int, tp_size: int, ops: kvdock.OpDispatcher) -> None:
    spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=heads, head_dim=4, max_positions=8, dtype=torch.float32)
    with pytest.raises(kvdock.ArgumentValueError, match=f"num_k_heads = {heads} on tp_size = {tp_size} ranks"):
        make(kind, ops, spec, kvdock.RankInfo("cpu", tp_size, 0))
    other = kvdock.KVSpec((kvdock.LayerSpec(tp_size, heads, 4, 4),), 8, torch.float32)
    with pytest.raises(kvdock.ArgumentValueError, match=f"num_v_heads = {heads} on tp_size = {tp_size} ranks"):
        make(kind, ops, other, kvdock.RankInfo("cpu", tp_size, 0))


@pytest.mark.parametrize(("heads", "tp_size", "held"), [(32, 8, 4), (8, 8, 1), (4, 8, 1), (1, 8, 1), (6, 2, 3)])
def test_a_rank_holds_its_share(kind: str, heads: int, tp_size: int, held: int, ops: kvdock.OpDispatcher) -> None:
    spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=heads, head_dim=4, max_positions=8, dtype=torch.float32)
    head_dim = 2 if kind == "paged" else 1
    cache = make(kind, ops, spec, kvdock.RankInfo("cpu", tp_size, tp_size - 1))
    assert cache.k_cache(0).shape[head_dim] == cache.v_cache(0).shape[head_dim] == held


def test_a_device_that_nobody_claims_lists_who_is_there_and_why_not(kind: str) -> None:
    runtime = runtime_of(
        InProcessBackend("healthy", claims=["cpu"], devices=["cpu"]),
        InProcessBackend("gone", probe=kvdock.plugin.Probe.absent("no acme card")),
        InProcessBackend("sick", probe=kvdock.plugin.Probe.unusable("driver 3 is too old")),
    )
    with pytest.raises(kvdock.NoBackendError) as caught:
        make(kind, runtime.dispatcher, rank=kvdock.RankInfo("meta"))
    for part in (
        "claims meta",
        "healthy (does not claim meta)",
        "gone (ABSENT: no acme card)",
        "sick (UNUSABLE: driver 3 is too old)",
        "Fix: ",
    ):
        assert part in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_without_any_backend_nothing_is_allocated(kind: str) -> None:
    runtime = kvdock.Runtime(environ={"KVDOCK_DISABLE_AUTOLOAD": "1"})
    huge = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=2**20, head_dim=2**20, max_positions=2**20, dtype=torch.float32)
    with pytest.raises(kvdock.NoBackendError, match="claims cpu"):  # an allocation of that size would fail otherwise
        make(kind, runtime.dispatcher, huge)


def test_a_cache_keeps_the_backend_it_was_created_with(kind: str) -> None:
    runtime, calls = counting_runtime("usual", "other")
    with kvdock.use_backend("other"):
        kept = make(kind, runtime.dispatcher)
        step(kind, kept)
    free = make(kind, runtime.dispatcher)
    assert {backend for backend, _ in calls} == {"other"}
    calls.clear()
    step(kind, kept)
    step(kind, kept, 2)
    if kind == "paged":
        kept.gather(0, torch.tensor([0]))
        kept.copy_blocks([(0, 1)])
    assert {backend for backend, _ in calls} == {"other"}, "after the block"
    calls.clear()
    with kvdock.use_backend("usual"):
        step(kind, kept)
    assert {backend for backend, _ in calls} == {"other"}, "in a block that names another"
    calls.clear()
    step(kind, free)
    assert {backend for backend, _ in calls} == {"usual"}
    calls.clear()
    with kvdock.use_backend("other"):
        step(kind, free)
    assert {backend for backend, _ in calls} == {"other"}, "a cache made outside follows the block"


def test_portable_may_be_asked_for_by_name(kind: str) -> None:
    runtime, calls = counting_runtime("usual")
    with kvdock.use_backend("portable"):
        cache = make(kind, runtime.dispatcher)
    step(kind, cache)
    assert not calls
    assert count(cache) == 2 * 2 * 8


def test_an_unknown_backend_is_refused_when_the_cache_is_made(kind: str) -> None:
    runtime, _ = counting_runtime("usual")
    huge = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=2**20, head_dim=2**20, max_positions=2**20, dtype=torch.float32)
    with kvdock.use_backend("nobody"), pytest.raises(kvdock.BackendUnavailableError, match=r"nobody.*usual"):
        make(kind, runtime.dispatcher, huge)


def test_debug_looks_at_a_cache_that_has_a_backend_of_its_own(kind: str) -> None:
    runtime, _ = counting_runtime("usual", "other")
    with kvdock.use_backend("other"):
        cache = make(kind, runtime.dispatcher)
    with kvdock.debug(), pytest.raises(kvdock.IndexRangeError):
        step(kind, cache, at=16)
    if kind == "paged":
        k, v = torch.ones(2, 2, 8), torch.ones(2, 2, 8)
        with kvdock.debug(), pytest.warns(kvdock.KVDockWarning, match="paged_caching_: 1 slots occur more than once, first 5"):
            cache.update(0, k, v, torch.tensor([5, 5]))


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("used_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_inference_mode_makes_no_difference(kind: str, made_in: Any, used_in: Any, ops: kvdock.OpDispatcher) -> None:
    with made_in():
        cache = make(kind, ops)
        first = cache.k_cache(0)
    with used_in():
        k_out, v_out = step(kind, cache)
        assert float(k_out.max()) == float(v_out.max()) == 3.0
        if kind == "paged":
            cache.copy_blocks([(0, 3)])
            assert (cache.gather(0, torch.tensor([14]))[0] == 3).all()
        assert first is cache.k_cache(0)
        cache.k_cache(1).fill_(1.0)  # an engine may write by itself
    with made_in():
        step(kind, cache, 2)
        cache.reset()
    assert count(cache) == 0
    assert not first.is_inference()
    step(kind, cache)


def test_no_gradients_are_recorded(kind: str, ops: kvdock.OpDispatcher) -> None:
    cache = make(kind, ops)
    k_out, v_out = step(kind, cache, grad=True)
    assert not k_out.requires_grad
    assert not v_out.requires_grad
    assert k_out.grad_fn is None
    assert count(cache) == 2 * 2 * 8
    cache.reset()
    assert not cache.k_cache(0).requires_grad


def test_threads_may_write_different_places_at_once(kind: str, ops: kvdock.OpDispatcher) -> None:
    cache = make(kind, ops)
    barrier = threading.Barrier(2)
    failures: list[BaseException] = []

    def work(layer: int) -> None:
        try:
            barrier.wait()
            for turn in range(50):
                step(kind, cache, layer, at=turn % 8, value=float(layer + 1))
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for layer in (0, 1):
        assert set(cache.k_cache(layer).unique().tolist()) <= {0.0, layer + 1.0}
        assert int((cache.v_cache(layer) == layer + 1).sum()) == 8 * 2 * 8


def test_two_caches_share_nothing(kind: str, ops: kvdock.OpDispatcher) -> None:
    one, other = make(kind, ops), make(kind, ops)
    before = contents(other)
    for layer in range(3):
        step(kind, one, layer)
    assert same(contents(other), before)
    assert not bits(other.k_cache(0)).any()


@needs_backends
def test_the_default_runtime_serves_a_cache_without_being_asked(kind: str) -> None:
    cache = make(kind)
    step(kind, cache)
    assert count(cache) == 2 * 2 * 8
