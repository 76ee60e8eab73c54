"""`swap_blocks_`: forms of pairs, what is refused and how, and host memory. What is copied is for the kit, in `tests/backends`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import kvdock
from kvdock.ops.catalog import SWAP_BLOCKS
from kvdock.ops.index_values import check_pairs, live_pairs, pairs_on_device
from kvdock.ops.portable import swap_blocks
from kvdock.ops.schema import Arg, OpSchema, Role
from kvdock.ops.validate import check_traced, validate
from kvdock_conformance import reference
from opskit import Geometry, Memory, Target, check

G = Geometry()
FORMS: dict[str, Any] = {
    "lists": [[0, 5], [3, 2]],
    "tuples, with a source twice": ((0, 5), (0, 2)),
    "int32 array": np.array([[0, 5], [3, 2]], dtype=np.int32),
    "every other row of an array": np.array([[0, 5], [9, 9], [3, 2]])[::2],
    "crosswise, and a number in both pools": [(1, 0), (0, 1), (2, 2)],
    "with padding": [(-1, 5), (3, -2), (3, 4)],
}


def two(memory: Memory, source: str = "nhd", to: str = "nhd", geometry: Geometry = G) -> tuple[torch.Tensor, torch.Tensor]:
    return geometry.pools(memory, source)[0], geometry.pools(memory, to)[1]


@pytest.mark.parametrize("pairs", FORMS.values(), ids=FORMS)
def test_pairs_come_in_many_forms(target: Target, memory: Memory, pairs: Any) -> None:
    check(target, memory, "swap_blocks_", *two(memory), pairs)


@pytest.mark.parametrize("pairs", [[], (), np.zeros((0, 2), dtype=np.int64), torch.zeros((0, 2), dtype=torch.int32)])
def test_no_pairs_change_nothing(target: Target, memory: Memory, pairs: Any) -> None:
    pools, before = two(memory), memory.copy()
    kvdock.ops.swap_blocks_(*pools, pairs)
    before.assert_same("swap_blocks_")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.float64], ids=str)
def test_bits_of_any_dtype(target: Target, memory: Memory, dtype: torch.dtype) -> None:
    """Bytes in somebody's own format too: they are swapped as uint8."""
    pools = two(memory, "hnd", "padded blocks", Geometry(dtype=dtype))
    if dtype is torch.int8:
        with pytest.raises(kvdock.UnsupportedError, match="quantised"):
            kvdock.ops.swap_blocks_(*pools, [(0, 5)])
        pools = pools[0].view(torch.uint8), pools[1].view(torch.uint8)
    check(target, memory, "swap_blocks_", *pools, memory.index([[0, 5], [1, 1], [-1, 0]]))


def test_calls_that_repeat_and_bound_calls_are_the_same(target: Target, memory: Memory) -> None:
    pools = two(memory, "nhd", "hnd")
    bound = target.runtime.dispatcher.op("swap_blocks_").bind(*pools)
    for number in range(6):
        index = memory.index([[number, 5 - number], [2, (6 - number) % 6]])
        check(target, memory, "swap_blocks_", *pools, index)
        expected = memory.copy()
        reference.swap_blocks_(*map(expected.twin, (*pools, index.flip(0))))
        bound(index.flip(0))
        expected.assert_same("a bound call")


