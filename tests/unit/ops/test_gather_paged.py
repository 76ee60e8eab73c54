"""`gather_paged`: what it returns, and what it does not touch. Layouts are in `test_paged_layouts`."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target, bits_of, check, check_gather

G = Geometry()

SLOTS = {
    "none": [],
    "one": [13],
    "padding": [-1],
    "all negative": [-1, -2, -(2**31), -1, -1, -1],
    "some negative": [3, -1, 7, -1, -1, 0, 22, -1],
    "repeated": [5, 5, 5, 0, 5, 23, 23],
    "every slot": list(range(24)),
    "reversed": list(range(23, -1, -1)),
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots(target: Target, memory: Memory, slots: list[int], dtype: torch.dtype) -> None:
    pools, mapping = G.pools(memory), memory.index(slots, dtype)
    check_gather(target, memory, *pools, mapping)
    assert check(target, memory, "gather_paged", *pools, mapping, *G.tokens(memory, [len(slots)])) == []


def test_a_batch_of_rows(target: Target, memory: Memory) -> None:
    pools = G.pools(memory)
    for rows in ([[5]], [[1, -1, 2], [-1, -1, 23]], [[4], [-1], [0]], [list(range(12)), list(range(12, 24))]):
        mapping = memory.index(rows)
        check_gather(target, memory, *pools, mapping)
        for out in ("contiguous", "[B, H, q, D]", "fused qkv"):
            check(target, memory, "gather_paged", *pools, mapping, *G.tokens(memory, mapping.shape, out))


@pytest.mark.parametrize(
    "shape",
    [(6, 1, 2, 8), (1, 4, 2, 8), (1, 1, 2, 8), (6, 4, 1, 8), (1, 4, 1, 8), (1, 1, 1, 8)],
    ids=lambda shape: "x".join(map(str, shape)),
)
@pytest.mark.parametrize("room", [0, 3], ids=["tight", "with more behind"])
def test_a_pool_that_is_expanded(target: Target, memory: Memory, shape: tuple[int, ...], room: int) -> None:
    """It is only read, so blocks, slots or heads of it may be one in memory."""
    k_cache = memory.tensor(G.dtype, (shape[0] * (1 + room), *shape[1:]))[: shape[0]].expand(G.k_shape)
    v_cache = G.pools(memory)[1]
    for slots in (list(range(24)), [5, -1, 0, 23], [13], []):
        mapping = memory.index(slots)
        check_gather(target, memory, k_cache, v_cache, mapping)
        check(target, memory, "gather_paged", k_cache, v_cache, mapping, *G.tokens(memory, [len(slots)]))
        check(target, memory, "gather_paged", v_cache, k_cache, mapping, *G.tokens(memory, [len(slots)]))


@pytest.mark.parametrize("lead", [(0,), (0, 3), (3, 0)])
def test_no_slots(target: Target, memory: Memory, lead: tuple[int, ...]) -> None:
    k, v = kvdock.ops.gather_paged(*G.pools(memory), torch.zeros(lead, dtype=torch.int64, device=target.device))
    assert k.shape == (*lead, 2, 8)
    assert v.shape == (*lead, 2, 8)


@pytest.mark.parametrize("bad", [24, 25, 2**31 - 1, 2**40, 2**63 - 1])
@pytest.mark.parametrize("slots", [[2], [2, -1, 9], list(range(12))], ids=["one", "few", "many"])
def test_a_slot_beyond_the_pool(target: Target, memory: Memory, slots: list[int], bad: int) -> None:
    """On the host it raises and the outputs stay as they were; on a device it reads as zeros."""
    pools, mapping = G.pools(memory), memory.index([*slots[:-1], bad])
    assert check(target, memory, "gather_paged", *pools, mapping, *G.tokens(memory, [len(slots)])) == [(len(slots) - 1,)]
    check_gather(target, memory, *pools, mapping)


def test_out_comes_back_itself(target: Target, memory: Memory) -> None:
    out = G.tokens(memory, [3])
    for given in (out, list(out)):
        got = kvdock.ops.gather_paged(*G.pools(memory), memory.index([1, 2, 3]), out=given)
        assert isinstance(got, tuple)
        assert got[0] is out[0]
        assert got[1] is out[1]


def test_new_outputs_are_dense_and_new(target: Target, memory: Memory) -> None:
    pools, mapping = G.pools(memory, "hnd"), memory.index([1, 2, 3])
    first, second = kvdock.ops.gather_paged(*pools, mapping), kvdock.ops.gather_paged(*pools, mapping)
    assert all(tensor.is_contiguous() for tensor in (*first, *second))
    assert first[0].data_ptr() != second[0].data_ptr()
    first[0].zero_()
    assert torch.equal(bits_of(second[0]), bits_of(kvdock.ops.gather_paged(*pools, mapping)[0]))


def test_a_pool_without_blocks_reads_as_zeros(target: Target, memory: Memory) -> None:
    pools = Geometry(num_blocks=0).pools(memory)
    check(target, memory, "gather_paged", *pools, memory.index([-1, -5, -1]), *G.tokens(memory, [3]))
    assert len(check(target, memory, "gather_paged", *pools, memory.index([-1, 0, -1]), *G.tokens(memory, [3]))) == 1


def test_one_output_for_keys_and_values_is_an_error(target: Target, memory: Memory) -> None:
    pools, mapping, (k, _) = G.pools(memory), memory.index([1, 2, 3]), G.tokens(memory, [3])
    kvdock.ops.gather_paged(*pools, mapping, out=G.tokens(memory, [3]))
    before = memory.copy()
    with pytest.raises(kvdock.ArgumentValueError, match=r"gather_paged: v_out: expected memory outside k_out.* Fix: pass two tensors"):
        kvdock.ops.gather_paged(*pools, mapping, out=(k, k))
    before.assert_same("raised")


@pytest.mark.parametrize("name", ["k_out", "v_out"])
def test_an_output_that_overlaps_itself_is_an_error(target: Target, memory: Memory, name: str) -> None:
    """Also once there is a plan for outputs of this kind: their strides are not in its key."""
    pools, mapping, (k, v) = G.pools(memory), memory.index([1, 2, 3]), G.tokens(memory, [3])
    kvdock.ops.gather_paged(*pools, mapping, out=(k, v))
    one = memory.tensor(G.dtype, (1, 2, 8))
    before = memory.copy()
    for wrong in (one.expand(3, 2, 8), one[:, :1].expand(3, 2, 8), one.view(16).as_strided((3, 2, 8), (4, 8, 1))):
        with pytest.raises(kvdock.ArgumentValueError, match=f"gather_paged: {name}: expected a destination in which every place"):
            kvdock.ops.gather_paged(*pools, mapping, out=(wrong, v) if name == "k_out" else (k, wrong))
    before.assert_same("raised")


@pytest.mark.parametrize("out", ["a tensor", "three", "none inside", "a string"])
def test_out_must_be_a_pair_of_tensors(target: Target, memory: Memory, out: str) -> None:
    pools, mapping, (k, v) = G.pools(memory), memory.index([1, 2, 3]), G.tokens(memory, [3])
    wrong = {"a tensor": torch.stack([k, v]), "three": (k, v, k), "none inside": (k, None), "a string": "kv"}[out]
    with pytest.raises(kvdock.ArgumentTypeError, match=r"gather_paged: (out: expected a pair|v_out: expected a torch)"):
        kvdock.ops.gather_paged(*pools, mapping, out=wrong)
