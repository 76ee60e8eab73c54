"""What a fast call must not serve, and what it must: see `kvdock.ops.signatures`. Each test makes one, and then changes something."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.selection import PORTABLE
from kvdock.ops.signatures import FastCall, Recent
from opskit import SINGLE, Geometry, Memory, Target, active, bits_of, check
from opskit.drawing import ROOM
from opskit.kernels import runtime_of
from opskit.targets import forget_runtimes
from support_plugins import CallDescriptor, CallKernel, InProcessBackend

G = Geometry(dtype=torch.float32)
REPEATS = 4
each_target = pytest.mark.parametrize("target", SINGLE, indirect=True)


@pytest.fixture(autouse=True)
def cold() -> None:
    """Start with runtimes that have met no call."""
    forget_runtimes()


def fast_calls(op: Any) -> list[FastCall]:
    """Return what the calling thread has settled of an op."""
    return [fast for signature in op.recent.signatures for fast in signature.fast.values() if isinstance(fast, FastCall)]


# What stands at other addresses and sizes


@each_target
def test_an_output_that_folds_onto_itself_as_it_grows_is_refused(target: Target) -> None:
    """``[B, S]`` outputs whose rows lie ``S`` apart: dense for S tokens, and overlapping for more at the same strides."""
    memory = Memory(target.device)
    pools, flat = G.pools(memory), memory.tensor(G.dtype, (2, ROOM))

    def outputs(batch: int, count: int) -> list[torch.Tensor]:
        return [each.as_strided((batch, count, 2, 8), (3 * 16, 16, 8, 1)) for each in flat]

    mapping = memory.index([1, 2, 3, 4, -1, 6] * 4)
    for _ in range(REPEATS):
        check(target, memory, "gather_paged", *pools, mapping.as_strided((2, 3), (3, 1)), *outputs(2, 3))
    assert fast_calls(target.runtime.dispatcher.op("gather_paged")) or target.name == "portable"
    for batch, count in ((2, 4), (3, 5)):
        slots, before = mapping.as_strided((batch, count), (3, 1)), memory.copy()
        for _ in range(REPEATS):
            with pytest.raises(kvdock.ArgumentValueError, match="gather_paged: k_out: expected a destination in which every place"):
                kvdock.ops.gather_paged(*pools, slots, out=tuple(outputs(batch, count)))  # type: ignore[arg-type]
        before.assert_same("raised")
    for batch, count in ((1, 9), (5, 2), (2, 3)):
        for _ in range(REPEATS):
            check(target, memory, "gather_paged", *pools, memory.index([[1] * count] * batch), *outputs(batch, count))


@each_target
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_that_are_made_have_strides_that_follow_the_count(target: Target, batch: int) -> None:
    """Slots out of a wider table keep their strides as a step takes more of its columns; new outputs of several rows do not."""
    memory = Memory(target.device)
    pools, table = G.pools(memory), memory.index(torch.randint(-1, 24, (batch, 12), generator=torch.Generator().manual_seed(3)).tolist())
    for count in (3, 5, 12, 1, 4):
        slots = table[:, :count]
        for _ in range(2 * REPEATS):
            for pool, rows in zip(pools, kvdock.ops.gather_paged(*pools, slots), strict=True):
                expected = torch.where(slots[..., None, None] < 0, 0, pool.flatten(0, 1)[slots.clamp(min=0)])
                assert rows.is_contiguous()
                assert torch.equal(bits_of(rows), bits_of(expected))


@each_target
@pytest.mark.parametrize("step", [17, 18, 20, 16])
def test_one_row_with_an_odd_step_and_then_more(target: Target, step: int) -> None:
    """The stride of one row says nothing, and counts as soon as there are two."""
    memory = Memory(target.device)
    pools, flat = G.pools(memory), memory.tensor(G.dtype, (2, ROOM))
    for _ in range(2):
        for count in (1, 3, 1, 7):
            tokens = [each.as_strided((count, 2, 8), (step, 8, 1)) for each in flat]
            batch = [each.as_strided((1, count, 2, 8), (5, step, 8, 1)) for each in flat]
            for _ in range(REPEATS):
                check(target, memory, "paged_caching_", *pools, *tokens, memory.index(list(range(count))))
                check(target, memory, "paged_caching_", *pools, *batch, memory.index([list(range(count))]))


@each_target
def test_pools_that_lie_interleaved_in_one_storage(target: Target) -> None:
    """Block by block, and head by head. Tokens between their first and last byte are refused; so are pools that do share a byte."""
    memory = Memory(target.device)
    whole = memory.tensor(G.dtype, (6, 2, 4, 2, 8))
    heads = memory.tensor(G.dtype, (6, 4, 2, 2, 8))
    k, v = G.tokens(memory, [5])
    slots = memory.index([5, 0, -1, 23, 9])
    for _ in range(2):
        for pools in ((whole[:, 0], whole[:, 1]), (heads[:, :, 0], heads[:, :, 1]), (whole[:, 1], whole[:, 0])):
            for _ in range(REPEATS):
                check(target, memory, "paged_caching_", *pools, k, v, slots)
        before = memory.copy()
        for _ in range(REPEATS):
            with pytest.raises(kvdock.ArgumentValueError, match=r"paged_caching_: k: expected memory outside"):
                kvdock.ops.paged_caching_(whole[:, 0], whole[:, 1], whole[2, 1, :1], v[:1], slots[:1])
            with pytest.raises(kvdock.ArgumentValueError, match=r"paged_caching_: v_cache: expected memory outside k_cache"):
                kvdock.ops.paged_caching_(whole[:, 0], whole[:, 0], k, v, slots)
        before.assert_same("raised")


def kinds(like: torch.Tensor) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return tensors that are more than their bytes, and whether an op takes them."""
    with torch.inference_mode():
        inference = like.clone()
    wrapped = like.clone().as_subclass(type("Tagged", (torch.Tensor,), {}))
    return {
        "inference": (inference, True),
        "requires_grad": (like.clone().requires_grad_(), True),
        "computed": (like.clone().requires_grad_() * 1, True),
        "parameter": (torch.nn.Parameter(like.clone()), True),
        "frozen parameter": (torch.nn.Parameter(like.clone(), requires_grad=False), True),
        "negative": (torch._neg_view(like.clone()), False),
        "subclass": (wrapped, False),
    }


