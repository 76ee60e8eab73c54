"""Schemas as data, and that an op is nothing but its schema: a new one works through the whole of `ops` unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.calls.variant import HOST_INT_RANK, pivot_of, variants_of
from kvdock.ops.catalog import CATALOG, PAGED_CACHING
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.schema import Arg, Dim, OpSchema, Relation, Role
from opskit import runtime_of
from support_plugins import InProcessBackend

F32, I64 = torch.float32, torch.int64


def test_sizes_are_read_from_words() -> None:
    arg = Arg("k", Role.TENSOR, ("... Hk 2",))
    one, two = arg.shapes()
    assert one == (Dim("lead0", True), Dim("Hk", False), Dim("2", False))
    assert two == (Dim("lead0", True), Dim("lead1", True), Dim("Hk", False), Dim("2", False))
    assert [dim.literal for dim in one] == [None, None, 2]
    assert arg.dims_of_rank(4) == two
    assert arg.dims_of_rank(2) is None
    assert Arg("n", Role.RUNTIME_INT, ("", "*n")).shapes() == ((), (Dim("n", True),))


def test_every_argument_of_the_catalog_has_the_role_that_its_op_gives_it() -> None:
    written = {op: {arg.name for arg in schema.mutated} for op, schema in CATALOG.items()}
    assert written == {
        "paged_caching_": {"k_cache", "v_cache"},
        "static_update_": {"k_cache", "v_cache"},
        "gather_paged": {"k_out", "v_out"},
        "copy_blocks_": {"k_cache", "v_cache"},
        "swap_blocks_": {"dst_cache"},
        "paged_attention": {"out", "lse"},
        "mla_caching_": {"kv_cache"},
        "mla_gather": {"kv_c_out", "k_pe_out"},
    }
    pools = ({"k_cache", "v_cache"}, {"kv_cache"}, {"src_cache", "dst_cache"})
    assert all({arg.name for arg in schema.static_args} in pools for schema in CATALOG.values())
    assert {arg.name for schema in CATALOG.values() for arg in schema.args if arg.role is Role.RUNTIME_INT} == {
        *("cache_lengths", "max_query_len")
    }
    assert {arg.name for schema in CATALOG.values() for arg in schema.args if arg.optional} == {
        *("k_scale", "v_scale", "cu_query_lens", "starts", "sinks", "lse", "scale")
    }


def test_an_argument_is_found_by_name_and_names_are_distinct() -> None:
    assert PAGED_CACHING.arg("v").same_dtype == "v_cache"
    assert PAGED_CACHING.bind(tuple(range(7)))["slot_mapping"] == 4
    with pytest.raises(kvdock.ArgumentValueError, match=r"OpSchema twice: args: expected distinct names, got a, a"):
        OpSchema("twice", (Arg("a", Role.TENSOR), Arg("a", Role.TENSOR)))


@pytest.mark.parametrize(
    ("op", "pivot", "ranks"),
    [
        ("paged_caching_", "k", [3, 4]),
        ("static_update_", "cache_lengths", [HOST_INT_RANK, 0, 1]),
        ("gather_paged", "slot_mapping", [1, 2]),
        ("copy_blocks_", "k_cache", [4]),
        ("swap_blocks_", "src_cache", [4]),
    ],
)
def test_variants_are_told_apart_by_the_rank_of_one_argument(op: str, pivot: str, ranks: list[int]) -> None:
    schema = CATALOG[op]
    assert schema.args[pivot_of(schema)].name == pivot
    variants = variants_of(schema)
    assert [variant.pivot_rank for variant in variants] == ranks
    assert [variant.number for variant in variants] == list(range(len(ranks)))
    assert all((pivot in variant.dims) is (variant.pivot_rank != HOST_INT_RANK) for variant in variants)


ADD_ROWS = OpSchema(
    "add_rows_",
    (
        Arg("table", Role.MUTATED, ("rows width",), (F32,)),
        Arg("x", Role.TENSOR, ("*n width",), (F32,), same_dtype="table"),
        Arg("bias", Role.TENSOR, ("width",), (F32,), optional=True),
        Arg("start", Role.RUNTIME_INT, ("",), (I64,)),
        Arg("scale", Role.STATIC),
    ),
    (Relation("n <= rows", "x", "at most the {rows} rows of table", "pass fewer"),),
)
"""An op that core does not know: ``table[start : start + n] += scale * x + bias``."""


class AddRows(kvdock.plugin.Kernel):
    """Its kernel; what is static is settled in `prepare`."""

    def __init__(self) -> None:
        self.prepared: list[kvdock.plugin.Request] = []

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return [] if request.args["scale"] != "huge" else ["its scale is too large"]

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        self.prepared.append(request)
        factor = float(request.args["scale"])

        class Plan(kvdock.plugin.Descriptor):
            def __call__(self, table: torch.Tensor, x: torch.Tensor, bias: Any, start: Any, scale: Any) -> None:
                table[int(start) : int(start) + len(x)] += factor * x + (0 if bias is None else bias)

        return Plan()


@pytest.fixture
def added() -> tuple[Any, AddRows]:
    """Return the op of a dispatcher that knows only this schema, and its kernel."""
    kernel = AddRows()
    backend = InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels={"add_rows_": kernel})
    with pytest.warns(kvdock.KVDockWarning, match="'add_rows_', which is no op of this kvdock"):  # the dispatcher's, brought by no hook
        runtime = runtime_of(backend)
    return OpDispatcher(runtime.registry, {"add_rows_": ADD_ROWS}).op("add_rows_"), kernel


def test_a_new_op_is_a_new_schema_and_a_kernel(added: tuple[Any, AddRows]) -> None:
    op, kernel = added
    table = torch.zeros(5, 3)
    for count, start in ((1, 0), (2, 3), (5, 0)):
        op(table, torch.ones(count, 3), None, start, 2.0)
    assert table[:, 0].tolist() == [4, 2, 2, 4, 4]
    assert len(kernel.prepared) == 1, "counts and ints are run-time values"
    op(table, torch.ones(1, 3), None, 0, 3.0)
    assert [request.args["scale"] for request in kernel.prepared] == [2.0, 3.0], "a static value selects the plan"
    op(table, torch.ones(1, 3), None, torch.tensor(0), 3.0)
    op(table, torch.ones(1, 3), torch.ones(3), 0, 3.0)
    assert len(kernel.prepared) == 4, "so do the kind of an int and an optional argument"
    op.bind(table)(torch.ones(1, 3), None, 1, 2.0)
    assert len(kernel.prepared) == 4
    assert table[:, 0].tolist() == [4 + 3 + 3 + 4, 4, 2, 4, 4]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((torch.zeros(6, 3), None, 0, 2.0), "x: expected at most the 5 rows of table, got shape [6, 3]. Fix: pass fewer"),
        ((torch.zeros(1, 4), None, 0, 2.0), "x: expected shape [n, width=3] to agree with table, got shape [1, 4]"),
        ((torch.zeros(1, 3), torch.zeros(4), 0, 2.0), "bias: expected shape [width=3] to agree with table, got shape [4]"),
        ((torch.zeros(1, 3), None, 1.5, 2.0), "start: expected an int or a torch.Tensor, got float 1.5"),
        ((torch.zeros(1, 3), None, 0, "huge"), "acme: its scale is too large; portable: it has no kernel for this op"),
    ],
    ids=["relation", "size", "optional", "int", "reasons"],
)
def test_a_new_op_refuses_what_its_schema_does(added: tuple[Any, AddRows], args: tuple[Any, ...], text: str) -> None:
    op, _ = added
    table = torch.zeros(5, 3)
    op(table, torch.zeros(1, 3), None, 0, 2.0)
    for call in (op, lambda *rest: op.bind(table)(*rest[1:])):
        with pytest.raises(kvdock.KVDockError) as caught:
            call(table, *args)
        assert text in str(caught.value)
