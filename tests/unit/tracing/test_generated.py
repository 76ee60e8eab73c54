"""The code that torch's compiler writes: pools are written in place, whatever their layout, and nothing of a pool's size is made."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import kvdock

pytestmark = [
    pytest.mark.slow,  # a C++ compiler runs for each graph
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler: g++"),
    pytest.mark.filterwarnings("default"),  # the compiler's own
]

CPU, LAYERS, BLOCKS, BLOCK, HEADS, DIM = torch.device("cpu"), 3, 64, 4, 2, 8
LAYER = BLOCKS * BLOCK * HEADS * DIM
"""Elements of a layer's keys: far more than the tokens of any of these steps have."""


def spec() -> kvdock.KVSpec:
    return kvdock.KVSpec.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, max_positions=256, dtype=torch.float32)


def paged_cache(**options: Any) -> kvdock.PagedKVCache:
    cache = kvdock.create_cache(spec(), kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK, **options), kvdock.RankInfo(CPU))
    assert isinstance(cache, kvdock.PagedKVCache)
    return cache


def largest_buffer(code: str) -> int:
    """Return the elements of the largest tensor that generated code makes."""
    made = re.findall(r"empty_strided\w*\(\(([^()]*)\)", code)
    return max((int(torch.tensor([int(n) for n in sizes.split(",") if n.strip()]).prod()) for sizes in made), default=0)