@each_target
@pytest.mark.parametrize("kind", ["inference", "requires_grad", "computed", "parameter", "frozen parameter", "negative", "subclass"])
def test_tensors_that_are_more_than_their_bytes(target: Target, kind: str) -> None:
    pools = [torch.zeros(shape, device=target.device) for shape in (G.k_shape, G.v_shape)]
    tokens, slots = torch.randn(5, 2, 8, device=target.device), torch.arange(5, device=target.device)
    other, taken = kinds(tokens * 3)[kind]
    for _ in range(2):
        for _ in range(REPEATS):
            kvdock.ops.paged_caching_(*pools, tokens, tokens.clone(), slots)
            assert torch.equal(bits_of(pools[0].flatten(0, 1)[:5]), bits_of(tokens))
        for _ in range(REPEATS):
            pools[1].zero_()
            if taken:
                kvdock.ops.paged_caching_(*pools, tokens, other, slots)
                assert torch.equal(pools[1].flatten(0, 1)[:5], tokens * 3)
                assert not any(pool.requires_grad or pool.grad_fn for pool in pools)
                continue
            with pytest.raises(kvdock.ArgumentTypeError, match=r"paged_caching_: v: expected a plain torch\.Tensor"):
                kvdock.ops.paged_caching_(*pools, tokens, other, slots)
            assert not pools[1].any()


