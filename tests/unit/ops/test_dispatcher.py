"""Which kernel serves a call: the backend's own, else a portable one; and what `explain` says about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.portable.paged_caching import PagedCaching
from opskit import CountingKernel, Geometry, Memory, active, check, runtime_of
from opskit.targets import HAS_CPU_BACKEND, Target
from support_plugins import CallKernel, InProcessBackend

G = Geometry()
SIDE_BY_SIDE = "halves [2, NB, ...]"
"""Pools with no token between them: then a repeated call needs the fewest checks, wherever memory happens to lie."""


class Picky(CountingKernel):
    """A kernel with reasons against float32."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ["it is made for halves", "and for nothing else"] if request.tensor("k_cache").dtype == torch.float32 else []


class Backend(InProcessBackend):
    """A backend on the CPU that knows some dtypes, and records the devices that it was asked to guard."""

    def __init__(self, kernels: dict[str, kvdock.plugin.Kernel], dtypes: tuple[torch.dtype, ...] | None = None) -> None:
        super().__init__("acme", claims=("cpu",), devices=("cpu",), kernels=kernels)
        self._dtypes = dtypes
        self.guarded: list[str] = []

    def capabilities(self) -> kvdock.plugin.Capabilities:
        return kvdock.plugin.Capabilities(dtypes=self._dtypes)

    @contextlib.contextmanager
    def device_guard(self, device: torch.device) -> Iterator[None]:
        self.guarded.append(f"enter {device}")
        yield
        self.guarded.append(f"leave {device}")


