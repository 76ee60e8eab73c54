"""Cases of `gather_paged` and `copy_blocks_` as data."""

from __future__ import annotations

import pytest
import torch

from kvdock_conformance.cases.copies import Copy, fanned
from kvdock_conformance.cases.drawing import ITEMSIZE, Drawing
from kvdock_conformance.cases.layouts import POOLS, READ_POOLS, SOURCES, Geometry
from kvdock_conformance.cases.numbers import SPECIAL_BITS, finite
from kvdock_conformance.cases.paged import FORETOLD, Gather, foretold
from kvdock_conformance.checking.copies import check_pairs_refused
from kvdock_conformance.checking.memory import BITS, Arenas
from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.requirements import load

HOST = torch.device("cpu")
INDEPENDENT = [item for item in load() if item.area == "copy_blocks_" and item.check is not check_pairs_refused]


def _id(item: Requirement) -> str:
    return item.id


def test_a_case_of_a_read_has_outputs_too() -> None:
    data = Gather("x", [3, -1], geometry=Geometry(num_blocks=2, hv=3), index="int32", index_gap=2, seed=5).case().data
    (made,) = data["calls"]
    assert made["op"] == "gather_paged"
    assert list(made["args"]) == ["k_cache", "v_cache", "slot_mapping", "k_out", "v_out"], "in the schema's order"
    assert made["args"]["slot_mapping"] == {"arena": 2, "dtype": "int32", "shape": [2], "strides": [3], "offset": 0, "values": [3, -1]}
    assert [made["args"][name]["shape"] for name in ("k_out", "v_out")] == [[2, 2, 8], [2, 3, 8]]
    assert [spec["seed"] for spec in data["arenas"]] == [5, 6, 7, 8, 9]
    assert Gather("x").leading == (13,)
    assert Gather("x", range(5)).leading == (5,)
    assert Gather("x", range(6), (2, 3)).leading == (2, 3)


def test_values_of_a_read_are_those_of_its_pools() -> None:
    data = Gather("x", geometry=Geometry(num_blocks=1), values=[7, -2]).case().data
    args, memory = data["calls"][0]["args"], Arenas(data["arenas"], HOST)
    assert memory.tensor(args["v_cache"]).view(torch.int16).flatten()[:4].tolist() == [7, -2, 7, -2]
    assert "values" not in args["k_out"]


@pytest.mark.parametrize(("name", "offset"), [("values begin keys", 0), ("values end keys", 3)])
def test_values_may_be_a_part_of_the_rows_of_keys(name: str, offset: int) -> None:
    k, v = READ_POOLS[name](Drawing(), Geometry(dk=8, dv=5))
    assert (v.arena, v.strides, v.shape) == (k.arena, k.strides, (*k.shape[:3], 5))
    assert v.offset == k.offset + offset * ITEMSIZE[k.dtype]


@pytest.mark.parametrize("name", sorted(name for name in set(READ_POOLS) - set(POOLS) if "values" not in name))
def test_an_expanded_pool_lies_in_its_arena_and_shares_memory(name: str) -> None:
    g, drawing = Geometry(hv=3, dv=16), Drawing()
    k, v = READ_POOLS[name](drawing, g)
    assert (k.shape, v.shape) == (g.k_shape, g.v_shape)
    assert 0 in k.strides
    assert (0 in v.strides) == (name != "keys expanded")
    for view in (k, v):
        last = sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
        assert view.offset + (last + 1) * ITEMSIZE[view.dtype] <= drawing.arenas[view.arena]["bytes"]
        assert view.strides[-1] == 1


def test_a_case_of_a_copy() -> None:
    data = Copy("x", [(0, 5), (-1, 2)], index="int32", pair_gap=1, host=True).case(error="E").data
    (made,) = data["calls"]
    assert list(made["args"]) == ["k_cache", "v_cache", "block_pairs"]
    assert made["args"]["block_pairs"]["strides"] == [3, 1]
    assert [arena.get("host", False) for arena in data["arenas"]] == [False, False, True]
    assert data["error"] == "E"
    memory = Arenas(data["arenas"], HOST)
    assert memory.tensor(made["args"]["block_pairs"]).tolist() == [[0, 5], [-1, 2]]
    empty = Copy("x", []).case().data
    assert Arenas(empty["arenas"], HOST).tensor(empty["calls"][0]["args"]["block_pairs"]).shape == (0, 2)


