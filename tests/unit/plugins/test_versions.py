"""A plugin that was written for 1.0, under a contract of 1.1 whose `paged_caching_` takes one more argument."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.ops import selection
from kvdock.ops.catalog import PAGED_CACHING
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.schema import Arg, OpSchema, Role
from kvdock.plugins import contract
from kvdock.plugins.registry import Registry

SOURCE = Path(__file__).parents[2] / "data" / "plugin_of_1_0.py"
BIAS = Arg("bias", Role.TENSOR, ("",), (torch.float32,), optional=True, since=(1, 1))
pytestmark = pytest.mark.filterwarnings("ignore:kvdock.* has moved to kvdock.plugin:DeprecationWarning")

PLACES = {"behind all": 7, "in the middle": 4}
"""Where 1.1 puts it: descriptors are called by position."""


@pytest.fixture
def old() -> ModuleType:
    """Return the plugin, imported anew; each old name warns."""
    spec = importlib.util.spec_from_file_location("plugin_of_1_0", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.warns(DeprecationWarning, match="has moved to kvdock.plugin") as caught:
        spec.loader.exec_module(module)
    names = {str(warning.message).split()[0] for warning in caught}
    assert names >= {"kvdock.Backend", "kvdock.hookimpl", "kvdock.ops.hostcheck.slots_in_range"}
    assert {warning.filename for warning in caught} == {str(SOURCE)}
    return module


def grown(place: int) -> OpSchema:
    """Return the op as 1.1 has it."""
    return attrs.evolve(PAGED_CACHING, args=(*PAGED_CACHING.args[:place], BIAS, *PAGED_CACHING.args[place:]), check_values=None)


class Portable(kvdock.plugin.Kernel):
    """The portable kernel of 1.1: it knows the argument."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.seen: list[torch.Tensor | None] = []

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return []

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        args = {name: meta for name, meta in request.args.items() if name != "bias"}
        return Biased(self, PORTABLE_KERNELS["paged_caching_"].prepare(attrs.evolve(request, args=args)))


class Biased(kvdock.plugin.Descriptor):
    def __init__(self, kernel: Portable, inner: kvdock.plugin.Descriptor) -> None:
        self.kernel, self.inner = kernel, inner

    def __call__(self, *args: Any) -> None:
        place = self.kernel.place
        self.kernel.seen.append(args[place])
        self.inner(*args[:place], *args[place + 1 :])


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def place(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def portable(place: int, monkeypatch: pytest.MonkeyPatch) -> Portable:
    kernel = Portable(place)
    monkeypatch.setattr(selection, "PORTABLE_KERNELS", {"paged_caching_": kernel})
    return kernel


@pytest.fixture
def ops(old: ModuleType, place: int, monkeypatch: pytest.MonkeyPatch) -> OpDispatcher:
    """Return the ops of kvdock with contract 1.1, and the old plugin loaded."""
    monkeypatch.setattr(contract, "KVDOCK_API", (1, 1))
    registry = Registry({"KVDOCK_DISABLE_AUTOLOAD": "1"})
    registry.register(old, "old")
    return OpDispatcher(registry, {"paged_caching_": grown(place)})


def arguments(count: int = 3) -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), torch.randn(count, 1, 8), torch.randn(count, 1, 8), torch.arange(count) + 2


def call(ops: OpDispatcher, place: int, bias: torch.Tensor | None, args: tuple[torch.Tensor, ...]) -> None:
    values = [*args, None, None]
    values.insert(place, bias)
    with kvdock.use_backend("old"):
        ops.op("paged_caching_")(*values)


def test_calls_that_1_0_knew_are_served_as_ever(ops: OpDispatcher, old: ModuleType, place: int, portable: Portable) -> None:
    for count in (1, 3, 5, 3, 3, 3, 3, 3, 3, 3):
        args = arguments(count)
        call(ops, place, None, args)
        for cache, rows in zip(args[:2], args[2:4], strict=True):
            assert torch.equal(cache.view(8, 1, 8)[2 : 2 + count], rows)
    assert old.CALLS.count("call") == 10
    assert "fix" not in old.CALLS, "use_backend is in force, so no call is repeated by addresses"
    assert portable.seen == []


def test_bound_calls_are_repeated_with_what_it_knows(ops: OpDispatcher, old: ModuleType, place: int, portable: Portable) -> None:
    k_cache, v_cache, *rest = arguments()
    write = ops.op("paged_caching_").bind(k_cache, v_cache, named="old")
    values: list[torch.Tensor | None] = [*rest, None, None]
    values.insert(place - 2, None)
    for _ in range(40):
        write(*values)
    assert "fix" in old.CALLS, "it was asked with the seven arguments that it takes"
    assert torch.equal(k_cache.view(8, 1, 8)[2:5], rest[0])


def test_the_new_argument_is_a_reason_against_it(ops: OpDispatcher, old: ModuleType, place: int, portable: Portable) -> None:
    bias, args = torch.ones(()), arguments()
    call(ops, place, bias, args)
    assert old.CALLS == []
    assert portable.seen == [bias], "what knows the argument served it"
    assert torch.equal(args[0].view(8, 1, 8)[2:5], args[2])
    values = [*args, None, None]
    values.insert(place, bias)
    said = ops.explain("paged_caching_", tuple(values), "old")
    assert said.served_by == "portable"
    assert said.rejected == [("old", ["bias came with version 1.1 of the contract, and old is made for 1.0"])]


def test_with_nobody_who_knows_it_the_call_is_refused(
    ops: OpDispatcher, old: ModuleType, place: int, portable: Portable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PORTABLE_KERNELS", {})
    args = arguments()
    with pytest.raises(UnsupportedError, match=r"old: bias came with version 1\.1 of the contract, and old is made for 1\.0"):
        call(ops, place, torch.ones(()), args)
    assert not args[0].any()


def test_a_plugin_of_today_sees_the_argument(place: int, monkeypatch: pytest.MonkeyPatch, old: ModuleType, portable: Portable) -> None:
    monkeypatch.setattr(old, "KVDOCK_API", (1, 1))
    monkeypatch.setattr(contract, "KVDOCK_API", (1, 1))
    registry = Registry({"KVDOCK_DISABLE_AUTOLOAD": "1"})
    registry.register(old, "old")
    values: list[Any] = [*arguments(), None, None]
    values.insert(place, None)
    said = OpDispatcher(registry, {"paged_caching_": grown(place)}).explain("paged_caching_", tuple(values), "old")
    assert said.rejected == [("old", ["what is bias?"])], "its version promises that it knows all of 1.1"


def test_an_argument_that_came_later_must_be_optional() -> None:
    late = attrs.evolve(BIAS, optional=False)
    with pytest.raises(ArgumentValueError, match="OpSchema paged_caching_: bias: expected optional, since it came later than the op"):
        attrs.evolve(PAGED_CACHING, args=(*PAGED_CACHING.args, late))


def test_everything_in_the_catalog_came_with_a_version_that_there_is() -> None:
    from kvdock.ops.catalog import CATALOG

    for schema in CATALOG.values():
        assert all((1, 0) <= arg.since <= kvdock.plugin.KVDOCK_API for arg in schema.args)