def arguments(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Return arguments of `paged_caching_`."""
    g = Geometry(dtype=dtype)
    memory = Memory()
    return (*g.pools(memory), *g.tokens(memory, [3]), memory.index([1, 2, 3]))


def test_an_op_that_the_backend_has_is_served_by_it() -> None:
    kernel = CountingKernel(PORTABLE_KERNELS["paged_caching_"])
    with active(runtime_of(Backend({"paged_caching_": kernel}))) as runtime:
        kvdock.ops.paged_caching_(*arguments())
    assert len(kernel.prepared) == 1
    assert not runtime.dispatcher.fallbacks


def test_an_op_that_the_backend_lacks_is_served_by_portable_kernels_and_counted() -> None:
    memory = Memory()
    pools, pairs = G.pools(memory), memory.index([[0, 1]])
    with active(runtime_of(Backend({}))) as runtime:
        check(Of(runtime), memory, "copy_blocks_", *pools, pairs)
        check(Of(runtime), memory, "copy_blocks_", *pools, pairs)
    assert runtime.dispatcher.fallbacks == {("copy_blocks_", "acme"): 1}


class Of(Target):
    """A target with this runtime."""

    def __init__(self, runtime: kvdock.Runtime) -> None:
        super().__init__("acme", "cpu", False)
        object.__setattr__(self, "own", runtime)

    @property
    def runtime(self) -> kvdock.Runtime:
        return object.__getattribute__(self, "own")


NOT_FLOAT32 = {"kernel": (Picky(PagedCaching()), None), "capabilities": (CountingKernel(PagedCaching()), (torch.bfloat16,))}


@pytest.mark.parametrize(("kernel", "dtypes"), NOT_FLOAT32.values(), ids=NOT_FLOAT32)
def test_a_request_that_the_kernel_does_not_serve_falls_to_portable(kernel: CountingKernel, dtypes: tuple[torch.dtype, ...] | None) -> None:
    backend = Backend({"paged_caching_": kernel}, dtypes)
    with active(runtime_of(backend)) as runtime:
        kvdock.ops.paged_caching_(*arguments(torch.float32))
        assert (len(kernel.prepared), runtime.dispatcher.fallbacks["paged_caching_", "acme"]) == (0, 1)
        kvdock.ops.paged_caching_(*arguments(torch.bfloat16))
        assert (len(kernel.prepared), runtime.dispatcher.fallbacks["paged_caching_", "acme"]) == (1, 1)


def test_a_kernel_that_fails_is_never_replaced_after_it_may_have_written() -> None:
    def fail(*args: Any) -> None:
        args[0].zero_()
        raise RuntimeError("out of luck")

    with active(runtime_of(Backend({"paged_caching_": CallKernel(fail)}))) as runtime:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of luck"):
                kvdock.ops.paged_caching_(*arguments())
    assert not runtime.dispatcher.fallbacks


def test_a_kernel_that_cannot_be_prepared_leaves_no_plan() -> None:
    class Broken(CallKernel):
        tries = 0

        def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
            Broken.tries += 1
            raise RuntimeError("no compiler")

    with active(runtime_of(Backend({"paged_caching_": Broken(print)}))) as runtime:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no compiler"):
                kvdock.ops.paged_caching_(*arguments())
        assert runtime.dispatcher.op("paged_caching_").prepared == 0
    assert Broken.tries == 2


def test_preparing_and_destroying_happen_under_the_device() -> None:
    kernel = CountingKernel(PagedCaching())
    backend = Backend({"paged_caching_": kernel})
    with active(runtime_of(backend)) as runtime:
        kvdock.ops.paged_caching_(*arguments())
        assert backend.guarded == ["enter cpu", "leave cpu"]
        runtime.registry.register_kernel("acme", "paged_caching_", CountingKernel(PagedCaching()), override=True)
        kvdock.ops.paged_caching_(*arguments())
    assert backend.guarded == ["enter cpu", "leave cpu"] * 3
    assert len(kernel.destroyed) == 1


def test_a_request_that_nobody_serves_lists_every_reason() -> None:
    caches = [torch.zeros(2, 2, 1, 4, dtype=torch.int8) for _ in range(2)]
    backend = Backend({"copy_blocks_": CountingKernel(PORTABLE_KERNELS["copy_blocks_"])}, (torch.float16,))
    with active(runtime_of(backend)), pytest.raises(kvdock.UnsupportedError) as caught:
        kvdock.ops.copy_blocks_(*caches, [(0, 1)])
    assert str(caught.value) == (
        "copy_blocks_ on cpu: expected a request that some kernel serves, got acme: acme stores torch.float16, not torch.int8; "
        "portable: quantised caches (torch.int8) are not there yet. Fix: change what the reasons name, or install a backend that "
        "serves it; bytes of any dtype can be moved, by .view(torch.uint8)"
    )


def test_explain_says_which_kernel_and_why_not_the_others() -> None:
    runtime = runtime_of(Backend({"paged_caching_": Picky(PagedCaching())}))
    args = (*arguments(torch.float32), None, None)
    told = runtime.dispatcher.explain("paged_caching_", args)
    assert (told.op, told.device, told.backend, told.served_by) == ("paged_caching_", "cpu", "acme", "portable")
    assert told.kernel == "kvdock.ops.portable.paged_caching.PagedCaching"
    assert told.rejected == [("acme", ["it is made for halves", "and for nothing else"])]
    assert "only ready backend that claims cpu" in told.backend_reason
    halves = runtime.dispatcher.explain("paged_caching_", (*arguments(), None, None))
    assert (halves.served_by, halves.rejected) == ("acme", [])
    asked = runtime.dispatcher.explain("paged_caching_", (*arguments(), None, None), "portable")
    assert (asked.served_by, asked.rejected) == ("portable", [("acme", ["use_backend asked for portable kernels"])])
    assert runtime.dispatcher.op("paged_caching_").prepared == 0, "explaining prepares nothing"
    assert not runtime.dispatcher.fallbacks


def test_explain_refuses_what_the_op_would() -> None:
    args = arguments()
    with pytest.raises(kvdock.ArgumentTypeError, match="paged_caching_: k: expected torch"):
        runtime_of(Backend({})).dispatcher.explain("paged_caching_", (*args[:2], args[2].float(), *args[3:], None, None))


def test_an_op_that_there_is_not() -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"op: expected one of copy_blocks_, gather_paged, .*, got 'frobnicate'"):
        runtime_of(Backend({})).dispatcher.op("frobnicate")


def test_a_device_that_nobody_claims() -> None:
    """Also with good arguments only: what is wrong with them is said first."""
    meta = [t.to("meta") for t in arguments()]
    with active(runtime_of(Backend({}))):
        with pytest.raises(kvdock.NoBackendError, match=r"claims meta.*acme \(does not claim meta\)"):
            kvdock.ops.paged_caching_(*meta)
        with pytest.raises(kvdock.ArgumentTypeError, match="k: expected"):
            kvdock.ops.paged_caching_(*meta[:2], meta[2].float(), *meta[3:])
        kvdock.ops.paged_caching_(*meta[:2], *(t[:0] for t in meta[2:]))


@pytest.mark.skipif(not HAS_CPU_BACKEND, reason="kvdock_cpu is not installed")
def test_portable_is_a_name_beside_any_backend() -> None:
    target = Target("cpu", "cpu", False)
    memory = Memory()
    pools, tokens, slots = G.pools(memory), G.tokens(memory, [3]), memory.index([1, 24, 3])
    with active(target.runtime, "portable") as runtime:
        before = runtime.dispatcher.fallbacks["paged_caching_", "cpu"]
        check(target, memory, "paged_caching_", *pools, *tokens, slots)
        check(target, memory, "paged_caching_", *pools, *tokens, memory.index([1, 2, 3]))
        assert runtime.dispatcher.fallbacks["paged_caching_", "cpu"] >= before
        args = (*pools, *tokens, slots, None, None)
        assert runtime.dispatcher.explain("paged_caching_", args, "portable").served_by == "portable"
        assert runtime.dispatcher.explain("paged_caching_", args).served_by == "cpu"


@pytest.mark.parametrize("calls", [1, 2, 3, 10])
@pytest.mark.parametrize("count", [1, 20])
def test_a_name_is_for_its_block_only_however_often_a_call_is_repeated(calls: int, count: int) -> None:
    """What a repeated call is remembered for must not be the backend that a block asked for, nor the other way round."""
    ran: list[str] = []
    runtime = runtime_of(Backend({"paged_caching_": CallKernel(lambda *args: ran.append("acme"))}))
    memory = Memory()
    pools, tokens, slots = G.pools(memory, SIDE_BY_SIDE), G.tokens(memory, [count]), memory.index([i % 24 for i in range(count)])
    with active(runtime):
        bound = runtime.dispatcher.op("paged_caching_").bind(*pools)
        own = runtime.dispatcher.op("paged_caching_").bind(*pools, named="portable")
        for _ in range(2):
            before = memory.copy()
            with kvdock.use_backend("portable"):
                for _ in range(calls):
                    kvdock.ops.paged_caching_(*pools, *tokens, slots)
                    bound(*tokens, slots, None, None)
            assert ran == [], "the block's backend served"
            before.restore()
            for _ in range(calls):
                kvdock.ops.paged_caching_(*pools, *tokens, slots)
                bound(*tokens, slots, None, None)
            before.assert_same("acme writes nothing")
            assert ran == ["acme"] * (2 * calls)
            for _ in range(calls):
                own(*tokens, slots, None, None)
            assert len(ran) == 2 * calls, "a bound call's own backend comes before anything else"
            before.restore()
            ran.clear()


def test_debug_mode_looks_at_every_repeated_call() -> None:
    memory = Memory()
    pools, tokens, slots = G.pools(memory), G.tokens(memory, [3]), memory.index([5, 5, 7])
    with active(runtime_of(Backend({}))):
        for _ in range(5):
            kvdock.ops.paged_caching_(*pools, *tokens, slots)
        for _ in range(3):
            with kvdock.debug(), pytest.warns(kvdock.KVDockWarning, match="first 5"):
                kvdock.ops.paged_caching_(*pools, *tokens, slots)


def repeated(runtime: kvdock.Runtime, ran: list[str], change: Any) -> None:
    """Repeat a call and a bound call, change something, and repeat them."""
    memory = Memory()
    pools, tokens, slots = G.pools(memory, SIDE_BY_SIDE), G.tokens(memory, [3]), memory.index([1, 2, 3])
    bound = runtime.dispatcher.op("paged_caching_").bind(*pools)
    for _ in range(2):
        for _ in range(5):
            kvdock.ops.paged_caching_(*pools, *tokens, slots)
            bound(*tokens, slots, None, None)
        change()
        ran.append("change")


def test_a_kernel_that_is_replaced_is_not_called_again_however_often_it_was() -> None:
    ran: list[str] = []
    first, second = (CallKernel(lambda *args, name=name: ran.append(name)) for name in ("first", "second"))
    with active(runtime_of(Backend({"paged_caching_": first}))) as runtime:
        repeated(runtime, ran, lambda: runtime.registry.register_kernel("acme", "paged_caching_", second, override=True))
    assert ran == [*["first"] * 10, "change", *["second"] * 10, "change"]


@pytest.mark.parametrize("how", ["clear", "capacity"])
def test_a_plan_that_was_dropped_is_not_run_again_however_often_it_was(how: str) -> None:
    """Dropped by clearing this thread's caches, or by another plan that takes its place in a cache of one."""
    kernel = CountingKernel(PagedCaching())
    other = arguments(torch.float16)
    with active(runtime_of(Backend({"paged_caching_": kernel}))) as runtime:
        descriptors = runtime.dispatcher.descriptors
        if how == "capacity":
            descriptors.set_capacity("paged_caching_", 1)
        repeated(runtime, [], descriptors.clear if how == "clear" else lambda: kvdock.ops.paged_caching_(*other))
        kvdock.ops.paged_caching_(*arguments())
    dtypes = [request.args["k"].dtype for request in kernel.prepared]
    assert dtypes.count(torch.bfloat16) == 3, "prepared again after each drop"
    assert len(kernel.destroyed) == len(kernel.prepared) - 1, "each that was dropped was destroyed once"
