"""Ops that plugins bring: what the hook may return, and how they are found, called and served. `examples/rope_op` is a whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.cli.explain import explain
from kvdock.errors import ArgumentTypeError, ArgumentValueError, PluginError, UnsupportedError
from kvdock.ops.catalog import PAGED_CACHING
from kvdock.plugin import Arg, Descriptor, Kernel, Op, OpSchema, Request, Role, call_op
from kvdock.plugins.contract import BrokenContractError, check_ops
from kvdock.plugins.discovery import _brought_twice
from kvdock.plugins.loading import Contribution
from kvdock.plugins.records import PluginRecord, PluginState
from kvdock.plugins.registry import Registry
from opskit import active
from support_plugins import QUIET, CallKernel, InProcessBackend, module, plugin

SCHEMA = OpSchema(
    "acme_add_", (Arg("y", Role.MUTATED, ("*n D",), (torch.float32,)), Arg("x", Role.TENSOR, ("*n D",), (torch.float32,), same_dtype="y"))
)


class Plan(Descriptor):
    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> None:
        y += x


class Add(Kernel):
    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons

    def supports(self, request: Request) -> Sequence[str]:
        return self.reasons

    def prepare(self, request: Request) -> Descriptor:
        return Plan()


def reference(y: torch.Tensor, x: torch.Tensor) -> None:
    for row, other in zip(y, x, strict=True):
        row += other


OP = Op(SCHEMA, Add(), reference)


def with_x(**parts: Any) -> OpSchema:
    return OpSchema("acme_add_", (SCHEMA.args[0], attrs.evolve(SCHEMA.args[1], **parts)))


def bringing(*ops: Op, name: str = "acme_ops") -> Any:
    return module(name, KVDOCK_API=(1, 0), kvdock_ops=lambda: list(ops))


def runtime(*backends: InProcessBackend, op: Op = OP) -> kvdock.Runtime:
    registry = Registry(QUIET)
    registry.register(bringing(op), "ops")
    registry.register(plugin(*backends or (InProcessBackend("acme", claims=("cpu",), devices=("cpu",)),)), "backends")
    return kvdock.Runtime(registry)


def test_it_is_called_in_the_default_runtime_and_served_by_its_portable_kernel() -> None:
    with active(runtime()) as made:
        for count in (1, 3, 5, 3, 3, 3, 3, 3, 3, 3):
            y, x = torch.ones(count, 4), torch.arange(count * 4.0).view(count, 4)
            assert call_op("acme_add_", y, x) is None
            assert torch.equal(y, x + 1)
        assert made.dispatcher.op("acme_add_").prepared == 1, "cached like any op: the number of rows is no part of the key"
        assert made.dispatcher.fallbacks == {("acme_add_", "acme"): 1}
        said = explain(
            "acme_add_", device="cpu", dtype="float32", backend=None, sizes={"heads": 1, "head_dim": 4, "block_size": 4}, calls=2
        )
        assert (said["served_by"], said["kernel"]) == ("portable", f"{__name__}.Add")
        assert said["run"]["calls"] == 2


def test_it_is_checked_like_any_op() -> None:
    with active(runtime()), pytest.raises(ArgumentTypeError, match=r"acme_add_: x: expected one of torch\.float32, got torch\.float64"):
        call_op("acme_add_", torch.ones(2, 4), torch.ones(2, 4, dtype=torch.float64))
    with active(runtime()), pytest.raises(ArgumentValueError, match=r"acme_add_: x: expected memory outside y"):
        call_op("acme_add_", (y := torch.ones(2, 4)), y)


def test_a_backends_own_kernel_comes_first_and_its_name_is_known() -> None:
    calls: list[Any] = []
    own = InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels={"acme_add_": CallKernel(lambda *args: calls.append(args))})
    with active(runtime(own)):
        call_op("acme_add_", torch.ones(2, 4), torch.ones(2, 4))
    assert len(calls) == 1


def test_portable_kernels_may_be_asked_for_and_may_refuse() -> None:
    with active(runtime()), kvdock.use_backend("portable"):
        call_op("acme_add_", (y := torch.ones(2, 4)), torch.ones(2, 4))
        assert y.sum() == 16
    with active(runtime(op=Op(SCHEMA, Add("not today"), reference))), pytest.raises(UnsupportedError, match="portable: not today"):
        call_op("acme_add_", torch.ones(2, 4), torch.ones(2, 4))


def test_an_op_that_nobody_brings_lists_those_there_are() -> None:
    with active(runtime()), pytest.raises(ArgumentValueError, match=r"op: expected one of acme_add_, copy_blocks_, .*got 'acme_sub_'"):
        call_op("acme_sub_")


def test_a_plugin_with_nothing_but_ops_is_ready_and_says_so() -> None:
    registry = Registry(QUIET)
    record = registry.register(bringing(OP), "ops")
    assert (record.state, record.reason) == (PluginState.READY, "brings ops: acme_add_")
    assert registry.brought_ops() == {"acme_add_": OP}
    with pytest.raises(ArgumentValueError, match=r"op name 'acme_add_': expected a name that nobody uses, got that of plugin 'ops' \("):
        registry.register(bringing(OP, name="others"), "others")


def test_an_op_that_two_installed_plugins_bring_is_nobodys() -> None:
    record = PluginRecord("a", "a", "a-dist", "1.0", PluginState.READY)
    both = [
        Contribution(record, ops={"acme_add_": OP}),
        Contribution(PluginRecord("b", "b", "b-dist", "1.0", PluginState.READY), ops={"acme_add_": OP}),
    ]
    assert _brought_twice(both[:1]) == {}
    text = "op 'acme_add_' is brought by plugins a, b, and is not there. Fix: deny all but one with KVDOCK_BACKENDS_DENY"
    assert _brought_twice(both) == {"acme_add_": text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (OP, "kvdock_ops(): expected a list of Op objects, got Op("),
        ([SCHEMA], "kvdock_ops()[0]: expected a Op, got OpSchema("),
        ([OP, OP], "kvdock_ops(): expected ops of different names, got two of 'acme_add_'"),
    ],
)
def test_what_the_hook_returns_is_checked(value: Any, text: str) -> None:
    with pytest.raises(BrokenContractError) as caught:
        check_ops(value)
    assert str(caught.value).startswith(text)
    with pytest.raises(PluginError, match="INCOMPATIBLE"):
        Registry(QUIET).register(module("m", KVDOCK_API=(1, 0), kvdock_ops=lambda: value), "m")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Op(PAGED_CACHING, Add(), reference), ArgumentValueError, "no op of kvdock's own, got 'paged_caching_'"),
        (lambda: Op(OpSchema("acme add", SCHEMA.args), Add(), reference), ArgumentValueError, "expected an identifier"),
        (
            lambda: Op(with_x(dims=()), Add(), reference),
            ArgumentValueError,
            "x: dims: expected a tuple of lines of sizes, such as ('*T D',), got ()",
        ),
        (lambda: Op(with_x(dims="*n D"), Add(), reference), ArgumentValueError, "such as ('*T D',), got '*n D'"),
        (lambda: Op(with_x(dims=("*n +",)), Add(), reference), ArgumentValueError, "such as ('*T D',), got ('*n +',)"),
        (lambda: Op(with_x(dims=("n ...",)), Add(), reference), ArgumentValueError, "such as ('*T D',), got ('n ...',)"),
        (lambda: Op(with_x(dtypes=()), Add(), reference), ArgumentValueError, "x: dtypes: expected a tuple of torch.dtype, got ()"),
        (
            lambda: Op(with_x(dtypes=torch.float32), Add(), reference),
            ArgumentValueError,
            "x: dtypes: expected a tuple of torch.dtype, got torch.float32",
        ),
        (lambda: Op("acme_add_", Add(), reference), ArgumentTypeError, "Op: schema: expected a OpSchema, got 'acme_add_'"),
        (lambda: Op(SCHEMA, print, reference), ArgumentTypeError, "Op: portable: expected a Kernel"),
        (lambda: Op(SCHEMA, Add(), None), ArgumentTypeError, "Op: reference: expected a function, got None"),
        (
            lambda: Op(OpSchema("acme_", (Arg("plan", Role.MUTATED, ("D",), (torch.float32,)),)), Add(), reference),
            ArgumentValueError,
            "OpSchema acme_: plan: expected names of arguments and sizes that the code of a call does not use",
        ),
    ],
)
def test_an_op_that_cannot_be_is_refused_where_it_is_made(make: Callable[[], Op], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)
