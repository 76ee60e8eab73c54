"""Described tensors against torch's own views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvdock_conformance.cases.drawing import ITEMSIZE, Drawing, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.cases.paged import Write, shuffled
from kvdock_conformance.checking.memory import Arenas, expanded
from kvdock_conformance.checking.rooms import MARGIN
from kvdock_conformance.requirements import load

HOST = torch.device("cpu")


def real(drawing: Drawing, view: View) -> torch.Tensor:
    tensor: torch.Tensor = Arenas(drawing.arenas, HOST).tensor(view.spec())
    return tensor


def same(view: View, tensor: torch.Tensor) -> None:
    """Compare where a view lies with where torch has one of a base at the arena's first byte."""
    assert view.shape == tuple(tensor.shape)
    assert view.strides == tensor.stride()
    assert view.offset == tensor.storage_offset() * tensor.element_size()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.select(1, 2),
        lambda x: x.slice(0, 1, 4, 2) if isinstance(x, View) else x[1:4:2],
        lambda x: x.slice(2, 3, 8) if isinstance(x, View) else x[:, :, 3:8],
        lambda x: x.transpose(0, 2),
        lambda x: x.split(2, (2, 4)) if isinstance(x, View) else x.unflatten(2, (2, 4)),
        lambda x: x.slice(1, 0, 1).expand((4, 5, 8)) if isinstance(x, View) else x[:, :1].expand(4, 5, 8),
        lambda x: x.transpose(0, 1).select(0, 2).slice(1, 2, 6) if isinstance(x, View) else x.transpose(0, 1).select(0, 2)[:, 2:6],
    ],
)
def test_a_view_is_where_torch_has_it(change: Callable[[Any], Any]) -> None:
    base = Drawing().tensor("float32", (4, 3, 8))
    same(change(base), change(torch.empty(4, 3, 8)))


def test_orders_gaps_offsets_and_shifts() -> None:
    view = Drawing().tensor("int32", (2, 3, 4), order=(1, 0, 2), gaps=(5, 0, 1), offset=8, shift=4)
    assert view.strides == (5, 15, 1)
    assert view.offset == 8
    drawing = Drawing(seed=7)
    drawing.tensor("int32", (2,), shift=4)
    drawing.tensor("int64", (), fill="zeros", host=True)
    assert drawing.arenas == [{"bytes": 8, "seed": 7, "shift": 4}, {"bytes": 8, "seed": 8, "fill": "zeros", "host": True}]
    assert real(drawing, View(0, "int32", (2,), (1,))).data_ptr() % 64 == 4
    assert real(drawing, View(1, "int64", (), ())).item() == 0


def test_itemsizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == dict(ITEMSIZE)


@pytest.mark.parametrize("name", POOLS)
def test_every_pool_has_the_shapes_of_its_geometry_and_an_inner_stride_of_1(name: str) -> None:
    g = Geometry()
    drawing = Drawing()
    k, v = POOLS[name](drawing, g)
    assert (k.shape, v.shape) == (g.k_shape, g.v_shape)
    assert k.strides[-1] == v.strides[-1] == 1
    places = [place for view in (k, v) for place in addresses(drawing, view)]
    assert len(set(places)) == len(places), "no element of a pool lies on another"


def addresses(drawing: Drawing, view: View) -> list[tuple[int, int]]:
    """Return arena and address of every element, which must lie inside the arena."""
    index = torch.arange(1 << 20, dtype=torch.int32).as_strided(view.shape, view.strides).flatten().tolist()
    size = ITEMSIZE[view.dtype]
    ends = [view.offset + (element + 1) * size for element in index]
    assert 0 < min(ends) <= max(ends) <= drawing.arenas[view.arena]["bytes"]
    return [(view.arena, end) for end in ends]


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_has_the_leading_sizes_and_lies_in_its_arena(name: str, lead: tuple[int, ...]) -> None:
    g = Geometry(hk=3, hv=2, dv=16)
    drawing = Drawing()
    k, v = SOURCES[name](drawing, g, lead)
    assert (k.shape, v.shape) == ((*lead, 3, 8), (*lead, 2, 16))
    for view in (k, v):
        assert view.strides[-1] == 1
        addresses(drawing, view)


