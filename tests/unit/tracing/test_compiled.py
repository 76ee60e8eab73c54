"""Under ``torch.compile(fullgraph=True)``: the same bytes as without, no more graphs than sizes ask for, and the same errors.

The compiler is the one that runs graphs as they are; `test_generated` has the one that writes code.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugin import call_op
from opskit import active, counting_runtime
from opskit.any_schema import SCHEMAS, op_of
from support_isolated import answer
from support_plugins import InProcessBackend, plugin
from support_slow import first_of
from unit.plugins import test_brought_ops as brought

LAYERS = 3
CPU = torch.device("cpu")
Step = Callable[..., Any]


def spec(layers: int = LAYERS) -> kvdock.KVSpec:
    return kvdock.KVSpec.uniform(num_layers=layers, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.float32)


def paged_cache(**options: Any) -> kvdock.PagedKVCache:
    cache = kvdock.create_cache(spec(), kvdock.PagedKVCacheConfig(num_blocks=8, block_size=4, **options), kvdock.RankInfo(CPU))
    assert isinstance(cache, kvdock.PagedKVCache)
    return cache


def static_cache() -> kvdock.StaticKVCache:
    cache = kvdock.create_cache(spec(), kvdock.StaticKVCacheConfig(max_batch_size=4, max_cache_len=16), kvdock.RankInfo(CPU))
    assert isinstance(cache, kvdock.StaticKVCache)
    return cache


def compiled(step: Step, backend: str = "aot_eager", **options: Any) -> tuple[Step, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(step, fullgraph=True, backend=counter, **options), counter


def same(cache: kvdock.Cache, step: Step, run: Step, *args: Any) -> None:
    """Compare what a step returns, and what is in the cache behind it."""
    twin = copy.deepcopy([(cache.k_cache(i), cache.v_cache(i)) for i in range(cache.num_layers)])
    found = run(*args)
    found = [each.clone() for each in found]
    after = [(cache.k_cache(i).clone(), cache.v_cache(i).clone()) for i in range(cache.num_layers)]
    for i, (k, v) in enumerate(twin):
        cache.k_cache(i).copy_(k)
        cache.v_cache(i).copy_(v)
    expected = step(*args)
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)
    for i, (k, v) in enumerate(after):
        assert torch.equal(k, cache.k_cache(i))
        assert torch.equal(v, cache.v_cache(i))
    assert any(bool((k != other).any()) for (k, _), (other, _) in zip(after, twin, strict=True)), "the step wrote"


def paged_step(cache: kvdock.PagedKVCache) -> Step:
    def step(x: torch.Tensor, slots: torch.Tensor) -> Any:
        for layer in range(cache.num_layers):
            k_cache, _ = cache.update(layer, x * (layer + 1), x + 1, slots)
            k, v = cache.gather(layer, slots)
            x = x + k * 0.5 - v
        return x, k_cache[0]

    return step


LAYOUTS = list(itertools.product(kvdock.KVCacheLayout.__members__.values(), kvdock.HeadLayout.__members__.values()))


@pytest.mark.parametrize(("layout", "heads"), first_of(LAYOUTS), ids=str)
def test_a_step_of_a_paged_cache(layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    cache = paged_cache(layout=layout, head_layout=heads)
    step = paged_step(cache)
    run, counter = compiled(step)
    for count in (3, 5, 2, 9, 7, 3):
        same(cache, step, run, torch.randn(count, 2, 8), torch.randperm(32)[:count])
    assert counter.frame_count == 2, "the first number of tokens, and any"
    assert len([node for node in counter.graphs[0].graph.nodes if node.op == "placeholder"]) == 4, "tokens, slots, and each pool once"


@pytest.mark.slow
def test_tokens_blocks_and_rows_may_be_any_from_the_start() -> None:
    """Under error_on_recompile a second graph is an error. A first call with `dynamic=True`, or one that warms up, serves all."""
    cache = paged_cache()
    step = paged_step(cache)
    run, counter = compiled(step, dynamic=True)
    run(torch.randn(3, 2, 8), torch.arange(3))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 9, 31, 32):
            same(cache, step, run, torch.randn(rows, 2, 8), torch.randperm(32)[:rows])
        kvdock.ops.paged_caching_(cache.k_cache(0), cache.v_cache(0), *torch.randn(2, 3, 2, 8), torch.arange(3))
        run(torch.randn(4, 2, 8), torch.arange(4))
    assert counter.frame_count == 1


@pytest.mark.slow  # eight seconds: every check has symbols
def test_rows_of_tokens_may_be_any() -> None:
    cache = paged_cache()
    step = paged_step(cache)
    run, counter = compiled(step, dynamic=True)
    for rows, count in ((5, 3), (4, 3), (4, 7), (3, 2)):
        same(cache, step, run, torch.randn(rows, count, 2, 8), torch.randperm(32)[: rows * count].view(rows, count))
    assert counter.frame_count == 1


LENGTHS: dict[str, Callable[[int, int], Any]] = {
    "int": lambda rows, length: length,
    "one": lambda rows, length: torch.tensor(length),
    "each": lambda rows, length: torch.arange(rows) + length,
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_step_of_a_static_cache(kind: str) -> None:
    """A length is no part of the graph: neither an int's, which changes with every step, nor a tensor's, which is not read."""
    cache = static_cache()

    def step(x: torch.Tensor, lengths: Any) -> Any:
        for layer in range(cache.num_layers):
            k, v = cache.update(layer, x * (layer + 1), x + 1, lengths)
            x = x + k.sum(2, keepdim=True) - v.mean(2, keepdim=True) * (16 if v.shape[2] == 16 else v.shape[2])
        return (x,)

    run, counter = compiled(step)
    for rows, length in ((2, 3), (3, 4), (4, 7), (3, 11), (2, 2)):
        run(torch.randn(rows, 2, 1, 8), LENGTHS[kind](rows, length))
    assert counter.frame_count == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(2, 13):
            args = torch.randn(4, 2, 1, 8), LENGTHS[kind](4, length)
            before = [cache.k_cache(i).clone() for i in range(LAYERS)]
            run(*args)
            assert all(not torch.equal(cache.k_cache(i), before[i]) for i in range(LAYERS))
            assert torch.equal(cache.k_cache(0)[0, :, length], args[0][0, :, 0])


def test_the_views_of_a_static_update_reach_as_far_as_is_known() -> None:
    cache = static_cache()
    run, _ = compiled(lambda x, lengths: cache.update(0, x, x, lengths))
    x = torch.randn(2, 2, 3, 8)
    for lengths, reach in ((4, 7), (5, 8), (torch.tensor(6), 16)):
        k, v = run(x, lengths)
        assert (k.shape, v.shape) == ((2, 2, reach, 8),) * 2
        assert torch.equal(k[:, :, int(lengths) : int(lengths) + 3], x)


def test_pools_that_are_arguments_are_written_in_place() -> None:
    def step(k_cache: torch.Tensor, v_cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> Any:
        kvdock.ops.paged_caching_(k_cache, v_cache, x, x * 2, slots)
        kvdock.ops.copy_blocks_(k_cache, v_cache, torch.tensor([[0, 5]]))
        return kvdock.ops.gather_paged(k_cache, v_cache, slots + 20)

    run, counter = compiled(step, dynamic=True)
    shared = torch.zeros(2, 8, 4, 2, 8)
    pairs = [[torch.zeros(8, 4, 2, 8) for _ in "kv"], [*shared], [shared.transpose(2, 3)[0].transpose(1, 2), shared[1]]]
    for pools in pairs:
        x = torch.randn(3, 2, 8)
        k, v = run(*pools, x, torch.arange(3))
        assert torch.equal(k, x)
        assert torch.equal(v, x * 2)
        assert torch.equal(pools[1][0, :3], x * 2)
    assert counter.frame_count <= 2, "pools of a memory of their own, and two in one"


ROOTS: dict[str, Callable[[], torch.Tensor]] = {
    "of another dtype": lambda: torch.zeros(8, 4, 2, 32, dtype=torch.uint8).view(torch.float32),
    "with a gradient": lambda: torch.zeros(2, 8, 4, 2, 8, requires_grad=True)[1].detach(),
    "made for inference": lambda: torch.inference_mode()(lambda: torch.zeros(2, 8, 4, 2, 8)[1])().clone(),
    "a part of a part": lambda: torch.zeros(2, 8, 2, 4, 16)[1].transpose(1, 2)[..., 8:],
}


@pytest.mark.parametrize("kind", ROOTS)
def test_a_pool_may_be_a_view_of_anything(kind: str) -> None:
    pools = [ROOTS[kind]() for _ in "kv"]
    write = kvdock.runtime.default().dispatcher.op("paged_caching_").bind(*pools)

    def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        k_cache, _ = write(x, x * 2, slots, None, None)
        return k_cache[0] + 1

    x = torch.randn(3, 2, 8)
    found = compiled(step)[0](x, torch.arange(3))
    assert torch.equal(found[:3], x + 1)
    assert torch.equal(pools[1][0, :3], x * 2)


PAIRS: dict[str, Any] = {"list": [(0, 3), (1, 2)], "none": []}
PAIRS |= {"numpy": np.array(PAIRS["list"]), "tensor": torch.tensor(PAIRS["list"])}


@pytest.mark.parametrize("kind", PAIRS)
def test_blocks_are_copied_in_every_layer(kind: str) -> None:
    cache = paged_cache(layout=kvdock.KVCacheLayout.PAGE_FIRST)
    for layer in range(LAYERS):
        cache.k_cache(layer).normal_()
    before = [cache.k_cache(layer).clone() for layer in range(LAYERS)]

    def step(x: torch.Tensor) -> torch.Tensor:
        cache.copy_blocks(PAIRS[kind])
        return x + cache.gather(1, torch.tensor([12]))[0]

    compiled(step)[0](torch.ones(()))
    for layer, old in enumerate(before):
        moved = old if kind == "none" else old[[0, 1, 1, 0, *range(4, 8)]]
        assert torch.equal(cache.k_cache(layer), moved)


def test_static_values_that_change_have_graphs_of_their_own() -> None:
    """Also where torch has made symbols of them, since they were seen to change."""
    entry, kernel, _ = op_of(SCHEMAS["norm"], fixes=False)
    x, weight = torch.randn(3, 4), torch.randn(4)

    def step(x: torch.Tensor, eps: Any) -> Any:
        return entry.call(x * 2, weight, eps, None) + 1

    run, counter = compiled(step)
    for eps in (0.5, 0.25, 0.125, 3, 4, True, 0.25):
        assert torch.equal(run(x, eps), step(x, eps))
        assert kernel.found[-1] == kernel.found[-2]
    assert counter.frame_count <= 7, "none for what was there, and torch begins anew where a symbol turns out to be none"


def test_outputs_that_are_given_are_returned() -> None:
    pools, slots = torch.randn(2, 8, 4, 2, 8), torch.tensor([3, -1, 9])

    def step(*out: torch.Tensor) -> Any:
        return kvdock.ops.gather_paged(*pools, slots, out=(out[0], out[1]))

    out = torch.full((2, 3, 2, 8), 7.0)
    k, v = compiled(step)[0](*out)
    expected = kvdock.ops.gather_paged(*pools, slots)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(v, expected[1])
    assert k.data_ptr() == out[0].data_ptr()


@pytest.mark.parametrize("wants", [False, True])
def test_gradients_are_as_without(wants: bool) -> None:
    """They go through what is beside the ops, and never into a pool."""
    cache = paged_cache()
    k = torch.randn(3, 2, 8, requires_grad=wants)

    def step(k: torch.Tensor, slots: torch.Tensor) -> Any:
        pool, _ = cache.update(0, k * 2, k, slots)
        read, _ = cache.gather(0, slots)
        return (k * k).sum(), read, pool

    for run in (step, compiled(step)[0]):
        loss, read, pool = run(k, torch.arange(3))
        assert (loss.requires_grad, read.requires_grad, pool.requires_grad) == (wants, False, False)
        assert cache.k_cache(0).grad_fn is None
        assert torch.equal(read, (k * 2).detach())
        if wants:
            k.grad = None
            loss.backward()
            assert torch.equal(k.grad, (k * 2).detach())  # type: ignore[arg-type] # the line above made it
    kept = [torch.randn(8, 4, 2, 8, requires_grad=wants) for _ in "kv"]
    for run in (kvdock.ops.gather_paged, compiled(lambda *args: kvdock.ops.gather_paged(*args))[0]):
        assert not any(each.requires_grad for each in run(*kept, torch.arange(3)))


def test_a_cache_keeps_its_backend() -> None:
    runtime, kernels = counting_runtime()
    kernels_of_other = {"paged_caching_": PORTABLE_KERNELS["paged_caching_"]}
    priority = kvdock.plugin.Priority.SPECIALISED
    other = InProcessBackend("other", claims=("cpu",), devices=("cpu",), kernels=kernels_of_other, priority=priority)
    runtime.registry.register(plugin(other), "other")
    with active(runtime):
        with kvdock.use_backend("counting"):
            kept = paged_cache()
        usual = paged_cache()
        for cache, calls in ((usual, 0), (kept, 1)):
            run, counter = compiled(lambda x, slots, cache=cache: (cache.update(0, x, x, slots), x + 1)[1])
            run(torch.randn(3, 2, 8), torch.arange(3))
            assert len(kernels["paged_caching_"].prepared) == calls
            named = [node.kwargs["backend"] for node in counter.graphs[0].graph.nodes if "kvdock" in str(node.target)]
            assert named == ["counting" if calls else None]
        with kvdock.use_backend("portable"):
            run(torch.randn(3, 2, 8), torch.arange(3))
        with kvdock.use_backend("nosuch"), pytest.raises(kvdock.BackendUnavailableError, match="nosuch"):
            compiled(lambda x: kvdock.ops.gather_paged(usual.k_cache(0), usual.v_cache(0), x))[0](torch.arange(3))


def test_a_cache_keeps_its_runtime() -> None:
    """Whichever is the process's when the graph runs."""
    runtime, kernels = counting_runtime()
    with active(runtime):
        cache = paged_cache()
    run, _ = compiled(lambda x, slots: (cache.update(0, x, x, slots), x + 1)[1])
    run(torch.randn(3, 2, 8), torch.arange(3))
    assert len(kernels["paged_caching_"].prepared) == 1


