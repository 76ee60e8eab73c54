"""Calls of every op, and calls with one mistake, as cases: they are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.every_op import OPS, OpCall
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.cases.mistakes import Mistake
from kvdock_conformance.cases.static import STATIC, Update
from kvdock_conformance.checking.meaning import REFERENCES
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load

HOST = torch.device("cpu")


def real(data: Any, number: int = 0) -> dict[str, Any]:
    """Return the arguments of a call."""
    memory = Arenas(data["arenas"], HOST)
    return {name: memory.tensor(spec) for name, spec in data["calls"][number]["args"].items()}


def in_order(op: str, args: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(args.get(name) for name in CATALOG[op].arg_names)


def test_the_ops_are_those_of_the_catalog() -> None:
    assert [op for op in CATALOG if f"KVD-OP-001@{op}" not in {item.id for item in load()}] == [*OPS], "asked as any op is, or here"
    assert set(REFERENCES) == set(CATALOG)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("pool", sorted(POOLS))
def test_a_call_of_any_op_is_good(op: str, pool: str) -> None:
    for source in SOURCES if pool == "nhd" and op in ("paged_caching_", "static_update_") else ("contiguous",):
        drawing = Drawing()
        call = OpCall(op, tokens=3, pool=pool, source=source, geometry=Geometry(num_blocks=8, block=8), seed=4)
        args = real(drawing.case(call.call(drawing)))
        validate(CATALOG[op], in_order(op, args))
        assert REFERENCES[op](*args.values()) == [], "every index is in range"


def test_two_seeds_of_a_copy_undo_each_other() -> None:
    one, two = (
        real(drawing.case(OpCall("copy_blocks_", 3, seed=seed).call(drawing))) for seed, drawing in enumerate([Drawing(), Drawing()])
    )
    assert one["block_pairs"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert two["block_pairs"].tolist() == [[1, 0], [3, 2], [5, 4]]


@pytest.mark.parametrize(
    ("lengths", "shape", "told"),
    [(7, None, 7), ([7], (), 7), ([7], None, [7]), ([4, 9, 0], None, [4, 9, 0]), ([4, 9], (3,), [4, 9, 4])],
)
def test_lengths_come_in_each_form(lengths: Any, shape: Any, told: Any) -> None:
    args = real(Update("x", lengths, shape=shape, index_gap=2).case().data)
    assert args["k_cache"].shape == (3, 2, 16, 8)
    assert args["k_cache"].is_contiguous()
    assert args["k"].shape == (3, 2, 5, 8)
    assert args["k"].is_contiguous()
    assert args["cache_lengths"] == told if isinstance(lengths, int) else args["cache_lengths"].tolist() == told


def test_an_update_has_as_many_rows_and_positions_as_asked() -> None:
    args = real(Update("x", rows=2, new=4, geometry=STATIC, pool="nhd", source="fused qkv").case().data)
    assert args["v"].shape == (2, 2, 4, 8)
    assert args["v"].stride() == (4 * 64, 8, 64, 1)
    assert args["v_cache"].stride() == (256, 8, 16, 1)


def mistaken(name: str, **settings: Any) -> dict[str, Any]:
    change = lambda drawing, good: {"k": drawing.tensor("float32", good["k"].shape)}  # noqa: E731
    data: dict[str, Any] = dict(Mistake("paged_caching_", name, change, **settings).case().data)
    return data


def test_a_mistake_is_a_good_call_and_one_that_differs_in_one_thing() -> None:
    data = mistaken("k in float32", error="ArgumentTypeError")
    good, wrong = data["calls"]
    assert [name for name in good["args"] if good["args"][name] != wrong["args"][name]] == ["k"]
    assert (data["error"], data["texts"]) == ("ArgumentTypeError", [": k: ", "shape [3, 2, 8]"])
    assert (data["meta"], data["may_pass"]) == ([], False)
    assert mistaken("x", texts=("a", "b"))["texts"] == ["a", "b"]


def mistakes() -> list[Any]:
    cases = [(item.id, case) for item in load() if item.area == "errors" for case in item.selected(Level.EXTENDED)]
    return [pytest.param(case.data, id=f"{name}, {case.name}") for name, case in cases if "error" in case.data]


def test_every_op_is_asked_about_every_kind_of_mistake_that_it_can_have() -> None:
    ops: dict[str, set[str]] = {}
    for item in load():
        if item.area == "errors":
            ops[item.id] = {case.data["calls"][0]["op"] for case in item.selected(Level.EXTENDED)}
    every, scaled = set(OPS), {"paged_caching_", "gather_paged"}
    for number in (1, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15):
        assert ops[f"KVD-ERROR-{number:03}"] == every
    assert ops["KVD-ERROR-002"] == every - {"copy_blocks_"}, "pairs have no length that could disagree"
    assert ops["KVD-ERROR-009"] == scaled
    assert ops["KVD-ERROR-013"] == {"copy_blocks_"}


def test_the_good_call_of_every_mistake_is_good() -> None:
    for parameter in mistakes():
        (data,) = parameter.values
        args = real(data)
        validate(CATALOG[data["calls"][0]["op"]], in_order(data["calls"][0]["op"], args))
        assert data["texts"], parameter.id
