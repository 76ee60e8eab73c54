"""The forms of each op: what torch is told of them, and that it is true (`torch.library.opcheck`)."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch.library import opcheck

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.ops.forms import Form, Forms, kind_of
from kvdock.ops.schema import Arg, OpSchema, Relation, Role
from opskit.any_schema import SCHEMAS, op_of
from opskit.tracing import forms, seen
from support_isolated import answer

FIXED: dict[str, dict[str, Any]] = {
    "copy_blocks_": {"block_pairs": torch.tensor([[0, 1], [3, 2]])},
    "swap_blocks_": {"block_pairs": torch.tensor([[0, 4], [3, 2]])},
    "paged_attention": {
        "q": torch.randn(3, 4, 8),
        "block_table": torch.tensor([[1, 3], [0, 1], [2, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 5, 3]),
        "cu_query_lens": torch.tensor([0, 1, 2, 3]),
        "starts": torch.tensor([2, 0, 1]),
        "scale": 0.5,
        "causal": True,
        "window": 3,
        "softcap": 20.0,
        "max_query_len": 1,
        "out": torch.zeros(3, 4, 8),
        "lse": torch.zeros(3, 4),
    },
}
"""Values that numbers from 0 on would not be."""


def check(entry: OpEntry, fixed: dict[str, Any]) -> list[str]:
    """Let torch check every form of an op, also where gradients are wanted. Return the names of the forms."""
    names = []
    for values in forms(entry.schema, fixed):
        (func, args, kwargs), *others = seen(lambda values=values: entry.trace(values, None)).calls
        assert not others
        names.append(func._overloadname)
        opcheck(func, args, kwargs)
        sources = {arg.name for arg in entry.schema.args if arg.role is Role.TENSOR}
        named = [sources_of(name, value, sources) for name, value in zip(entry.schema.arg_names, args, strict=False)]
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in named):
            opcheck(func, tuple(named), kwargs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    return names


def sources_of(name: str, value: Any, sources: set[str]) -> Any:
    wants = name in sources and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.clone().requires_grad_() if wants else value


@pytest.mark.parametrize("op", CATALOG)
def test_torch_finds_every_form_as_it_is_told(op: str) -> None:
    names = check(kvdock.runtime.default().dispatcher.op(op), FIXED.get(op, {}))
    known = {"gather_paged": {"default", "out"}, "static_update_": {"tensor", "len"}, "paged_caching_": {"default"}}
    assert {*names} == known.get(op, {*names})


@pytest.mark.slow  # hundreds of forms
@pytest.mark.parametrize("op", SCHEMAS)
def test_so_it_does_of_every_shape_of_schema(op: str) -> None:
    entry, kernel, _ = op_of(SCHEMAS[op], fixes=False)
    names = check(entry, {"slots": torch.tensor([2, 0, 1])})
    assert kernel.calls >= len(names)


def test_static_values_come_as_they_are() -> None:
    """1, 1.0 and True are equal, and need not mean the same."""
    entry, kernel, _ = op_of(SCHEMAS["pool_only_"], fixes=False)
    for value in (1, 1.0, True, None, 0.5, "causal", (1, "a"), (), (1.5, (None, True))):
        pool = torch.zeros(3, 4)
        entry.call(value, pool.clone())
        seen(lambda value=value, pool=pool: entry.call(value, pool))
        assert kernel.found[-1] == kernel.found[-2]
    with pytest.raises(kvdock.ArgumentTypeError, match=r"a static argument of a traced call: expected numbers, strings, and tuples"):
        seen(lambda: entry.call(torch.float32, torch.zeros(3, 4)))


def text(op: str, *kinds: str) -> str:
    return Form(CATALOG[op], op, kinds).text


def test_what_is_written_and_what_is_made_stands_in_the_schema() -> None:
    caches, scales, rest = "{0} k_cache, {1} v_cache", "Tensor? k_scale, Tensor? v_scale", "*, str? backend, int dispatcher"
    read, written = caches.format("Tensor", "Tensor"), caches.format("Tensor(a0!)", "Tensor(a1!)")
    given = ("tensor",) * 4
    assert text("paged_caching_", *given, "tensor", "none", "none") == (
        f"paged_caching_({written}, Tensor k, Tensor v, Tensor slot_mapping, {scales}, {rest}) -> ()"
    )
    assert text("static_update_", *given, "int") == f"static_update_.len({written}, Tensor k, Tensor v, SymInt cache_lengths, {rest}) -> ()"
    assert text("static_update_", *given, "tensor").startswith("static_update_.tensor(")
    assert (
        text("gather_paged", *given[:3], *("none",) * 4)
        == f"gather_paged({read}, Tensor slot_mapping, {scales}, {rest}) -> (Tensor, Tensor)"
    )
    assert text("gather_paged", *given[:3], "none", "none", "tensor", "tensor") == (
        f"gather_paged.out({read}, Tensor slot_mapping, {scales}, Tensor(a5!) k_out, Tensor(a6!) v_out, {rest}) -> ()"
    )


def test_every_device_type_comes_to_the_dispatcher() -> None:
    pools = [torch.zeros(2, 4, 2, 8) for _ in "kv"]
    seen(lambda: kvdock.ops.copy_blocks_(*pools, torch.tensor([[0, 1]])))
    name = "kvdock::copy_blocks_"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
    for key in ("CPU", "CUDA", "XPU", "PrivateUse1", "Meta"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key)
        own = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        assert own is (key == "Meta"), "the fake is of Meta, and no device has code of its own"


def test_a_form_is_registered_once_whichever_thread_is_first() -> None:
    schema = OpSchema("once_", (Arg("y", Role.MUTATED, ("*n D",), (torch.float32,)), Arg("x", Role.TENSOR, ("*n D",), (torch.float32,))))
    entry, kernel, _ = op_of(schema, fixes=False)
    barrier, failed = threading.Barrier(8), []

    def run() -> None:
        barrier.wait()
        try:
            seen(lambda: entry.call(torch.zeros(2, 3), torch.ones(2, 3)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, kernel.calls) == ([], 8)


def test_another_op_of_the_same_name_is_another_op_of_torch() -> None:
    """As when a plugin was changed, and loaded again."""
    args = Arg("y", Role.MUTATED, ("*n D",), (torch.float32,)), Arg("x", Role.TENSOR, ("*n D",), (torch.float32,))
    relation = Relation("n < 5", "x", "fewer", "less")
    found = []
    for schema in (OpSchema("twin_", args), OpSchema("twin_", args, (relation,)), OpSchema("twin_", args)):
        entry, _, _ = op_of(schema, fixes=False)
        found.append(seen(lambda entry=entry: entry.call(torch.zeros(2, 3), torch.ones(2, 3))).calls[0][0])
    assert [str(func) for func in found] == ["kvdock.twin_.default", "kvdock.twin__2.default", "kvdock.twin_.default"]


def test_kinds_that_an_argument_may_not_have_are_refused_by_name() -> None:
    made = Forms(lambda *call: None)
    for place, kind in itertools.product(range(4), ("int", "none", "str", "literal")):
        kinds = ["tensor"] * 5
        kinds[place] = kind
        name = CATALOG["static_update_"].arg_names[place]
        with pytest.raises(kvdock.ArgumentTypeError, match=rf"^static_update_: {name}: expected a torch.Tensor, got {kind}"):
            made.of(CATALOG["static_update_"], tuple(kinds))
    with pytest.raises(kvdock.ArgumentTypeError, match=r"^static_update_: cache_lengths: expected an int or a torch.Tensor, got bool"):
        made.of(CATALOG["static_update_"], ("tensor",) * 4 + (kind_of(True),))


def test_nothing_is_registered_before_a_call_is_traced() -> None:
    code = """
import json, torch, kvdock
before = hasattr(torch.ops.kvdock, "copy_blocks_")
pools = [torch.zeros(2, 4, 2, 8) for _ in "kv"]
kvdock.ops.copy_blocks_(*pools, [(0, 1)])
print(json.dumps([before, hasattr(torch.ops.kvdock, "copy_blocks_"), "torch._dynamo" in __import__("sys").modules]))
"""
    assert answer(code) == [False, False, False]
