"""Repeated calls are checked where the run was asked to be made: on the device that it names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock import runtime
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance.checking import repeated
from kvdock_conformance.checking.repeated import BoundTarget, check_repeated
from kvdock_conformance.checking.target import Target
from kvdock_conformance.kinds import KINDS
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load
from kvdock_conformance.stand_ins import StandIn, register_backend
from kvdock_cpu.backend import CpuBackend


class Two(StandIn):
    """A backend whose second device holds no data, which tells it from the first."""

    def devices(self) -> Sequence[torch.device]:
        return [torch.device("cpu"), torch.device("meta")]


def test_both_ways_of_a_repeated_call_are_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(Two("two-of-them", PORTABLE_KERNELS))
    seen: list[tuple[type, torch.device]] = []
    monkeypatch.setattr(
        repeated, "check_calls", lambda way, *others, also, **settings: seen.extend((type(each), each.device) for each in (way, *also))
    )
    case = load()["KVD-DESC-013"].selected(Level.CORE)[0]
    for device in ("cpu", "meta"):
        check_repeated(Target("two-of-them", device=device), case.data)
    where = [torch.device("cpu"), torch.device("meta")]
    assert seen == [(kind, device) for device in where for kind in (Target, BoundTarget)]


def test_a_deep_copy_writes_to_no_pool_but_the_one_it_is_given() -> None:
    register_backend(StandIn("copied", PORTABLE_KERNELS))
    target, pools = BoundTarget("copied"), torch.zeros(2, 4, 2, 1, 8)
    new = {"k": torch.ones(1, 1, 8), "v": torch.ones(1, 1, 8), "slot_mapping": torch.tensor([3])}
    args = {"k_cache": pools[0], "v_cache": pools[1], **new}
    target.call("paged_caching_", args)
    pools.zero_()
    copy.deepcopy(target).call("paged_caching_", args)
    assert torch.equal(pools[:, 1, 1, 0], torch.ones(2, 8))


class Counting(kvdock.plugin.Descriptor):
    """The CPU's, which counts what repeats it, and the calls of that."""

    uses_autograd = False

    def __init__(self, inner: kvdock.plugin.Descriptor, counts: list[str]) -> None:
        self._inner, self._counts = inner, counts

    def __call__(self, *args: Any) -> None:
        self._inner(*args)

    def fix(self, *args: Any) -> Callable[..., None] | None:
        again = self._inner.fix(*args)

        def counted(*addresses: int) -> None:
            assert again is not None
            self._counts.append("again")
            again(*addresses)

        self._counts.append("fixed")
        return counted


class Counts(kvdock.plugin.Kernel):
    """The CPU's write, with plans that count."""

    def __init__(self) -> None:
        self.counts: list[str] = []

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return Counting(CpuBackend().kernels()[request.op].prepare(request), self.counts)


class Rival(CpuBackend):
    """A backend of the host beside the CPU's own, which is asked first, or not."""

    name = "rival"

    def __init__(self, kernel: Counts, *, is_first: bool) -> None:
        self.kernel, self.is_first = kernel, is_first

    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        return {"paged_caching_": self.kernel}

    def capabilities(self) -> kvdock.plugin.Capabilities:
        priority = kvdock.plugin.Priority.SPECIALISED if self.is_first else kvdock.plugin.Priority.FALLBACK
        return attrs.evolve(super().capabilities(), priority=priority)


@pytest.fixture
def of_its_own() -> Iterator[None]:
    """A runtime for backends that claim the host."""
    before = runtime.made()
    runtime.set_default(None)
    yield
    runtime.set_default(before)


@pytest.mark.parametrize(("is_first", "variable"), [(True, ""), (False, "rival"), (False, "")])
@pytest.mark.usefixtures("of_its_own")
def test_calls_are_repeated_beside_another_backend_where_a_user_has_them_repeated(
    monkeypatch: pytest.MonkeyPatch, is_first: bool, variable: str
) -> None:
    monkeypatch.setenv("KVDOCK_BACKEND_CPU", variable)
    register_backend(Rival(kernel := Counts(), is_first=is_first))
    target, about = KINDS["backend"].open("rival", None, None)
    pools, rows = [torch.zeros(2, 4, 1, 8) for _ in range(2)], [torch.ones(1, 1, 8) for _ in range(2)]
    args = dict(zip(("k_cache", "v_cache", "k", "v"), pools + rows, strict=True))
    for slot in range(6):
        target.call("paged_caching_", {**args, "slot_mapping": torch.tensor([slot])})
    assert [pool[..., 0].sum() for pool in pools] == [6, 6]
    if is_first or variable:
        assert about["by_name"] == ""
        assert kernel.counts[0] == "fixed"
        assert kernel.counts.count("again") >= 3
    else:
        assert about["by_name"].endswith("; KVDOCK_BACKEND_CPU=rival has them so")
        assert kernel.counts == []


class Refuses(kvdock.plugin.Kernel):
    """Serves nothing, and is not to be asked for a plan."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ["not this one"]

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        raise RuntimeError("what was refused is prepared")


def test_what_the_backend_refuses_is_called_very_often_by_who_serves_it() -> None:
    register_backend(StandIn("refuses-gathers", {"mla_gather": Refuses()}))
    requirement = load()["KVD-OP-028@mla_gather"]
    for case in requirement.selected(Level.CORE):
        requirement.check(Target("refuses-gathers"), case.data)
