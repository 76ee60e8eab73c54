"""The CPU backend: how it presents itself, which way a call takes, and that no way allocates keys or values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kvdock
from kvdock.ops.catalog import CATALOG
from opskit import Geometry, Memory, Target, active, check
from opskit.targets import HAS_CPU_BACKEND

pytestmark = pytest.mark.skipif(not HAS_CPU_BACKEND, reason="kvdock_cpu is not installed")

CPU = Target("cpu", "cpu", False)
BIG = Geometry.even(8, 128, num_blocks=400, block=16)


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with active(CPU.runtime):
        yield


def backend() -> kvdock.plugin.Backend:
    """Return the backend that the entry point hands over."""
    import kvdock_cpu

    (made,) = kvdock_cpu.kvdock_backends()
    return made


def test_it_is_ready_everywhere_and_claims_the_cpu_alone() -> None:
    cpu = backend()
    assert (cpu.name, cpu.device_type) == ("cpu", "cpu")
    assert cpu.probe().state is kvdock.plugin.ProbeState.READY
    assert cpu.claims(torch.device("cpu"))
    assert not cpu.claims(torch.device("meta"))
    assert not cpu.claims(torch.device("cuda", 0))
    assert list(cpu.devices()) == [torch.device("cpu")]
    assert not cpu.is_capturing(torch.device("cpu"))
    assert cpu.skipped_writes(torch.device("cpu")) == 0


def test_it_has_a_kernel_of_its_own_for_every_op() -> None:
    kernels = backend().kernels()
    assert set(kernels) == set(CATALOG)
    assert all(type(kernel).__module__.startswith("kvdock_cpu.") for kernel in kernels.values())


def test_the_version_that_it_was_made_for_is_stated() -> None:
    import kvdock_cpu

    assert kvdock_cpu.KVDOCK_API == (1, 0)


def test_the_installed_entry_point_serves_calls_of_the_process() -> None:
    from kvdock.runtime import default

    assert default().registry.choose("paged_caching_", torch.device("cpu")).backend.name == "cpu"


def allocated(call: Callable[[], Any]) -> int:
    """Return the bytes that a call takes from torch's allocator, in all."""
    for _ in range(3):  # so that the plan is there, and what is remembered of a call
        call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    result = profiled.profiler.kineto_results  # type: ignore[union-attr]
    return sum(event.nbytes() for event in result.events() if event.name() == "[memory]" and event.nbytes() > 0)


WAYS = {
    "one": (1, "contiguous", "random"),
    "few": (4, "contiguous", "random"),
    "few with padding": (4, "contiguous", "padding"),
    "runs": (1000, "contiguous", "blocks"),
    "scattered": (1000, "contiguous", "random"),
    "scattered with padding": (1000, "contiguous", "padding"),
    "many in blocks": (4000, "contiguous", "blocks"),
    "many scattered": (4000, "contiguous", "random"),
    "out of a projection": (1000, "fused qkv", "random"),
    "out of a projection, with padding": (1000, "fused qkv", "padding"),
    "heads before tokens": (1000, "[B, H, q, D]", "random"),
}


