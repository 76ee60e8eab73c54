"""Where one member of a tensor-parallel group is, and which heads it holds."""

from __future__ import annotations

import attrs
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.spec import check_int

__all__ = ["RankInfo"]


def _to_device(value: object) -> torch.device:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ArgumentTypeError("RankInfo: device", expected='a torch.device or a string such as "cpu"', got=repr(value))
    try:
        device = torch.device(value)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ArgumentValueError(
            "RankInfo: device", expected='a device that torch knows, such as "cpu"', got=repr(value), fix=str(error).splitlines()[0]
        ) from error
    index = str(value).rpartition(":")[2]
    if index.isdigit() and int(index) != device.index:
        raise ArgumentValueError(
            "RankInfo: device",
            expected="an index that torch can hold",
            got=f"{value!r}, which torch takes for {device}",
            fix="count devices from 0",
        )
    return device


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