def test_places_that_seem_to_go_on_lie_in_one_tensor() -> None:
    calls = foretold([Copy("", [(block, 5)]) for block in FORETOLD], "block_pairs").data["calls"]
    index = [call["args"]["block_pairs"] for call in calls]
    assert [spec["values"] for spec in index] == [[block, 5] for block in FORETOLD]
    assert len({(spec["arena"], spec["offset"], *spec["shape"], *spec["strides"]) for spec in index}) == 1


def test_values_may_lie_at_the_address_of_keys_of_their_shape() -> None:
    g = Geometry()
    for k, v in (READ_POOLS["values expanded from keys"](Drawing(), g), SOURCES["values of the first token"](Drawing(), g, (2, 3))):
        assert (v.arena, v.offset, v.shape) == (k.arena, k.offset, k.shape)
        assert v.strides != k.strides


def test_neighbours_are_counted_rather_than_listed() -> None:
    data = Copy("x", neighbours=3).case().data
    spec = data["calls"][0]["args"]["block_pairs"]
    assert spec["values"] == {"first": 0, "step": 1}
    assert Arenas(data["arenas"], HOST).tensor(spec).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_pools_of_a_copy_may_have_blocks_of_unlike_sizes() -> None:
    k, v = Copy("x", geometry=Geometry(block=3), values_geometry=Geometry(block=7, hv=1, dv=46), pool="hnd").pools(Drawing())
    assert (k.shape, v.shape) == ((6, 3, 2, 8), (6, 7, 1, 46))


@pytest.mark.parametrize(("blocks", "count"), [(64, 20), (64, 30), (2100, 1024), (5, 2)])
def test_fanned_pairs_are_independent_of_their_order(blocks: int, count: int) -> None:
    pairs = fanned(blocks, count)
    sources, destinations = {src for src, _ in pairs}, {dst for _, dst in pairs}
    assert len(pairs) == len(destinations) == count
    assert not sources & destinations
    assert max(destinations) < blocks


@pytest.mark.parametrize("item", INDEPENDENT, ids=_id)
def test_copies_that_must_succeed_do_not_depend_on_their_order(item: Requirement) -> None:
    """A fault must be noticed by what it copies, not by an error about something else."""
    for case in item.selected(Level.CORE):
        for call in case.data["calls"][:1] if "error" in case.data else case.data["calls"]:
            memory = Arenas([{**arena, "fill": "zeros"} for arena in case.data["arenas"]], HOST)
            pairs = [pair for pair in memory.tensor(call["args"]["block_pairs"]).tolist() if min(pair) >= 0]
            destinations = [dst for _, dst in pairs]
            assert len(set(destinations)) == len(destinations), case.name
            assert not set(destinations) & {src for src, _ in pairs}, case.name


@pytest.mark.parametrize("dtype", [dtype for dtype in SPECIAL_BITS if getattr(torch, dtype).is_floating_point])
def test_special_bits_are_what_they_are_said_to_be(dtype: str) -> None:
    own = getattr(torch, dtype)
    numbers = torch.tensor(SPECIAL_BITS[dtype], dtype=torch.int64).to(BITS[ITEMSIZE[dtype]]).view(own)
    assert numbers.isnan().tolist() == [True, True, *[False] * 6]
    assert numbers[2:4].tolist() == [float("inf"), float("-inf")]
    assert numbers[4:6].tolist() == [0.0, 0.0]
    assert numbers[4:6].signbit().tolist() == [True, False]
    assert 0 < numbers[6] < torch.finfo(own).tiny
    assert numbers[7] == torch.finfo(own).max


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_finite_numbers_are_finite_and_of_either_sign(dtype: str) -> None:
    numbers = torch.tensor(finite(dtype), dtype=torch.int64).to(BITS[ITEMSIZE[dtype]]).view(getattr(torch, dtype)).float()
    assert 1e-4 < numbers.abs().min() < numbers.abs().max() < 3.2e4
    assert (numbers < 0).sum() == (numbers > 0).sum() == len(numbers) / 2
