"""Outside of torch.compile: who torch shows calls of its ops to sees those of kvdock's, and tensors without memory are never read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import kvdock
from opskit import Geometry, Memory, active, counting_runtime
from opskit.tracing import seen

G = Geometry(dtype=torch.float32)
Args = list[torch.Tensor]


def pools() -> Args:
    return [torch.zeros(shape) for shape in (G.k_shape, G.v_shape)]


def tokens(count: int = 3) -> Args:
    return [*(torch.randn(count, 2, 8) for _ in "kv"), torch.arange(count) * 2]


def written(k_cache: torch.Tensor, args: Args) -> bool:
    return torch.equal(k_cache.reshape(-1, 2, 8)[args[-1]], args[-3])


@pytest.fixture
def warm() -> None:
    """Let this thread know such calls well: what is quick must notice too."""
    for _ in range(12):
        held, args = pools(), tokens()
        kvdock.ops.paged_caching_(*held, *args)
        kvdock.ops.gather_paged(*held, args[-1])


def write_and_read(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
    return kvdock.ops.gather_paged(k_cache, v_cache, slots)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic", "before dispatch"])
def test_what_make_fx_records_writes(warm: None, tracing: str) -> None:
    before = tracing == "before dispatch"
    graph = make_fx(write_and_read, tracing_mode="real" if before else tracing, pre_dispatch=before)(*pools(), *tokens())
    assert graph.code.count("torch.ops.kvdock.") == 2
    for count in (3, 3) if tracing in ("real", "fake", "before dispatch") else (3, 5, 1):
        held, args = pools(), tokens(count)
        k, v = graph(*held, *args)
        assert written(held[0], args)
        assert torch.equal(k, args[0])
        assert torch.equal(v, args[1])


def test_it_records_what_caches_do(warm: None) -> None:
    spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.float32)
    paged = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=4, block_size=4), kvdock.RankInfo(torch.device("cpu")))
    static = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(max_batch_size=1), kvdock.RankInfo(torch.device("cpu")))

    def step(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
        paged.update(1, k, v, slots)
        static.update(1, k.transpose(0, 1)[None], v.transpose(0, 1)[None], 5)
        paged.copy_blocks([(0, 3)])
        return paged.gather(1, slots)

    args = tokens()
    step(*args)
    graph = make_fx(step)(*args)
    assert graph.code.count("torch.ops.kvdock.") == 4
    paged.reset()
    static.reset()
    k, _ = graph(*args)
    assert torch.equal(k, args[0])
    assert torch.equal(static.k_cache(1)[0, :, 5:8], args[0].transpose(0, 1))
    assert torch.equal(paged.k_cache(1)[3], paged.k_cache(1)[0])


def test_fake_tensors_get_fake_results_and_touch_no_memory(warm: None) -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in (*pools(), *tokens())]
    for _ in range(3):
        k, v = write_and_read(*fakes)
        with mode:
            write_and_read(*fakes)
        assert type(k) is type(v) is type(fakes[0])
        assert (k.shape, v.dtype) == ((3, 2, 8), torch.float32)
    out = [mode.from_tensor(tensor) for tensor in tokens()[:2]]
    assert kvdock.ops.gather_paged(*fakes[:2], fakes[-1], out=(out[0], out[1])) == (out[0], out[1])


def test_what_is_wrong_with_fake_tensors_is_said_as_ever(warm: None) -> None:
    mode = FakeTensorMode()
    k_cache, v_cache, k, v, slots = (mode.from_tensor(tensor) for tensor in (*pools(), *tokens()))
    with pytest.raises(
        kvdock.ArgumentTypeError, match=r"^paged_caching_: k: expected torch.float32, the dtype of k_cache, got torch.float64"
    ):
        kvdock.ops.paged_caching_(k_cache, v_cache, k.double(), v, slots)
    with pytest.raises(kvdock.ArgumentValueError, match=r"^paged_caching_: v: expected shape \[T=3, Hv=2, Dv=8\] to agree with k, v_cache"):
        kvdock.ops.paged_caching_(k_cache, v_cache, k, v[:2], slots)
    with pytest.raises(kvdock.ArgumentValueError, match=r"^paged_caching_: k: expected an innermost stride of 1"):
        kvdock.ops.paged_caching_(k_cache, v_cache, k.transpose(1, 2).contiguous().transpose(1, 2), v, slots)
    wrong: Any = 3
    with pytest.raises(kvdock.ArgumentTypeError, match=r"^paged_caching_: k: expected a torch.Tensor, got int"):
        kvdock.ops.paged_caching_(k_cache, v_cache, wrong, v, slots)


def test_functional_tensors_stay_functional(warm: None) -> None:
    held, args = pools(), tokens()
    before = [pool.clone() for pool in held]
    with FunctionalTensorMode():
        wrapped = [FunctionalTensor.to_functional(tensor) for tensor in (*held, *args)]
        k, _ = write_and_read(*wrapped)
        torch._sync(k)
        assert torch.equal(torch._from_functional_tensor(k.elem), args[0])
    assert all(torch.equal(pool, other) for pool, other in zip(held, before, strict=True)), "the write is in the functional pool"


def test_a_class_of_tensors_has_its_say(warm: None) -> None:
    """As does one that stands for two tensors, beside plain ones too."""
    held, args = pools(), tokens()
    twin = [TwoTensor(tensor, tensor.clone()) for tensor in (*held, *args)]
    k, v = write_and_read(*twin)
    assert written(twin[0].a, args)
    assert written(twin[0].b, args)
    assert torch.equal(k.b, args[0])
    assert torch.equal(v.a, args[1])
    held = pools()
    kvdock.ops.paged_caching_(*held, *twin[2:4], args[-1])
    assert written(held[0], args)


def test_a_mode_of_the_users_sees_each_call(warm: None) -> None:
    held, args = pools(), tokens()
    for _ in range(5):
        mode = seen(lambda: write_and_read(*held, *args))
        assert [str(func) for func, _, _ in mode.calls] == ["kvdock.paged_caching_.default", "kvdock.gather_paged.out"]
    assert written(held[0], args)
    with FlopCounterMode(display=False), kvdock.debug():
        kvdock.ops.paged_caching_(*held, *args)
        with pytest.raises(kvdock.IndexRangeError, match=r"slot_mapping\[0\]"):
            kvdock.ops.paged_caching_(*held, *args[:2], args[-1] + 99)


def test_a_backend_that_was_asked_for_serves_it_then_too() -> None:
    runtime, kernels = counting_runtime()
    with active(runtime):
        held, args = pools(), tokens()
        for name, calls in (("portable", 0), ("counting", 1)):
            with kvdock.use_backend(name):
                seen(lambda: kvdock.ops.paged_caching_(*held, *args))
            assert len(kernels["paged_caching_"].prepared) == calls
            write = runtime.dispatcher.op("paged_caching_").bind(*pools(), named=name)
            mode = seen(lambda write=write: write(*args, None, None))
            assert mode.calls[0][2]["backend"] == name


def test_torch_jit_records_it(warm: None) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch.jit"):
        graph = torch.jit.trace(lambda *args: write_and_read(*args)[0], (*pools(), *tokens()))
    held, args = pools(), tokens()
    graph(*held, *args)
    assert written(held[0], args)


class Module(torch.nn.Module):
    """A cache of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.k_cache, self.v_cache = (torch.nn.Buffer(pool) for pool in pools())

    def forward(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
        return write_and_read(self.k_cache, self.v_cache, k, v, slots)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch's own, in export
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_says_that_it_writes(warm: None, strict: bool) -> None:
    args = tokens()
    exported = torch.export.export(Module(), tuple(args), strict=strict)
    module: Any = exported.module()
    k, v = module(*args)
    assert torch.equal(k, args[0])
    assert torch.equal(v, args[1])
    assert written(module.k_cache, args)
    assert {*exported.run_decompositions().graph_signature.buffers_to_mutate.values()} == {"k_cache", "v_cache"}


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]] = {
    "vmap": lambda call, tensor: torch.vmap(call)(tensor[None]),
    "grad": lambda call, tensor: torch.func.grad(call)(tensor),
    "functionalize": lambda call, tensor: torch.func.functionalize(call)(tensor),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_are_refused(warm: None, transform: str) -> None:
    held, args = pools(), tokens()

    def call(k: torch.Tensor) -> torch.Tensor:
        kvdock.ops.paged_caching_(*held, k, *args[1:])
        return k.sum()

    with pytest.raises(
        kvdock.ArgumentTypeError, match=r"^paged_caching_: k: expected a plain torch.Tensor.* Fix: call it outside of torch\."
    ):
        TRANSFORMS[transform](call, args[0])
    assert not held[0].any()


def test_memory_that_torch_does_not_trace_is_compared_byte_for_byte() -> None:
    """Nothing is written beside what is addressed, whichever way a call comes."""
    memory = Memory()
    held, (k, v), slots = G.pools(memory), G.tokens(memory, [3]), memory.index([1, -1, 7])
    start = memory.copy()
    kvdock.ops.paged_caching_(*held, k, v, slots)
    after = memory.copy()
    start.restore()
    seen(lambda: kvdock.ops.paged_caching_(*held, k, v, slots))
    after.assert_same("seen by a mode")