def test_a_fused_projection_is_split_as_torch_splits_it() -> None:
    k, v = SOURCES["fused qkv"](Drawing(), Geometry(hk=3, hv=2, dv=16), (2, 3))
    _, k_rows, v_rows = torch.empty(6, 32 + 24 + 32).to(torch.bfloat16).split([32, 24, 32], dim=1)
    same(k, k_rows.view(2, 3, 3, 8))
    same(v, v_rows.view(2, 3, 2, 16))


def test_a_case_of_a_write_is_a_call_with_all_its_arguments() -> None:
    data = Write("x", [3, -1], geometry=Geometry(num_blocks=2), index="int32", index_gap=2, seed=5).case().data
    assert [spec["seed"] for spec in data["arenas"]] == [5, 6, 7, 8, 9]
    (made,) = data["calls"]
    assert made["op"] == "paged_caching_"
    assert list(made["args"]) == ["k_cache", "v_cache", "k", "v", "slot_mapping"]
    assert made["args"]["slot_mapping"] == {"arena": 4, "dtype": "int32", "shape": [2], "strides": [3], "offset": 0, "values": [3, -1]}
    memory = Arenas(data["arenas"], HOST)
    assert memory.tensor(made["args"]["slot_mapping"]).tolist() == [3, -1]
    assert Write("x").leading == (13,)
    assert Write("x", range(5)).leading == (5,)
    assert Write("x", range(6), lead=(2, 3)).leading == (2, 3)


def test_absent_arguments_are_left_out_and_lengths_stay_ints() -> None:
    assert call("op", k_cache=None, cache_lengths=3) == {"op": "op", "args": {"cache_lengths": 3}}


def test_values_are_repeated_counted_or_shuffled() -> None:
    assert expanded([1, 2], 5).tolist() == [1, 2, 1, 2, 1]
    assert expanded({"first": 4, "step": -2}, 3).tolist() == [4, 2, 0]
    some = expanded(shuffled(100), 20).tolist()
    assert len(set(some)) == 20
    assert all(0 <= value < 100 for value in some)
    assert some == expanded(shuffled(100), 20).tolist() != expanded(shuffled(100, seed=2), 20).tolist(), "the same in every process"
    assert MARGIN >= 64


def test_the_kit_knows_every_dtype_of_a_cache() -> None:
    import kvdock

    names = {str(dtype).removeprefix("torch.") for dtype in (*kvdock.plugin.COPY_DTYPES, *kvdock.plugin.QUANTISED_DTYPES)}
    assert names <= set(ITEMSIZE)
    written = {case.name.partition(",")[0] for case in load()["KVD-WRITE-020"].cases()}
    assert written == {str(dtype).removeprefix("torch.") for dtype in kvdock.plugin.COPY_DTYPES}, "each dtype is written bit for bit"


def test_special_values_are_what_they_are_said_to_be() -> None:
    for case in load()["KVD-WRITE-020"].cases():
        spec = case.data["calls"][0]["args"]["k"]
        if "values" in spec and spec["dtype"] == "uint8":
            values = Arenas(case.data["arenas"], HOST).tensor(spec).flatten()[:8]
            assert values.tolist() == [0x7F, 0xFF, 0x80, 0x81, 0x55, 0, 1, 0xAA]
            assert values[:2].view(torch.float8_e4m3fn).isnan().all()
        elif "values" in spec:
            values = Arenas(case.data["arenas"], HOST).tensor(spec).flatten()[:8]
            kinds = [
                values[:2].isnan().all(),
                values[2] == torch.inf,
                values[3] == -torch.inf,
                values[4:6].eq(0).all(),
                values[4].signbit(),
            ]
            assert all(map(bool, kinds)), case.name
            tiny, largest = torch.finfo(values.dtype).tiny, torch.finfo(values.dtype).max
            assert 0 < values[6] < tiny
            assert values[7] == largest