def test_an_op_that_a_plugin_brings_is_traced_too() -> None:
    with active(brought.runtime()) as runtime:
        run, counter = compiled(lambda y, x: (call_op("acme_add_", y, x * 2), y + 1)[1], dynamic=True)
        for count in (3, 5, 4):
            y, x = torch.ones(count, 4), torch.randn(count, 4)
            assert torch.equal(run(y, x), y + 1)
            assert torch.equal(y, x * 2 + 1)
        assert counter.frame_count == 1
        bound = runtime.dispatcher.op("acme_add_").bind()
        before = y.clone()
        compiled(lambda y, x: (bound(y, x), y + 1)[1])[0](y, x)
        assert torch.equal(y, before + x)


WRONG: dict[str, tuple[int, Any, str]] = {
    "dtype": (
        0,
        torch.zeros(3, 2, 8, dtype=torch.float64),
        "paged_caching_: k: expected torch.float32, the dtype of k_cache, got torch.float64",
    ),
    "shape": (1, torch.zeros(2, 2, 8), "paged_caching_: v: expected shape [T=3, Hv=2, Dv=8] to agree with k, v_cache, got shape [2, 2, 8]"),
    "kind": (0, 3, "paged_caching_: k: expected a torch.Tensor, got int"),
    "nothing": (2, None, "paged_caching_: slot_mapping: expected a torch.Tensor, got none"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_when_it_is_traced(what: str) -> None:
    place, value, text = WRONG[what]
    cache, args = paged_cache(), [*torch.randn(2, 3, 2, 8), torch.arange(3)]
    args[place] = value
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        compiled(lambda *args: cache.update(0, *args))[0](*args)
    assert text in str(caught.value)
    assert not cache.k_cache(0).any()


def test_what_is_wrong_with_values_is_said_when_it_runs() -> None:
    cache = paged_cache()
    run, _ = compiled(lambda x, slots: (cache.update(0, x, x, slots), x + 1)[1])
    run(torch.randn(3, 2, 8), torch.arange(3))
    before = cache.k_cache(0).clone()
    with pytest.raises(kvdock.IndexRangeError, match=r"^paged_caching_: slot_mapping\[1\]: expected a slot below 32"):
        run(torch.randn(3, 2, 8), torch.tensor([1, 32, 2]))
    assert torch.equal(cache.k_cache(0), before)


def test_a_transform_under_the_compiler_is_right_or_refused() -> None:
    pools, slots = torch.randn(2, 8, 4, 2, 8), torch.tensor([[3, 1], [0, 9]])
    found = torch.compile(torch.vmap(lambda each: kvdock.ops.gather_paged(*pools, each)), fullgraph=True, backend="aot_eager")(slots)
    assert torch.equal(found[0], kvdock.ops.gather_paged(*pools, slots)[0])

    def write(k: torch.Tensor) -> torch.Tensor:
        kvdock.ops.paged_caching_(*pools, k, k, torch.arange(3))
        return k + 1

    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"kvdock::paged_caching_|vmap"):
        torch.compile(torch.vmap(write), fullgraph=True, backend="aot_eager")(torch.randn(1, 3, 2, 8))


FIRST = """
import json, torch, kvdock
from torch._dynamo.testing import CompileCounterWithBackend
counter = CompileCounterWithBackend("aot_eager")
def step(k_cache, v_cache, x, slots):
    kvdock.ops.paged_caching_(k_cache, v_cache, x, x, slots)
    return kvdock.ops.gather_paged(k_cache, v_cache, slots)[0]
run = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
pools, x = [torch.zeros(8, 4, 2, 8) for _ in "kv"], torch.randn(3, 2, 8)
found = [torch.equal(run(*pools, x, torch.arange(3)), x)]
step(*pools, x, torch.arange(3))
found.append(torch.equal(run(*pools, x[:2], torch.arange(2)), x[:2]))
print(json.dumps([*found, counter.frame_count]))
"""


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_traced() -> None:
    """Plugins are found beside what is traced. An eager call later asks for one more graph at most."""
    first, second, graphs = answer(FIRST)
    assert first
    assert second
    assert graphs <= 2
