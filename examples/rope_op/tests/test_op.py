"""The op in kvdock's default runtime, where the installed plugin brought it, against its reference."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.plugin import ArgumentTypeError, ArgumentValueError, Descriptor, IndexRangeError, Kernel, Request
from kvdock_rope import rope_caching_
from kvdock_rope.op import ROPE_CACHING

HEADS, DIM, POSITIONS = 2, 8, 32


def arguments(count: int, dtype: torch.dtype = torch.float32, *, is_hnd: bool = False) -> list[torch.Tensor]:
    """Return arguments for ``count`` tokens; slots in no order, one of them padding."""
    shape = (4, HEADS, 4, DIM) if is_hnd else (4, 4, HEADS, DIM)
    pools = [torch.randn(shape).to(dtype) for _ in "kv"]
    pools = [pool.transpose(1, 2) for pool in pools] if is_hnd else pools
    rows = torch.randn(count, 2 * HEADS * DIM).to(dtype)  # keys and values out of one projection
    k, v = (part.unflatten(1, (HEADS, DIM)) for part in rows.chunk(2, dim=1))
    angles = torch.randn(POSITIONS, DIM // 2)
    slots = torch.randperm(16)[:count]
    slots[count // 2] = -1
    return [*pools, k, v, angles.cos(), angles.sin(), torch.randint(POSITIONS, (count,)), slots]


@pytest.mark.parametrize("is_hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_writes_what_the_reference_writes(dtype: torch.dtype, is_hnd: bool) -> None:
    for count in (1, 3, 7, 16, 3, 3, 3, 3, 3, 3):
        args = arguments(count, dtype, is_hnd=is_hnd)
        expected = [pool.clone() for pool in args[:2]]
        ROPE_CACHING.reference(*expected, *args[2:])
        rope_caching_(*args)
        for pool, other in zip(args[:2], expected, strict=True):
            assert torch.equal(pool, other)


def test_a_plan_serves_every_number_of_tokens() -> None:
    op = kvdock.runtime.default().dispatcher.op("rope_caching_")
    rope_caching_(*arguments(5))
    before = op.prepared
    for count in (2, 9, 16):
        rope_caching_(*arguments(count))
    assert op.prepared == before


def test_it_is_bound_to_its_pools_as_caches_do() -> None:
    args = arguments(5)
    expected = [pool.clone() for pool in args[:2]]
    ROPE_CACHING.reference(*expected, *args[2:])
    k_cache, v_cache, k, v, cos, sin, positions, slots = args
    write = kvdock.runtime.default().dispatcher.op("rope_caching_").bind(k_cache, v_cache, cos, sin)
    write(k, v, positions, slots)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_it_can_be_compiled() -> None:
    def step(args: list[torch.Tensor]) -> torch.Tensor:
        rope_caching_(*args)
        return args[2] + 1

    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    for count in (5, 3, 7):
        args = arguments(count)
        expected = [pool.clone() for pool in args[:2]]
        ROPE_CACHING.reference(*expected, *args[2:])
        assert torch.equal(run(args), args[2] + 1)
        assert torch.equal(args[0], expected[0])
        assert torch.equal(args[1], expected[1])


def test_what_is_wrong_is_refused_before_anything_is_written() -> None:
    args = arguments(5)
    before = args[0].clone()
    with pytest.raises(IndexRangeError, match=r"rope_caching_: slot_mapping\[0\]: expected a slot below 16"):
        rope_caching_(*args[:7], torch.tensor([99, 1, 2, 3, 4]))
    with pytest.raises(IndexRangeError, match=r"rope_caching_: positions\[1\]: expected a position below 32, got 32"):
        rope_caching_(*args[:6], torch.tensor([0, 32, 2, 3, 4]), args[7])
    with pytest.raises(ArgumentValueError, match=r"rope_caching_: cos: expected one number for each pair of the 8 elements"):
        rope_caching_(*args[:4], torch.zeros(4, 3), torch.zeros(4, 3), *args[6:])
    with pytest.raises(ArgumentTypeError, match="rope_caching_: k: "):
        rope_caching_(*args[:2], args[2].double(), *args[3:])
    assert torch.equal(args[0], before)


def test_explain_says_who_serves_it() -> None:
    said = kvdock.runtime.default().dispatcher.explain("rope_caching_", tuple(arguments(3)))
    assert (said.backend, said.served_by, said.kernel) == ("cpu", "portable", "kvdock_rope.portable.RopeCaching")
    assert said.rejected == [("cpu", ["it has no kernel for this op"])]


class Counting(Kernel):
    """A backend's own kernel for the op."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def supports(self, request: Request) -> Sequence[str]:
        return [] if request.tensor("k").dtype == torch.float32 else ["k: float32 only"]

    def prepare(self, request: Request) -> Descriptor:
        self.requests.append(request)
        return ROPE_CACHING.portable.prepare(request)


@pytest.fixture
def native() -> Iterator[Counting]:
    """Give the CPU backend a kernel of its own for the op."""
    kernel = Counting()
    kvdock.runtime.set_default(None)
    kvdock.runtime.default().registry.register_kernel("cpu", "rope_caching_", kernel)
    yield kernel
    kvdock.runtime.set_default(None)


def test_a_backend_may_bring_a_kernel_of_its_own(native: Counting) -> None:
    args: Any = arguments(4)
    rope_caching_(*args)
    rope_caching_(*arguments(4, torch.bfloat16))
    assert [request.tensor("k").dtype for request in native.requests] == [torch.float32]
