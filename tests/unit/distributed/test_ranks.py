"""Where a process is, asked of torch's groups and meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kvdock
from kvdock.distributed import check_alike, gather_heads, merge_over_ranks
from kvdock.integrations.torch_distributed import TorchDistributed
from kvdock.rank import RankInfo


def test_without_a_group() -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"RankInfo: group: expected a process group.*Fix: call torch.distributed.init"):
        RankInfo.from_process_group("cpu")


def test_in_a_group_of_one(alone: None) -> None:
    assert RankInfo.from_process_group("cpu") == RankInfo("cpu", 1, 0)
    assert RankInfo.from_process_group(torch.device("meta"), dist.group.WORLD) == RankInfo("meta", 1, 0)
    with pytest.raises(kvdock.ArgumentValueError, match="device"):
        RankInfo.from_process_group("nothing")


def test_outside_of_a_group(alone: None) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"expected a group with this process in it.*Fix: ask on members only"):
        RankInfo.from_process_group("cpu", dist.GroupMember.NON_GROUP_MEMBER)


def test_in_a_mesh(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert RankInfo.from_device_mesh(mesh, "tp") == RankInfo("cpu", 1, 0)
    assert RankInfo.from_device_mesh(mesh["tp"]) == RankInfo("cpu", 1, 0)
    assert RankInfo.from_device_mesh(mesh, "tp", "meta") == RankInfo("meta", 1, 0)
    for dim in (None, "pp"):
        with pytest.raises(
            kvdock.ArgumentValueError, match=r"RankInfo: dim: expected one of \('dp', 'tp'\), got .*Fix: name the dimension"
        ):
            RankInfo.from_device_mesh(mesh, dim)
    nameless = init_device_mesh("cpu", (1,))
    assert RankInfo.from_device_mesh(nameless) == RankInfo("cpu", 1, 0)
    with pytest.raises(kvdock.ArgumentValueError, match="None, for a mesh of one dimension"):
        RankInfo.from_device_mesh(nameless, "tp")


@pytest.mark.parametrize("mesh", [None, "cpu", 3])
def test_no_mesh(mesh: Any) -> None:
    with pytest.raises(kvdock.ArgumentTypeError, match=r"^RankInfo: mesh: expected a DeviceMesh, got .*Fix: make one with torch"):
        RankInfo.from_device_mesh(mesh)


OUT, LSE = torch.zeros(1, 2, 4), torch.zeros(1, 2)
CALLS: dict[str, Callable[[Any], object]] = {
    "RankInfo": lambda group: RankInfo.from_process_group("cpu", group),
    "check_alike": lambda group: check_alike(bytes(32), group),
    "gather_heads": lambda group: gather_heads(OUT, group),
    "merge_over_ranks": lambda group: merge_over_ranks(OUT, LSE, group),
    "TorchDistributed": lambda group: TorchDistributed(group),
}


@pytest.mark.parametrize("name", CALLS)
def test_who_is_in_no_group_is_told(name: str) -> None:
    """torch has each of its calls do nothing, or raises errors of its own: digests that nobody compared were alike."""
    with pytest.raises(
        kvdock.ArgumentValueError, match=rf"^{name}: group: expected a process group, got none.*Fix: call torch\.distributed\."
    ):
        CALLS[name](None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (dist.GroupMember.NON_GROUP_MEMBER, 5, "tp"):
            with pytest.raises(
                kvdock.ArgumentValueError, match=rf"^{name}: group: expected a group with this process in it, got .*Fix: ask on"
            ):
                CALLS[name](group)
        CALLS[name](dist.group.WORLD)
    finally:
        dist.destroy_process_group()
