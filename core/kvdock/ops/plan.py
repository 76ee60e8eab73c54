"""A plan: a prepared descriptor with what the quick path of a call needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvdock.errors import BackendError
from kvdock.interface import Descriptor
from kvdock.ops.selection import Selection

__all__ = ["Plan"]


class Plan:
    """A descriptor with what the quick checks need: ``run`` is its call, ``extents`` the bytes each pool spans."""

    __slots__ = ("captured", "descriptor", "extents", "run", "selection")

    def __init__(self, descriptor: Descriptor, extents: tuple[int, ...], selection: Selection) -> None:
        self.captured = False
        self.descriptor = descriptor
        self.extents = extents
        self.selection = selection
        self.run = _runner(self)

    @property
    def pinned(self) -> bool:
        """Whether a graph recorded a call of it, and may launch it again for as long as the process lives."""
        return self.captured or self.descriptor.pinned

    def fix(self, values: tuple[Any, ...]) -> Callable[..., None] | None:
        """Return what repeats a call on other addresses, if a call of the descriptor is all there is to it.

        One whose calls `_runner` puts something in front of is not asked: the function would do without that.
        """
        return self.descriptor.fix(*values) if self.run == self.descriptor.__call__ else None

    def destroy(self) -> None:
        """Let the descriptor go, under its device."""
        self.run = _run_destroyed  # which also parts the plan from what may refer back to it
        with self.selection.choice.backend.device_guard(self.selection.device):
            self.descriptor.destroy()


def _run_destroyed(*values: Any) -> None:
    """Refuse to run a plan whose descriptor is no more."""
    raise BackendError("a plan", expected="one that is not destroyed", got="a destroyed one", fix="report this: it is a bug in kvdock")


def _runner(plan: Plan) -> Callable[..., None]:
    """Return what to call at each call of a plan: its descriptor, behind what that does not do itself."""
    run: Callable[..., None] = plan.descriptor.__call__  # a bound method is called quicker than an instance
    if plan.descriptor.uses_autograd:
        run = _outside_autograd(run)
    if plan.selection.choice.capabilities.graph_capture and not plan.descriptor.notes_capture:
        run = _noting_capture(run, plan)
    return run


def _outside_autograd(run: Callable[..., None]) -> Callable[..., None]:
    """Keep autograd away from a call: a cache records no gradients, must not be drawn into a graph, and may be made for inference."""

    def run_outside_autograd(*values: Any) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in tensors):
            with torch.inference_mode():  # torch refuses to write them elsewhere, to some kernels half-way
                return run(*values)
        if any(tensor.requires_grad for tensor in tensors):
            with torch.no_grad():
                return run(*values)
        return run(*values)

    return run_outside_autograd


def _noting_capture(run: Callable[..., None], plan: Plan) -> Callable[..., None]:
    """Note when a call is recorded into a graph, so that its plan stays."""
    is_capturing, device = plan.selection.choice.backend.is_capturing, plan.selection.device

    def run_noting_capture(*values: Any) -> None:
        if not plan.captured and is_capturing(device):
            plan.captured = True
        run(*values)

    return run_noting_capture
