"""Where one member of a tensor-parallel group is, and which heads it holds."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.spec import check_int, device_of

__all__ = ["RankInfo", "place_in"]


def place_in(subject: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return how many ranks a group of torch's has, and which of them this process is.

    Args:
        subject: what to call it in an error.
        group: None for that of all processes.

    Raises:
        ArgumentValueError: there is no such group, or this process is not in it: torch's calls do nothing then, or wait for ever.
    """
    if not (dist.is_available() and dist.is_initialized()):
        fix = "call torch.distributed.init_process_group() first; a single process needs no group: RankInfo(device)"
        raise ArgumentValueError(subject, expected="a process group", got="none: torch.distributed is not set up", fix=fix)
    if (group is not None and not isinstance(group, dist.ProcessGroup)) or dist.get_rank(group) < 0:
        fix = "ask on members only: dist.new_group() gives every process a group, and those that are not in it an empty one"
        raise ArgumentValueError(subject, expected="a group with this process in it", got=repr(group)[:80], fix=fix)
    return dist.get_world_size(group), dist.get_rank(group)


def _to_device(value: object) -> torch.device:
    return device_of("RankInfo: device", value)


@attrs.frozen
class RankInfo:
    """One rank of a tensor-parallel group.

    Args:
        device: the device that holds this rank's caches.
        tp_size: number of ranks that share the KV heads, at least 1.
        tp_rank: this rank's place, ``0 <= tp_rank < tp_size``.
    """

    device: torch.device = attrs.field(converter=_to_device)
    tp_size: int = 1
    tp_rank: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("tp_size", "tp_rank"):
            if type(getattr(self, name)) is not int:
                raise ArgumentTypeError(f"RankInfo: {name}", expected="an int", got=repr(getattr(self, name)))
        if self.tp_size < 1:
            raise ArgumentValueError("RankInfo: tp_size", expected="at least 1", got=self.tp_size, fix="use 1 for a single device")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ArgumentValueError(
                "RankInfo: tp_rank", expected=f"0 <= tp_rank < tp_size = {self.tp_size}", got=self.tp_rank, fix="count ranks from 0"
            )

    @classmethod
    def from_process_group(cls, device: torch.device | str, group: dist.ProcessGroup | None = None) -> RankInfo:
        """Return this process's place in a group of torch's, whose members share the KV heads.

        Args:
            device: the device that holds this rank's caches.
            group: the tensor-parallel group; None: all processes.

        Raises:
            ArgumentValueError: there is no such group, or this process is not in it.
        """
        size, place = place_in("RankInfo: group", group)
        return cls(device, size, place)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, dim: str | None = None, device: torch.device | str | None = None) -> RankInfo:
        """Return this process's place along one dimension of a mesh.

        Args:
            mesh: the mesh.
            dim: name of its tensor-parallel dimension; None where it has one dimension.
            device: the device that holds this rank's caches; None: the current one of the mesh's type.

        Raises:
            ArgumentTypeError: no mesh.
            ArgumentValueError: the mesh has no such dimension, or several and none is named; this process is not in it.
        """
        if not isinstance(mesh, DeviceMesh):
            fix = "make one with torch.distributed.device_mesh.init_device_mesh, or call from_process_group"
            raise ArgumentTypeError("RankInfo: mesh", expected="a DeviceMesh", got=repr(mesh)[:80], fix=fix)
        names = mesh.mesh_dim_names or ()
        if dim not in names if dim is not None else mesh.ndim != 1:
            expected = f"one of {names}" if names else "None, for a mesh of one dimension"
            raise ArgumentValueError("RankInfo: dim", expected=expected, got=repr(dim), fix="name the dimension that shares the KV heads")
        if device is None:
            kind = mesh.device_type
            device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        return cls.from_process_group(device, mesh.get_group(dim))

    def head_range(self, num_heads: int, what: str = "heads") -> range:
        """Return which of a model's heads this rank holds.

        Heads are split evenly. With more ranks than heads each head is replicated on ``tp_size / num_heads`` ranks.

        Args:
            num_heads: heads of the whole model.
            what: how an error calls them, such as ``"num_k_heads"``.

        Raises:
            ArgumentValueError: neither number is a multiple of the other, or there are no heads.
        """
        check_int(what, num_heads, 1)
        if num_heads % self.tp_size == 0:
            share = num_heads // self.tp_size
            return range(self.tp_rank * share, (self.tp_rank + 1) * share)
        if self.tp_size % num_heads == 0:
            head = self.tp_rank // (self.tp_size // num_heads)
            return range(head, head + 1)
        raise ArgumentValueError(
            f"{what} = {num_heads} on tp_size = {self.tp_size} ranks",
            expected="one to be a multiple of the other, so that every rank holds the same number of heads",
            got=f"a remainder of {num_heads % self.tp_size}",
            fix=f"choose a tp_size that divides {num_heads} or is a multiple of it",
        )
