"""The harness itself: kernels that are wrong, each in a way that has been shipped somewhere, must be caught.

Each faulty kernel is the right one with one change. It is run through the same checks as the real ones, on calls that the
right kernel passes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS, SKIPPED
from opskit import Geometry, Memory, Target, active, bits_of, check, check_gather, runtime_of
from support_plugins import CallKernel, InProcessBackend

Cache = Rows = torch.Tensor
G = Geometry()


class HostTarget(Target):
    """A target whose runtime is the one that is active."""

    active_runtime: kvdock.Runtime

    @property
    def runtime(self) -> kvdock.Runtime:
        return HOST.active_runtime


HOST = HostTarget("faulty", "cpu", False)
DEVICE = HostTarget("faulty", "cpu", True)


def running(kernels: Mapping[str, kvdock.plugin.Kernel]) -> Any:
    """Let the ops run on these kernels."""
    runtime = runtime_of(InProcessBackend("faulty", claims=("cpu",), devices=("cpu",), kernels=kernels))
    HostTarget.active_runtime = runtime
    return active(runtime)


def write(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *scales: Any) -> None:
    """`paged_caching_`, as right as it needs to be here."""
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for place, slot in enumerate(slots.flatten().tolist()):
            if 0 <= slot < k_cache.shape[0] * k_cache.shape[1]:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = rows.flatten(0, -3)[place]


def address(tensor: torch.Tensor, *place: int) -> int:
    """Return the address of an element."""
    return tensor.data_ptr() + sum(i * step for i, step in zip(place, tensor.stride(), strict=False)) * tensor.element_size()


def swapped(k_cache: Cache, v_cache: Cache, k: Rows, v: Rows, *rest: Any) -> None:
    write(k_cache, v_cache, v, k, *rest)


def last_slot_dropped(k_cache: Cache, v_cache: Cache, k: Rows, v: Rows, slots: torch.Tensor, *rest: Any) -> None:
    write(k_cache, v_cache, k, v, torch.where(slots == slots.max(), -1, slots))


def last_token_dropped(k_cache: Cache, v_cache: Cache, k: Rows, v: Rows, slots: torch.Tensor, *rest: Any) -> None:
    write(k_cache, v_cache, k[:-1], v[:-1], slots[:-1])


def negative_wraps(k_cache: Cache, v_cache: Cache, k: Rows, v: Rows, slots: torch.Tensor, *rest: Any) -> None:
    write(k_cache, v_cache, k, v, slots % (k_cache.shape[0] * k_cache.shape[1]))


def byte_past_the_row(*args: Any) -> None:
    write(*args)
    k_cache, slots = args[0], args[4]
    block, offset = divmod(int(slots.max()), k_cache.shape[1])
    ctypes.memset(address(k_cache, block, offset) + k_cache.shape[2] * k_cache.stride(2) * k_cache.element_size(), 0x11, 1)


def byte_before_the_pool(*args: Any) -> None:
    write(*args)
    ctypes.memset(args[1].data_ptr() - 1, 0x11, 1)


def byte_behind_the_pool(*args: Any) -> None:
    write(*args)
    ctypes.memset(address(args[1], *[size - 1 for size in args[1].shape]) + args[1].element_size(), 0x11, 1)


def through_floats(k_cache: Cache, v_cache: Cache, k: Rows, v: Rows, *rest: Any) -> None:
    write(k_cache, v_cache, (k.float() * 1.0).to(k.dtype), v, *rest)


def input_changed(*args: Any) -> None:
    write(*args)
    args[2].view(torch.int16)[0] += 1


def slots_changed(*args: Any) -> None:
    write(*args)
    args[4].clamp_(min=0)


def first_head_only(k_cache: Cache, v_cache: Cache, k: Rows, v: Rows, *rest: Any) -> None:
    write(k_cache[:, :, :1], v_cache, k[:, :1], v, *rest)


def strides_of_k_for_v(k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> None:
    write(k_cache, v_cache.as_strided(v_cache.shape, k_cache.stride()), *rest)


def dense_rows_assumed(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
    write(k_cache, v_cache, k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1)), *rest)


def nothing(*args: Any) -> None:
    """Write nothing at all."""


def raises_after_writing(*args: Any) -> None:
    write(*args)
    if int(args[4].max()) >= 24:
        raise kvdock.IndexRangeError("paged_caching_: slot_mapping[1]", got=24)


def names_the_wrong_position(*args: Any) -> None:
    if int(args[4].max()) >= 24:
        raise kvdock.IndexRangeError("paged_caching_: slot_mapping[0]", got=24)
    write(*args)


FAULTS = {
    fault.__name__: fault
    for fault in (
        swapped,
        last_slot_dropped,
        last_token_dropped,
        negative_wraps,
        byte_past_the_row,
        byte_before_the_pool,
        byte_behind_the_pool,
        through_floats,
        input_changed,
        slots_changed,
        first_head_only,
        strides_of_k_for_v,
        dense_rows_assumed,
        nothing,
    )
}


def one_write(target: Target, slots: list[int], pool: str = "k and v unlike", source: str = "fused qkv") -> None:
    """Check one call, in which every fault shows."""
    memory = Memory()
    pools, (k, v) = G.pools(memory, pool), G.tokens(memory, [len(slots)], source)
    k.view(torch.int16)[0, 0, 0] = 0x7F81  # a signalling NaN, which arithmetic makes quiet
    check(target, memory, "paged_caching_", *pools, k, v, memory.index(slots))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_faulty_write_is_caught(fault: Callable[..., None]) -> None:
    slots = [5, -1, 22, -2, 0]
    with running({"paged_caching_": CallKernel(write)}):
        one_write(HOST, slots)
    with running({"paged_caching_": CallKernel(fault)}), pytest.raises(AssertionError, match=r"^paged_caching_: \d+ bytes differ in arena"):
        one_write(HOST, slots)


REFUSALS = {
    "raises after writing": (raises_after_writing, "paged_caching_ raised: .* bytes differ"),
    "names the wrong position": (names_the_wrong_position, "did not match"),
    "does not raise": (write, "DID NOT RAISE"),
}


@pytest.mark.parametrize(("fault", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_faulty_refusal_is_caught(fault: Callable[..., None], text: str) -> None:
    with running({"paged_caching_": CallKernel(fault)}), pytest.raises((AssertionError, pytest.fail.Exception), match=f"(?is){text}"):
        one_write(HOST, [5, 24, 3])


def test_skipping_without_counting_is_caught() -> None:
    with running({"paged_caching_": CallKernel(write)}):
        one_write(DEVICE, [5, 23, 3])
        with pytest.raises(AssertionError, match="count of skipped writes"):
            one_write(DEVICE, [5, 24, 3])


def test_counting_padding_as_skipped_is_caught() -> None:
    count = SKIPPED.prepare(torch.device("cpu"))

    def counts_all(*args: Any) -> None:
        write(*args)
        count.add_(int(((args[4] < 0) | (args[4] >= 24)).sum()))

    with running({"paged_caching_": CallKernel(counts_all)}):
        one_write(DEVICE, [5, 24, 3])
        with pytest.raises(AssertionError, match="count of skipped writes"):
            one_write(DEVICE, [5, -1, 3])


def right(op: str) -> kvdock.plugin.Kernel:
    return PORTABLE_KERNELS[op]


class After(kvdock.plugin.Kernel):
    """The portable kernel of an op, and something after it."""

    def __init__(self, op: str, then: Callable[..., None]) -> None:
        self._inner = right(op)
        self._then = then

    def supports(self, request: kvdock.plugin.Request) -> list[str]:
        return list(self._inner.supports(request))

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        inner, then = self._inner.prepare(request), self._then

        class Both(kvdock.plugin.Descriptor):
            def __call__(self, *args: Any) -> None:
                inner(*args)
                then(*args)

        return Both()


def zero_wrong_row(*args: Any) -> None:
    args[-2].view(torch.int16)[0] ^= 1


def touch_pool(*args: Any) -> None:
    args[0].view(torch.int16)[0, 0, 0, 0] ^= 1


@pytest.mark.parametrize("fault", [zero_wrong_row, touch_pool])
def test_a_faulty_read_is_caught(fault: Callable[..., None]) -> None:
    memory = Memory()
    pools, slots, out = G.pools(memory), memory.index([3, -1, 20]), G.tokens(memory, [3])
    for kernel, raises in ((right("gather_paged"), False), (After("gather_paged", fault), True)):
        with running({"gather_paged": kernel}):
            expecting(raises, lambda: check(HOST, memory, "gather_paged", *pools, slots, *out))
            expecting(raises, lambda: check_gather(HOST, memory, *pools, slots))


def expecting(raises: bool, run: Callable[[], Any]) -> None:
    """Run, expecting what the harness says about a fault, or nothing."""
    if not raises:
        run()
        return
    with pytest.raises(AssertionError, match="differ"):
        run()


def row_behind(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
    ctypes.memset(address(k_cache, k.shape[0] - 1, 0, 0) + 3, 0x11, 1)


def next_block(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    v_cache.view(torch.int16)[int(pairs[0, 1]) - 1, -1, -1, -1] ^= 1


def source_block(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    k_cache.view(torch.int16)[int(pairs[0, 0]), 0] ^= 1


@pytest.mark.parametrize("fault", [None, next_block, source_block])
def test_a_faulty_copy_is_caught(fault: Callable[..., None] | None) -> None:
    with running({"copy_blocks_": After("copy_blocks_", fault) if fault else right("copy_blocks_")}):
        memory = Memory()
        pools, pairs = G.pools(memory), memory.index([[0, 5]])
        expecting(fault is not None, lambda: check(HOST, memory, "copy_blocks_", *pools, pairs))


@pytest.mark.parametrize("fault", [None, row_behind])
def test_a_faulty_static_update_is_caught(fault: Callable[..., None] | None) -> None:
    with running({"static_update_": After("static_update_", fault) if fault else right("static_update_")}):
        memory = Memory()
        tensors = [memory.tensor(G.dtype, (4, 2, size, 8)) for size in (10, 10, 3, 3)]
        expecting(fault is not None, lambda: check(HOST, memory, "static_update_", *tensors, 4))


def pools_apart() -> Iterator[tuple[str, Memory]]:
    """Yield memories in which a gap, a margin or an input has changed since a copy was taken."""
    for name, change in {
        "gap": lambda m, t: m.arenas[0].bytes[m.arenas[0].at + 33].bitwise_xor_(1),
        "margin before": lambda m, t: m.arenas[0].bytes[0].bitwise_xor_(1),
        "margin behind": lambda m, t: m.arenas[0].bytes[-1].bitwise_xor_(1),
        "tensor": lambda m, t: t.view(torch.int16)[0, 0].bitwise_xor_(1),
    }.items():
        memory = Memory()
        tensor = memory.tensor(torch.bfloat16, (3, 16), gaps=(0, 4))
        copy = memory.copy()
        copy.assert_same(name)
        change(memory, tensor)
        with pytest.raises(AssertionError, match=rf"^{name}: 1 bytes differ in arena 0"):
            copy.assert_same(name)
        yield name, memory
        copy.restore()
        copy.assert_same(name)


def test_every_byte_of_a_memory_counts() -> None:
    assert [name for name, _ in pools_apart()] == ["gap", "margin before", "margin behind", "tensor"]


def test_tensors_are_cut_as_asked() -> None:
    memory = Memory()
    tensor = memory.tensor(torch.float32, (2, 3, 4), order=(1, 0, 2), gaps=(0, 5, 1), offset=8, shift=4)
    assert tensor.stride() == (5, 10, 1)
    assert tensor.data_ptr() % 64 == 12 % 64
    assert tensor.storage_offset() * 4 % 64 == 8
    twin = memory.copy().twin(tensor)
    assert twin.stride() == tensor.stride()
    assert torch.equal(bits_of(twin), bits_of(tensor))
    assert twin.data_ptr() != tensor.data_ptr()
