"""What lies around a call: autograd, inference mode, threads, torch's defaults, and graphs being captured."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvdock
from opskit import DEVICE_KERNELS, Geometry, Memory, Target, active, bits_of, check, counting_runtime, runtime_of
from support_plugins import InProcessBackend

G = Geometry()
COUNTS = [1, 3, 20]


@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_source_that_wants_gradients_does_not_draw_the_pool_into_a_graph(target: Target, wants: tuple[bool, bool], count: int) -> None:
    """Leaves, and what was computed from them, as a model in training mode hands over."""
    pools = [torch.zeros(shape, device=target.device) for shape in (G.k_shape, G.v_shape)]
    leaves = [torch.randn(count, 2, 8, device=target.device, requires_grad=want) for want in wants]
    slots = torch.arange(count, device=target.device)
    for tokens in (leaves, [leaf * 2 for leaf in leaves], [(leaf * 2).transpose(0, 1).contiguous().transpose(0, 1) for leaf in leaves]):
        kvdock.ops.paged_caching_(*pools, *tokens, slots)
        assert not any(pool.requires_grad or pool.grad_fn for pool in pools)
        for pool, source in zip(pools, tokens, strict=True):
            assert torch.equal(pool.view(-1, 2, 8)[:count], source.detach())
    out = kvdock.ops.gather_paged(*pools, slots)
    assert not any(tensor.requires_grad for tensor in out)


def test_static_updates_record_no_gradients(target: Target) -> None:
    pools = [torch.zeros(6, 2, 10, 8, device=target.device) for _ in range(2)]
    k = torch.randn(6, 2, 3, 8, device=target.device, requires_grad=True) * 2
    for lengths in (0, torch.tensor(3, device=target.device), torch.arange(6, device=target.device)):
        kvdock.ops.static_update_(*pools, k, k.clone(), lengths)
        assert not any(pool.requires_grad or pool.grad_fn for pool in pools)
    assert torch.equal(pools[0][5, :, 5:8], k[5].detach())


def test_a_pool_that_wants_gradients_can_be_read(target: Target) -> None:
    pools = [torch.randn(shape, device=target.device, requires_grad=True) for shape in (G.k_shape, G.v_shape)]
    k, v = kvdock.ops.gather_paged(*pools, torch.tensor([3, -1, 7], device=target.device))
    assert not k.requires_grad
    assert torch.equal(k[0], pools[0][0, 3].detach())
    assert torch.equal(v[2], pools[1][1, 3].detach())


def every_op(memory: Memory, target: Target, made_in: Callable[[], Any], called_in: Callable[[], Any]) -> None:
    """Make pools in one mode, and run every op on them in another."""
    with made_in():
        paged = [tensor.clone() for tensor in G.pools(memory)]
        static = [torch.zeros(6, 2, 10, 8, dtype=G.dtype, device=target.device) for _ in range(2)]
    for count in COUNTS:
        for source in ("contiguous", "fused qkv"):
            k, v = G.tokens(memory, [count], source)
            slots = torch.arange(count, device=target.device)
            with called_in():
                kvdock.ops.paged_caching_(*paged, k, v, slots)
                got = kvdock.ops.gather_paged(*paged, slots)
            assert torch.equal(bits_of(got[0]), bits_of(k))
            assert torch.equal(bits_of(got[1]), bits_of(v))
    k = memory.tensor(G.dtype, (6, 2, 2, 8))
    for lengths in (2, torch.tensor([3], device=target.device), torch.arange(6, device=target.device)):
        with called_in():
            kvdock.ops.static_update_(*static, k, k.clone(), lengths)
    assert torch.equal(bits_of(static[1][5, :, 5:7]), bits_of(k[5]))
    with called_in():
        kvdock.ops.copy_blocks_(*paged, [(0, 5)])
    assert torch.equal(bits_of(paged[0][5]), bits_of(paged[0][0]))


MODES: dict[str, Callable[[], Any]] = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("made_in", MODES.values(), ids=MODES)
@pytest.mark.parametrize("called_in", MODES.values(), ids=MODES)
def test_inference_mode_both_ways(target: Target, memory: Memory, made_in: Callable[[], Any], called_in: Callable[[], Any]) -> None:
    every_op(memory, target, made_in, called_in)


@pytest.mark.parametrize("first", MODES.values(), ids=MODES)
def test_plans_of_one_mode_serve_in_another(first: Callable[[], Any]) -> None:
    """A cold runtime, so that plans and counts of skipped writes are made in the first mode."""
    with active(runtime_of(InProcessBackend("cold", claims=("cpu",), devices=("cpu",), kernels=DEVICE_KERNELS))):
        for mode in (first, *MODES.values()):
            every_op(Memory(), Target("cold", "cpu", True), mode, mode)


@pytest.mark.parametrize("count", COUNTS)
def test_torchs_defaults_do_not_matter(target: Target, memory: Memory, count: int) -> None:
    """A model is often built with a default device or dtype, and some engines leave them set."""
    pools, tokens, slots = (
        G.pools(memory),
        G.tokens(memory, [count], "fused qkv"),
        memory.index([-1, *range(count - 1)] if count > 1 else [4]),
    )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            for args in (("paged_caching_", *pools, *tokens, slots), ("gather_paged", *pools, slots, *G.tokens(memory, [count]))):
                with torch.device("cpu"):
                    expected = memory.copy()
                function = getattr(kvdock.ops, args[0])
                function(*args[1:]) if args[0] == "paged_caching_" else function(*args[1:4], out=args[4:])
                with torch.device("cpu"):
                    after = memory.copy()
                    expected.restore()
                    check(target, memory, *args)
                    after.assert_same(f"{args[0]} under other defaults")
            kvdock.ops.copy_blocks_(*pools, [(0, 5)])
            kvdock.ops.copy_blocks_(*pools, [])
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(bits_of(pools[0][5]), bits_of(pools[0][0]))


@pytest.mark.slow  # torch imports its compiler to switch this on
def test_deterministic_algorithms(target: Target, memory: Memory) -> None:
    pools, tokens = G.pools(memory), G.tokens(memory, [20], "fused qkv")
    torch.use_deterministic_algorithms(True)
    try:
        check(target, memory, "paged_caching_", *pools, *tokens, memory.index(list(range(20))))
        check(target, memory, "gather_paged", *pools, memory.index([3, -1, 7]), *G.tokens(memory, [3]))
        check(target, memory, "copy_blocks_", *pools, memory.index([[0, 1]]))
    finally:
        torch.use_deterministic_algorithms(False)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work in threads that start together, and raise what one of them raised."""
    barrier, errors = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_with_cold_caches(target: Target) -> None:
    """Each writes its own pool, many times, from the first call on; each has its plans, and every row is right."""
    runtime, kernels = counting_runtime(target.device, target.kernels)
    with active(runtime):

        def work(number: int) -> None:
            memory = Memory(target.device, seed=1000 * number)
            pools, tokens = G.pools(memory), G.tokens(memory, [20], "fused qkv")
            slots = memory.index([(i * 7 + number) % 24 for i in range(20)])
            for _ in range(30):
                kvdock.ops.paged_caching_(*pools, *tokens, slots)
                read = kvdock.ops.gather_paged(*pools, slots)
                assert torch.equal(bits_of(read[0]), bits_of(tokens[0]))
                assert torch.equal(bits_of(read[1]), bits_of(tokens[1]))
            assert runtime.dispatcher.op("paged_caching_").prepared == 1

        in_threads(2, work)
        assert runtime.dispatcher.op("paged_caching_").prepared == 0, "this thread has no plans"
        assert len(kernels["paged_caching_"].prepared) == 2, "one plan for each thread"