class Settling(CallKernel):
    """A kernel of `gather_paged` that notes, for each launch with settled strides, those of ``k_out`` and the sizes of the slots."""

    def __init__(self) -> None:
        super().__init__(lambda *args: None)
        self.launched: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        descriptor = _Fixing(self._call)
        descriptor.launch_for = lambda *args: lambda *numbers: self.launched.append((args[-2].stride(), numbers[5:]))
        return descriptor


class _Fixing(CallDescriptor):
    uses_autograd = False
    launch_for: Callable[..., Callable[..., None]]

    def fix(self, *args: Any) -> Callable[..., None]:
        return self.launch_for(*args)


def test_a_launch_is_settled_for_outputs_with_the_strides_of_those_that_are_made() -> None:
    memory, kernel = Memory(), Settling()
    pools, table = G.pools(memory), memory.index([[1] * 12] * 3)
    with active(runtime_of(InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels={"gather_paged": kernel}))):
        for batch, count in ((3, 3), (3, 5), (3, 12), (2, 12), (1, 4), (1, 9)):
            kernel.launched.clear()
            for _ in range(4 * REPEATS):
                kvdock.ops.gather_paged(*pools, table[:batch, :count])
            assert kernel.launched, "settled"
            for (row, *steps), sizes in kernel.launched:
                assert sizes == (batch, count)
                assert steps == [16, 8, 1]
                assert batch == 1 or row == count * 16


# What drops plans


class Recording(CallKernel):
    """A kernel that notes each call by its name, with how it was called, and does nothing."""

    def __init__(self, name: str, events: list[str], prepared: list[str]) -> None:
        super().__init__(lambda *args: events.append(f"{name} called"))
        self._name, self._events, self._prepared = name, events, prepared

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        self._prepared.append(self._name)
        descriptor = _Fixing(self._call)
        descriptor.launch_for = lambda *args: lambda *numbers: self._events.append(f"{self._name} launched")
        return descriptor


