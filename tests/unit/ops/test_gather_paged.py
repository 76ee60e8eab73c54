"""`gather_paged`: outputs that it refuses, with whole texts. What it reads is for the conformance kit, in `tests/backends`."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target

G = Geometry()


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
