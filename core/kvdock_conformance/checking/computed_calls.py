"""Calls on a device of ops that compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvdock.ops.dispatcher import call_op
from kvdock_conformance.checking.device_calls import DeviceCall
from kvdock_conformance.checking.meaning import in_order, refer_to, schema_of, tolerance_of
from kvdock_conformance.checking.memory import Arenas

__all__ = ["ComputedCall"]


class ComputedCall(DeviceCall):
    """A call of an op that computes. What is out of range is padding: what is counted of it may differ.

    ``data`` is the case: calls ``by_heads``, each with its ``arenas``, and ``values`` of the argument ``index`` by slot.
    """

    def __init__(self, data: Mapping[str, Any], device: torch.device, slots: Sequence[int], heads: int = 2) -> None:
        self.data, self.op = data, data["op"]
        super().__init__(device, slots, heads)

    def skips(self) -> int:
        """Return 0."""
        return 0

    def make(self, device: torch.device, heads: int) -> None:
        """Make the arguments."""
        made = self.data["by_heads"][str(heads)]
        memory = Arenas(made["arenas"], device)
        self.args = {name: memory.tensor(spec) for name, spec in made["calls"][0]["args"].items()}
        self.names = [arg.name for arg in schema_of(self.op).mutated if arg.name in self.args]
        self.written = tuple(self.args[name].zero_() for name in self.names)
        tensors = {name: value for name, value in self.args.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
        self.sources = tuple(value for name, value in tensors.items() if name not in self.names)

    def indices(self) -> torch.Tensor:
        """Return the first index, in host memory."""
        values = self.data["values"]
        return torch.tensor([values[slot] if 0 <= slot < len(values) else 0 for slot in self.slots])

    def run(self) -> None:
        """Compute."""
        call_op(self.op, *in_order(self.op, {**self.args, self.data["index"]: self.index}))

    def right(self) -> list[torch.Tensor]:
        """Return what must be written by what the sources hold now."""
        host = {name: value.cpu().clone() if isinstance(value, torch.Tensor) else value for name, value in self.args.items()}
        refer_to(self.op, {**host, self.data["index"]: self.indices()})
        return [host[name] for name in self.names]

    def tolerance(self, got: torch.Tensor) -> float:
        """Return the bound of what is computed in a dtype."""
        return tolerance_of(self.op, got.dtype)