@pytest.mark.parametrize(
    ("pairs", "error", "text"),
    [
        (
            [[0, 1], [6, 2]],
            kvdock.IndexRangeError,
            "block_pairs[1, 0]: expected a block id below 6, or a negative one for padding, got 6. Fix: pass (src, dst) block ids of "
            "src_cache, not slots",
        ),
        (
            [[-1, 9], [5, 9]],
            kvdock.IndexRangeError,
            "block_pairs[1, 1]: expected a block id below 9, or a negative one for padding, got 9. Fix: pass (src, dst) block ids of "
            "dst_cache, not slots",
        ),
        (
            [[0, 5], [-1, 5], [2, 5]],
            kvdock.ArgumentValueError,
            "block_pairs[2]: expected destinations that occur once, so that the order of copies does not matter, got destination 5 twice. "
            "Fix: drop the doubled pair",
        ),
        ("ab", kvdock.ArgumentTypeError, "block_pairs: expected [N, 2] integers (src, dst), got 'ab'. Fix: pass a list of pairs, or "
         "an integer array or tensor of shape [N, 2]"),
    ],
)  # fmt: skip
def test_wrong_pairs_are_named_and_nothing_is_written(
    target: Target, memory: Memory, pairs: Any, error: type[Exception], text: str
) -> None:
    source, to = memory.tensor(G.dtype, (6, 4, 2, 8)), memory.tensor(G.dtype, (9, 4, 2, 8))
    if target.name == "portable as on a device" and not isinstance(pairs, str):  # host memory that nobody reads, lists neither
        was = target.skipped()
        kvdock.ops.swap_blocks_(source, to, pairs)
        assert target.skipped() - was == (error is kvdock.IndexRangeError)
        if error is not kvdock.IndexRangeError:
            assert any(torch.equal(to[5].view(torch.uint8), source[block].view(torch.uint8)) for block in (0, 2))
        return
    before = memory.copy()
    with pytest.raises(error) as caught:
        kvdock.ops.swap_blocks_(source, to, pairs)
    assert str(caught.value) == f"swap_blocks_: {text}"
    before.assert_same("raised")


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "one pool": (lambda a, b: (b, b), kvdock.ArgumentValueError, "src_cache: .*Fix: copy blocks inside one pool with .*copy_blocks_"),
    "its memory": (lambda a, b: (b[:], b), kvdock.ArgumentValueError, "src_cache: expected memory outside dst_cache, .*copy_blocks_"),
    "a part of it": (lambda a, b: (b[1:], b), kvdock.ArgumentValueError, "src_cache: expected memory outside dst_cache, .*copy_blocks_"),
    "other heads": (lambda a, b: (a, b[:, :, :1]), kvdock.ArgumentValueError, r"dst_cache: expected shape \[NBd, block=4, Hk=2, Dk=8\]"),
    "other blocks": (lambda a, b: (a[:, :2], b), kvdock.ArgumentValueError, r"dst_cache: expected shape \[NBd, block=2, Hk=2, Dk=8\]"),
    "another dtype": (lambda a, b: (a.float(), b), kvdock.ArgumentTypeError, "dst_cache: expected torch.float32, the dtype of src_cache"),
    "another width": (lambda a, b: (a, b.view(torch.float16)), kvdock.ArgumentTypeError, "bits are never reinterpreted"),
    "an inner stride": (lambda a, b: (a.mT, b.mT), kvdock.ArgumentValueError, "src_cache: expected an innermost stride of 1"),
    "one block for all": (lambda a, b: (a, b[:1].expand(6, 4, 2, 8)), kvdock.ArgumentValueError, "dst_cache: .*memory of its own"),
    "no tensor": (lambda a, b: (None, b), kvdock.ArgumentTypeError, "src_cache: expected a torch.Tensor, got NoneType"),
}


@pytest.mark.parametrize(("change", "error", "text"), WRONG.values(), ids=WRONG)
def test_pools_that_do_not_fit_are_refused(target: Target, memory: Memory, change: Any, error: type[Exception], text: str) -> None:
    pools = two(memory)
    for _ in range(20):  # known by then, and what repeats it made
        kvdock.ops.swap_blocks_(*pools, [(0, 1)])
    wrong, before = change(*pools), memory.copy()
    for _ in range(2):
        with pytest.raises(error, match=f"^swap_blocks_: (src_cache|dst_cache): .*|{text}") as caught:
            kvdock.ops.swap_blocks_(*wrong, [(0, 1)])
        assert caught.match(text)
    before.assert_same("raised")


# Where it runs: one of two pools may lie in host memory. What is on "meta" stands for a device here, as far as nothing is run.


def test_the_device_is_that_of_the_pool_that_is_not_in_host_memory() -> None:
    host, device, index = torch.zeros(3, 4, 2, 8), torch.zeros(5, 4, 2, 8, device="meta"), torch.zeros(1, 2, dtype=torch.int64)
    for pools, where in (((host, device), (True, False)), ((device, host), (False, True)), ((device, device.clone()), (False, False))):
        request = validate(SWAP_BLOCKS, (*pools, index))
        assert request.device == torch.device("meta")
        assert (request.tensor("src_cache").is_on_host, request.tensor("dst_cache").is_on_host) == where
        assert validate(SWAP_BLOCKS, (*pools, index.to("meta"))).device == torch.device("meta")
        check_traced(SWAP_BLOCKS, (*pools, index))
    on_host = validate(SWAP_BLOCKS, (host, host.clone(), index))
    assert on_host.device == torch.device("cpu")
    assert not on_host.tensor("src_cache").is_on_host, "nothing else is where the op does not run"


