"""What a plan is prepared for: exactly what is and what is not in its key, and when plans are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch

import kvdock
from opskit import SINGLE, Geometry, Memory, Target, active, check, counting_runtime
from opskit.kernels import CountingKernel

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


@attrs.frozen
class Call:
    """One call of `paged_caching_`, by what its tensors are like. Shapes count elements, addresses bytes."""

    pool: tuple[int, ...] = (6, 4, 2, 8)
    v_pool: tuple[int, ...] = (6, 4, 2, 8)
    order: tuple[int, ...] = (0, 1, 2, 3)
    gaps: tuple[int, ...] = (0, 0, 0, 0)
    lead: tuple[int, ...] = (5,)
    row_gap: int = 0
    token_order: tuple[int, ...] | None = None
    dtype: torch.dtype = BF16
    index: torch.dtype = I64
    k_at: int = 0
    v_at: int = 0
    pool_at: int = 0
    slots_at: int = 0
    slot_step: int = 1

    def run(self) -> None:
        memory = Memory()
        pools = [
            memory.tensor(self.dtype, shape, order=self.order, gaps=self.gaps, offset=self.pool_at) for shape in (self.pool, self.v_pool)
        ]
        gaps = (*[0] * len(self.lead), self.row_gap, 0) if self.row_gap else None
        k, v = (
            memory.tensor(self.dtype, (*self.lead, *pool[2:]), order=self.token_order, gaps=gaps, offset=at)
            for pool, at in ((self.pool, self.k_at), (self.v_pool, self.v_at))
        )
        places = memory.tensor(self.index, (*self.lead, self.slot_step), offset=self.slots_at)[..., 0]
        kvdock.ops.paged_caching_(*pools, k, v, places.fill_(-1))


@pytest.fixture
def kernels() -> Iterator[dict[str, CountingKernel]]:
    """Count what a cold runtime prepares."""
    runtime, kernels = counting_runtime()
    with active(runtime):
        yield kernels


SAME = {
    "more tokens": (Call(), Call(lead=(500,))),
    "one token": (Call(), Call(lead=(1,))),
    "another batch": (Call(lead=(2, 3)), Call(lead=(7, 1))),
    "a batch of one": (Call(lead=(2, 3)), Call(lead=(1, 1))),
    "heads before tokens": (Call(lead=(2, 3)), Call(lead=(2, 3), token_order=(0, 2, 1, 3))),
    "heads before more tokens": (Call(lead=(2, 3), token_order=(0, 2, 1, 3)), Call(lead=(2, 64), token_order=(0, 2, 1, 3))),
    "tokens before batches": (Call(lead=(2, 3)), Call(lead=(2, 3), token_order=(1, 0, 2, 3))),
    "rows of a wider projection": (Call(row_gap=8), Call(row_gap=800)),
    "dense rows and rows of a projection": (Call(), Call(row_gap=16)),
    "another address of the same class": (Call(), Call(k_at=16, v_at=48, pool_at=32)),
    "slots at another address": (Call(), Call(slots_at=8)),
    "strided slots": (Call(), Call(slot_step=3)),
    "an odd row stride, of one row": (Call(lead=(1,)), Call(lead=(1,), row_gap=1)),
}
OTHER = {
    "more blocks": (Call(), Call(pool=(7, 4, 2, 8), v_pool=(7, 4, 2, 8))),
    "larger blocks": (Call(), Call(pool=(6, 8, 2, 8), v_pool=(6, 8, 2, 8))),
    "more heads": (Call(), Call(pool=(6, 4, 3, 8))),
    "more heads of values": (Call(), Call(v_pool=(6, 4, 3, 8))),
    "a larger dim": (Call(), Call(pool=(6, 4, 2, 16))),
    "a larger dim of values": (Call(), Call(v_pool=(6, 4, 2, 16))),
    "another memory order": (Call(), Call(order=(0, 2, 1, 3))),
    "padded blocks": (Call(), Call(gaps=(0, 8, 0, 0))),
    "another dtype": (Call(), Call(dtype=torch.float16)),
    "another dtype of slots": (Call(), Call(index=I32)),
    "rows of a batch": (Call(), Call(lead=(5, 1))),
    "k 2 bytes further": (Call(), Call(k_at=2)),
    "k 4 bytes further": (Call(), Call(k_at=4)),
    "k 8 bytes further": (Call(), Call(k_at=8)),
    "k at 2 and at 4 bytes": (Call(k_at=2), Call(k_at=4)),
    "k at 4 and at 8 bytes": (Call(k_at=4), Call(k_at=8)),
    "v 2 bytes further": (Call(), Call(v_at=2)),
    "pools 8 bytes further": (Call(), Call(pool_at=8)),
    "an odd row stride": (Call(), Call(row_gap=1)),
    "row strides of 4 and of 8 bytes": (Call(row_gap=2), Call(row_gap=4)),
}


@pytest.mark.parametrize(("first", "second"), SAME.values(), ids=SAME)
def test_one_plan_serves_both(kernels: dict[str, CountingKernel], first: Call, second: Call) -> None:
    for call in (first, second, first):
        call.run()
    assert len(kernels["paged_caching_"].prepared) == 1


@pytest.mark.parametrize(("first", "second"), OTHER.values(), ids=OTHER)
def test_each_has_its_own_plan(kernels: dict[str, CountingKernel], first: Call, second: Call) -> None:
    for call in (first, second, first, second):
        call.run()
    assert len(kernels["paged_caching_"].prepared) == 2


@pytest.mark.parametrize("shape", [(1, 4, 2, 8), (6, 1, 2, 8), (6, 4, 1, 8), (1, 1, 1, 8)], ids=str)
def test_strides_of_size_1_dims_are_in_no_key(kernels: dict[str, CountingKernel], shape: tuple[int, ...]) -> None:
    """torch gives them any number: slicing and reshaping leave strides there that mean nothing."""
    tensors = [torch.zeros(shape), torch.zeros(shape), torch.zeros(1, *shape[2:]), torch.zeros(1, *shape[2:])]
    for step in (None, 3):
        strides = [[step or s if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)] for t in tensors]
        views = [t.as_strided(t.shape, steps) for t, steps in zip(tensors, strides, strict=True)]
        kvdock.ops.paged_caching_(*views, torch.tensor([0]))
    assert len(kernels["paged_caching_"].prepared) == 1


def static(rows: int, new: int, lengths: Any, order: tuple[int, ...] | None = None) -> None:
    """Run a `static_update_` that is in range."""
    memory = Memory()
    caches = [memory.tensor(BF16, (6, 2, 100, 8)) for _ in range(2)]
    kvdock.ops.static_update_(*caches, *(memory.tensor(BF16, (rows, 2, new, 8), order=order) for _ in range(2)), lengths)


def test_lengths_and_counts_are_in_no_key(kernels: dict[str, CountingKernel]) -> None:
    kernel = kernels["static_update_"]
    for rows, new, length in ((6, 3, 0), (6, 3, 97), (1, 1, 50), (4, 100, 0)):
        static(rows, new, length)
        static(rows, new, length, (0, 2, 1, 3))
    assert len(kernel.prepared) == 1
    for length in (0, 97, 50):
        static(6, 3, torch.tensor(length))
    assert len(kernel.prepared) == 2, "[] lengths"
    for rows, lengths in ((6, [0] * 6), (6, [5]), (3, [1, 2, 3])):
        static(rows, 3, torch.tensor(lengths))
    assert len(kernel.prepared) == 3, "[n] lengths"
    static(6, 3, torch.tensor([5], dtype=I32))
    assert len(kernel.prepared) == 4, "int32 lengths"


def test_the_number_of_pairs_is_in_no_key(kernels: dict[str, CountingKernel]) -> None:
    caches = [torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2, 8)]
    for pairs in ([(0, 1)], [(0, 1), (2, 3), (4, 5)], torch.tensor([[0, 1], [2, 3], [4, 5]])[::2], torch.tensor([[0, 1, 2]])[:, :2]):
        kvdock.ops.copy_blocks_(*caches, pairs)
    assert len(kernels["copy_blocks_"].prepared) <= 2
    assert {request.args["block_pairs"].dtype for request in kernels["copy_blocks_"].prepared} == {I64}


def test_a_request_says_what_is_static_and_nothing_else(kernels: dict[str, CountingKernel]) -> None:
    """A kernel may rely on all of it from call to call, so that no run-time value may be in there."""
    Call(pool=(6, 4, 3, 8), gaps=(0, 8, 0, 0), lead=(5,), row_gap=4, k_at=2, v_at=32).run()
    (request,) = kernels["paged_caching_"].prepared
    assert (request.op, request.device) == ("paged_caching_", torch.device("cpu"))
    meta = kvdock.plugin.TensorMeta
    assert request.args == {
        "k_cache": meta(BF16, (6, 4, 3, 8), (4 * 24 + 8, 24, 8, 1), 16),
        "v_cache": meta(BF16, (6, 4, 2, 8), (4 * 16 + 8, 16, 8, 1), 16),
        "k": meta(BF16, (None, 3, 8), None, 2),
        "v": meta(BF16, (None, 2, 8), None, 8),
        "slot_mapping": meta(I64, (None,), None, 8),
        "k_scale": None,
        "v_scale": None,
    }
    assert request.tensor("k") is request.args["k"]
    with pytest.raises(TypeError, match="paged_caching_: k_scale: expected a tensor in this request, got None"):
        request.tensor("k_scale")


def test_a_host_length_stands_in_a_request_without_its_value(kernels: dict[str, CountingKernel]) -> None:
    static(6, 3, 42)
    assert kernels["static_update_"].prepared[0].args["cache_lengths"] == kvdock.plugin.HOST_INT


@pytest.mark.parametrize("at", [0, 2, 4, 6, 8, 14])
@pytest.mark.parametrize("row_gap", [0, 1, 2, 4])
@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_every_alignment_after_every_other_writes_the_right_bytes(target: Target, at: int, row_gap: int) -> None:
    """A plan made for 16-byte pieces must not be used on an address that is only even, and the other way round."""
    g = Geometry()
    for other in (0, 2, 4, 8):
        memory = Memory(target.device)
        pools = [memory.tensor(BF16, g.k_shape, offset=offset) for offset in (other, 0)]
        for count in (1, 3, 13):
            for offset in (other, at):
                k, v = (memory.tensor(BF16, (count, 2, 8), gaps=(0, row_gap, 0), offset=place) for place in (offset, at))
                check(target, memory, "paged_caching_", *pools, k, v, memory.index([(7 * i + 3) % 24 for i in range(count)]))


def test_a_change_of_what_is_registered_drops_all_plans_once(kernels: dict[str, CountingKernel]) -> None:
    """Plans of an earlier epoch are destroyed at the next preparation, each once; their kernel may be gone."""
    runtime, kernels = counting_runtime()
    kernel = kernels["paged_caching_"]
    with active(runtime):
        for call in (Call(), Call(dtype=F32), Call(index=I32)):
            call.run()
        assert (len(kernel.prepared), len(kernel.destroyed)) == (3, 0)
        second = CountingKernel(kernel.inner)
        runtime.registry.register_kernel("counting", "paged_caching_", second, override=True)
        Call().run()
        assert (len(kernel.prepared), len(second.prepared)) == (3, 1), "the new kernel serves"
        assert sorted(map(str, kernel.destroyed)) == sorted(map(str, kernel.prepared)), "each old plan was destroyed once"
        assert runtime.dispatcher.op("paged_caching_").prepared == 1
        Call().run()
        runtime.registry.register_kernel("counting", "paged_caching_", kernel, override=True)
        Call().run()
        assert (len(kernel.prepared), len(kernel.destroyed), len(second.destroyed)) == (4, 3, 1)


def test_a_plan_for_a_name_is_not_used_without_it() -> None:
    runtime, kernels = counting_runtime()
    with active(runtime):
        with kvdock.use_backend("portable"):
            Call().run()
        assert len(kernels["paged_caching_"].prepared) == 0
        assert runtime.dispatcher.fallbacks["paged_caching_", "counting"] == 1
        Call().run()
        with kvdock.use_backend("counting"):
            Call().run()
        assert len(kernels["paged_caching_"].prepared) == 2


def test_what_only_the_slow_path_accepts_is_prepared_once(kernels: dict[str, CountingKernel]) -> None:
    """An int of a class of its own is a length all the same, and the plan is that of any int."""

    class Length(int):
        pass

    for _ in range(3):
        static(6, 3, Length(4))
        static(6, 3, 4)
    kernel = kernels["static_update_"]
    assert (len(kernel.prepared), len(kernel.destroyed)) == (1, 0)


def test_a_bound_op_shares_plans_with_the_function(kernels: dict[str, CountingKernel]) -> None:
    from kvdock.ops.dispatcher import active_dispatcher

    pools = [torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2, 8)]
    k, slots = torch.zeros(3, 2, 8), torch.tensor([1, 2, 3])
    write: Callable[..., None] = active_dispatcher().op("paged_caching_").bind(*pools)
    for _ in range(2):
        write(k, k.clone(), slots, None, None)
        kvdock.ops.paged_caching_(*pools, k, k.clone(), slots)
    assert len(kernels["paged_caching_"].prepared) == 1