def test_two_threads_in_one_pool(target: Target) -> None:
    """Threads may share a pool as they may share any tensor: each writes blocks of its own."""
    memory = Memory(target.device)
    pools = G.pools(memory)
    tokens = [G.tokens(memory, [12]) for _ in range(2)]
    slots = [memory.index(list(range(12 * number, 12 * number + 12))) for number in range(2)]
    named = "portable" if target.name == "portable" else None

    def work(number: int) -> None:
        write = target.runtime.dispatcher.op("paged_caching_").bind(*pools, named=named)
        for _ in range(50):
            write(*tokens[number], slots[number], None, None)

    in_threads(2, work)
    for number in range(2):
        assert torch.equal(bits_of(pools[0]).view(24, 2, 8)[12 * number : 12 * number + 12], bits_of(tokens[number][0]))


class Capturing(InProcessBackend):
    """A backend that captures a graph when the test says so."""

    def __init__(self) -> None:
        super().__init__("capturing", claims=("cpu",), devices=("cpu",), kernels=DEVICE_KERNELS)
        self.capturing = False

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing


def test_a_new_signature_while_a_graph_is_captured_raises() -> None:
    """Preparing may compile or allocate. A signature that is known runs, with any count."""
    backend, memory = Capturing(), Memory()
    pools, (k, v) = G.pools(memory), G.tokens(memory, [20])
    slots = memory.index(list(range(20)))
    with active(runtime_of(backend)):
        kvdock.ops.paged_caching_(*pools, k[:3], v[:3], slots[:3])
        backend.capturing = True
        kvdock.ops.paged_caching_(*pools, k, v, slots)
        kvdock.ops.paged_caching_(*pools, k[:0], v[:0], slots[:0])
        before = memory.copy()
        text = r"^paged_caching_ on cpu: got a new signature while a graph is captured\. Fix: warm up first: call it once with tensors"
        for new in ((k, v, slots.int()), (k.view(2, 10, 2, 8), v.view(2, 10, 2, 8), slots.view(2, 10))):
            with pytest.raises(kvdock.BackendError, match=text):
                kvdock.ops.paged_caching_(*pools, *new)
        with pytest.raises(kvdock.BackendError, match=r"gather_paged on cpu: got a new signature .* warm up first"):
            kvdock.ops.gather_paged(*pools, slots)
        before.assert_same("raised")
        backend.capturing = False
        kvdock.ops.gather_paged(*pools, slots)
        backend.capturing = True
        kvdock.ops.gather_paged(*pools, slots[:5])


def test_what_is_wrong_is_said_also_while_a_graph_is_captured() -> None:
    backend, memory = Capturing(), Memory()
    pools, (k, v), slots = G.pools(memory), G.tokens(memory, [3]), memory.index([1, 2, 3])
    backend.capturing = True
    with active(runtime_of(backend)), pytest.raises(kvdock.ArgumentTypeError, match="k: expected"):
        kvdock.ops.paged_caching_(*pools, k.half(), v, slots)


def test_debug_mode_reads_nothing_back_while_a_graph_is_captured() -> None:
    """Reading would break the capture; the kernel's own counting remains."""
    backend, memory = Capturing(), Memory()
    pools, tokens, slots = G.pools(memory), G.tokens(memory, [3]), memory.index([5, 5, 24])
    with active(runtime_of(backend)) as runtime, kvdock.debug():
        with pytest.raises(kvdock.IndexRangeError):
            kvdock.ops.paged_caching_(*pools, *tokens, slots)
        kvdock.ops.paged_caching_(*pools, *tokens, memory.index([1, 2, 3]))
        backend.capturing = True
        before = runtime.skipped_writes("cpu")
        kvdock.ops.paged_caching_(*pools, *tokens, slots)  # a warning would be an error here
        assert runtime.skipped_writes("cpu") == before + 1