def test_pairs_on_a_device_need_a_pool_there() -> None:
    pools = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    with pytest.raises(kvdock.ArgumentValueError, match="block_pairs: expected a tensor on cpu, where src_cache is, got a tensor on meta"):
        kvdock.ops.swap_blocks_(*pools, torch.zeros(1, 2, dtype=torch.int64, device="meta"))


def test_an_op_needs_a_tensor_that_says_where_it_runs() -> None:
    pool, rows = Arg("pool", Role.MUTATED, ("NB D",), host=True), Arg("rows", Role.TENSOR, ("*T D",), host=True)
    assert OpSchema("any_", (rows, pool)).placing == ("pool",)
    with pytest.raises(kvdock.ArgumentValueError, match="a tensor that every call has, on the device where the op is to run"):
        OpSchema("nowhere_", (rows,))
    assert OpSchema("here_", (rows, pool, Arg("x", Role.TENSOR, ("*T D",)))).placing == ("x",)


@pytest.mark.parametrize("on_device", [False, True], ids=["pairs on the host", "pairs on a device"])
@pytest.mark.parametrize("room", [1, 2**26])
def test_staged_swaps_are_the_same_in_parts(memory: Memory, monkeypatch: pytest.MonkeyPatch, room: int, on_device: bool) -> None:
    """Where a device cannot reach host memory: gathered, brought over and put into place, so many bytes at a time."""
    monkeypatch.setattr(swap_blocks, "STAGED", room)
    pools, skipped = two(memory, "hnd", "nhd"), torch.zeros((), dtype=torch.int64)
    index = memory.index([[0, 5], [-1, 3], [0, 2], [4, 4], *([[6, 0], [1, 9]] if on_device else [])])
    expected = memory.copy()
    beyond = reference.swap_blocks_(*map(expected.twin, (*pools, index)))
    if on_device:
        monkeypatch.setattr(swap_blocks, "HOST", torch.device("meta"))
    assert swap_blocks.swap_staged("swap_blocks_", *pools, index, skipped) > 0
    expected.assert_same("staged")
    assert int(skipped) == len(beyond) == (2 if on_device else 0)
    assert swap_blocks.swap_staged("swap_blocks_", *pools, index[:0], skipped) == 0


def test_pairs_between_two_pools_are_checked_apart() -> None:
    index = torch.tensor([[0, 1], [1, 0], [-1, 99], [2, 2]])
    assert [*map(tuple, live_pairs("x", index, 3, num_sources=3))] == [(0, 1), (1, 0), (2, 2)]
    assert live_pairs("x", torch.tensor([[-1, 0]]), 1, num_sources=0) == []
    assert check_pairs("x", index, 3, num_sources=3) == []
    assert pairs_on_device("x", index, 3, torch.device("cpu"), num_sources=3) is index
    with pytest.raises(kvdock.IndexRangeError, match=r"x: block_pairs\[3, 0\]: expected a block id below 2"):
        live_pairs("x", index, 3, num_sources=2)


def test_debug_mode_checks_both_pools() -> None:
    pools = torch.zeros(3, 4, 2, 8), torch.zeros(5, 4, 2, 8)
    with kvdock.debug():
        kvdock.ops.swap_blocks_(*pools, [(2, 4)])
        with pytest.raises(kvdock.IndexRangeError, match=r"block_pairs\[0, 0\]"):
            kvdock.ops.swap_blocks_(*pools, [(3, 0)])


def test_it_is_an_op_of_torch_under_compile() -> None:
    source, to = torch.randn(4, 2, 2, 8), torch.zeros(6, 2, 2, 8)

    def step(index: torch.Tensor) -> torch.Tensor:
        kvdock.ops.swap_blocks_(source, to, index)
        return to.sum()

    compiled = torch.compile(step, backend=aot_eager, fullgraph=True)
    for pairs in ([[0, 5]], [[1, 2], [3, 0]]):
        total = compiled(torch.tensor(pairs))
        assert all(torch.equal(to[dst], source[src]) for src, dst in pairs)
        assert torch.equal(total, to.sum())
