"""When a plan is made: at each call, or once for all calls of a step where the caller says where a step begins and ends."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from .planned import Planned

__all__ = ["one_step", "planned"]

_Plans = dict[Hashable, tuple[Sequence[torch.Tensor | None], Planned | None]]

_STEP: contextvars.ContextVar[_Plans | None] = contextvars.ContextVar("kvdock_flashinfer_step", default=None)


@contextlib.contextmanager
def one_step() -> Iterator[None]:
    """Make a block of code in which calls with the same table and lengths share a plan, so that the host waits once, not for each layer.

    The caller promises that nothing writes to these tensors within the block but operations of torch: kernels and replayed graphs that
    write by address are not noticed. In-place operations of torch are, except on tensors that were made in inference mode.
    """
    plans: _Plans = {}
    token = _STEP.set(plans)
    try:
        yield
    finally:
        _STEP.reset(token)
        for _, made in plans.values():
            if made is not None:
                made.give_back()


@contextlib.contextmanager
def planned(of: Hashable, tensors: Sequence[torch.Tensor | None], make: Callable[[], Planned | None]) -> Iterator[Planned | None]:
    """Lend a plan: that of this step, or one of its own.

    Args:
        of: whose plan it is, and all that it depends on but the tensors.
        tensors: tables and lengths that it was made of.
        make: makes it; None where there can be none.
    """
    plans = _STEP.get()
    if plans is None:
        made = make()
        try:
            yield made
        finally:
            if made is not None:
                made.give_back()
        return
    key = (of, *map(_identity, tensors))
    if key not in plans:
        plans[key] = (tensors, make())  # held, so that no other tensor gets their memory within the step
    yield plans[key][1]


def _identity(tensor: torch.Tensor | None) -> Hashable:
    """Return what tells a tensor, and what it held, from others."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version
