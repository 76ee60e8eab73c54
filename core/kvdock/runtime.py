"""The composition root: where registry and dispatcher are put together.

A process has one default runtime, made at the first use; `kvdock.ops.*` and `create_cache` go through it. Tests and
embedders can make their own and pass its dispatcher, or make it the process's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvdock.guarded import ask, ask_guard
from kvdock.interface import Backend
from kvdock.ops.dispatcher import ACTIVE_OPS, OpDispatcher
from kvdock.ops.modes import MODE
from kvdock.ops.portable import SKIPPED
from kvdock.ops.shared import Shared
from kvdock.plugins.registry import Registry

__all__ = ["Runtime", "default", "made", "set_default"]


class Runtime(Shared):
    """A registry of backends and the ops that go through it. Threads may share it, and copies of what keeps it do.

    Args:
        registry: the backends; by default those that entry points name, found at first use.
        environ: variables to configure a default registry from; by default the process's.
    """

    def __init__(self, registry: Registry | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.registry = registry if registry is not None else Registry(environ=environ)
        self.dispatcher = OpDispatcher(self.registry)

    def skipped_writes(self, device: torch.device | str) -> int:
        """Return how many writes were skipped on a device because a slot or position was out of range.

        Counts tokens, by the backends that claim the device, or the one that `use_backend` names, and by the portable kernels.
        May synchronise; padding does not count. A device without an index is the current one of its type.
        """
        device = torch.empty(0, device=device).device  # with its index: counts are kept by device
        return SKIPPED.read(device) + sum(_skipped_by(backend, device) for backend in self._backends(device))

    def capture(self, device: torch.device, steps: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """Make each step one call that repeats it, by the device's backend, or the one that `use_backend` names.

        Where the device's backend has no graphs, as one for a single kernel may, another that claims the device records them.

        `kvdock.interface.Backend.capture` says what a step may do, and what comes back: the steps themselves where nothing is recorded.
        What a step raises comes through, with a note; a backend's answer that is no function for each is a `PluginError`.
        """
        backends = self._backends(device)
        backend = next((each for each in backends if self._has_graphs(each)), backends[0])
        try:
            with ask_guard(backend, device):
                made = backend.capture(device, steps)
        except Exception as error:  # the steps are the caller's, so it need not be the backend's fault
            error.add_note(f"raised while backend {backend.name!r} captured steps on {device}: a step must not wait for the device")
            raise

        def fits(answer: Any) -> bool:
            return isinstance(answer, Sequence) and len(answer) == len(steps) and all(map(callable, answer))

        return list(ask(backend.name, f"capture({device}, ...)", lambda: made, f"{len(steps)} functions", fits))

    def _has_graphs(self, backend: Backend) -> bool:
        return self.registry.loaded()[backend.name].capabilities.graph_capture

    def _backends(self, device: torch.device) -> list[Backend]:
        """Return the backend of a device and the others that claim it, or the one that `use_backend` names: who may serve calls."""
        mode = MODE.get()
        named = mode.named if mode is not None else None
        first = self.dispatcher.choose("paged_caching_", device, named).backend
        others = [] if named is not None else self.registry.claimants(device)
        return list({backend.name: backend for backend in (first, *others)}.values())


def _skipped_by(backend: Backend, device: torch.device) -> int:
    question, fits = f"skipped_writes({device})", lambda count: isinstance(count, int)
    count: int = ask(backend.name, question, lambda: backend.skipped_writes(device), "an int", fits)
    return count


_lock = threading.Lock()
_default: Runtime | None = None


def default() -> Runtime:
    """Return the process's runtime, made at the first call."""
    global _default  # the one piece of process-wide state
    if _default is None:
        with _lock:
            if _default is None:
                _default = Runtime()
    return _default


def made() -> Runtime | None:
    """Return the process's runtime if it has been used; asking does not make it."""
    return _default


def set_default(runtime: Runtime | None) -> None:
    """Make a runtime the process's, for all calls from now on; None for a new one at the next use.

    Caches keep the ops that they were made with. No other thread may call an op meanwhile.
    """
    global _default
    with _lock:
        _default = runtime
        ACTIVE_OPS.clear()
