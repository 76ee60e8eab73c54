"""Repeated calls are checked where the run was asked to be made: on the device that it names."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance.checking import repeated
from kvdock_conformance.checking.repeated import BoundTarget, check_repeated
from kvdock_conformance.checking.target import Target
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load
from kvdock_conformance.stand_ins import StandIn, register_backend


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
