"""`copy_blocks_` under the interpreter: pairs on the device, which the kernel checks, and pairs that the host checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import kvdock
from opskit import POOLS, Geometry, Memory, Target, active, check, noting
from opskit.interpreted import HOST_PAIRS

G = Geometry()
PAIRS = {
    "one": [[0, 5]],
    "one source for many": [[4, 0], [4, 1], [4, 2], [4, 3], [4, 5]],
    "padding": [[-1, -1]],
    "some padding": [[-1, 3], [2, 3], [0, -1], [-7, -9], [4, 1]],
    "padding beside ids beyond": [[-1, 99], [99, -1], [2, 3]],
    "the smallest ints": [[-(2**31), 0], [1, -(2**31)], [2, 3]],
    "none": [],
}
BEYOND = {"source": [[6, 0]], "destination": [[0, 6]], "both": [[7, 8]], "some": [[0, 1], [2, 2**31 - 1], [9, 3], [4, 5]]}


@pytest.fixture
def host_pairs(target: Target) -> Iterator[Target]:
    """Serve `kvdock.ops` by the backend as it is, which checks pairs in host memory before a launch."""
    with active(HOST_PAIRS.runtime, "acme"):
        yield HOST_PAIRS


@pytest.mark.parametrize("pairs", (PAIRS | BEYOND).values(), ids=PAIRS | BEYOND)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pairs(target: Target, memory: Memory, pairs: list[list[int]], dtype: torch.dtype) -> None:
    index = memory.index([row for pair in pairs for row in (pair, [3, 4])] or [[0, 0]], dtype)[: 2 * len(pairs) : 2]
    check(target, memory, "copy_blocks_", *G.pools(memory), index)


@pytest.mark.parametrize("bad", [2**40, 2**63 - 1])
def test_far_beyond(target: Target, memory: Memory, bad: int) -> None:
    pairs = memory.index([[0, 1], [bad, 2], [3, bad], [-1, bad]])
    assert len(check(target, memory, "copy_blocks_", *G.pools(memory), pairs)) == 2


@pytest.mark.parametrize("pairs", (PAIRS | BEYOND).values(), ids=PAIRS | BEYOND)
def test_pairs_that_the_host_checks(host_pairs: Target, memory: Memory, pairs: list[list[int]]) -> None:
    index = memory.index(pairs) if pairs else memory.index([[0, 0]])[:0]
    check(host_pairs, memory, "copy_blocks_", *G.pools(memory), index)


@pytest.mark.parametrize("pairs", [[[0, 5], [1, 5]], [[0, 1], [1, 2]]], ids=["doubled", "chained"])
def test_pairs_whose_order_matters(host_pairs: Target, memory: Memory, pairs: list[list[int]]) -> None:
    pools, before = G.pools(memory), memory.copy()
    with pytest.raises(kvdock.ArgumentValueError, match="expected destinations that occur once and are no source"):
        kvdock.ops.copy_blocks_(*pools, pairs)
    before.assert_same("raised")


@pytest.mark.parametrize("pool", POOLS)
def test_pools(target: Target, pool: str) -> None:
    for g in (G, Geometry.even(1, 8), Geometry.even(2, 8, block=1), Geometry.even(3, 5)):
        with noting(g=g) as memory:
            check(target, memory, "copy_blocks_", *g.pools(memory, pool), memory.index([[0, 5], [-1, 2], [3, 1], [9, 4]]))


SIZES = {
    "pieces": Geometry.even(3, 64, block=48),
    "Dk 192, Dv 128": Geometry(dk=192, dv=128, block=16),
    "Hk 4, Hv 1, dims 46 and 80": Geometry(hk=4, dk=46, hv=1, dv=80),
    "dim 1": Geometry(dk=1, dv=1),
    "float64": Geometry(dtype=torch.float64, dk=3, dv=5),
}


@pytest.mark.parametrize("g", SIZES.values(), ids=SIZES)
def test_sizes(target: Target, g: Geometry) -> None:
    for pool in ("nhd", "hnd", "odd steps"):
        with noting(pool=pool) as memory:
            check(target, memory, "copy_blocks_", *g.pools(memory, pool), memory.index([[0, 5], [3, 1]]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_every_order_of_dims(target: Target, order: tuple[int, ...]) -> None:
    """Of blocks in one piece, and with places left free behind each dim; keys and values of unlike orders."""
    shapes = [(6, 4, 2, 8), (6, 4, 3, 1), (6, 1, 3, 5), (6, 3, 1, 5), (6, 1, 1, 4), (6, 3, 2, 1)]
    for shape, gaps in itertools.product(shapes, [(0, 0, 0, 0), (3, 1, 2, 0), (0, 0, 8, 0), (8, 0, 0, 0), (0, 8, 0, 0)]):
        if order[-1] != 3 and shape[3] != 1:
            continue  # the innermost stride must be 1
        with noting(shape=shape, gaps=gaps) as memory:
            pools = memory.tensor(G.dtype, shape, order=order, gaps=gaps), memory.tensor(G.dtype, shape)
            check(target, memory, "copy_blocks_", *pools, memory.index([[0, 5], [3, 1]]))


def test_unlike_blocks(target: Target, memory: Memory) -> None:
    k_cache = Geometry(block=3, hk=3, dk=5).pools(memory)[0]
    v_cache = Geometry(block=7, hv=1, dv=46).pools(memory, "odd steps")[1]
    check(target, memory, "copy_blocks_", k_cache, v_cache, memory.index([[0, 5], [3, 2], [6, 0]]))


@pytest.mark.parametrize("offset", [2, 4, 8])
def test_addresses(target: Target, offset: int) -> None:
    for at in (0, offset):
        with noting(at=at) as memory:
            pools = [memory.tensor(G.dtype, shape, offset=at) for shape in (G.k_shape, G.v_shape)]
            check(target, memory, "copy_blocks_", *pools, memory.index([[0, 5], [3, 1]]))
