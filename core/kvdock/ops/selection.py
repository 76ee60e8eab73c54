"""The seam between ops and whoever knows the backends: `ops` asks a `Chooser`, and never sees a plugin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch

from kvdock.guarded import ask, ask_guard
from kvdock.interface import KVDOCK_API, Backend, Capabilities, Kernel, Stream
from kvdock.ops.brought import Op

__all__ = ["Choice", "Chooser", "Rejected", "Selection"]

Rejected = tuple[tuple[str, tuple[str, ...]], ...]
"""Who was asked to serve a request and does not, each with its reasons."""


@attrs.frozen
class Choice:
    """The backend chosen for one op on one device.

    Args:
        backend: the backend, which is ready.
        kernels: its kernels by op name, with what was registered over them.
        capabilities: what it said it can do.
        reason: why it was chosen, for people: ``"only ready backend that claims cpu"``.
        api: version of the contract that its plugin was made for.
    """

    backend: Backend
    kernels: Mapping[str, Kernel]
    capabilities: Capabilities
    reason: str
    api: tuple[int, int] = KVDOCK_API

    def side_stream(self, device: torch.device) -> Stream | None:
        """Return a new stream of a device, see `Backend.side_stream`. Raises `PluginError` as `kvdock.guarded.ask` does."""
        with ask_guard(self.backend, device):
            question = functools.partial(self.backend.side_stream, device)
            made: Stream | None = ask(self.backend.name, "side_stream()", question, "a Stream or None", _is_stream)
        return made

    def pin(self, memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
        """Lock pages of host memory for a device, see `Backend.pin`. Raises `PluginError` as `kvdock.guarded.ask` does."""
        with ask_guard(self.backend, device):
            question = functools.partial(self.backend.pin, memory, device)
            undo: Callable[[], None] | None = ask(self.backend.name, "pin()", question, "a function or None", _undoes)
        return undo


def _is_stream(answer: Any) -> bool:
    return answer is None or isinstance(answer, Stream)


def _undoes(answer: Any) -> bool:
    return answer is None or callable(answer)


class Chooser(Protocol):
    """Chooses the backend for an op on a device. `kvdock.plugins.registry.Registry` is one."""

    def brought_ops(self) -> Mapping[str, Op]:
        """Return the ops that plugins bring, by name."""
        ...

    epoch: int
    """Counts changes to what is registered. It is part of every key, so that no plan outlives what it was chosen from."""

    def choose(self, op: str, device: torch.device, named: str | None = None) -> Choice:
        """Return the backend for an op on a device, with its index: the one ``named`` before any other that is configured.

        Raises:
            NoBackendError: no ready backend claims the device.
            BackendUnavailableError: the named or configured backend does not exist, is not ready, or does not run there.
            AmbiguousBackendError: several are ready and none is preferred.
        """
        ...

    def instead(
        self, op: str, device: torch.device, rejected: Rejected, against: Callable[[Choice], tuple[str, ...]]
    ) -> tuple[Choice | None, Rejected]:
        """Return who else of those that claim the device serves a request, if any does, and all who were asked and do not.

        Asks by priority, the highest first, for reasons ``against`` each; ``rejected`` has the chosen backend's.

        Raises:
            AmbiguousBackendError: several of one priority serve it.
        """
        ...


@attrs.frozen
class Selection:
    """Which kernel serves a request, and why each candidate before it does not.

    ``choice`` is the backend that serves it; of a portable kernel, that which was chosen. ``known`` are the places of the
    arguments that the kernel's version of the contract has; None where it has all.
    """

    kernel: Kernel
    served_by: str
    choice: Choice
    device: torch.device
    rejected: Rejected
    known: tuple[int, ...] | None = None