def slots_of(kind: str, count: int) -> torch.Tensor:
    """Return slots of a pool of 6,400."""
    generator = torch.Generator().manual_seed(0)
    if kind == "blocks":
        blocks = torch.randperm(BIG.num_blocks, generator=generator)[: -(-count // BIG.block)]
        return (blocks[:, None] * BIG.block + torch.arange(BIG.block)).flatten()[:count]
    slots = torch.randperm(BIG.capacity, generator=generator)[:count]
    if kind == "padding":
        slots[::50] = -1
    return slots


@pytest.fixture(scope="module")
def big() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(BIG.k_shape, dtype=BIG.dtype), torch.zeros(BIG.v_shape, dtype=BIG.dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("count", "source", "kind"), WAYS.values(), ids=WAYS)
def test_a_write_allocates_no_more_than_its_indices(
    big: tuple[torch.Tensor, torch.Tensor], count: int, source: str, kind: str, dtype: torch.dtype
) -> None:
    """Some int64 index tensors at most: not one copy of keys or values, which are 256 times as large."""
    k, v = BIG.tokens(Memory(), [count], source)
    slots = slots_of(kind, count).to(dtype)
    assert allocated(lambda: kvdock.ops.paged_caching_(*big, k, v, slots)) <= 6 * 8 * count + 256


@pytest.mark.parametrize("lengths", ["int", "[1]", "[b] few", "[b] many"])
def test_a_static_update_allocates_no_more_than_its_indices(lengths: str) -> None:
    rows = {"[b] few": 4}.get(lengths, 16)
    caches = [torch.zeros(rows, 8, 64, 128, dtype=torch.bfloat16) for _ in range(2)]
    k = torch.randn(rows, 8, 20, 128, dtype=torch.bfloat16)
    v = k.clone()
    where: Any = {"int": 3, "[1]": torch.tensor([3])}.get(lengths, torch.arange(rows))
    assert allocated(lambda: kvdock.ops.static_update_(*caches, k, v, where)) <= 8 * 8 * rows * 20 + 256


def test_copying_blocks_allocates_nothing_of_their_size(big: tuple[torch.Tensor, torch.Tensor]) -> None:
    pairs = torch.tensor([[i, 399 - i] for i in range(100)])
    assert allocated(lambda: kvdock.ops.copy_blocks_(*big, pairs)) <= 64 * len(pairs)


def test_reading_allocates_its_outputs_and_indices(big: tuple[torch.Tensor, torch.Tensor]) -> None:
    slots, out = slots_of("random", 500), BIG.tokens(Memory(), [500])
    assert allocated(lambda: kvdock.ops.gather_paged(*big, slots, out=out)) <= 6 * 8 * 500 + 256
    made = 2 * 500 * 8 * 128 * 2
    assert made <= allocated(lambda: kvdock.ops.gather_paged(*big, slots)) <= made + 6 * 8 * 500 + 256


@pytest.mark.parametrize("pool", ["hnd", "page-first", "padded slots", "padded heads", "odd steps"])
def test_reading_any_layout_allocates_its_indices_only(pool: str) -> None:
    g = Geometry.even(8, 128, num_blocks=64, block=16)
    pools, slots = g.pools(Memory(), pool), slots_of("random", 6400)
    slots = slots[slots < g.capacity][:500].view(4, 125).to(torch.int32)
    for source in ("contiguous", "fused qkv", "[B, H, q, D]"):
        out = g.tokens(Memory(), [4, 125], source)
        assert allocated(lambda out=out: kvdock.ops.gather_paged(*pools, slots, out=out)) <= 8 * 8 * 500 + 256, source


READS = {  # one indexed copy of whole rows, where rows are dense in both and blocks start whole steps apart; else another way
    ("nhd", "contiguous"): True,
    ("nhd", "fused qkv"): True,
    ("nhd", "padded tokens"): True,
    ("nhd", "[B, H, q, D]"): False,
    ("page-first", "contiguous"): True,
    ("halves [NB, 2, ...]", "contiguous"): True,
    ("padded slots", "contiguous"): True,
    ("padded heads", "contiguous"): False,
    ("hnd", "contiguous"): False,
    ("slots outermost", "contiguous"): False,
    ("odd steps", "contiguous"): False,
}


@pytest.mark.parametrize(("pool", "out"), READS, ids=str)
def test_rows_are_read_whole_where_they_lie_in_one_piece(monkeypatch: pytest.MonkeyPatch, pool: str, out: str) -> None:
    """Every byte is compared too, in batches that are one run of rows and in a part of each row of a larger one, which are not."""
    memory, g, calls = Memory(), Geometry.even(2, 8, num_blocks=6, block=4), list[Any]()
    pools, real = g.pools(memory, pool), torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *args, **options: calls.append(args) or real(*args, **options))
    for slots in ([[3, -1, 7], [22, 0, 9]], [[8, 2, 17]]):
        mapping = memory.index(slots)
        check(CPU, memory, "gather_paged", *pools, mapping, *g.tokens(memory, mapping.shape, out))
        assert len(calls) == (2 if READS[pool, out] else 0), slots
        calls.clear()
        k, v = (tokens[:, : mapping.shape[1]] for tokens in g.tokens(memory, (len(slots), 5), out))
        check(CPU, memory, "gather_paged", *pools, mapping, k, v)
        assert len(calls) == (2 if READS[pool, out] and len(slots) == 1 else 0), slots
        calls.clear()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 100, 2047, 2048, 2049])
@pytest.mark.parametrize("kind", ["blocks", "random", "padding"])
def test_every_way_writes_the_same(count: int, kind: str) -> None:
    """The counts are around those where one way takes over from another."""
    g = Geometry.even(1, 8, num_blocks=400, block=16)
    memory = Memory()
    pools, slots = g.pools(memory), memory.index(slots_of(kind, count).tolist())
    for source in ("contiguous", "padded tokens"):
        check(CPU, memory, "paged_caching_", *pools, *g.tokens(memory, [count], source), slots)
    check(CPU, memory, "gather_paged", *pools, slots, *g.tokens(memory, [count]))


def test_a_gradient_is_not_recorded_on_any_way() -> None:
    pools = [torch.zeros(BIG.k_shape) for _ in range(2)]
    for count, source in ((1, "dense"), (4, "dense"), (64, "dense"), (64, "strided")):
        k = torch.randn(count, 8, 128, requires_grad=True)
        rows = k if source == "dense" else k.transpose(0, 1).contiguous().transpose(0, 1)
        kvdock.ops.paged_caching_(*pools, rows, rows * 2, torch.arange(count))
        assert not any(pool.requires_grad for pool in pools)
        assert torch.equal(pools[1].view(-1, 8, 128)[:count], (rows * 2).detach())