def generated(step: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Compile a step, run it once, and return what it returned and its code."""
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(torch.compile(step, fullgraph=True), *args)
    return found, "\n".join(codes)


def assert_in_place(code: str, writes: int) -> None:
    assert len(re.findall(r"torch\.ops\.kvdock\.\w+_\.\w+\(", code)) == writes
    assert 0 < largest_buffer(code) < LAYER // 4
    assert "clone" not in re.sub(r"#.*", "", code)
    assert "copy_(" not in re.sub(r"#.*", "", code)


def step_of(cache: kvdock.PagedKVCache) -> Callable[..., Any]:
    def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            k_cache, _ = cache.update(layer, x * (layer + 1), x + 1, slots)
            k, v = cache.gather(layer, slots)
            x = x + k * 0.5 - v + k_cache[0, 0, 0, 0]
        return x

    return step


LAYOUTS = [(layout, heads) for layout in kvdock.KVCacheLayout for heads in kvdock.HeadLayout]


@pytest.mark.parametrize(("layout", "heads"), LAYOUTS, ids=str)
def test_a_step_of_all_layers_writes_the_pools_in_place(layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    cache = paged_cache(layout=layout, head_layout=heads)
    step, args = step_of(cache), (torch.randn(5, HEADS, DIM), torch.randperm(BLOCKS * BLOCK)[:5])
    found, code = generated(step, *args)
    assert_in_place(code, LAYERS)
    after = [cache.k_cache(layer).clone() for layer in range(LAYERS)]
    cache.reset()
    torch.testing.assert_close(found, step(*args), rtol=1e-6, atol=1e-6)
    for layer, pool in enumerate(after):
        torch.testing.assert_close(pool, cache.k_cache(layer), rtol=1e-6, atol=1e-6)


def test_what_comes_from_one_projection_is_passed_on_as_it_lies() -> None:
    cache = paged_cache()

    def step(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        k, v = rows[:, : HEADS * DIM].unflatten(1, (HEADS, DIM)), rows[:, HEADS * DIM :].unflatten(1, (HEADS, DIM))
        cache.update(0, k, v, slots)
        return rows.sum()

    rows = torch.randn(6, 2 * HEADS * DIM)
    _, code = generated(step, rows, torch.arange(6))
    assert largest_buffer(code) <= 1, "not even the tokens are copied"
    assert torch.equal(cache.v_cache(0).view(-1, HEADS * DIM)[:6], rows[:, HEADS * DIM :])


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_a_static_cache_is_written_in_place(kind: str) -> None:
    config = kvdock.StaticKVCacheConfig(max_batch_size=4, max_cache_len=256)
    cache = kvdock.create_cache(spec(), config, kvdock.RankInfo(CPU))
    assert isinstance(cache, kvdock.StaticKVCache)

    def step(x: torch.Tensor, lengths: Any) -> torch.Tensor:
        for layer in range(LAYERS):
            k, _ = cache.update(layer, x * (layer + 1), x + 1, lengths)
            x = x + k.sum(2, keepdim=True)
        return x

    x = torch.randn(2, HEADS, 1, DIM)
    _, code = generated(step, x, 7 if kind == "int" else torch.tensor([7, 3]))
    assert_in_place(code, LAYERS)
    assert torch.equal(cache.k_cache(0)[0, :, 7], x[0, :, 0])


def write_and_read(k_cache: torch.Tensor, v_cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    kvdock.ops.paged_caching_(k_cache, v_cache, x * 2, x + 1, slots)
    return kvdock.ops.gather_paged(k_cache, v_cache, slots)[0] + 1


STEPS: dict[str, Callable[..., Any]] = {
    "two pools": write_and_read,
    "one tensor": lambda pools, *args: write_and_read(pools[0], pools[1], *args),
    "two of one memory": write_and_read,
}


@pytest.mark.parametrize("kind", STEPS)
def test_pools_that_are_arguments_are_written_in_place_unless_they_share_memory(kind: str) -> None:
    """The last is what the page on torch.compile says not to do: the results are right, and each call copies the memory there and back."""
    both, x = torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM), torch.randn(3, HEADS, DIM)
    pools = {"two pools": [both[0].clone(), both[1].clone()], "one tensor": [both], "two of one memory": [*both]}[kind]
    found, code = generated(STEPS[kind], *pools, x, torch.arange(3))
    if kind == "two of one memory":
        assert largest_buffer(code) == 2 * LAYER
    else:
        assert_in_place(code, 1)
    assert torch.equal(found, x * 2 + 1)
    assert torch.equal((pools[0][1] if kind == "one tensor" else pools[1])[0, :3], x + 1)


def test_a_view_from_before_the_write_copies_the_pool() -> None:
    """What the page on torch.compile says not to do: should this fail, torch has learned it, and the page can say less."""
    cache = paged_cache()

    def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        before = cache.k_cache(0) * 1
        cache.update(0, x, x, slots)
        return before

    _, code = generated(step, torch.randn(3, HEADS, DIM), torch.arange(3))
    assert largest_buffer(code) >= LAYER


def test_a_dropped_clone_is_loud_and_the_advice_helps() -> None:
    """pytorch#198031: a clone of a part of what is written later is dropped. Should this not raise, torch has mended it."""
    pools = [torch.randn(BLOCKS, BLOCK, HEADS, DIM) for _ in "kv"]
    rows, slots = pools[0].view(-1, HEADS, DIM)[8:11].clone(), torch.arange(3)

    def cloned(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
        k, v = (pool.view(-1, HEADS, DIM)[8:11].clone() for pool in (k_cache, v_cache))
        kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)

    advice = r"Fix: read it with kvdock.ops.gather_paged, or before the compiled function: torch.compile may drop a clone\(\)"
    with pytest.raises(kvdock.ArgumentValueError, match=rf"^paged_caching_: k: expected memory outside k_cache.*{advice}"):
        torch.compile(cloned, fullgraph=True)(*pools, slots)
    assert torch.equal(pools[0].view(-1, HEADS, DIM)[8:11], rows)

    def gathered(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
        kvdock.ops.paged_caching_(k_cache, v_cache, *kvdock.ops.gather_paged(k_cache, v_cache, slots + 8), slots)

    torch.compile(gathered, fullgraph=True)(*pools, slots)
    assert torch.equal(pools[0].view(-1, HEADS, DIM)[:3], rows)


def test_graphs_of_a_device_may_be_replayed() -> None:
    """torch replays no graph that writes what it does not know to stay: it is told of the pools, and has each memory once."""
    from torch._functorch import aot_autograd

    known: list[tuple[int, list[int]]] = []
    real = aot_autograd._try_get_metadata_from_dynamo

    def noted(*args: Any) -> Any:
        result = real(*args)
        known.append((len(result[0] or ()), result[1]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot_autograd, "_try_get_metadata_from_dynamo", noted)
        args = torch.randn(5, HEADS, DIM), torch.arange(5)
        torch.compile(step_of(paged_cache()), fullgraph=True, backend="aot_eager")(*args)
    ((inputs, static),) = known
    assert (inputs, len(static)) == (4, 2), "tokens and slots; keys and values of all layers, which stay"
