"""A plan: a prepared descriptor with what the quick path of a call needs of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kvdock.descriptors.lifetimes import Ending, Held, Owner
from kvdock.interface import Descriptor
from kvdock.ops.selection import Selection

__all__ = ["Plan", "outside_autograd"]


class Plan(Held):
    """A descriptor that a kernel prepared, and ``run``, which is its call.

    Who runs it holds it, by a name of its own, since ``run`` alone does not. When the last lets go, its descriptor is destroyed
    under its device: nothing may refer to a plan but its cache and the frames that run it, least of all what it refers to itself.
    """

    __slots__ = ("_known", "_plain", "descriptor", "run")

    def __init__(self, descriptor: Descriptor, selection: Selection, owner: Owner) -> None:
        super().__init__(descriptor, owner, functools.partial(selection.choice.backend.device_guard, selection.device))
        self.descriptor = descriptor
        self._known = known = selection.known
        self.run: Callable[..., None] = descriptor.__call__  # a bound method is called quicker than an instance
        if known is not None:  # arguments that came later are absent, or it would not have been chosen
            self.run = lambda *values: descriptor(*[values[place] for place in known])
        self._plain = self.run
        if descriptor.uses_autograd:
            self.run = outside_autograd(self.run)
        if selection.choice.capabilities.graph_capture and not descriptor.notes_capture:
            self.run = _noting_capture(self.run, selection, self.ending)

    def fix(self, values: tuple[Any, ...]) -> Callable[..., None] | None:
        """Return what repeats a call on other addresses, if a call of the descriptor is all there is to it.

        One whose ``run`` does more is not asked: the function would do without that.
        """
        if self.run is not self._plain:
            return None
        return self.descriptor.fix(*(values if self._known is None else [values[place] for place in self._known]))


def outside_autograd(run: Callable[..., None]) -> Callable[..., None]:
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


def _noting_capture(run: Callable[..., None], selection: Selection, ending: Ending) -> Callable[..., None]:
    """Note when a call is recorded into a graph, so that its descriptor stays."""
    is_capturing, device = selection.choice.backend.is_capturing, selection.device

    def run_noting_capture(*values: Any) -> None:
        if not ending.captured and is_capturing(device):
            ending.captured = True
        run(*values)

    return run_noting_capture
