"""Where a process is, asked of torch's groups and meshes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kvdock
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