class World:
    """A runtime whose kernels do nothing but note it, and one call of its `paged_caching_`, direct and bound."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.prepared: list[str] = []
        backend = InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels={"paged_caching_": self.kernel("first")})
        self.runtime = runtime_of(backend)
        self.op = self.runtime.dispatcher.op("paged_caching_")
        memory = Memory()
        self.pools, self.tokens, self.slots = G.pools(memory), G.tokens(memory, [5]), memory.index([1, 2, 3, 4, 5])
        self.bound = self.op.bind(*self.pools)

    def kernel(self, name: str) -> Recording:
        return Recording(name, self.events, self.prepared)

    def run(self, bound: Callable[..., Any] | None = None, times: int = 1) -> list[str]:
        """Make the call, direct and bound, some times, and return what ran since the last such run."""
        self.events.clear()
        for _ in range(times):
            kvdock.ops.paged_caching_(*self.pools, *self.tokens, self.slots)
            (bound or self.bound)(*self.tokens, self.slots, None, None)
        return list(self.events)


@pytest.fixture
def world() -> Any:
    found = World()
    with active(found.runtime):
        found.run(times=REPEATS)
        assert found.run() == ["first launched"] * 2, "there is a fast call"
        yield found


def test_a_clear_by_another_thread_drops_fast_calls(world: World) -> None:
    for number in range(2, 5):
        thread = threading.Thread(target=world.runtime.dispatcher.descriptors.clear)
        thread.start()
        thread.join()
        world.run(times=REPEATS)
        assert world.run() == ["first launched"] * 2
        assert world.prepared == ["first"] * number, "prepared anew, once"


def test_a_change_of_what_is_registered_drops_fast_calls(world: World) -> None:
    for name in ("second", "third"):
        world.runtime.registry.register_kernel("acme", "paged_caching_", world.kernel(name), override=True)
        assert all(event.startswith(name) for event in world.run(times=REPEATS))
        assert world.run() == [f"{name} launched"] * 2


def test_a_plan_that_left_a_full_cache_takes_its_fast_calls_along(world: World) -> None:
    world.runtime.dispatcher.descriptors.set_capacity("paged_caching_", 1)
    assert world.run() == ["first launched"] * 2
    for number in range(3):
        kvdock.ops.paged_caching_(*[pool.double() for pool in world.pools], *[t.double() for t in world.tokens], world.slots)
        assert world.prepared == ["first"] * (2 + 2 * number)
        world.run(times=REPEATS)
        assert world.run() == ["first launched"] * 2
        assert world.prepared == ["first"] * (3 + 2 * number), "its place was taken"


def test_a_fast_call_is_for_its_backend_only(world: World) -> None:
    for _ in range(2):
        before = world.pools[0].clone()
        with kvdock.use_backend(PORTABLE):
            assert world.run(times=REPEATS) == []
        assert torch.equal(bits_of(world.pools[0].flatten(0, 1)[1]), bits_of(world.tokens[0][0])), "portable kernels wrote"
        world.pools[0].copy_(before)
        assert world.run(times=2) == ["first launched"] * 4
        own = world.op.bind(*world.pools, named=PORTABLE)
        assert world.run(own, times=REPEATS) == ["first launched"] * REPEATS
        world.pools[0].copy_(before)


def test_debug_mode_is_asked_before_a_fast_call(world: World) -> None:
    world.slots.fill_(99)
    assert world.run() == ["first launched"] * 2
    with kvdock.debug(), pytest.raises(kvdock.IndexRangeError, match=r"slot_mapping\[0\]"):
        world.run()
    assert world.events == []


# Who knows a fast call


def test_layers_share_a_fast_call_and_count_for_themselves(world: World) -> None:
    """32 layers in turn: each finds the first one's by its strides, and has it at hand from its second call on."""
    layers = [world.op.bind(*[pool.clone() for pool in world.pools]) for _ in range(32)]
    recents: list[Recent] = [layer.__self__.recent for layer in layers]  # type: ignore[attr-defined]
    for _ in range(REPEATS):
        for layer, recent in zip(layers, recents, strict=True):
            layer(*world.tokens, world.slots, None, None)
            assert len(recent.state0[3]) == 1
    assert len(fast_calls(world.op)) == 1
    assert all(recent.counts[fast_calls(world.op)[0]] == 1 for recent in recents), "by strides once each"
    assert world.prepared == ["first"]


@pytest.mark.usefixtures("real_number")
def test_a_pattern_of_strides_is_settled_when_it_has_been_read_so_often(real_number: int) -> None:
    """By all layers together: what a fast call is made of is the same for each."""
    world = World()
    with active(world.runtime):
        for count in range(1, real_number + 1):
            assert world.events.count("first launched") == 0
            assert fast_calls(world.op) == []
            kvdock.ops.paged_caching_(*world.pools, *world.tokens, world.slots)
            assert len(world.events) == count
        assert len(fast_calls(world.op)) == 1
        assert world.run(times=3) == ["first launched"] * 6


def test_a_deep_copy_of_a_bound_op_writes_into_its_own_pools() -> None:
    """It starts without fast calls, and finds those of its op."""
    runtime = runtime_of(InProcessBackend("plain", claims=("cpu",), devices=("cpu",), kernels={}))
    pools = [torch.zeros(G.k_shape), torch.zeros(G.v_shape)]
    tokens, slots = torch.ones(5, 2, 8), torch.arange(5)
    bound = runtime.dispatcher.op("paged_caching_").bind(*pools)
    for _ in range(REPEATS):
        bound(tokens, tokens, slots, None, None)
    copied, shallow = copy.deepcopy(bound), copy.copy(bound)
    copies = copied.__self__._pools  # type: ignore[attr-defined]
    pools[0].zero_()
    for number in range(1, REPEATS + 1):
        copied(tokens * number, tokens, slots, None, None)
        assert not pools[0].any()
        assert torch.equal(copies[0].flatten(0, 1)[:5], tokens * number)
    shallow(tokens, tokens, slots, None, None)
    assert torch.equal(pools[0].flatten(0, 1)[:5], tokens)
